//! Layers that carry a state from token to token: gated delta nets and short convolutions.
//!
//! ```text
//! normed [T, H] -> inputs of the state [T, C], gates -> Rule: convolution, delta rule -> [T, W] -> output
//! ```
//!
//! Projections are products as everywhere. What follows one another is a [`Rule`], which steps row by row and so
//! gives a row the same bits alone and beside others. A cache keeps the state before its last pass and that
//! pass's rows: what a verification takes back is made again from these by the same steps. That costs a step of
//! a state a token, where a state a row would cost as much memory traffic in every pass, and no products.

mod cached;
mod rule;

use candle_core::{Device, Tensor};
use longdraft_kernels::linear::linear_exact;
use longdraft_kernels::matrix::linear_each;
use longdraft_kernels::recurrence::Walk;
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_kernels::swiglu::swiglu;

use super::feed_forward::Projection;
use crate::error::Result;

pub(super) use cached::CachedState;
pub(super) use rule::{Rows, Rule, State};

/// The mixer of a layer without keys.
pub(super) enum Recurrent {
    Delta(Box<DeltaNet>),
    Convolution(Box<ShortConvolution>),
}

/// Projections of a gated delta net (Qwen3-Next):
/// `y = norm(o) ∘ silu(z)`, `β = σ(b)`, `γ = exp(−A softplus(a + dt))`.
pub(super) struct DeltaNet {
    /// Queries, keys and values, `[C, H]`.
    pub(super) qkv: Projection,
    /// `z`, `[Nv Dv, H]`.
    pub(super) gate: Projection,
    /// `b` and `a`, `[Nv, H]` each; f32, for their exponentials.
    pub(super) b: Tensor,
    pub(super) a: Tensor,
    /// `−A`, `[Nv]`.
    pub(super) rates: Vec<f64>,
    /// `[Nv]`
    pub(super) dt: Vec<f64>,
    /// `[Dv]`, as it multiplies.
    pub(super) norm: Tensor,
    pub(super) eps: f64,
    pub(super) out: Projection,
}

/// Projections of a short convolution between two gates (LFM2): `[B | C | z]`, `y = C ∘ conv(B ∘ z)`.
pub(super) struct ShortConvolution {
    /// `[3H, H]`
    pub(super) input: Projection,
    pub(super) out: Projection,
}

/// What a layer hands from its projections to its output.
pub(super) struct Inputs {
    /// What the rule reads.
    pub(super) rows: Rows,
    /// `z` or `C`, `[T, W]`.
    gate: Tensor,
}

impl Recurrent {
    /// The projections of normed states `[T, H]`.
    pub(super) fn inputs(&self, normed: &Tensor) -> Result<Inputs> {
        match self {
            Self::Delta(net) => net.inputs(normed),
            Self::Convolution(own) => own.inputs(normed),
        }
    }

    /// `residual` plus the layer's output, of what the rule made `[T, W]`.
    pub(super) fn apply_onto(
        &self,
        residual: &Tensor,
        mixed: Vec<f32>,
        gate: &Tensor,
    ) -> Result<Tensor> {
        let mixed = Tensor::from_vec(mixed, gate.dims(), &Device::Cpu)?.to_device(gate.device())?;
        match self {
            Self::Delta(net) => net.out.apply_onto(residual, &net.gated(&mixed, gate)?),
            Self::Convolution(own) => own.out.apply_onto(residual, &(gate * mixed)?),
        }
    }
}

impl Inputs {
    /// What multiplies the rule's outputs.
    pub(super) fn gate(&self) -> &Tensor {
        &self.gate
    }
}

/// Steps through packed rows, each document from nothing.
pub(super) fn of_documents(rule: &Rule, rows: &Rows, document_ids: &[i32]) -> Result<Vec<f32>> {
    let (before, mut after) = (rule.start(), rule.start());
    rule.run(rows, &Walk::documents(document_ids), &before, &mut after)
}

impl DeltaNet {
    fn inputs(&self, normed: &Tensor) -> Result<Inputs> {
        let [qkv, gate] = linear_each(normed, [self.qkv.map(), self.gate.map()])?;
        let values = |weight: &Tensor| -> Result<Vec<f32>> {
            Ok(linear_exact(normed, weight, None)?.flatten_all()?.to_vec1()?)
        };
        let logistic = |x: &f32| (1.0 / (1.0 + (-f64::from(*x)).exp())) as f32;
        let rate = values(&self.b)?.iter().map(logistic).collect();
        let (heads, a) = (self.rates.len().max(1), values(&self.a)?);
        let decay = a.iter().enumerate().map(|(i, a)| {
            let head = i % heads;
            (self.rates[head] * softplus(f64::from(*a) + self.dt[head])).exp() as f32
        });
        let decay = decay.collect();
        let rows = Rows { inputs: qkv.flatten_all()?.to_vec1()?, decay, rate };
        Ok(Inputs { rows, gate })
    }

    /// `norm(o) ∘ silu(z)` per head.
    fn gated(&self, mixed: &Tensor, gate: &Tensor) -> Result<Tensor> {
        let (tokens, width) = mixed.dims2()?;
        let head = self.norm.dim(0)?;
        let normed = rms_norm(&mixed.reshape((tokens, width / head, head))?, &self.norm, self.eps)?;
        Ok(swiglu(gate, &normed.reshape((tokens, width))?)?)
    }
}

/// `ln(1 + e^x)`
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

impl ShortConvolution {
    fn inputs(&self, normed: &Tensor) -> Result<Inputs> {
        let (weight, bias) = self.input.map();
        let all = weight.linear(normed, bias)?;
        let width = all.dim(1)? / 3;
        let part = |i: usize| all.narrow(1, i * width, width);
        let inputs = (part(0)? * part(2)?)?.flatten_all()?.to_vec1()?;
        let rows = Rows { inputs, decay: Vec::new(), rate: Vec::new() };
        Ok(Inputs { rows, gate: part(1)?.contiguous()? })
    }
}

#[cfg(test)]
mod tests {
    use super::softplus;

    #[test]
    fn softplus_is_right_at_both_ends() {
        for (x, want) in [(0.0, 2.0_f64.ln()), (50.0, 50.0), (-50.0, (-50.0_f64).exp())] {
            assert!((softplus(x) - want).abs() <= 1e-15 * want.max(1e-10), "{x}");
        }
    }
}
