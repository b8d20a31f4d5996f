use half::f16;

use super::*;
use crate::gemm::Mat;
use crate::test_support::Noise;

/// Where a stored block's 16-bit floats lie.
fn floats(format: BlockFormat) -> &'static [usize] {
    match format {
        BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4K | BlockFormat::Q5K => &[0, 2],
        BlockFormat::Q2K => &[80, 82],
        BlockFormat::Q3K => &[108],
        BlockFormat::Q6K => &[208],
        BlockFormat::Mxfp4 => &[],
        _ => &[0],
    }
}

/// A block of random bits with scales of a sensible size.
fn random_block(noise: &mut Noise, format: BlockFormat) -> Vec<u8> {
    let mut block: Vec<u8> = (0..format.bytes()).map(|_| noise.below(256) as u8).collect();
    for at in floats(format) {
        let scale = f16::from_f64(noise.next() * 0.1).to_le_bytes();
        block[*at..at + 2].copy_from_slice(&scale);
    }
    if format == BlockFormat::Mxfp4 {
        block[0] = 118 + noise.below(10) as u8;
    }
    block
}

fn random(noise: &mut Noise, format: BlockFormat, outputs: usize, inputs: usize) -> Vec<u8> {
    let blocks = outputs * inputs / format.values();
    (0..blocks).flat_map(|_| random_block(noise, format)).collect()
}

fn side_by_side(format: BlockFormat, outputs: usize, inputs: usize, stored: &[u8]) -> Vec<u8> {
    let mut out = vec![0; held_bytes(format, outputs, inputs).expect("whole blocks")];
    put_side_by_side(format, inputs, stored, &mut out);
    out
}

fn values(noise: &mut Noise, count: usize) -> Vec<f32> {
    (0..count).map(|_| noise.next() as f32).collect()
}

/// A product in f64, and how far fixed-point activations may be from it.
fn exact(x: &[f32], w: &[f32]) -> (f64, f64) {
    let (mut sum, mut bound) = (0.0, 0.0);
    let largest = |values: &[f32]| values.iter().fold(0.0, |a: f64, b| a.max(f64::from(b.abs())));
    for (x, w) in x.chunks_exact(BLOCK).zip(w.chunks_exact(BLOCK)) {
        let (x_largest, w_largest) = (largest(x), largest(w));
        for (x, w) in x.iter().zip(w) {
            let (x, w) = (f64::from(*x), f64::from(*w));
            sum += x * w;
            bound += x_largest / 254.0 * w.abs() + 2e-6 * x.abs() * w_largest;
        }
    }
    (sum, bound + 1e-6)
}

/// Rows, outputs and blocks of a row.
const SIZES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (1, 40, 5),
    (2, 16, 2),
    (3, 35, 3),
    (5, 100, 7),
    (8, 33, 1),
    (16, 17, 4),
    (17, 18, 2),
    (300, 70, 1),
];

#[test]
fn every_instruction_set_and_number_of_rows_has_the_same_bits_near_the_exact_product() {
    let mut noise = Noise::new(41);
    for format in BlockFormat::ALL {
        for (rows, outputs, blocks) in SIZES {
            let inputs = blocks * format.values();
            let stored = random(&mut noise, format, outputs, inputs);
            let bytes = side_by_side(format, outputs, inputs, &stored);
            let b = Blocks::transposed(&bytes, format, outputs, inputs);
            let widened = b.widened();
            let x = values(&mut noise, rows * inputs);
            let a = FixedRows::of(Mat::rows(&x, rows, inputs, inputs));
            let start: Vec<f32> = (0..rows * outputs).map(|i| i as f32).collect();
            let mut plain = vec![0.0; rows * outputs];
            product(Kernel::Plain, &mut plain, &a, b, false);
            for (row, x) in x.chunks_exact(inputs).enumerate() {
                let one = FixedRows::of(Mat::rows(x, 1, inputs, inputs));
                let mut alone = vec![0.0; outputs];
                matmul_quantised(&mut alone, &one, b, false);
                let here = &plain[row * outputs..][..outputs];
                assert_eq!(bits(&alone), bits(here), "{format:?} {rows} {row}");
                for (w, value) in widened.chunks_exact(inputs).zip(here) {
                    let (exact, bound) = exact(x, w);
                    let error = (f64::from(*value) - exact).abs();
                    assert!(error <= bound, "{format:?} {value} {exact} {bound}");
                }
            }
            for kernel in Kernel::all() {
                for accumulate in [false, true] {
                    let mut ours = start.clone();
                    product(kernel, &mut ours, &a, b, accumulate);
                    let wanted = plain.iter().zip(&start);
                    let wanted = wanted.map(|(x, at)| if accumulate { at + x } else { *x });
                    let wanted: Vec<f32> = wanted.collect();
                    assert_eq!(bits(&ours), bits(&wanted), "{kernel:?} {format:?} {rows}");
                }
            }
        }
    }
}

#[test]
fn every_number_of_rows_of_a_pass_has_the_bits_of_one() {
    let mut noise = Noise::new(44);
    for format in BlockFormat::ALL {
        let (outputs, inputs) = (37, 2 * format.values());
        let stored = random(&mut noise, format, outputs, inputs);
        let bytes = side_by_side(format, outputs, inputs, &stored);
        let b = Blocks::transposed(&bytes, format, outputs, inputs);
        let x = values(&mut noise, 16 * inputs);
        let of = |kernel, rows: usize| {
            let a = FixedRows::of(Mat::rows(&x[..rows * inputs], rows, inputs, inputs));
            let mut out = vec![0.0; rows * outputs];
            product(kernel, &mut out, &a, b, false);
            bits(&out)
        };
        let all = of(Kernel::Plain, 16);
        for kernel in Kernel::all() {
            for rows in 1..=16 {
                assert_eq!(of(kernel, rows), all[..rows * outputs], "{kernel:?} {format:?} {rows}");
            }
        }
    }
}

#[test]
fn extreme_activations_neither_wrap_nor_vanish() {
    let mut noise = Noise::new(43);
    for format in BlockFormat::ALL {
        let (outputs, inputs) = (20, 3 * format.values());
        let stored = random(&mut noise, format, outputs, inputs);
        let bytes = side_by_side(format, outputs, inputs, &stored);
        let b = Blocks::transposed(&bytes, format, outputs, inputs);
        let widened = b.widened();
        let same_sign = vec![1.0; inputs];
        let mut outlier = values(&mut noise, inputs);
        outlier[40] = -3e4;
        let huge: Vec<f32> = outlier.iter().map(|x| 1e30 * x).collect();
        let tiny: Vec<f32> = outlier.iter().map(|x| 1e-30 * x).collect();
        let of = |kernel, x: &[f32]| {
            let mut ours = vec![1.0; outputs];
            let x = FixedRows::of(Mat::rows(x, 1, inputs, inputs));
            product(kernel, &mut ours, &x, b, false);
            ours
        };
        for x in [same_sign, outlier, huge, tiny] {
            let size = f64::from(x.iter().fold(0.0, |size: f32, x| size.max(x.abs())));
            for kernel in Kernel::all() {
                for (w, value) in widened.chunks_exact(inputs).zip(of(kernel, &x)) {
                    let (exact, bound) = exact(&x, w);
                    let error = (f64::from(value) - exact).abs();
                    assert!(error <= bound + 1e-6 * size, "{kernel:?} {format:?} {value} {exact}");
                }
            }
        }
        for kernel in Kernel::all() {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = values(&mut noise, inputs);
                x[33 % inputs] = bad;
                let ours = of(kernel, &x);
                assert!(ours.iter().all(|value| value.is_nan()), "{kernel:?} {format:?} {bad}");
            }
            for small in [0.0, -0.0, 1e-40] {
                let ours = of(kernel, &vec![small; inputs]);
                assert!(ours.iter().all(|value| *value == 0.0), "{kernel:?} {format:?} {small}");
            }
        }
    }
}

/// Blocks of equal bytes have the largest and least codes and scales, with which sums in 16 bits
/// would wrap first; and scales may be infinite or no numbers.
#[test]
fn extreme_blocks_have_the_same_bits_on_every_instruction_set() {
    let mut noise = Noise::new(45);
    for format in BlockFormat::ALL {
        let mut stored = Vec::new();
        for byte in [0x00, 0xff, 0x7f, 0x80, 0x0f, 0xf0, 0x55, 0xaa] {
            for scale in [0x3c00_u16, 0xbc00, 0x0001, 0x7bff, 0x7c00, 0xfc00, 0x7e00] {
                let mut block = vec![byte; format.bytes()];
                for at in floats(format) {
                    block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
                }
                stored.extend(block);
            }
        }
        let (outputs, inputs) = (stored.len() / format.bytes(), format.values());
        let bytes = side_by_side(format, outputs, inputs, &stored);
        let b = Blocks::transposed(&bytes, format, outputs, inputs);
        let turns: Vec<f32> = (0..inputs).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
        let x = [vec![1.0; inputs], vec![-1.0; inputs], turns, values(&mut noise, inputs)].concat();
        let a = FixedRows::of(Mat::rows(&x, 4, inputs, inputs));
        let of = |kernel| {
            let mut out = vec![0.0; 4 * outputs];
            product(kernel, &mut out, &a, b, false);
            // Which bits a NaN has is open.
            bits(&out.iter().map(|x| if x.is_nan() { f32::NAN } else { *x }).collect::<Vec<_>>())
        };
        let plain = of(Kernel::Plain);
        for kernel in Kernel::all() {
            assert_eq!(of(kernel), plain, "{kernel:?} {format:?}");
        }
        for (row, x) in x.chunks_exact(inputs).enumerate() {
            for (w, value) in b.widened().chunks_exact(inputs).zip(&plain[row * outputs..]) {
                let (exact, bound) = exact(x, w);
                let value = f64::from(f32::from_bits(*value));
                let near = (value - exact).abs() <= bound.max(1e-6 * exact.abs());
                // The largest power of MXFP4 is finite, only its multiples are not.
                let either = format == BlockFormat::Mxfp4 || !value.is_finite();
                assert!(
                    if exact.is_finite() { near } else { either },
                    "{format:?} {value} {exact}"
                );
            }
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A stored block's values, as GGML documents them; of smaller blocks and those of uneven values.
fn documented(format: BlockFormat, block: &[u8]) -> Option<Vec<f32>> {
    const UNEVEN: [f32; 16] = [
        -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0,
        69.0, 89.0, 113.0,
    ];
    const FOURS: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
    let nibbles = |from: usize| -> Vec<u8> {
        let codes = &block[from..from + 16];
        codes.iter().map(|byte| byte & 15).chain(codes.iter().map(|byte| byte >> 4)).collect()
    };
    let fives = |bits: usize| -> Vec<f32> {
        let above = u32::from_le_bytes([0, 1, 2, 3].map(|i| block[bits + i]));
        let codes = nibbles(bits + 4).into_iter().enumerate();
        codes
            .map(|(n, low)| f32::from(low) + if above >> n & 1 == 1 { 16.0 } else { 0.0 })
            .collect()
    };
    let values = match format {
        BlockFormat::Q4_0 => {
            nibbles(2).iter().map(|code| (f32::from(*code) - 8.0) * half(0)).collect()
        }
        BlockFormat::Q4_1 => {
            nibbles(4).iter().map(|code| f32::from(*code) * half(0) + half(2)).collect()
        }
        BlockFormat::Q5_0 => fives(2).iter().map(|code| (code - 16.0) * half(0)).collect(),
        BlockFormat::Q5_1 => fives(4).iter().map(|code| code * half(0) + half(2)).collect(),
        BlockFormat::Q8_0 => {
            block[2..].iter().map(|code| f32::from(code.cast_signed()) * half(0)).collect()
        }
        BlockFormat::Iq4Nl => {
            nibbles(2).iter().map(|code| UNEVEN[usize::from(*code)] * half(0)).collect()
        }
        BlockFormat::Iq4Xs => {
            let high = u16::from_le_bytes([block[2], block[3]]);
            let of_part = |part: usize| -> Vec<f32> {
                let low = if part.is_multiple_of(2) {
                    block[4 + part / 2] & 15
                } else {
                    block[4 + part / 2] >> 4
                };
                let scale = i32::from(low) + 16 * i32::from(high >> (2 * part) & 3) - 32;
                let codes = nibbles(8 + 16 * part);
                let scale = half(0) * scale as f32;
                codes.iter().map(|code| scale * UNEVEN[usize::from(*code)]).collect()
            };
            (0..8).flat_map(of_part).collect()
        }
        BlockFormat::Mxfp4 => {
            let power = 2.0_f64.powi(i32::from(block[0]) - 127);
            let of = |code: &u8| {
                let size = power * f64::from(FOURS[usize::from(code & 7)]);
                (if code & 8 > 0 { 0.0 - size } else { size }) as f32
            };
            nibbles(1).iter().map(of).collect()
        }
        _ => return None,
    };
    Some(values)
}

#[test]
fn blocks_side_by_side_have_the_documented_values() {
    let mut noise = Noise::new(42);
    for format in BlockFormat::ALL {
        let (outputs, inputs) = (37, 3 * format.values());
        let stored = random(&mut noise, format, outputs, inputs);
        let mut want = vec![0.0; outputs * inputs];
        format.widen(&stored, &mut want);
        let blocks = stored.chunks_exact(format.bytes()).zip(want.chunks_exact(format.values()));
        for (block, want) in blocks {
            if let Some(documented) = documented(format, block) {
                assert_eq!(bits(&documented), bits(want), "{format:?}");
            }
        }
        let bytes = side_by_side(format, outputs, inputs, &stored);
        assert_eq!(Some(bytes.len()), held_bytes(format, outputs, inputs));
        let b = Blocks::transposed(&bytes, format, outputs, inputs);
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
fn blocks_in_memory_are_little_larger_than_in_a_file() {
    for format in BlockFormat::ALL {
        let (held, stored) = (format.layout().held_bytes(), format.bytes());
        assert!(held >= stored && held <= stored + stored / 16, "{format:?}: {held} for {stored}");
    }
}

/// Powers of two from the smallest to the largest, whose values are no normal numbers at both ends.
#[test]
fn every_power_of_mxfp4_is_exact() {
    for exponent in 0..=255 {
        let mut block = vec![0x71; 17];
        block[0] = exponent;
        let mut values = [0.0; 32];
        BlockFormat::Mxfp4.widen(&block, &mut values);
        let power = 2.0_f64.powi(i32::from(exponent) - 127);
        assert_eq!(values[0].to_bits(), ((0.5 * power) as f32).to_bits(), "{exponent}");
        assert_eq!(values[16].to_bits(), ((6.0 * power) as f32).to_bits(), "{exponent}");
    }
}

#[test]
fn empty_products_are_zero() {
    let mut out = [1.0; 3];
    let b = Blocks::transposed(&[], BlockFormat::Q8_0, 3, 0);
    matmul_quantised(&mut out[..], &FixedRows::of(Mat::rows(&[], 1, 0, 0)), b, false);
    assert_eq!(bits(&out), [0; 3]);
    matmul_quantised(&mut [][..], &FixedRows::of(Mat::rows(&[], 0, 0, 0)), b, false);
}
