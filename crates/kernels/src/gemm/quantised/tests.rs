use half::f16;

use super::*;
use crate::gemm::Mat;
use crate::gemm::tests::instruction_sets;
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

fn values(noise: &mut Noise, count: usize) -> Vec<f32> {
    (0..count).map(|_| noise.next() as f32).collect()
}

/// A product in f64, and how far fixed-point activations may be from it.
fn exact(x: &[f32], w: &[f32]) -> (f64, f64) {
    let (mut sum, mut bound) = (0.0, 0.0);
    for (x, w) in x.chunks_exact(BLOCK).zip(w.chunks_exact(BLOCK)) {
        let largest = x.iter().fold(0.0, |largest: f64, x| largest.max(f64::from(x.abs())));
        for (x, w) in x.iter().zip(w) {
            let (x, w) = (f64::from(*x), f64::from(*w));
            sum += x * w;
            bound += largest / 254.0 * w.abs() + 1e-6 * (x * w).abs();
        }
    }
    (sum, bound + 1e-6)
}

#[test]
fn every_instruction_set_and_number_of_rows_has_the_same_bits_near_the_exact_product() {
    let mut noise = Noise::new(41);
    for format in FORMATS {
        for (rows, outputs, inputs) in [
            (1, 1, 32),
            (1, 40, 576),
            (2, 16, 64),
            (5, 100, 1056),
            (8, 33, 32),
            (16, 17, 544),
            (300, 70, 64),
        ] {
            let stored = random(&mut noise, format, outputs, inputs);
            let bytes = side_by_side(format, outputs, inputs, &stored);
            let b = Blocks::transposed(&bytes, format, outputs, inputs);
            let widened = b.widened();
            let x = values(&mut noise, rows * inputs);
            let a = FixedRows::of(Mat::rows(&x, rows, inputs, inputs));
            let start: Vec<f32> = (0..rows * outputs).map(|i| i as f32).collect();
            let mut plain = vec![0.0; rows * outputs];
            product(Isa::Portable, &mut plain, &a, b, false);
            for (row, x) in x.chunks_exact(inputs).enumerate() {
                let one = FixedRows::of(Mat::rows(x, 1, inputs, inputs));
                let mut alone = vec![0.0; outputs];
                matmul_quantised(&mut alone, &one, b, false);
                let here = &plain[row * outputs..][..outputs];
                assert_eq!(bits(&alone), bits(here), "{format:?} {rows} {row}");
                for (w, value) in widened.chunks_exact(inputs).zip(here) {
                    let (exact, bound) = exact(x, w);
                    assert!(
                        (f64::from(*value) - exact).abs() <= bound,
                        "{format:?} {value} {exact}"
                    );
                }
            }
            for isa in instruction_sets() {
                for accumulate in [false, true] {
                    let mut ours = start.clone();
                    product(isa, &mut ours, &a, b, accumulate);
                    let wanted = plain.iter().zip(&start);
                    let wanted = wanted.map(|(x, at)| if accumulate { at + x } else { *x });
                    let wanted: Vec<f32> = wanted.collect();
                    assert_eq!(bits(&ours), bits(&wanted), "{isa:?} {format:?} {rows}");
                }
            }
        }
    }
}

#[test]
fn extreme_activations_neither_wrap_nor_vanish() {
    let mut noise = Noise::new(43);
    for format in FORMATS {
        let (outputs, inputs) = (20, 96);
        let stored = random(&mut noise, format, outputs, inputs);
        let bytes = side_by_side(format, outputs, inputs, &stored);
        let b = Blocks::transposed(&bytes, format, outputs, inputs);
        let widened = b.widened();
        let same_sign = vec![1.0; inputs];
        let mut outlier = values(&mut noise, inputs);
        outlier[40] = -3e4;
        let huge: Vec<f32> = outlier.iter().map(|x| 1e30 * x).collect();
        let tiny: Vec<f32> = outlier.iter().map(|x| 1e-30 * x).collect();
        for x in [same_sign, outlier, huge, tiny] {
            let size = f64::from(x.iter().fold(0.0, |size: f32, x| size.max(x.abs())));
            for isa in instruction_sets() {
                let mut ours = vec![0.0; outputs];
                product(isa, &mut ours, &FixedRows::of(Mat::rows(&x, 1, inputs, inputs)), b, false);
                for (w, value) in widened.chunks_exact(inputs).zip(&ours) {
                    let (exact, bound) = exact(&x, w);
                    let error = (f64::from(*value) - exact).abs();
                    assert!(error <= bound + 1e-6 * size, "{isa:?} {format:?} {value} {exact}");
                }
            }
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = values(&mut noise, inputs);
            x[33] = bad;
            for isa in instruction_sets() {
                let mut ours = vec![0.0; outputs];
                product(isa, &mut ours, &FixedRows::of(Mat::rows(&x, 1, inputs, inputs)), b, false);
                assert!(ours.iter().all(|value| value.is_nan()), "{isa:?} {format:?} {bad}");
            }
        }
        for small in [0.0, -0.0, 1e-40] {
            let x = vec![small; inputs];
            let mut ours = vec![1.0; outputs];
            matmul_quantised(&mut ours, &FixedRows::of(Mat::rows(&x, 1, inputs, inputs)), b, false);
            assert!(ours.iter().all(|value| *value == 0.0), "{format:?} {small}");
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
    matmul_quantised(&mut out, &FixedRows::of(Mat::rows(&[], 1, 0, 0)), b, false);
    assert_eq!(bits(&out), [0; 3]);
    matmul_quantised(&mut [], &FixedRows::of(Mat::rows(&[], 0, 0, 0)), b, false);
}
