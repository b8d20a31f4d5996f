//! Rounded products beside exact ones, on every instruction set.

use half::{bf16, f16};

use super::super::factors::Factors;
use super::super::micro::Isa;
use super::super::tests::{instruction_sets, operand, values};
use super::super::{Threads, kept_bytes, matmul, product};
use super::*;
use crate::settings::with_rounded_products;
use crate::test_support::Noise;

/// Instruction sets whose rounded kernel this machine runs.
fn kernels() -> Vec<Factors> {
    let runs = |isa: &Isa| {
        #[cfg(target_arch = "x86_64")]
        return *isa != Isa::Avx512 || isa.gains_by_rounding();
        #[cfg(not(target_arch = "x86_64"))]
        return *isa == Isa::Portable;
    };
    instruction_sets().into_iter().filter(runs).map(|isa| Factors { isa, rounded: true }).collect()
}

const SIZES: [(usize, usize, usize); 10] = [
    (1, 1, 1),
    (3, 5, 2),
    (15, 33, 9),
    (29, 31, 17),
    (40, 130, 515),
    (200, 70, 41),
    (16, 64, 1024),
    (17, 300, 600),
    (700, 130, 66),
    (2700, 130, 3),
];

/// The product of factors that are rounded one by one, in f64.
fn by_definition(a: Mat<'_>, b: Mat<'_>, row: usize, col: usize) -> f64 {
    let depth = super::super::blocks::depth_of(a.cols);
    let a_at = |k: usize| a.data[row * a.row_stride + k * a.col_stride];
    let b_at = |k: usize| b.data[k * b.row_stride + col * b.col_stride];
    let mut sum = 0.0;
    for first in (0..a.cols).step_by(depth) {
        let steps = first..(first + depth).min(a.cols);
        let code = largest_code(steps.len()) as f32;
        let largest =
            |at: &dyn Fn(usize) -> f32| steps.clone().map(|k| at(k).abs()).fold(0.0, f32::max);
        let (of_a, of_b) = (largest(&a_at), largest(&b_at));
        let rounded =
            |x: f32, of: f32| (f64::from(x) * f64::from(code / of)).round_ties_even() as i64;
        let exact: i64 =
            steps.clone().map(|k| rounded(a_at(k), of_a) * rounded(b_at(k), of_b)).sum();
        assert!(i32::try_from(exact).is_ok(), "a sum of integers leaves 32 bits");
        sum += exact as f64 * f64::from(of_a / code) * f64::from(of_b / code);
    }
    sum
}

#[test]
fn every_kernel_multiplies_rounded_factors_exactly() {
    let mut noise = Noise::new(3);
    for (rows, cols, depth) in SIZES {
        let a_data = values(&mut noise, (rows + 3) * (depth + 3));
        let b_data = values(&mut noise, (cols + 3) * (depth + 3));
        for layout in 0..4 {
            let a = operand(&a_data, rows, depth, layout % 2 == 1);
            let b = operand(&b_data, depth, cols, layout / 2 == 1);
            for accumulate in [false, true] {
                assert_product(a, b, accumulate);
            }
        }
    }
}

/// Every kernel has the product by definition, with the same bits.
fn assert_product(a: Mat<'_>, b: Mat<'_>, accumulate: bool) {
    let (cols, stride) = (b.cols, b.cols + 2);
    let mut first: Option<Vec<f32>> = None;
    for factors in kernels() {
        for threads in [Threads::One, Threads::Pool] {
            let mut dst = vec![0.5_f32; a.rows * stride];
            product(factors, &mut dst, stride, (a, b), accumulate, threads);
            if let Some(first) = &first {
                let same = first.iter().zip(&dst).all(|(x, y)| x.to_bits() == y.to_bits());
                assert!(same, "{factors:?}: other bits than the first kernel's");
                continue;
            }
            for (row, line) in dst.chunks(stride).enumerate() {
                for (col, got) in line[..cols].iter().enumerate() {
                    let added = if accumulate { 0.5 } else { 0.0 };
                    let want = by_definition(a, b, row, col) + added;
                    let error = (f64::from(*got) - want).abs();
                    assert!(error < 1e-5 * (1.0 + want.abs()), "({row}, {col}): {got} {want}");
                }
                assert!(line[cols..].iter().all(|x| x.to_bits() == 0.5_f32.to_bits()), "a gap");
            }
            first = Some(dst);
        }
    }
}

#[test]
fn the_largest_integers_never_leave_32_bits() {
    for steps in 1..=512 {
        let (code, words) = (u64::from(largest_code(steps)), words_of(steps) as u64);
        assert!(2 * words * code * code < 1 << 31, "{steps} steps");
        assert!(code == 32_767 || 2 * words * (code + 1) * (code + 1) >= 1 << 31, "{steps} steps");
    }
    // All factors as large as they can be.
    let (rows, depth) = (64, 1024);
    let ones = vec![-3.0_f32; rows * depth];
    let (a, b) = (Mat::rows(&ones, rows, depth, depth), Mat::rows(&ones, rows, depth, depth).t());
    for factors in kernels() {
        let mut dst = vec![0.0; rows * rows];
        product(factors, &mut dst, rows, (a, b), false, Threads::One);
        let want = 9.0 * depth as f32;
        assert!(dst.iter().all(|x| (x - want).abs() < 1e-6 * want), "{factors:?} {}", dst[0]);
    }
}

#[test]
fn the_error_is_small_beside_the_norms_of_row_and_column() {
    let (rows, cols, depth) = (64, 80, 2048);
    let mut noise = Noise::new(5);
    // Magnitudes over some decades, as gradients of logits have them.
    let spread = |x: &f32| x.powi(5) * 1e-3;
    let a: Vec<f32> = values(&mut noise, rows * depth).iter().map(spread).collect();
    let b = values(&mut noise, depth * cols);
    let (a, b) = (Mat::rows(&a, rows, depth, depth), Mat::rows(&b, depth, cols, cols));
    let mut dst = vec![0.0; rows * cols];
    product(kernels()[0], &mut dst, cols, (a, b), false, Threads::One);
    for row in 0..rows {
        for col in 0..cols {
            let pairs = || {
                (0..depth).map(|k| {
                    (f64::from(a.data[row * depth + k]), f64::from(b.data[k * cols + col]))
                })
            };
            let want: f64 = pairs().map(|(a, b)| a * b).sum();
            let norms = pairs().map(|(a, _)| a * a).sum::<f64>().sqrt()
                * pairs().map(|(_, b)| b * b).sum::<f64>().sqrt();
            let error = (f64::from(dst[row * cols + col]) - want).abs() / norms;
            assert!(error < 2e-4, "({row}, {col}): {error}");
        }
    }
}

/// Bits of a product whose right operand lies column by column if `turned`.
fn turned_product<T: Element>(
    factors: Factors,
    a: Mat<'_>,
    b: &[T],
    cols: usize,
    turned: bool,
) -> Vec<u32> {
    let b = if turned {
        Mat::rows(b, cols, a.cols, a.cols).t()
    } else {
        Mat::rows(b, a.cols, cols, cols)
    };
    let mut dst = vec![0.0; a.rows * cols];
    product(factors, &mut dst, cols, (a, b), false, Threads::One);
    dst.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn weights_of_16_bits_are_rounded_as_their_values_are() {
    let (rows, cols, depth) = (70, 50, 130);
    let mut noise = Noise::new(6);
    let a = values(&mut noise, rows * depth);
    let halves: Vec<f16> =
        values(&mut noise, cols * depth).into_iter().map(f16::from_f32).collect();
    let wide: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
    let brains: Vec<bf16> = wide.iter().map(|x| bf16::from_f32(*x)).collect();
    let brains_wide: Vec<f32> = brains.iter().map(|x| x.to_f32()).collect();
    let a = Mat::rows(&a, rows, depth, depth);
    for factors in kernels() {
        for turned in [false, true] {
            assert_eq!(
                turned_product(factors, a, &halves, cols, turned),
                turned_product(factors, a, &wide, cols, turned)
            );
            assert_eq!(
                turned_product(factors, a, &brains, cols, turned),
                turned_product(factors, a, &brains_wide, cols, turned)
            );
        }
    }
}

#[test]
fn what_is_not_finite_is_seen_and_what_is_tiny_vanishes() {
    let depth = 70;
    for factors in kernels() {
        for layout in 0..4 {
            let (mut a, mut b) = (vec![1.0_f32; 9 * depth], vec![1.0_f32; 9 * depth]);
            // Row 2 of the left operand, column 1 of the right one.
            let at = |line: usize, turned: bool| {
                if turned { 5 * 9 + line } else { line * (depth + 3) + 5 }
            };
            a[at(2, layout % 2 == 1)] = f32::NAN;
            b[at(1, layout / 2 == 0)] = f32::INFINITY;
            let a = operand(&a, 6, depth, layout % 2 == 1);
            let b = operand(&b, depth, 6, layout / 2 == 1);
            let mut dst = [0.0; 36];
            product(factors, &mut dst[..], 6, (a, b), false, Threads::One);
            for (index, value) in dst.iter().enumerate() {
                let (row, col) = (index / 6, index % 6);
                assert_eq!(
                    row == 2 || col == 1,
                    !value.is_finite(),
                    "{factors:?} {layout} {index}"
                );
            }
        }
        let tiny = vec![1e-40_f32; 100];
        let ones = vec![1.0_f32; 100];
        let mut dst = [1.0; 4];
        let (a, b) = (Mat::rows(&tiny, 2, 50, 50), Mat::rows(&ones, 50, 2, 2));
        product(factors, &mut dst[..], 2, (a, b), false, Threads::One);
        assert!(dst.iter().all(|x| x.to_bits() == 0), "{factors:?} {dst:?}");
    }
}

#[test]
fn large_products_are_rounded_where_the_thread_asks_for_it() {
    let side = 512;
    let mut noise = Noise::new(7);
    let (a, b) = (values(&mut noise, side * side), values(&mut noise, side * side));
    let of = |size: usize| {
        let (a, b) = (Mat::rows(&a, size, size, side), Mat::rows(&b, size, size, side));
        let mut dst = vec![0.0; size * size];
        matmul(&mut dst, size, a, b, false, Threads::Pool);
        dst.iter().map(|x: &f32| x.to_bits()).collect::<Vec<_>>()
    };
    let (exact, small) = (of(side), of(32));
    let kept = || kept_bytes((2000, side, side * 32), false, 2);
    let bytes = kept();
    with_rounded_products(true, || {
        let pays = Isa::detect().gains_by_rounding();
        assert_eq!(of(side) != exact, pays);
        assert_eq!(of(32), small);
        // Fewer values step by step. Rows lie as far apart as those of f32, and have scales beside them.
        assert_eq!(kept() != bytes, pays);
        with_rounded_products(false, || assert_eq!(of(side), exact));
        assert_eq!(of(side) != exact, pays);
    });
    assert_eq!(of(side), exact);
}
