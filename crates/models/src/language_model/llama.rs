//! A plain Llama under its published names, trained in place of the baseline.
//!
//! ```text
//! x = embedding[ids]
//! block: x += O Attn(rope(Q n(x)), rope(K n(x)), V n(x));  x += Down (silu(Gate n(x)) ∘ Up n(x))
//! logits = n(x) Wᵀ
//! ```

use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::attention::{KeyRanges, attention};
use longdraft_kernels::gated_mlp::{GatedMlp, gated_mlp_onto};
use longdraft_kernels::graph::reshape;
use longdraft_kernels::linear::{linear, linear_onto};
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_kernels::rope::{RopeTable, rope};
use serde_json::{Value, json};

use super::LanguageModelConfig;
use crate::config::{Architecture, Parts, RopeParameters, TargetConfig};
use crate::error::Result;

pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(super) const FINAL_NORM: &str = "model.norm.weight";
const LAYERS: &str = "model.layers.";

/// Documents begin with this token and have no end token: it ends a text, too.
const START: u32 = 1;

/// The full name of a layer's tensor.
pub(super) fn layer_tensor(layer: usize, name: &str) -> String {
    format!("{LAYERS}{layer}.{name}")
}

/// Whether a name is that of a layer's matrix.
pub(super) fn is_matrix(name: &str) -> bool {
    name.starts_with(LAYERS) && name.ends_with("_proj.weight")
}

/// Whether a name is that of a norm's weight.
pub(super) fn is_norm(name: &str) -> bool {
    name == FINAL_NORM || (name.starts_with(LAYERS) && name.ends_with("layernorm.weight"))
}

/// Whether a matrix is zero at the start: then every layer passes its input on.
pub(super) fn starts_at_zero(name: &str) -> bool {
    is_matrix(name) && (name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight"))
}

/// The same decoder as a target.
pub fn target_config(config: &LanguageModelConfig) -> TargetConfig {
    TargetConfig {
        architecture: Architecture::Llama,
        hidden_size: config.hidden_size,
        intermediate_size: config.mlp_width(),
        num_hidden_layers: config.num_hidden_layers,
        num_attention_heads: config.num_attention_heads,
        num_key_value_heads: config.num_key_value_heads,
        head_dim: config.head_dim(),
        vocab_size: config.vocab_size,
        max_position_embeddings: config.rope.reference_length,
        rms_norm_eps: config.rms_norm_eps,
        rope: RopeParameters::plain(config.rope.rope_theta),
        tie_word_embeddings: config.tie_word_embeddings,
        qkv_bias: false,
        attention_output_bias: false,
        mlp_bias: false,
        experts: None,
        initializer_range: 0.02,
        bos_token_id: Some(START),
        eos_token_ids: vec![START],
        pad_token_id: None,
        parts: Parts::default(),
        further_end_ids: Vec::new(),
    }
}

/// `config.json` of a Hugging Face folder.
pub(super) fn hugging_face_config(config: &LanguageModelConfig) -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": config.hidden_size, "intermediate_size": config.mlp_width(),
        "num_hidden_layers": config.num_hidden_layers, "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim(),
        "vocab_size": config.vocab_size, "max_position_embeddings": config.rope.reference_length,
        "rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings, "attention_bias": false, "mlp_bias": false,
        "bos_token_id": START, "eos_token_id": START, "torch_dtype": "float32",
    })
}

/// A layer's tensors.
#[derive(Debug, Clone)]
pub(super) struct LlamaBlock {
    input_layernorm: Tensor,
    q_proj: Tensor,
    k_proj: Tensor,
    v_proj: Tensor,
    o_proj: Tensor,
    post_attention_layernorm: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
}

impl LlamaBlock {
    /// From the tensors of one layer by name.
    pub(super) fn new(tensor: impl Fn(&str) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            input_layernorm: tensor("input_layernorm.weight")?,
            q_proj: tensor("self_attn.q_proj.weight")?,
            k_proj: tensor("self_attn.k_proj.weight")?,
            v_proj: tensor("self_attn.v_proj.weight")?,
            o_proj: tensor("self_attn.o_proj.weight")?,
            post_attention_layernorm: tensor("post_attention_layernorm.weight")?,
            gate_proj: tensor("mlp.gate_proj.weight")?,
            up_proj: tensor("mlp.up_proj.weight")?,
            down_proj: tensor("mlp.down_proj.weight")?,
        })
    }

    /// `[T, d]` → `[T, d]`.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        config: &LanguageModelConfig,
        ranges: &Arc<KeyRanges>,
        table: &RopeTable,
    ) -> Result<Tensor> {
        let (tokens, width) = x.dims2()?;
        let (dim, eps) = (config.head_dim(), config.rms_norm_eps);
        let normed = rms_norm(x, &self.input_layernorm, eps)?;
        let project = |weight: &Tensor, heads: usize| -> Result<Tensor> {
            Ok(reshape(&linear(&normed, weight, None)?, (tokens, heads, dim))?)
        };
        let q = rope(&project(&self.q_proj, config.num_attention_heads)?, table)?;
        let k = rope(&project(&self.k_proj, config.num_key_value_heads)?, table)?;
        let v = project(&self.v_proj, config.num_key_value_heads)?;
        let attended = reshape(&attention(&q, &k, &v, ranges)?, (tokens, width))?;
        let x = linear_onto(x, &attended, &self.o_proj, None)?;
        let normed = rms_norm(&x, &self.post_attention_layernorm, eps)?;
        let mlp = GatedMlp { gate: &self.gate_proj, up: &self.up_proj, down: &self.down_proj };
        Ok(gated_mlp_onto(&x, &normed, &mlp)?)
    }
}
