//! `config.json` of a Hugging Face folder.

use serde_json::Value;

use super::{Architecture, ExpertsConfig, RopeParameters, TargetConfig};
use crate::error::Problems;

/// Reads keys, collecting what is wrong instead of stopping at the first.
struct Keys<'a> {
    value: &'a Value,
    problems: Problems,
}

impl Keys<'_> {
    fn present(&self, key: &str) -> Option<&Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    fn size(&mut self, key: &str) -> Option<usize> {
        let value = self.present(key)?;
        let size = value.as_u64().map(|n| n as usize);
        if size.is_none() {
            let message = format!("`{key}` = {value} is not a whole number");
            self.problems.push(message);
        }
        size.or(Some(1))
    }

    fn required_size(&mut self, key: &str) -> usize {
        self.size(key).unwrap_or_else(|| {
            self.problems.push(format!("`{key}` is missing"));
            1
        })
    }

    fn number(&self, key: &str, default: f64) -> f64 {
        self.present(key).and_then(Value::as_f64).unwrap_or(default)
    }

    fn flag(&self, key: &str, default: bool) -> bool {
        self.present(key).and_then(Value::as_bool).unwrap_or(default)
    }

    fn token(&self, key: &str) -> Option<u32> {
        self.present(key).and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok())
    }

    /// A list of whole numbers.
    fn sizes(&mut self, key: &str) -> Vec<usize> {
        let Some(value) = self.present(key) else {
            return Vec::new();
        };
        let sizes = value.as_array().and_then(|list| {
            list.iter().map(|size| size.as_u64().map(|size| size as usize)).collect()
        });
        let message = format!("`{key}` = {value} is no list of whole numbers");
        sizes.unwrap_or_else(|| {
            self.problems.push(message);
            Vec::new()
        })
    }

    /// Sizes of an architecture's experts. Newer files say `num_local_experts` where older ones say
    /// `num_experts`.
    fn experts(&mut self, architecture: Architecture) -> Option<ExpertsConfig> {
        if !architecture.is_mixture() {
            return None;
        }
        let mixtral = architecture == Architecture::Mixtral;
        let count = self.size("num_experts").or_else(|| self.size("num_local_experts"));
        let num_experts = count.unwrap_or_else(|| {
            let name = if mixtral { "num_local_experts" } else { "num_experts" };
            self.problems.push(format!("`{name}` is missing"));
            1
        });
        let width = if mixtral { "intermediate_size" } else { "moe_intermediate_size" };
        let shared = (architecture == Architecture::Qwen2Moe)
            .then(|| self.required_size("shared_expert_intermediate_size"));
        Some(ExpertsConfig {
            num_experts,
            num_experts_per_tok: self.required_size("num_experts_per_tok"),
            // A Mixtral's is reported as the MLP's.
            moe_intermediate_size: self.size(width).unwrap_or_else(|| {
                if !mixtral {
                    self.problems.push(format!("`{width}` is missing"));
                }
                1
            }),
            shared_expert_intermediate_size: shared,
            norm_topk_prob: mixtral || self.flag("norm_topk_prob", false),
            decoder_sparse_step: self.size("decoder_sparse_step").unwrap_or(1),
            mlp_only_layers: self.sizes("mlp_only_layers"),
        })
    }

    /// Bias on q, k and v, and on the attention's output.
    fn attention_biases(&self, architecture: Architecture) -> (bool, bool) {
        match architecture {
            Architecture::Qwen2 => (self.flag("attention_bias", true), false),
            Architecture::Qwen2Moe => (self.flag("qkv_bias", true), false),
            _ => {
                let bias = self.flag("attention_bias", false);
                (bias, bias)
            }
        }
    }

    /// One id or a list of them.
    fn tokens(&self, key: &str) -> Vec<u32> {
        let ids = match self.present(key) {
            Some(Value::Array(ids)) => ids.iter().filter_map(Value::as_u64).collect(),
            Some(id) => id.as_u64().into_iter().collect(),
            None => Vec::new(),
        };
        ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect()
    }
}

pub(super) fn read(value: &Value) -> Result<TargetConfig, Problems> {
    let mut keys = Keys { value, problems: Problems::default() };
    let architecture = if let Some(name) = keys.present("model_type").and_then(Value::as_str) {
        let name = name.to_owned();
        Architecture::parse(&name, &Architecture::NAMES, &mut keys.problems)
    } else {
        keys.problems.push("`model_type` is missing");
        Architecture::Llama
    };
    if let Some(act) = keys.present("hidden_act").and_then(Value::as_str)
        && act != "silu"
    {
        let message = format!("`hidden_act` = \"{act}\" is not supported (silu is)");
        keys.problems.push(message);
    }
    if keys.flag("use_sliding_window", false) {
        keys.problems.push("`use_sliding_window` = true is not supported");
    }
    if architecture == Architecture::Mixtral
        && let Some(window) = keys.present("sliding_window")
    {
        let message = format!("`sliding_window` = {window} is not supported (null is)");
        keys.problems.push(message);
    }
    let hidden_size = keys.required_size("hidden_size");
    let num_attention_heads = keys.required_size("num_attention_heads");
    let num_key_value_heads = keys.size("num_key_value_heads").unwrap_or(num_attention_heads);
    let default_head_dim = match architecture {
        Architecture::Qwen3 => 128,
        _ => hidden_size / num_attention_heads.max(1),
    };
    let head_dim = keys.size("head_dim").unwrap_or(default_head_dim);
    let (qkv_bias, attention_output_bias) = keys.attention_biases(architecture);
    let max_position_embeddings = keys.size("max_position_embeddings").unwrap_or(2048);
    let rope = RopeParameters::from_json(value, max_position_embeddings, &mut keys.problems);
    let config = TargetConfig {
        architecture,
        hidden_size,
        intermediate_size: keys.required_size("intermediate_size"),
        num_hidden_layers: keys.required_size("num_hidden_layers"),
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        vocab_size: keys.required_size("vocab_size"),
        max_position_embeddings,
        rms_norm_eps: keys.number("rms_norm_eps", 1e-6),
        rope,
        tie_word_embeddings: keys.flag("tie_word_embeddings", false),
        qkv_bias,
        attention_output_bias,
        mlp_bias: keys.flag("mlp_bias", false),
        experts: keys.experts(architecture),
        initializer_range: keys.number("initializer_range", 0.02),
        bos_token_id: keys.token("bos_token_id"),
        eos_token_ids: keys.tokens("eos_token_id"),
        pad_token_id: keys.token("pad_token_id"),
    };
    let mut problems = keys.problems;
    config.validate(&mut problems);
    if problems.0.is_empty() { Ok(config) } else { Err(problems) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use longdraft_kernels::rope::RopeScaling;

    fn llama() -> Value {
        json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 160,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "vocab_size": 320, "rms_norm_eps": 1e-5, "eos_token_id": [1, 2]
        })
    }

    #[test]
    fn llama_defaults() {
        let config = read(&llama()).expect("valid");
        assert_eq!(
            (config.head_dim, config.qkv_bias, config.tie_word_embeddings),
            (16, false, false)
        );
        assert_eq!(config.eos_token_ids, [1, 2]);
        assert_eq!(config.rope, RopeParameters::plain(10_000.0));
    }

    #[test]
    fn qwen2_has_query_bias_without_output_bias_and_qwen3_its_own_head_dim() {
        let mut value = llama();
        value["model_type"] = json!("qwen2");
        let config = read(&value).expect("valid");
        assert!(config.qkv_bias && !config.attention_output_bias);
        value["model_type"] = json!("qwen3");
        let config = read(&value).expect("valid");
        assert!(config.qk_norm() && !config.qkv_bias && config.head_dim == 128);
    }

    #[test]
    fn llama_attention_bias_covers_the_output_projection() {
        let mut value = llama();
        value["attention_bias"] = json!(true);
        let config = read(&value).expect("valid");
        assert!(config.qkv_bias && config.attention_output_bias);
    }

    #[test]
    fn experts_are_read_from_both_spellings_and_checked() {
        let mut value = llama();
        value["model_type"] = json!("qwen3_moe");
        let text = read(&value).expect_err("no experts").to_string();
        for key in ["num_experts", "num_experts_per_tok", "moe_intermediate_size"] {
            assert!(text.contains(&format!("`{key}` is missing")), "{key} not in {text}");
        }
        value["num_local_experts"] = json!(8);
        value["num_experts_per_tok"] = json!(2);
        value["moe_intermediate_size"] = json!(24);
        let experts = read(&value).expect("valid").experts.expect("experts");
        assert_eq!((experts.num_experts, experts.norm_topk_prob), (8, false));
        value["num_experts"] = json!(1);
        value["mlp_only_layers"] = json!("all");
        value["decoder_sparse_step"] = json!(0);
        let text = read(&value).expect_err("invalid").to_string();
        for part in [
            "`num_experts_per_tok` = 2 exceeds `num_experts` = 1",
            "`mlp_only_layers` = \"all\"",
            "`decoder_sparse_step` = 0",
        ] {
            assert!(text.contains(part), "{part} not in {text}");
        }
    }

    #[test]
    fn a_mixtral_has_experts_as_wide_as_its_mlp_in_every_layer() {
        let mut value = llama();
        value["model_type"] = json!("mixtral");
        value["num_local_experts"] = json!(4);
        value["num_experts_per_tok"] = json!(2);
        let config = read(&value).expect("valid");
        let experts = config.experts.as_ref().expect("experts");
        assert_eq!((experts.moe_intermediate_size, experts.norm_topk_prob), (160, true));
        assert!((0..2).all(|layer| config.experts_in(layer).is_some()));
        value["sliding_window"] = json!(4096);
        let text = read(&value).expect_err("window").to_string();
        assert!(text.contains("`sliding_window` = 4096"), "{text}");
    }

    #[test]
    fn scaling_is_read_from_both_spellings() {
        let mut value = llama();
        value["rope_scaling"] = json!({"type": "linear", "factor": 2.0});
        assert_eq!(read(&value).expect("valid").rope.scaling, RopeScaling::Linear { factor: 2.0 });
        value["rope_scaling"] = Value::Null;
        value["rope_parameters"] = json!({
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
        });
        let rope = read(&value).expect("valid").rope;
        assert!((rope.theta - 500_000.0).abs() < 1e-9);
        assert!(matches!(rope.scaling, RopeScaling::Llama3 { .. }));
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let value = json!({
            "model_type": "gpt9", "hidden_size": "big", "num_attention_heads": 3,
            "num_key_value_heads": 2, "intermediate_size": 0, "num_hidden_layers": 1,
            "rope_scaling": {"type": "dynamic"}, "rms_norm_eps": -1.0
        });
        let text = read(&value).expect_err("invalid").to_string();
        for part in [
            "unknown architecture `gpt9`",
            "`hidden_size`",
            "`vocab_size` is missing",
            "`intermediate_size` = 0",
            "does not divide",
            "unknown rope scaling `dynamic`",
            "`rms_norm_eps`",
        ] {
            assert!(text.contains(part), "{part} not in {text}");
        }
    }
}
