//! Recognising published drafts.

use serde_json::Value;

use super::config_file::ARCHITECTURES;

/// What a draft's `config.json` is known by: an architecture of its own, the type that speculators
/// writes, or a vocabulary of its own under a plain model's name (the first public drafts).
pub(super) fn names_eagle3(config: &Value) -> bool {
    let is_eagle3 = |name: &Value| name.as_str().is_some_and(|n| ARCHITECTURES.contains(&n));
    let named = config["architectures"].as_array().is_some_and(|names| names.iter().any(is_eagle3));
    // Block drafts of one layer may have a vocabulary of their own, too.
    let has_blocks = ["block_size", "dflash_config"].iter().any(|key| !config[*key].is_null());
    let unnamed = config["draft_vocab_size"].is_u64()
        && config["num_hidden_layers"] == 1
        && config["model_type"] != "glide"
        && !has_blocks;
    named || config["speculators_model_type"] == "eagle3" || unnamed
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::draft::eagle3::Eagle3Config;

    #[test]
    fn public_layouts_are_recognised() {
        let first_public = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
            "draft_vocab_size": 32000
        });
        assert!(names_eagle3(&first_public));
        for (key, value) in [("block_size", json!(4)), ("dflash_config", json!({}))] {
            let mut of_blocks = first_public.clone();
            of_blocks[key] = value;
            assert!(!names_eagle3(&of_blocks), "{key}");
        }
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
