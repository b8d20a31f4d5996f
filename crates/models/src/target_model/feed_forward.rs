//! Second half of a decoder layer: a gated MLP, or a mixture of them.

use candle_core::{DType, Tensor};
use longdraft_kernels::dispatch::inner_type;
use longdraft_kernels::experts::{Choice, Expert, Routes, SigmoidChoice, experts_onto};
use longdraft_kernels::geglu::geglu;
use longdraft_kernels::linear::{add_linear, linear_exact};
use longdraft_kernels::matrix::{Matrix, linear_each};
use longdraft_kernels::rms_norm::rms_norm;
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

    /// Whether products of it take bf16 factors without a loss: it is dense and not f16.
    pub(super) fn takes_halves(&self) -> bool {
        self.weight.dense().is_some_and(|weight| weight.dtype() != DType::F16)
    }

    /// `x Wᵀ + b`
    pub(super) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.weight.linear(x, self.bias.as_ref())?)
    }

    /// Some of its outputs, in this order.
    pub(super) fn select(&self, outputs: &[u32]) -> Result<Self> {
        let bias = self
            .bias
            .as_ref()
            .map(|bias| bias.index_select(&Tensor::new(outputs, bias.device())?, 0));
        Ok(Self { weight: self.weight.select(outputs)?, bias: bias.transpose()? })
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
    /// Adds the output for normed states of bf16 to `sums` in place; false if that is not possible.
    pub(super) fn add_to(&self, sums: &Tensor, x: &Tensor) -> Result<bool> {
        let (Some(down), None, DType::BF16) =
            (self.down.weight.dense(), &self.down.bias, x.dtype())
        else {
            return Ok(false);
        };
        if !sums.is_contiguous() || sums.layout().start_offset() > 0 {
            return Ok(false);
        }
        add_linear(sums, &self.gated(x)?, down)?;
        Ok(true)
    }

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
    /// Softmax, weights times a factor.
    ScaledSoftmax(f32),
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
    Beside(Box<Beside>),
}

/// An MLP and experts side by side (Gemma 4): `norm(mlp(x)) + norm(experts(norm(h)))`, of hidden states `h` whose norm
/// is `x`. The router reads `h / rms(h) ∘ scale / √H`.
pub(super) struct Beside {
    pub(super) mlp: GatedMlp,
    pub(super) mixture: Mixture,
    /// `[H]` each: after the MLP, before the experts, after them.
    pub(super) norms: [Tensor; 3],
    /// `scale / √H`, `[H]`.
    pub(super) router_norm: Tensor,
    /// `[E]`, factors of the experts' weights.
    pub(super) expert_scales: Vec<f32>,
    pub(super) eps: f64,
}

impl Beside {
    fn apply_onto(&self, residual: &Tensor, x: &Tensor, hidden: &Tensor) -> Result<Tensor> {
        let [after_mlp, before_experts, after_experts] = &self.norms;
        let mlp = rms_norm(&self.mlp.down.apply(&self.mlp.gated(x)?)?, after_mlp, self.eps)?;
        let Mixture { router_weight, experts, experts_per_token, normalise, .. } = &self.mixture;
        let normed = rms_norm(hidden, &self.router_norm, self.eps)?;
        let logits = linear_exact(&normed, router_weight, None)?;
        let routes = Routes::choose(&logits, *experts_per_token, *normalise)?;
        let routes = routes.scaled_by(&self.expert_scales)?;
        let normed = rms_norm(hidden, before_experts, self.eps)?;
        let sum = experts_onto(&normed.zeros_like()?, &normed, experts, &routes)?;
        Ok(((residual + mlp)? + rms_norm(&sum, after_experts, self.eps)?)?)
    }
}

impl FeedForward {
    /// The type in which it takes the normed states of `hidden`: bf16 where many rows are multiplied in it, but never
    /// for a router, which reads them in f32.
    pub(super) fn inner_type(&self, hidden: &Tensor) -> DType {
        match self {
            Self::Dense(GatedMlp { activation: Activation::Silu, gate, up, down })
                if [gate, up, down].into_iter().all(Projection::takes_halves) =>
            {
                inner_type(hidden)
            }
            _ => hidden.dtype(),
        }
    }

    /// `residual` plus the output for the normed states `x` of `hidden`; `[T, H]` each, `x` of [`Self::inner_type`].
    pub(super) fn apply_onto(
        &self,
        residual: &Tensor,
        x: &Tensor,
        hidden: &Tensor,
    ) -> Result<Tensor> {
        match self {
            Self::Dense(mlp) => mlp.down.apply_onto(residual, &mlp.gated(x)?),
            Self::Experts(mixture) => mixture.apply_onto(residual, x),
            Self::Beside(both) => both.apply_onto(residual, x, hidden),
        }
    }

    /// The plain MLP, if it is one.
    pub(super) fn dense(&self) -> Option<&GatedMlp> {
        match self {
            Self::Dense(mlp) => Some(mlp),
            Self::Beside(both) => Some(&both.mlp),
            Self::Experts(_) => None,
        }
    }
}

impl Mixture {
    fn apply_onto(&self, residual: &Tensor, x: &Tensor) -> Result<Tensor> {
        let (choice, bias) = match &self.router {
            Router::Softmax(bias) => (Choice::Softmax, bias.as_ref()),
            Router::ScaledSoftmax(_) => (Choice::Softmax, None),
            Router::Sigmoid(numbers) => (Choice::Sigmoid(numbers), None),
            Router::SigmoidOnInput => (Choice::SigmoidOnInput, None),
        };
        let logits = linear_exact(x, &self.router_weight, bias)?;
        let mut routes =
            Routes::choose_by(&logits, self.experts_per_token, self.normalise, choice)?;
        if let Router::ScaledSoftmax(scale) = self.router {
            routes = routes.scaled_by(&vec![scale; self.experts.len()])?;
        }
        let sum = experts_onto(residual, x, &self.experts, &routes)?;
        match &self.shared {
            Some(shared) => Ok((sum + shared.apply(x)?)?),
            None => Ok(sum),
        }
    }
}
