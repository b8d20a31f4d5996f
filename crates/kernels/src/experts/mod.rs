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
//! are kept, and one pass over memory adds each row's. An NVIDIA GPU multiplies the rows of all experts in one start.
//! Frozen weights only: nothing flows back.

mod gpu;
mod routes;
#[cfg(test)]
mod tests;

use candle_core::{D, Result, Tensor, bail};

use crate::dispatch::fused;
use crate::geglu::geglu;
use crate::matrix::{Matrix, linear_each};
use crate::rows::select_rows;
use crate::storage::with_f32;
use crate::swiglu::{Clamped, clamped_swiglu, swiglu};

#[cfg(all(test, feature = "cuda"))]
pub(crate) use gpu::compiled;
pub use routes::{Choice, Routes, SigmoidChoice};

/// The matrices of one expert.
pub struct Expert {
    /// `[I, H]`
    pub gate: Matrix,
    /// `[I, H]`
    pub up: Matrix,
    /// `[H, I]`
    pub down: Matrix,
    /// Biases of the three, `[I]`, `[I]`, `[H]`; they lie inside of what a router weighs.
    pub biases: Option<[Tensor; 3]>,
    /// What gate and up become before `Down`.
    pub unit: Unit,
}

/// The gated unit of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Unit {
    /// [`swiglu`]
    #[default]
    Silu,
    /// [`geglu`]
    GeluTanh,
    /// [`clamped_swiglu`]
    Clamped(Clamped),
}

impl Expert {
    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let [of_gate, of_up, of_down] = match &self.biases {
            Some([gate, up, down]) => [Some(gate), Some(up), Some(down)],
            None => [None; 3],
        };
        let [gate, up] = linear_each(x, [(&self.gate, of_gate), (&self.up, of_up)])?;
        let gated = match self.unit {
            Unit::Silu => swiglu(&gate, &up)?,
            Unit::GeluTanh => geglu(&gate, &up)?,
            Unit::Clamped(bounds) => clamped_swiglu(&gate, &up, bounds)?,
        };
        self.down.linear(&gated, of_down)
    }
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
        return match gpu::experts_onto(residual, x, experts, routes)? {
            Some(sum) => Ok(sum),
            None => gathered(residual, x, experts, routes),
        };
    }
    let (rows, width) = x.dims2()?;
    let mut sums = residual.flatten_all()?.to_vec1::<f32>()?;
    for (expert, visits) in experts.iter().zip(routes.visits()) {
        if visits.is_empty() {
            continue;
        }
        let (visitors, weights) =
            (&routes.visitors[visits.clone()], &routes.weights[visits.clone()]);
        let inputs = routes.weigh(rows_of(x, visitors)?, &visits)?;
        let out = outputs_of(expert, &inputs, width)?;
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

fn outputs_of(expert: &Expert, x: &Tensor, width: usize) -> Result<Tensor> {
    let out = expert.apply(x)?;
    if out.dims() != [x.dim(0)?, width] {
        bail!("experts: output {:?} for rows of {width}", out.shape());
    }
    Ok(out)
}

/// The same grouping on a device: the outputs of all experts, `[R·k, H]`, then each row's sum of them.
fn gathered(residual: &Tensor, x: &Tensor, experts: &[Expert], routes: &Routes) -> Result<Tensor> {
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
        let own = routes.weigh(own, &visits)?;
        let out = outputs_of(expert, &own, width)?;
        outputs.slice_set(&out.contiguous()?, 0, visits.start)?;
    }
    routes.sums().of(&outputs, residual)
}

/// The same with every expert applied to every row, from router logits `[R, E]`, for any device
/// and float type.
pub(crate) fn reference(
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
        let of_biases = expert.biases.as_ref().map(|biases| biases.each_ref().map(Some));
        let [of_gate, of_up, of_down] = of_biases.unwrap_or([None; 3]);
        let linear = |x: &Tensor, weight: &Matrix, bias: Option<&Tensor>| {
            crate::linear::reference(x, &weight.to_dense()?, bias)
        };
        let (gate, up) = (linear(x, &expert.gate, of_gate)?, linear(x, &expert.up, of_up)?);
        let gated = match expert.unit {
            Unit::Silu => crate::swiglu::reference(&gate, &up)?,
            Unit::GeluTanh => crate::geglu::reference(&gate, &up)?,
            Unit::Clamped(bounds) => clamped_swiglu(&gate, &up, bounds)?,
        };
        let out = linear(&gated, &expert.down, of_down)?;
        sum = (sum + out.broadcast_mul(&weights.narrow(D::Minus1, index, 1)?)?)?;
    }
    Ok(sum)
}
