//! Decoder layers from named weights, wherever these come from.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::experts::Expert;
use longdraft_kernels::matrix::Matrix;

use super::feed_forward::{FeedForward, GatedMlp, Mixture, Projection, SharedExpert};
use super::layer::{DecoderLayer, LayerSizes};
use super::load::TargetOptions;
use super::names;
use crate::config::TargetConfig;
use crate::error::Result;
use crate::weights::WeightSource;

/// What a target is built of, by published name.
pub(super) trait Weights {
    /// A weight of a projection or an embedding table.
    fn matrix(&self, name: &str) -> Result<Matrix>;

    /// What is held in f32 whatever the dtype: norms, biases, routers.
    fn vector(&self, name: &str) -> Result<Tensor>;
}

/// Tensors that were checked before, in the form that is asked for.
pub(super) struct FileWeights<'a> {
    pub(super) source: &'a dyn WeightSource,
    pub(super) options: &'a TargetOptions,
}

impl Weights for FileWeights<'_> {
    fn matrix(&self, name: &str) -> Result<Matrix> {
        let TargetOptions { dtype, device, quantised, .. } = self.options;
        if *quantised
            && matches!(device, Device::Cpu)
            && let Some(matrix) = self.source.load_quantised(name)?
        {
            return Ok(Matrix::Quantised(Arc::new(matrix)));
        }
        Ok(Matrix::Dense(self.source.load(name, *dtype)?.to_device(device)?))
    }

    fn vector(&self, name: &str) -> Result<Tensor> {
        Ok(self.source.load(name, DType::F32)?.to_device(&self.options.device)?)
    }
}

/// Builds layer `index`.
pub(super) fn layer(
    config: &TargetConfig,
    weights: &dyn Weights,
    index: usize,
) -> Result<DecoderLayer> {
    let prefix = names::layer(index);
    let norm = |name: &str| weights.vector(&format!("{prefix}{name}.weight"));
    let projection = |name: &str, bias| projection(weights, &format!("{prefix}{name}"), bias);
    let qk_norm = if config.qk_norm() {
        Some((norm("self_attn.q_norm")?, norm("self_attn.k_norm")?))
    } else {
        None
    };
    Ok(DecoderLayer {
        input_layernorm: norm("input_layernorm")?,
        q_proj: projection("self_attn.q_proj", config.qkv_bias)?,
        k_proj: projection("self_attn.k_proj", config.qkv_bias)?,
        v_proj: projection("self_attn.v_proj", config.qkv_bias)?,
        o_proj: projection("self_attn.o_proj", config.attention_output_bias)?,
        qk_norm,
        post_attention_layernorm: norm("post_attention_layernorm")?,
        feed_forward: feed_forward(config, weights, index)?,
        sizes: LayerSizes::new(config),
    })
}

fn projection(weights: &dyn Weights, name: &str, bias: bool) -> Result<Projection> {
    let weight = weights.matrix(&format!("{name}.weight"))?;
    let bias = bias.then(|| weights.vector(&format!("{name}.bias"))).transpose()?;
    Ok(Projection { weight, bias })
}

fn feed_forward(config: &TargetConfig, weights: &dyn Weights, index: usize) -> Result<FeedForward> {
    let Some(experts) = config.experts_in(index) else {
        let prefix = format!("{}mlp", names::layer(index));
        return Ok(FeedForward::Dense(gated_mlp(weights, &prefix, config.mlp_bias)?));
    };
    let names = names::experts(config.architecture, index);
    let shared = match experts.shared_expert_intermediate_size {
        Some(_) => Some(SharedExpert {
            gate: weights.vector(&format!("{}_gate.weight", names.shared()))?,
            mlp: gated_mlp(weights, &names.shared(), false)?,
        }),
        None => None,
    };
    let expert = |expert: usize| -> Result<Expert> {
        let [gate, up, down] = names.of(expert);
        Ok(Expert {
            gate: weights.matrix(&gate)?,
            up: weights.matrix(&up)?,
            down: weights.matrix(&down)?,
        })
    };
    Ok(FeedForward::Experts(Mixture {
        router: weights.vector(&names.router())?,
        experts: (0..experts.num_experts).map(expert).collect::<Result<_>>()?,
        experts_per_token: experts.num_experts_per_tok,
        normalise: experts.norm_topk_prob,
        shared,
    }))
}

fn gated_mlp(weights: &dyn Weights, prefix: &str, bias: bool) -> Result<GatedMlp> {
    Ok(GatedMlp {
        gate: projection(weights, &format!("{prefix}.gate_proj"), bias)?,
        up: projection(weights, &format!("{prefix}.up_proj"), bias)?,
        down: projection(weights, &format!("{prefix}.down_proj"), bias)?,
    })
}
