//! The second half of a layer from named weights.

use candle_core::Tensor;
use longdraft_kernels::experts::{Expert, Unit};

use super::{Parts, norm};
use crate::config::{Activation, Architecture, Router as Choice, TargetConfig};
use crate::error::Result;
use crate::target_model::feed_forward::{
    Beside, FeedForward, GatedMlp, Mixture, Router, SharedExpert,
};
use crate::target_model::names;

impl Parts<'_> {
    /// An MLP with experts beside it.
    fn beside(&self, config: &TargetConfig, index: usize, mixture: Mixture) -> Result<FeedForward> {
        let prefix = names::layer(index);
        let norm = |name: &str| norm(config, self.weights, &format!("{prefix}{name}.weight"));
        let [after_mlp, before_experts, after_experts] = names::NORMS_BESIDE;
        let router = |name: &str| self.weights.vector(&format!("{prefix}router.{name}"));
        let scale = (config.hidden_size as f64).powf(-0.5);
        Ok(FeedForward::Beside(Box::new(Beside {
            mlp: self.gated_mlp(
                &format!("{prefix}mlp"),
                config.mlp_bias,
                config.parts.activation,
            )?,
            mixture,
            norms: [norm(after_mlp)?, norm(before_experts)?, norm(after_experts)?],
            router_norm: (router("scale")? * scale)?,
            expert_scales: router("per_expert_scale")?.flatten_all()?.to_vec1()?,
            eps: config.rms_norm_eps,
        })))
    }

    pub(super) fn feed_forward(&self, config: &TargetConfig, index: usize) -> Result<FeedForward> {
        let Some(experts) = config.experts_in(index) else {
            let prefix = names::mlp(config.architecture, index);
            let mlp = self.gated_mlp(&prefix, config.mlp_bias, config.parts.activation)?;
            return Ok(FeedForward::Dense(mlp));
        };
        let names = names::experts(config.architecture, index);
        let shared = match experts.shared_expert_intermediate_size {
            Some(_) => Some(SharedExpert {
                gate: config
                    .parts
                    .router
                    .gates_shared_expert()
                    .then(|| self.weights.vector(&format!("{}_gate.weight", names.shared())))
                    .transpose()?,
                mlp: self.gated_mlp(&names.shared(), false, Activation::Silu)?,
            }),
            None => None,
        };
        let unit = match (config.parts.clamped, config.parts.activation) {
            (Some(bounds), _) => Unit::Clamped(bounds),
            (None, Activation::Silu) => Unit::Silu,
            (None, Activation::GeluTanh) => Unit::GeluTanh,
        };
        let expert = |expert: usize| -> Result<Expert> {
            let [gate, up, down] = names.of(expert);
            Ok(Expert {
                gate: self.output_rows(&gate)?,
                up: self.output_rows(&up)?,
                down: self.input_columns(&down)?,
                biases: config
                    .parts
                    .expert_biases
                    .then(|| self.expert_biases(names.biases_of(expert)))
                    .transpose()?,
                unit,
            })
        };
        let of_router = &config.parts.router;
        let bias =
            names.router_bias(of_router).map(|name| self.weights.vector(&name)).transpose()?;
        let mixture = Mixture {
            router: match (of_router, bias) {
                (Choice::SigmoidOnInput, _) => Router::SigmoidOnInput,
                (Choice::ScaledSoftmax { scale }, _) => Router::ScaledSoftmax(*scale as f32),
                (Choice::Sigmoid { .. }, Some(bias)) => of_router
                    .sigmoid(bias.to_vec1()?)
                    .map_or(Router::Softmax(None), Router::Sigmoid),
                (_, bias) => Router::Softmax(bias),
            },
            router_weight: self.weights.vector(&names.router())?,
            experts: (0..experts.num_experts).map(expert).collect::<Result<_>>()?,
            experts_per_token: experts.num_experts_per_tok,
            normalise: experts.norm_topk_prob,
            shared,
        };
        match config.architecture {
            Architecture::Gemma4 => self.beside(config, index, mixture),
            _ => Ok(FeedForward::Experts(mixture)),
        }
    }

    /// Biases of an expert's matrices: the ranks hold some inner states each, and the first adds the last one.
    fn expert_biases(&self, names: [String; 3]) -> Result<[Tensor; 3]> {
        let [gate, up, down] = names;
        let inner = |name: &str| self.share.output_bias(&self.weights.vector(name)?);
        Ok([inner(&gate)?, inner(&up)?, self.share.start(&self.weights.vector(&down)?)?])
    }

    fn gated_mlp(&self, prefix: &str, bias: bool, activation: Activation) -> Result<GatedMlp> {
        Ok(GatedMlp {
            activation,
            gate: self.outputs(&format!("{prefix}.gate_proj"), bias)?,
            up: self.outputs(&format!("{prefix}.up_proj"), bias)?,
            down: self.inputs(&format!("{prefix}.down_proj"), bias)?,
        })
    }
}
