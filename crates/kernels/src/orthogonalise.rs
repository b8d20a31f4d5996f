//! Orthogonal factor of a matrix, approximately: what Muon (Jordan et al. 2024) steps along.
//!
//! `X = u / n(‖u‖_F)`, turned so that rows are no more than columns, then five times
//! `A = X Xᵀ`, `X ← a X + (b A + c A²) X`. Every singular value `s` goes through the odd polynomial
//! `a s + b s³ + c s⁵`; the result's lie near 1. Two rules:
//!
//! - Newton-Schulz: `n = ‖u‖ + 1e-7`, the same coefficients always;
//! - Polar Express (Amsel et al. 2025): `n = 1.01 ‖u‖ + 1e-6`, coefficients of each iteration.
//!
//! On a CPU it is `A = d I + E` with the mean `d` of the diagonal, so `a X + (b A + c A²) X` is
//! `(a + b d + c d²) X + ((b + 2 c d) E + c E²) X`: products of `E` lose less where their factors are rounded.
//!
//! A zero matrix stays zero. `A` and `A²` are symmetric, so half of each is computed. Cost: `5 (3 r² c + r³)` operations for `r ≤ c`.

use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

use crate::dispatch::fused;
use crate::gemm::{Mat, Threads, matmul_as, matmul_symmetric, pays_for_rounding};
use crate::storage::host_f64;

/// Which polynomials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Five equal quintics.
    NewtonSchulz,
    /// Five quintics fitted one after the other.
    PolarExpress,
}

const NEWTON_SCHULZ: [(f64, f64, f64); 5] = [(3.4445, -4.7750, 2.0315); 5];

const POLAR_EXPRESS: [(f64, f64, f64); 5] = [
    (8.156_554_524_902_461, -22.483_292_925_577_95, 15.878_769_915_207_462),
    (4.042_929_935_166_739, -2.808_917_465_908_714, 0.500_017_845_105_131_6),
    (3.891_667_802_292_660_7, -2.772_484_153_217_685, 0.506_064_817_850_339_3),
    (3.285_753_657_755_655, -2.368_129_493_342_537_6, 0.464_490_242_330_031_06),
    (2.346_541_325_859_637_7, -1.709_782_838_268_708_1, 0.423_235_511_693_053_23),
];

impl Rule {
    /// `(a, b, c)` of every iteration.
    pub fn coefficients(self) -> &'static [(f64, f64, f64); 5] {
        match self {
            Self::NewtonSchulz => &NEWTON_SCHULZ,
            Self::PolarExpress => &POLAR_EXPRESS,
        }
    }

    /// What a matrix of this Frobenius norm is divided by.
    pub fn divisor(self, norm: f64) -> f64 {
        match self {
            Self::NewtonSchulz => norm + 1e-7,
            Self::PolarExpress => 1.01 * norm + 1e-6,
        }
    }

    /// A singular value (of the divided matrix) after all iterations.
    pub fn of_singular_value(self, singular_value: f64) -> f64 {
        self.coefficients().iter().fold(singular_value, |s, (a, b, c)| {
            let square = s * s;
            s * (a + square * (b + c * square))
        })
    }
}

/// [`orthogonalise`] where the products are fastest: on `device`, if it is no CPU. The matrix comes
/// from the host and goes back there. On a CPU factors of large products are `rounded` if that is asked for and faster: Muon
/// was published in bf16, which rounds them more.
///
/// # Errors
/// - the device fails
///
/// # Panics
/// - `matrix` has another length
pub fn orthogonalise_on(
    device: &Device,
    matrix: &[f32],
    (rows, columns): (usize, usize),
    rule: Rule,
    rounded: bool,
) -> Result<Vec<f32>> {
    // Asked of a tensor without values on the host: a GPU without memory pools gives none to no bytes.
    let host = Tensor::zeros(0, DType::F32, &Device::Cpu)?;
    if (device.is_cpu() && fused(&[&host])) || matrix.is_empty() {
        return Ok(on_host(matrix, (rows, columns), rule, rounded));
    }
    reference(&Tensor::from_slice(matrix, (rows, columns), device)?, rule)?.flatten_all()?.to_vec1()
}

/// The orthogonal factor of a row-major `rows` x `columns` matrix. Its products have f32 factors, whatever those of a step are.
///
/// # Panics
/// - `matrix` has another length
pub fn orthogonalise(matrix: &[f32], rows: usize, columns: usize, rule: Rule) -> Vec<f32> {
    on_host(matrix, (rows, columns), rule, false)
}

fn on_host(matrix: &[f32], (rows, columns): (usize, usize), rule: Rule, rounded: bool) -> Vec<f32> {
    assert_eq!(matrix.len(), rows * columns, "a matrix of {rows} x {columns}");
    if matrix.is_empty() {
        return Vec::new();
    }
    let tall = rows > columns;
    let (r, c) = if tall { (columns, rows) } else { (rows, columns) };
    let norm = crate::adamw::square_sum(matrix).sqrt();
    let factor = (1.0 / rule.divisor(norm)) as f32;
    let mut x = if tall { transposed(matrix, columns) } else { matrix.to_vec() };
    x.iter_mut().for_each(|value| *value *= factor);
    let (mut gram, mut square) = (vec![0.0; r * r], vec![0.0; r * r]);
    let mut next = vec![0.0; r * c];
    let rounds = |inner: usize, cols: usize| rounded && pays_for_rounding((r, inner, cols));
    for &(a, b, c_) in rule.coefficients() {
        let wide = Mat::rows(&x, r, c, c);
        matmul_symmetric(rounds(c, r), &mut gram, wide, wide.t());
        let of_gram = take_diagonal(&mut gram, r);
        let symmetric = Mat::rows(&gram, r, r, r);
        matmul_symmetric(rounds(r, r), &mut square, symmetric, symmetric);
        let of_one = (b + 2.0 * c_ * of_gram) as f32;
        let of_square = c_ as f32;
        gram.par_iter_mut().zip(&square).with_min_len(1 << 14).for_each(|(gram, square)| {
            *gram = of_one * *gram + of_square * square;
        });
        let of_sum = take_diagonal(&mut gram, r);
        let own = (a + of_gram * (b + c_ * of_gram) + of_sum) as f32;
        next.par_iter_mut().zip(&x).with_min_len(1 << 14).for_each(|(next, x)| *next = own * x);
        matmul_as(rounds(r, c), &mut next, c, Mat::rows(&gram, r, r, r), wide, true, Threads::Pool);
        std::mem::swap(&mut x, &mut next);
    }
    if tall { transposed(&x, rows) } else { x }
}

/// Subtracts the mean of a square's diagonal from it, and returns the mean. What is left has smaller values beside smaller ones, so
/// that rounding by the largest of a row loses less.
fn take_diagonal(square: &mut [f32], side: usize) -> f64 {
    let sum: f64 = square.iter().step_by(side + 1).map(|value| f64::from(*value)).sum();
    let mean = (sum / side as f64) as f32;
    square.iter_mut().step_by(side + 1).for_each(|value| *value -= mean);
    f64::from(mean)
}

/// A row-major matrix of rows of `columns` values, turned.
fn transposed(matrix: &[f32], columns: usize) -> Vec<f32> {
    let rows = matrix.len() / columns;
    let mut out = vec![0.0; matrix.len()];
    out.par_chunks_mut(rows).enumerate().with_min_len(8).for_each(|(column, out)| {
        for (row, out) in out.iter_mut().enumerate() {
            *out = matrix[row * columns + column];
        }
    });
    out
}

/// The same from plain tensor ops, for any device and float type.
///
/// # Shapes
/// - `[rows, columns]` → the same
///
/// # Errors
/// - `matrix` is no matrix
pub fn reference(matrix: &Tensor, rule: Rule) -> Result<Tensor> {
    let (rows, columns) = matrix.dims2()?;
    let tall = rows > columns;
    let norm = host_f64(&matrix.sqr()?.sum_all()?.sqrt()?)?[0];
    let x = if tall { matrix.t()?.contiguous()? } else { matrix.clone() };
    let mut x = (x / rule.divisor(norm))?;
    for &(a, b, c) in rule.coefficients() {
        let gram = x.matmul(&x.t()?)?;
        let sum = ((&gram * b)? + (gram.matmul(&gram)? * c)?)?;
        x = ((&x * a)? + sum.matmul(&x)?)?;
    }
    if tall { x.t()?.contiguous() } else { Ok(x) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::with_rounded_products;
    use crate::test_support::Noise;

    #[test]
    fn rounded_factors_change_less_than_bf16_would() {
        let mut noise = Noise::new(5);
        for (rows, columns) in [(256, 256), (640, 256), (256, 1100)] {
            let matrix: Vec<f32> = (0..rows * columns).map(|_| noise.next() as f32).collect();
            for rule in [Rule::NewtonSchulz, Rule::PolarExpress] {
                let of = |rounded: bool| {
                    orthogonalise_on(&Device::Cpu, &matrix, (rows, columns), rule, rounded)
                        .expect("factor")
                };
                let exact = orthogonalise(&matrix, rows, columns, rule);
                // The calling thread's own choice does not count.
                assert_eq!(with_rounded_products(true, || of(false)), exact);
                let norm = |values: &[f32]| crate::adamw::square_sum(values).sqrt();
                let apart: Vec<f32> = of(true).iter().zip(&exact).map(|(x, y)| x - y).collect();
                let error = norm(&apart) / norm(&exact);
                let rounds = pays_for_rounding((256, 256, 256));
                assert_eq!(error > 0.0, rounds, "{rows} x {columns}, {rule:?}");
                assert!(error < 2.5e-3, "{rows} x {columns}, {rule:?}: {error}");
            }
        }
    }

    #[test]
    fn singular_values_go_through_the_published_map() {
        for (s, newton_schulz, polar_express) in [
            (1e-4, 0.048_473, 0.098_806),
            (1e-3, 0.470_544, 0.858_873),
            (0.1, 0.712_120, 1.059_161),
            (0.7, 1.120_323, 0.935_634),
            (1.0, 0.696_436, 0.859_129),
        ] {
            assert!((Rule::NewtonSchulz.of_singular_value(s) - newton_schulz).abs() < 1e-6);
            assert!((Rule::PolarExpress.of_singular_value(s) - polar_express).abs() < 1e-6);
        }
    }

    #[test]
    fn zero_stays_zero_and_nothing_is_left_of_nothing() {
        let zero = orthogonalise(&[0.0; 6], 2, 3, Rule::NewtonSchulz);
        assert!(zero.iter().all(|value| value.to_bits() == 0));
        assert!(orthogonalise(&[], 0, 3, Rule::PolarExpress).is_empty());
    }
}
