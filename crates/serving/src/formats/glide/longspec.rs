//! The GLIDE layer as the LongSpec scripts read it.

use candle_core::{DType, Device, Tensor};
use longdraft_models::config::Architecture;
use longdraft_models::draft::glide::GlideDraft;
use longdraft_models::error::Problems;
use serde_json::{Value, json};

use crate::Profile;
use crate::error::Result;
use crate::formats::files::{narrowed, torch_dtype};
use crate::formats::{Named, fitting};
use crate::target::TargetFacts;

/// The 20 tensors of the published class (23 with `mlp_bias`): keys and values of the cross branch
/// are never used and written as zeros unless a compat run kept them.
/// It fails with every tensor of which a value does not fit the dtype or is not finite.
pub(super) fn tensors(profile: Profile, draft: &GlideDraft, dtype: DType) -> Result<Named> {
    let mut problems = Problems::default();
    let mut all = Vec::new();
    for (name, tensor) in draft.named_tensors()? {
        all.push((name.clone(), narrowed(&name, &tensor, dtype, &mut problems)?));
    }
    let config = draft.config();
    let mut position = all.iter().position(|(name, _)| name == "cross_attn.o_proj.weight");
    for module in ["k_proj", "v_proj"] {
        for (kind, shape) in [
            ("weight", vec![config.kv_size(), config.hidden_size]),
            ("bias", vec![config.kv_size()]),
        ] {
            let name = format!("cross_attn.{module}.{kind}");
            if !all.iter().any(|(known, _)| *known == name) {
                let at = position.unwrap_or(all.len());
                all.insert(at, (name, Tensor::zeros(shape, dtype, &Device::Cpu)?));
                position = Some(at + 1);
            }
        }
    }
    fitting(profile, all, problems)
}

/// The target's configuration with the layer's class.
pub(super) fn config(draft: &GlideDraft, target: &TargetFacts, dtype: DType) -> Value {
    let (layer, target_config) = (draft.config(), target.config());
    let (class, model_type) = match target_config.architecture {
        Architecture::Qwen2 | Architecture::Qwen2Moe => ("Qwen2GlideDecoderLayer", "qwen2"),
        // A draft is dense whatever its target is; targets with parts that a Llama lacks do not come here.
        _ => ("LlamaGlideDecoderLayer", "llama"),
    };
    let mut value = json!({
        "architectures": [class],
        "model_type": model_type,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": target_config.num_hidden_layers,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "vocab_size": layer.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": target_config.max_position_embeddings,
        "model_max_length": target_config.max_position_embeddings,
        "rope_theta": target_config.rope.theta,
        "attention_bias": target_config.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "tie_word_embeddings": target_config.tie_word_embeddings,
        "initializer_range": layer.initializer_range,
        "torch_dtype": torch_dtype(dtype),
    });
    let rope = target_config.rope.to_json();
    if rope["rope_type"] != "default" {
        value["rope_scaling"] = rope.clone();
    }
    value["rope_parameters"] = rope;
    if let Some(bos) = target_config.bos_token_id {
        value["bos_token_id"] = bos.into();
    }
    if let [eos, ..] = target_config.eos_token_ids.as_slice() {
        value["eos_token_id"] = (*eos).into();
    }
    value
}
