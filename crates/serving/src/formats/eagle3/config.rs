//! `config.json` of an EAGLE-3 draft for every profile that is a folder.

use candle_core::DType;
use longdraft_models::draft::eagle3::{Eagle3Config, LAYER_IDS, TAPPED_LAYERS};
use serde_json::{Value, json};

use crate::Profile;
use crate::formats::files::{set_attn_factor, set_special_tokens, torch_dtype};
use crate::formats::speculators::folder;
use crate::target::TargetFacts;

/// States that enter a layer, as vLLM, speculators and GGUF files count.
pub(super) fn entered_ids(config: &Eagle3Config) -> [usize; TAPPED_LAYERS] {
    config.target_layers.map(|layer| layer.entered().0)
}

/// Outputs of layers, as SGLang counts.
pub(super) fn output_ids(config: &Eagle3Config) -> [usize; TAPPED_LAYERS] {
    config.target_layers.map(|layer| layer.0)
}

/// The keys of a profile's `config.json`; `draft_len` becomes the default depth of speculators.
pub(super) fn render(
    profile: Profile,
    config: &Eagle3Config,
    target: &TargetFacts,
    dtype: DType,
    draft_len: usize,
) -> Value {
    if profile == Profile::Speculators {
        return speculators(config, target, dtype, draft_len);
    }
    let mut value = common(config, dtype);
    set_special_tokens(&mut value, target.config());
    let top = json!(entered_ids(config));
    let nested = json!(output_ids(config));
    match profile {
        Profile::Sglang => value["eagle_config"][LAYER_IDS] = nested,
        Profile::Hf => {
            value[LAYER_IDS] = top;
            value["eagle_config"][LAYER_IDS] = nested;
        }
        _ => value[LAYER_IDS] = top,
    }
    value
}

/// The keys of our own `config.json` in an engine's dialect, without layer ids.
fn common(config: &Eagle3Config, dtype: DType) -> Value {
    let mut value = config.to_json();
    set_attn_factor(&mut value);
    let rope = value["rope_parameters"].clone();
    if let Some(keys) = value.as_object_mut() {
        for ours in ["embed_proj", "attention_window", "rope_divisors", "initializer_range"] {
            keys.remove(ours);
        }
    }
    // Old readers know this spelling only; a plain rope has none, since they refuse null.
    if rope["rope_type"] != "default" {
        let mut scaling = rope;
        if let Some(keys) = scaling.as_object_mut() {
            keys.remove("rope_theta");
        }
        value["rope_scaling"] = scaling;
    }
    value["torch_dtype"] = torch_dtype(dtype).into();
    value["eagle_config"] = json!({"use_aux_hidden_state": true});
    if let Some(window) = config.attention_window {
        value["sliding_window"] = (window + 1).into();
        value["layer_types"] = json!(["sliding_attention"]);
    }
    value
}

fn speculators(
    config: &Eagle3Config,
    target: &TargetFacts,
    dtype: DType,
    draft_len: usize,
) -> Value {
    let mut layer = common(config, dtype);
    if let Some(keys) = layer.as_object_mut() {
        for outer in [
            "architectures",
            "target_hidden_size",
            "draft_vocab_size",
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
            "num_aux_hidden_states",
            "eagle_config",
            "torch_dtype",
        ] {
            keys.remove(outer);
        }
    }
    set_special_tokens(&mut layer, target.config());
    let mut value = folder("eagle3", "Eagle3DraftModel", target, draft_len);
    for (key, of_draft) in [
        ("transformer_layer_config", layer),
        ("draft_vocab_size", config.draft_vocab_size.into()),
        ("norm_before_residual", config.norm_before_residual.into()),
        ("norm_before_fc", false.into()),
        ("fc_norm", config.fc_norm.into()),
        ("norm_output", config.norm_output.into()),
        (LAYER_IDS, json!(entered_ids(config))),
        ("embed_requires_grad", false.into()),
        ("tie_word_embeddings", false.into()),
        ("torch_dtype", torch_dtype(dtype).into()),
    ] {
        value[key] = of_draft;
    }
    if config.hidden_size != config.target_hidden_size {
        value["target_hidden_size"] = config.target_hidden_size.into();
    }
    value
}

#[cfg(test)]
mod tests {
    use longdraft_models::LayerId;

    use super::*;

    /// Engines multiply the usual factor, Hugging Face takes the whole one.
    #[test]
    fn an_unusual_factor_of_yarn_is_said_in_both_forms() {
        let json = |given: Value| {
            let json = json!({
                "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
                "vocab_size": 10, "max_position_embeddings": 64, "rope_scaling": given
            });
            Eagle3Config::from_json(&json, Some(32)).expect("valid")
        };
        let yarn = |name: &str, factor: f64| {
            json(json!({"rope_type": "yarn", "factor": 4.0, name: factor}))
        };
        let usual = 0.1 * 4.0_f64.ln() + 1.0;
        let config = yarn("attention_factor", 1.5 * usual);
        let written = common(&config, DType::F32);
        for key in ["rope_parameters", "rope_scaling"] {
            let share = written[key]["attn_factor"].as_f64().expect("a number");
            assert!((share - 1.5).abs() < 1e-12, "{key}: {share}");
        }
        let read = Eagle3Config::from_json(&written, Some(32)).expect("valid");
        assert_eq!(read.rope, config.rope, "the whole factor wins");
        assert_eq!(yarn("attn_factor", 1.5).rope, config.rope);
        let plain = common(&yarn("beta_fast", 32.0), DType::F32);
        assert!(plain["rope_parameters"]["attn_factor"].is_null());
    }

    /// The table of conventions: the same tensors under every reader's numbers.
    #[test]
    fn layers_count_as_each_reader_counts() {
        for (layers, entered, outputs) in [
            (32, [2, 16, 29], [1, 15, 28]),
            (30, [2, 15, 27], [1, 14, 26]),
            (8, [2, 4, 5], [1, 3, 4]),
        ] {
            let published = Eagle3Config::published_layers(layers).expect("layers");
            let json = json!({
                "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
                "vocab_size": 10, "eagle_config": {LAYER_IDS: published.map(|layer: LayerId| layer.0)}
            });
            let config = Eagle3Config::from_json(&json, None).expect("valid");
            assert_eq!(entered_ids(&config), entered, "n = {layers}: 2, n/2, n-3");
            assert_eq!(output_ids(&config), outputs, "n = {layers}: 1, n/2-1, n-4");
        }
    }
}
