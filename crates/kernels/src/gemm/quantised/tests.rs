use super::*;
use crate::gemm::tests::instruction_sets;
use crate::gemm::{Threads, matmul};
use crate::test_support::Noise;

const FORMATS: [BlockFormat; 3] = [BlockFormat::Q4_0, BlockFormat::Q4_1, BlockFormat::Q8_0];

/// Blocks of random bits with scales of a sensible size.
fn random(noise: &mut Noise, format: BlockFormat, outputs: usize, inputs: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..outputs * inputs / BLOCK {
        let start = bytes.len();
        bytes.extend((0..format.bytes()).map(|_| noise.below(256) as u8));
        for at in [0, 2].iter().take(if format == BlockFormat::Q4_1 { 2 } else { 1 }) {
            let scale = f16::from_f64(noise.next() * 0.1).to_le_bytes();
            bytes[start + at..start + at + 2].copy_from_slice(&scale);
        }
    }
    bytes
}

#[test]
fn products_have_the_bits_of_the_widened_matrix() {
    let mut noise = Noise::new(41);
    for format in FORMATS {
        for (rows, outputs, inputs) in [
            (1, 1, 32),
            (1, 40, 576),
            (2, 16, 64),
            (5, 100, 1056),
            (8, 33, 32),
            (16, 17, 544),
            (17, 64, 96),
            (70, 50, 64),
        ] {
            let bytes = random(&mut noise, format, outputs, inputs);
            let b = Blocks::transposed(&bytes, format, outputs, inputs);
            let widened = b.widened();
            let x: Vec<f32> = (0..rows * inputs).map(|_| noise.next() as f32).collect();
            let a = Mat::rows(&x, rows, inputs, inputs);
            for accumulate in [false, true] {
                let start: Vec<f32> = (0..rows * outputs).map(|i| i as f32).collect();
                let (mut ours, mut plain) = (start.clone(), start.clone());
                matmul_quantised(&mut ours, a, b, accumulate);
                let right = Mat::rows(&widened, outputs, inputs, inputs).t();
                matmul(&mut plain, outputs, a, right, accumulate, Threads::Pool);
                assert_eq!(bits(&ours), bits(&plain), "{format:?} {rows} {outputs} {inputs}");
                for isa in instruction_sets().into_iter().filter(|_| rows <= MOST_ROWS) {
                    let mut ours = start.clone();
                    few_rows(isa, &mut ours, a, b, accumulate);
                    assert_eq!(bits(&ours), bits(&plain), "{isa:?} {format:?} {rows}");
                }
            }
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn blocks_are_read_as_they_are_documented() {
    let half = |value: f32| f16::from_f32(value).to_le_bytes();
    let mut out = [0.0; BLOCK];
    let nibbles: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
    BlockFormat::Q4_0.widen(&[&half(0.5)[..], &nibbles].concat(), &mut out);
    assert_eq!((out[0], out[15], out[16], out[31]), (-4.0, 3.5, 3.5, -4.0));
    BlockFormat::Q4_1.widen(&[&half(0.5)[..], &half(-1.0), &nibbles].concat(), &mut out);
    assert_eq!((out[0], out[15], out[16], out[31]), (-1.0, 6.5, 6.5, -1.0));
    let bytes: Vec<u8> = (0..32).map(|i| (i as i8 - 16).cast_unsigned()).collect();
    BlockFormat::Q8_0.widen(&[&half(2.0)[..], &bytes].concat(), &mut out);
    assert_eq!((out[0], out[16], out[31]), (-32.0, 0.0, 30.0));
}

#[test]
fn empty_products_are_zero() {
    let mut out = [1.0; 3];
    let b = Blocks::transposed(&[], BlockFormat::Q8_0, 3, 0);
    matmul_quantised(&mut out, Mat::rows(&[], 1, 0, 0), b, false);
    assert_eq!(bits(&out), [0; 3]);
    matmul_quantised(&mut [], Mat::rows(&[], 0, 0, 0), b, false);
}
