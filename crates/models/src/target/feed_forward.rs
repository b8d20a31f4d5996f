//! Second half of a decoder layer: a gated MLP, or a mixture of them.

use candle_core::Tensor;
use longdraft_kernels::experts::{Choice, Expert, Routes, SigmoidChoice, experts_onto};
use longdraft_kernels::geglu::geglu;
use longdraft_kernels::linear::linear_exact;
use longdraft_kernels::matrix::{Matrix, linear_each};
use longdraft_kernels::swiglu::swiglu;

use crate::config::Activation;
use crate::error::Result;

/// A weight `[O, I]` with an optional bias `[O]`.
pub(super) struct Projection {
    pub(super) weight: Matrix,
    pub(super) bias: Option<Tensor>,
}

impl Projection {
    pub(super) fn map(&self) -> (&Matrix, Option<&Tensor>) {
        (&self.weight, self.bias.as_ref())
    }

    /// `residual` plus the projection.
    pub(super) fn apply_onto(&self, residual: &Tensor, x: &Tensor) -> Result<Tensor> {
        Ok(self.weight.linear_onto(residual, x, self.bias.as_ref())?)
    }
}

/// `Down (f(Gate x) ∘ Up x)`, with SiLU or GELU.
pub(super) struct GatedMlp {
    pub(super) activation: Activation,
    pub(super) gate: Projection,
    pub(super) up: Projection,
    pub(super) down: Projection,
}

impl GatedMlp {
    fn gated(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = linear_each(x, [self.gate.map(), self.up.map()])?;
        Ok(match self.activation {
            Activation::Silu => swiglu(&gate, &up)?,
            Activation::GeluTanh => geglu(&gate, &up)?,
        })
    }
}

/// An expert that every token visits, times `sigmoid(gate · x)` where it has a gate (Qwen2-MoE).
pub(super) struct SharedExpert {
    /// `[1, H]`
    pub(super) gate: Option<Tensor>,
    pub(super) mlp: GatedMlp,
}

impl SharedExpert {
    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let gated = self.mlp.gated(x)?;
        let (weight, bias) = self.mlp.down.map();
        let out = weight.linear(&gated, bias)?;
        let Some(gate) = &self.gate else { return Ok(out) };
        let share = (linear_exact(x, gate, None)?.neg()?.exp()? + 1.0)?.recip()?;
        Ok(out.broadcast_mul(&share)?)
    }
}

/// What chooses experts by the logits of a router.
pub(super) enum Router {
    /// Softmax, with a bias `[E]` on the logits.
    Softmax(Option<Tensor>),
    Sigmoid(SigmoidChoice),
    SigmoidOnInput,
}

/// A router and its experts.
pub(super) struct Mixture {
    pub(super) router: Router,
    /// `[E, H]`, f32 whatever the target is held as and multiplies in: rounding would change who is
    /// chosen.
    pub(super) router_weight: Tensor,
    pub(super) experts: Vec<Expert>,
    pub(super) experts_per_token: usize,
    /// Whether the weights of a token's experts sum to one.
    pub(super) normalise: bool,
    pub(super) shared: Option<SharedExpert>,
}

/// What a layer does after its attention.
pub(super) enum FeedForward {
    Dense(GatedMlp),
    Experts(Mixture),
}

impl FeedForward {
    /// `residual` plus the output for the normed states `x`; `[T, H]` each.
    pub(super) fn apply_onto(&self, residual: &Tensor, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(mlp) => mlp.down.apply_onto(residual, &mlp.gated(x)?),
            Self::Experts(mixture) => mixture.apply_onto(residual, x),
        }
    }

    /// The plain MLP, if it is one.
    pub(super) fn dense(&self) -> Option<&GatedMlp> {
        match self {
            Self::Dense(mlp) => Some(mlp),
            Self::Experts(_) => None,
        }
    }
}

impl Mixture {
    fn apply_onto(&self, residual: &Tensor, x: &Tensor) -> Result<Tensor> {
        let (choice, bias) = match &self.router {
            Router::Softmax(bias) => (Choice::Softmax, bias.as_ref()),
            Router::Sigmoid(numbers) => (Choice::Sigmoid(numbers), None),
            Router::SigmoidOnInput => (Choice::SigmoidOnInput, None),
        };
        let logits = linear_exact(x, &self.router_weight, bias)?;
        let routes = Routes::choose_by(&logits, self.experts_per_token, self.normalise, choice)?;
        let sum = experts_onto(residual, x, &self.experts, &routes)?;
        match &self.shared {
            Some(shared) => Ok((sum + shared.apply(x)?)?),
            None => Ok(sum),
        }
    }
}
