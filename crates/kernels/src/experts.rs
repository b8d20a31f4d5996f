//! Mixture of experts: a router sends every row through a few of many gated MLPs.
//!
//! With router logits `z = x Rᵀ`, `p = softmax(z)` and `S` the `k` most likely experts (ties to the
//! lower one): `y = r + Σ_{e ∈ S} w_e · Down_e (silu(Gate_e x) ∘ Up_e x)`, `w_e = p_e`, or
//! `p_e / Σ_S p`, which is the softmax over `S` alone (Shazeer et al. 2017; Mixtral,
//! arXiv 2401.04088).
//!
//! Rows are grouped by expert, so that a pass reads the weights of an expert once, however many
//! rows chose it, and none of the others. A row's sum runs over its experts in ascending order: its
//! bits depend neither on the rows beside it nor on what they chose. On a device every expert's outputs
//! are kept, and one pass over memory adds each row's. Frozen weights only: nothing flows back.

mod scored;

use std::ops::Range;

use candle_core::{D, DType, Result, Tensor, bail};

use crate::dispatch::fused;
use crate::matrix::{Matrix, linear_each};
use crate::rows::select_rows;
use crate::storage::with_f32;
use crate::sums::Sums;
use crate::swiglu::swiglu;
use crate::top_k::row_top_k;

pub use scored::Scored;

/// The matrices of one expert.
pub struct Expert {
    /// `[I, H]`
    pub gate: Matrix,
    /// `[I, H]`
    pub up: Matrix,
    /// `[H, I]`
    pub down: Matrix,
}

/// What gate and up of an expert become before `Down`.
pub type Gated = fn(&Tensor, &Tensor) -> Result<Tensor>;

impl Expert {
    fn apply(&self, x: &Tensor, gated: Gated) -> Result<Tensor> {
        let [gate, up] = linear_each(x, [(&self.gate, None), (&self.up, None)])?;
        self.down.linear(&gated(&gate, &up)?, None)
    }
}

/// The experts of every row: rows sorted by expert.
#[derive(Debug, Clone, PartialEq)]
pub struct Routes {
    rows: usize,
    /// Where each expert's rows begin in `visitors`; a last entry says where they end.
    starts: Vec<usize>,
    /// The rows of every expert, ascending.
    visitors: Vec<u32>,
    /// What each of them takes of the expert's output.
    weights: Vec<f32>,
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
        let mut chosen = row_top_k(&logits.to_dtype(DType::F32)?, per_row)?;
        for log_probs in chosen.log_probs.chunks_mut(per_row) {
            into_weights(log_probs, normalise);
        }
        Ok(Self::of_chosen(rows, count, per_row, (&chosen.ids, &chosen.log_probs)))
    }

    /// Groups rows by expert: `per_row` experts of each and their weights, row after row.
    fn of_chosen(
        rows: usize,
        count: usize,
        per_row: usize,
        (ids, of_ids): (&[u32], &[f32]),
    ) -> Self {
        let mut starts = vec![0; count + 1];
        ids.iter().for_each(|&expert| starts[expert as usize + 1] += 1);
        (0..count).for_each(|expert| starts[expert + 1] += starts[expert]);
        let mut next = starts.clone();
        let (mut visitors, mut weights) = (vec![0; rows * per_row], vec![0.0; rows * per_row]);
        for (i, (&expert, &weight)) in ids.iter().zip(of_ids).enumerate() {
            let place = &mut next[expert as usize];
            visitors[*place] = (i / per_row) as u32;
            weights[*place] = weight;
            *place += 1;
        }
        Self { rows, starts, visitors, weights }
    }

    /// Places among the visitors of the rows that visit each expert.
    fn visits(&self) -> impl Iterator<Item = Range<usize>> {
        self.starts.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// What every row adds up of the visitors' outputs: its experts ascending.
    fn sums(&self) -> Sums {
        let each = self.visitors.len() / self.rows.max(1);
        let mut taken = vec![0; self.rows];
        let mut places = vec![0; self.visitors.len()];
        let mut weights = vec![0.0; self.visitors.len()];
        for (place, (&row, &weight)) in self.visitors.iter().zip(&self.weights).enumerate() {
            let row = row as usize;
            places[row * each + taken[row]] = place as u32;
            weights[row * each + taken[row]] = weight;
            taken[row] += 1;
        }
        let from = (0..=self.rows).map(|row| (row * each) as u32).collect();
        Sums { from, places, weights: Some(weights) }
    }

    fn check(&self, residual: &Tensor, x: &Tensor, experts: &[Expert]) -> Result<()> {
        let (rows, _) = x.dims2()?;
        if x.shape() != residual.shape()
            || rows != self.rows
            || experts.len() != self.starts.len() - 1
        {
            bail!(
                "experts: input {:?}, residual {:?} and {} experts for routes of {} rows to {}",
                x.shape(),
                residual.shape(),
                experts.len(),
                self.rows,
                self.starts.len() - 1
            );
        }
        if x.track_op() || residual.track_op() {
            bail!("experts: no gradient flows through a mixture of experts");
        }
        Ok(())
    }
}

/// Turns the log-probabilities of a row's experts into their weights.
fn into_weights(log_probs: &mut [f32], normalise: bool) {
    let prob = |log_prob: &f32| f64::from(*log_prob).exp();
    let total = if normalise { log_probs.iter().map(prob).sum() } else { 1.0 };
    log_probs.iter_mut().for_each(|of| *of = (prob(of) / total) as f32);
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
    gated_experts_onto(residual, x, experts, routes, swiglu)
}

/// The same with another gated unit than SiLU's, such as [`crate::geglu::geglu`].
///
/// # Shapes
/// - as [`experts_onto`]
///
/// # Errors
/// - as [`experts_onto`]
pub fn gated_experts_onto(
    residual: &Tensor,
    x: &Tensor,
    experts: &[Expert],
    routes: &Routes,
    gated: Gated,
) -> Result<Tensor> {
    routes.check(residual, x, experts)?;
    if !fused(&[residual, x]) {
        return gathered(residual, x, (experts, gated), routes);
    }
    let (rows, width) = x.dims2()?;
    let mut sums = residual.flatten_all()?.to_vec1::<f32>()?;
    for (expert, visits) in experts.iter().zip(routes.visits()) {
        if visits.is_empty() {
            continue;
        }
        let (visitors, weights) = (&routes.visitors[visits.clone()], &routes.weights[visits]);
        let out = outputs_of((expert, gated), &rows_of(x, visitors)?, width)?;
        with_f32(&out, |out| {
            for ((row, weight), out) in visitors.iter().zip(weights).zip(out.chunks_exact(width)) {
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

fn outputs_of((expert, gated): (&Expert, Gated), x: &Tensor, width: usize) -> Result<Tensor> {
    let out = expert.apply(x, gated)?;
    if out.dims() != [x.dim(0)?, width] {
        bail!("experts: output {:?} for rows of {width}", out.shape());
    }
    Ok(out)
}

/// The same grouping on a device: the outputs of all experts, `[R·k, H]`, then each row's sum of them.
fn gathered(
    residual: &Tensor,
    x: &Tensor,
    (experts, gated): (&[Expert], Gated),
    routes: &Routes,
) -> Result<Tensor> {
    let (_, width) = x.dims2()?;
    let visitors = &routes.visitors;
    if visitors.is_empty() {
        return Ok(residual.clone());
    }
    let at = Tensor::from_slice(visitors, visitors.len(), x.device())?;
    let outputs = Tensor::zeros((visitors.len(), width), x.dtype(), x.device())?;
    for (expert, visits) in experts.iter().zip(routes.visits()) {
        if visits.is_empty() {
            continue;
        }
        let own = x.index_select(&at.narrow(0, visits.start, visits.len())?, 0)?;
        outputs.slice_set(
            &outputs_of((expert, gated), &own, width)?.contiguous()?,
            0,
            visits.start,
        )?;
    }
    routes.sums().of(&outputs, residual)
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
    use crate::cuda::emulator::emulated;
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
            assert_close(
                "gathered",
                &gathered(&residual, &x, (&experts, swiglu), &routes)?,
                &want,
                1e-5,
            );
            let on_gpu = emulated(|| {
                let routes = Routes::choose(&logits, per_row, normalise)?;
                experts_onto(&residual, &x, &experts, &routes)
            })?;
            assert_close("the GPU's", &on_gpu, &want, 1e-5);
        }
        Ok(())
    }

    #[test]
    fn rows_that_visit_nobody_are_the_residual() -> Result<()> {
        let mut noise = Noise::new(74);
        let experts = experts(3, 8, DType::F32, &mut noise)?;
        let none = Tensor::zeros((0, HIDDEN), DType::F32, &candle_core::Device::Cpu)?;
        let logits = Tensor::zeros((0, 3), DType::F32, &candle_core::Device::Cpu)?;
        let run = || {
            let routes = Routes::choose(&logits, 2, true)?;
            experts_onto(&none, &none, &experts, &routes)
        };
        assert_eq!(run()?.dims(), [0, HIDDEN]);
        assert_eq!(emulated(run)?.dims(), [0, HIDDEN]);
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
        let check = || -> Result<()> {
            let together = of(0, rows)?;
            for (row, together) in together.iter().enumerate() {
                assert_eq!(&of(row, 1)?[0], together);
            }
            assert_eq!(of(3, 20)?, together[3..23]);
            Ok(())
        };
        check()?;
        emulated(check)
    }

    #[test]
    fn weights_are_probabilities_or_shares_and_ties_go_to_the_lower_expert() {
        let logits = [0.0_f32, 1.0, -3.0, 1.0];
        let total: f64 = logits.iter().map(|z| f64::from(*z).exp()).sum();
        let p = (1.0_f64.exp() / total) as f32;
        for (per_row, normalise, want) in [
            (1, false, &[(1, p)][..]),
            (2, false, &[(1, p), (3, p)]),
            (2, true, &[(1, 0.5), (3, 0.5)]),
        ] {
            let row = Tensor::new(&[logits], &candle_core::Device::Cpu).expect("a row");
            let routes = Routes::choose(&row, per_row, normalise).expect("routes");
            let visits = routes.visits().enumerate().filter(|(_, visits)| !visits.is_empty());
            let got: Vec<_> =
                visits.map(|(expert, visits)| (expert, routes.weights[visits.start])).collect();
            assert_eq!(got.len(), want.len());
            for ((expert, weight), (wanted, share)) in got.iter().zip(want) {
                assert_eq!(expert, wanted);
                assert!((weight - share).abs() < 1e-6, "{weight} {share}");
            }
        }
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
