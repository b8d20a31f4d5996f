//! Recognising published drafts, and the nested configuration of speculators folders.

use serde_json::{Map, Value, json};

use super::config_file::ARCHITECTURES;
use crate::error::Problems;

/// What a draft's `config.json` is known by: an architecture of its own, the type that speculators
/// writes, or a vocabulary of its own under a plain model's name (the first public drafts).
pub(super) fn names_eagle3(config: &Value) -> bool {
    let is_eagle3 = |name: &Value| name.as_str().is_some_and(|n| ARCHITECTURES.contains(&n));
    let named = config["architectures"].as_array().is_some_and(|names| names.iter().any(is_eagle3));
    let unnamed = config["draft_vocab_size"].is_u64()
        && config["num_hidden_layers"] == 1
        && config["model_type"] != "glide";
    named || config["speculators_model_type"] == "eagle3" || unnamed
}

/// Sizes that files of speculators leave out where they equal their class's own.
fn class_defaults(model_type: &str) -> Option<Value> {
    match model_type {
        "llama" => Some(json!({
            "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0
        })),
        "qwen3" => Some(json!({
            "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32,
            "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151_936,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0
        })),
        _ => None,
    }
}

/// The keys of a plain `config.json`: those of `transformer_layer_config`, if there is one, with its
/// class's own sizes where they are left out, under those of the top level.
pub(super) fn flattened(value: &Value, problems: &mut Problems) -> Value {
    let Some(layer) = value["transformer_layer_config"].as_object() else { return value.clone() };
    // Without a type the speculators library takes the layer for Qwen3's.
    let model_type = layer.get("model_type").and_then(Value::as_str).unwrap_or("qwen3");
    let Some(defaults) = class_defaults(model_type) else {
        problems.push(format!(
            "`transformer_layer_config.model_type` = \"{model_type}\" is unknown (llama, qwen3)"
        ));
        return value.clone();
    };
    let mut flat: Map<String, Value> = defaults.as_object().cloned().unwrap_or_default();
    let set = |from: &Map<String, Value>, flat: &mut Map<String, Value>| {
        let present = from.iter().filter(|(_, value)| !value.is_null());
        flat.extend(present.map(|(key, value)| (key.clone(), value.clone())));
    };
    set(layer, &mut flat);
    // A base given only in the newer spelling must not lose to the class's own.
    if !layer.contains_key("rope_theta")
        && let Some(theta) = layer.get("rope_parameters").map(|rope| &rope["rope_theta"])
        && !theta.is_null()
    {
        flat.insert("rope_theta".into(), theta.clone());
    }
    if let Some(top) = value.as_object() {
        set(top, &mut flat);
    }
    flat.insert("tie_word_embeddings".into(), false.into());
    flat.insert(
        "num_hidden_layers".into(),
        layer.get("num_hidden_layers").cloned().unwrap_or(
            // Both classes count 32 where nothing is said.
            json!(32),
        ),
    );
    Value::Object(flat)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::eagle3::Eagle3Config;

    #[test]
    fn public_layouts_are_recognised() {
        let first_public = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
            "draft_vocab_size": 32000
        });
        assert!(names_eagle3(&first_public));
        assert!(names_eagle3(&json!({"architectures": ["LlamaForCausalLMEagle3"]})));
        assert!(names_eagle3(&json!({"speculators_model_type": "eagle3"})));
        assert!(!names_eagle3(&json!({"architectures": ["LlamaForCausalLM"]})));
        assert!(!names_eagle3(&json!({"model_type": "glide", "num_hidden_layers": 1})));
    }

    #[test]
    fn sizes_that_equal_the_class_are_filled_in() {
        let value = json!({
            "speculators_model_type": "eagle3", "draft_vocab_size": 100,
            "norm_before_residual": true, "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
            "transformer_layer_config": {
                "model_type": "llama", "num_hidden_layers": 1, "num_key_value_heads": 8,
                "vocab_size": 128_256, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}
            }
        });
        let config = Eagle3Config::from_json(&value, None).expect("valid");
        assert_eq!((config.hidden_size, config.intermediate_size), (4096, 11008));
        assert_eq!((config.head_dim, config.num_key_value_heads), (128, 8));
        assert_eq!((config.vocab_size, config.draft_vocab_size), (128_256, 100));
        assert!((config.rope.theta - 5e5).abs() < 1e-9 && config.norm_before_residual);
        assert_eq!(config.target_layers.map(|layer| layer.0), [1, 15, 28]);
        let mut unknown = value;
        unknown["transformer_layer_config"]["model_type"] = "mamba".into();
        let text = Eagle3Config::from_json(&unknown, None).expect_err("refused").to_string();
        assert!(text.contains("\"mamba\" is unknown"), "{text}");
    }
}
