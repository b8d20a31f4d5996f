use half::f16;

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
            let stored = random(&mut noise, format, outputs, inputs);
            let bytes = side_by_side(format, outputs, inputs, &stored);
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

/// A stored block's values, as GGML documents them.
fn documented(format: BlockFormat, block: &[u8]) -> Vec<f32> {
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    let nibbles = |codes: &[u8]| -> Vec<f32> {
        let halves = codes.iter().map(|byte| byte & 15).chain(codes.iter().map(|byte| byte >> 4));
        halves.map(f32::from).collect()
    };
    match format {
        BlockFormat::Q4_0 => {
            nibbles(&block[2..]).iter().map(|code| (code - 8.0) * half(0)).collect()
        }
        BlockFormat::Q4_1 => {
            nibbles(&block[4..]).iter().map(|code| code * half(0) + half(2)).collect()
        }
        BlockFormat::Q8_0 => {
            block[2..].iter().map(|code| f32::from(code.cast_signed()) * half(0)).collect()
        }
    }
}

#[test]
fn blocks_side_by_side_have_the_documented_values() {
    let mut noise = Noise::new(42);
    for format in FORMATS {
        let (outputs, inputs) = (37, 96);
        let stored = random(&mut noise, format, outputs, inputs);
        let bytes = side_by_side(format, outputs, inputs, &stored);
        assert_eq!(bytes.len(), 48 * 3 * format.bytes());
        let b = Blocks::transposed(&bytes, format, outputs, inputs);
        let blocks = stored.chunks_exact(format.bytes());
        let want: Vec<f32> = blocks.flat_map(|block| documented(format, block)).collect();
        assert_eq!(bits(&b.widened()), bits(&want), "{format:?}");
        let chosen = [36, 0, 17, 17, 5, 31, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14];
        let bytes = b.gathered(&chosen);
        let gathered = Blocks::transposed(&bytes, format, chosen.len(), inputs);
        for (place, col) in chosen.into_iter().enumerate() {
            let want = &want[col as usize * inputs..][..inputs];
            assert_eq!(bits(&b.column(col as usize)), bits(want), "{format:?} {col}");
            assert_eq!(bits(&gathered.column(place)), bits(want), "{format:?} {col}");
        }
    }
}

#[test]
fn empty_products_are_zero() {
    let mut out = [1.0; 3];
    let b = Blocks::transposed(&[], BlockFormat::Q8_0, 3, 0);
    matmul_quantised(&mut out, Mat::rows(&[], 1, 0, 0), b, false);
    assert_eq!(bits(&out), [0; 3]);
    matmul_quantised(&mut [], Mat::rows(&[], 0, 0, 0), b, false);
}
