//! Mixture of experts: a router sends every row through a few of many gated MLPs.
//!
//! With router logits `z = x Rᵀ`, `p = softmax(z)` and `S` the `k` most likely experts (ties to the
//! lower one): `y = r + Σ_{e ∈ S} w_e · Down_e (silu(Gate_e x) ∘ Up_e x)`, `w_e = p_e`, or
//! `p_e / Σ_S p`, which is the softmax over `S` alone (Shazeer et al. 2017; Mixtral,
//! arXiv 2401.04088).
//!
//! Rows are grouped by expert, so that a pass reads the weights of an expert once, however many
//! rows chose it, and none of the others. A row's sum runs over its experts in ascending order: its
//! bits depend neither on the rows beside it nor on what they chose. Frozen weights only: nothing
//! flows back.

use candle_core::{D, DType, Result, Tensor, bail};
use rayon::prelude::*;

use crate::dispatch::fused;
use crate::matrix::{Matrix, linear_each};
use crate::rows::select_rows;
use crate::storage::with_f32;
use crate::swiglu::swiglu;
use crate::top_k::top_k_of_row;

/// The matrices of one expert.
pub struct Expert {
    /// `[I, H]`
    pub gate: Matrix,
    /// `[I, H]`
    pub up: Matrix,
    /// `[H, I]`
    pub down: Matrix,
}

impl Expert {
    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = linear_each(x, [(&self.gate, None), (&self.up, None)])?;
        self.down.linear(&swiglu(&gate, &up)?, None)
    }
}

/// Which rows go to an expert, ascending, and the weights of its outputs.
#[derive(Debug, Clone, Default, PartialEq)]
struct Visitors {
    rows: Vec<u32>,
    weights: Vec<f32>,
}

/// The experts of every row.
#[derive(Debug, Clone, PartialEq)]
pub struct Routes {
    rows: usize,
    experts: Vec<Visitors>,
}

impl Routes {
    /// The `per_row` most likely experts of every row; `normalise` makes their weights sum to one.
    ///
    /// # Shapes
    /// - `logits`: `[R, E]`
    ///
    /// # Errors
    /// - `logits` is no matrix, or `per_row` is not between 1 and `E`
    pub fn choose(logits: &Tensor, per_row: usize, normalise: bool) -> Result<Self> {
        let (rows, count) = logits.dims2()?;
        if per_row == 0 || per_row > count {
            bail!("experts: {per_row} of {count} for every row");
        }
        let logits = logits.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        let chosen: Vec<Vec<(u32, f32)>> =
            logits.par_iter().map(|logits| choice(logits, per_row, normalise)).collect();
        let mut experts = vec![Visitors::default(); count];
        for (row, chosen) in chosen.iter().enumerate() {
            for &(expert, weight) in chosen {
                let visitors = &mut experts[expert as usize];
                visitors.rows.push(row as u32);
                visitors.weights.push(weight);
            }
        }
        Ok(Self { rows, experts })
    }

    fn check(&self, residual: &Tensor, x: &Tensor, experts: &[Expert]) -> Result<()> {
        let (rows, _) = x.dims2()?;
        if x.shape() != residual.shape() || rows != self.rows || experts.len() != self.experts.len()
        {
            bail!(
                "experts: input {:?}, residual {:?} and {} experts for routes of {} rows to {}",
                x.shape(),
                residual.shape(),
                experts.len(),
                self.rows,
                self.experts.len()
            );
        }
        if x.track_op() || residual.track_op() {
            bail!("experts: no gradient flows through a mixture of experts");
        }
        Ok(())
    }
}

/// Experts of one row and their weights.
fn choice(logits: &[f32], per_row: usize, normalise: bool) -> Vec<(u32, f32)> {
    let (experts, log_probs) = top_k_of_row(logits, per_row);
    let probs: Vec<f64> = log_probs.iter().map(|log_prob| f64::from(*log_prob).exp()).collect();
    let total = if normalise { probs.iter().sum() } else { 1.0 };
    experts.into_iter().zip(probs).map(|(expert, prob)| (expert, (prob / total) as f32)).collect()
}

/// `residual` plus the weighted outputs of every row's experts.
///
/// # Shapes
/// - `residual`, `x`: `[R, H]` → `[R, H]`
///
/// # Errors
/// - shapes do not fit the routes or the experts, or an input carries a gradient
pub fn experts_onto(
    residual: &Tensor,
    x: &Tensor,
    experts: &[Expert],
    routes: &Routes,
) -> Result<Tensor> {
    routes.check(residual, x, experts)?;
    if !fused(&[residual, x]) {
        return gathered(residual, x, experts, routes);
    }
    let (rows, width) = x.dims2()?;
    let mut sums = residual.flatten_all()?.to_vec1::<f32>()?;
    for (expert, visitors) in experts.iter().zip(&routes.experts) {
        if visitors.rows.is_empty() {
            continue;
        }
        let out = expert.apply(&rows_of(x, &visitors.rows)?)?;
        if out.dims() != [visitors.rows.len(), width] {
            bail!("experts: output {:?} for rows of {width}", out.shape());
        }
        with_f32(&out, |out| {
            for ((row, weight), out) in
                visitors.rows.iter().zip(&visitors.weights).zip(out.chunks_exact(width))
            {
                let sum = &mut sums[*row as usize * width..][..width];
                sum.iter_mut().zip(out).for_each(|(sum, out)| *sum += weight * out);
            }
            Ok(())
        })?;
    }
    Tensor::from_vec(sums, (rows, width), x.device())
}

/// Some rows; all of them without a copy.
fn rows_of(x: &Tensor, rows: &[u32]) -> Result<Tensor> {
    if rows.len() == x.dim(0)? {
        return Ok(x.clone());
    }
    select_rows(x, rows)
}

/// The same grouping from plain tensor ops, where rows are added on the device.
fn gathered(residual: &Tensor, x: &Tensor, experts: &[Expert], routes: &Routes) -> Result<Tensor> {
    let mut sum = residual.clone();
    for (expert, Visitors { rows, weights }) in experts.iter().zip(&routes.experts) {
        if rows.is_empty() {
            continue;
        }
        let weights = Tensor::from_slice(weights, (rows.len(), 1), x.device())?;
        let out = expert.apply(&rows_of(x, rows)?)?;
        let weighted = out.broadcast_mul(&weights.to_dtype(out.dtype())?)?;
        let rows = Tensor::from_slice(rows, rows.len(), x.device())?;
        sum = sum.index_add(&rows, &weighted, 0)?;
    }
    Ok(sum)
}

/// The same with every expert applied to every row, from router logits `[R, E]`, for any device
/// and float type.
///
/// # Errors
/// - as [`experts_onto`]
pub fn reference(
    residual: &Tensor,
    x: &Tensor,
    experts: &[Expert],
    logits: &Tensor,
    per_row: usize,
    normalise: bool,
) -> Result<Tensor> {
    let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
    let probs = shifted.broadcast_div(&shifted.sum_keepdim(D::Minus1)?)?;
    let order = logits.arg_sort_last_dim(false)?;
    let chosen = order.narrow(D::Minus1, 0, per_row)?.contiguous()?;
    let mut weights = probs.gather(&chosen, D::Minus1)?;
    if normalise {
        weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    }
    let weights = probs.zeros_like()?.scatter_add(&chosen, &weights, D::Minus1)?;
    let mut sum = residual.clone();
    for (index, expert) in experts.iter().enumerate() {
        let linear =
            |x: &Tensor, weight: &Matrix| crate::linear::reference(x, &weight.to_dense()?, None);
        let (gate, up) = (linear(x, &expert.gate)?, linear(x, &expert.up)?);
        let out = linear(&crate::swiglu::reference(&gate, &up)?, &expert.down)?;
        sum = (sum + out.broadcast_mul(&weights.narrow(D::Minus1, index, 1)?)?)?;
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{Noise, assert_close};

    const HIDDEN: usize = 24;

    fn experts(count: usize, width: usize, dtype: DType, noise: &mut Noise) -> Result<Vec<Expert>> {
        let mut matrix = |outputs, inputs| -> Result<Matrix> {
            Ok(Matrix::Dense(noise.tensor(&[outputs, inputs]).to_dtype(dtype)?))
        };
        (0..count)
            .map(|_| {
                Ok(Expert {
                    gate: matrix(width, HIDDEN)?,
                    up: matrix(width, HIDDEN)?,
                    down: matrix(HIDDEN, width)?,
                })
            })
            .collect()
    }

    #[test]
    fn grouping_by_expert_equals_every_expert_on_every_row() -> Result<()> {
        let mut noise = Noise::new(71);
        for (rows, count, per_row, width, dtype, normalise) in [
            (1, 1, 1, 5, DType::F32, false),
            (1, 8, 2, 33, DType::F32, true),
            (7, 8, 8, 16, DType::F32, false),
            (40, 5, 2, 17, DType::BF16, true),
            (130, 16, 3, 8, DType::F32, true),
        ] {
            let experts = experts(count, width, dtype, &mut noise)?;
            let (x, residual) = (noise.tensor(&[rows, HIDDEN]), noise.tensor(&[rows, HIDDEN]));
            let logits = noise.tensor(&[rows, count]);
            let routes = Routes::choose(&logits, per_row, normalise)?;
            let want = reference(&residual, &x, &experts, &logits, per_row, normalise)?;
            assert_close("fused", &experts_onto(&residual, &x, &experts, &routes)?, &want, 1e-5);
            assert_close("gathered", &gathered(&residual, &x, &experts, &routes)?, &want, 1e-5);
        }
        Ok(())
    }

    #[test]
    fn a_row_has_the_bits_that_it_has_alone() -> Result<()> {
        let mut noise = Noise::new(72);
        let experts = experts(6, 40, DType::F32, &mut noise)?;
        let (rows, per_row) = (50, 2);
        let (x, residual) = (noise.tensor(&[rows, HIDDEN]), noise.tensor(&[rows, HIDDEN]));
        let logits = noise.tensor(&[rows, 6]);
        let of = |first: usize, count: usize| -> Result<Vec<Vec<f32>>> {
            let part = |t: &Tensor| t.narrow(0, first, count);
            let routes = Routes::choose(&part(&logits)?, per_row, true)?;
            experts_onto(&part(&residual)?, &part(&x)?, &experts, &routes)?.to_vec2()
        };
        let together = of(0, rows)?;
        for (row, together) in together.iter().enumerate() {
            assert_eq!(&of(row, 1)?[0], together);
        }
        assert_eq!(of(3, 20)?, together[3..23]);
        Ok(())
    }

    #[test]
    fn weights_are_probabilities_or_shares_and_ties_go_to_the_lower_expert() {
        let logits = [0.0, 1.0, -3.0, 1.0];
        let total: f64 = logits.iter().map(|z| f64::from(*z).exp()).sum();
        let p = (1.0_f64.exp() / total) as f32;
        let close = |got: Vec<(u32, f32)>, want: &[(u32, f32)]| {
            assert_eq!(got.len(), want.len());
            for ((expert, weight), (wanted, share)) in got.iter().zip(want) {
                assert_eq!(expert, wanted);
                assert!((weight - share).abs() < 1e-6, "{weight} {share}");
            }
        };
        close(choice(&logits, 1, false), &[(1, p)]);
        close(choice(&logits, 2, false), &[(1, p), (3, p)]);
        close(choice(&logits, 2, true), &[(1, 0.5), (3, 0.5)]);
    }

    #[test]
    fn what_does_not_fit_is_an_error() -> Result<()> {
        let mut noise = Noise::new(73);
        let experts = experts(3, 8, DType::F32, &mut noise)?;
        let (x, logits) = (noise.tensor(&[4, HIDDEN]), noise.tensor(&[4, 3]));
        assert!(Routes::choose(&logits, 4, true).is_err());
        assert!(Routes::choose(&logits, 0, true).is_err());
        let routes = Routes::choose(&logits, 2, true)?;
        assert!(experts_onto(&x, &x, &experts[..2], &routes).is_err());
        assert!(experts_onto(&x, &noise.tensor(&[5, HIDDEN]), &experts, &routes).is_err());
        assert!(experts_onto(&noise.tensor(&[4, 9]), &x, &experts, &routes).is_err());
        let trained = noise.var(&[4, HIDDEN]);
        assert!(experts_onto(&x, trained.as_tensor(), &experts, &routes).is_err());
        Ok(())
    }
}
