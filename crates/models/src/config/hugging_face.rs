//! `config.json` of a Hugging Face folder.

#[cfg(test)]
mod tests;

use serde_json::Value;

use super::families::{self, Defaults, Sizes};
use super::json_keys::Keys;
use super::{Architecture, ExpertsConfig, TargetConfig, end_tokens};
use crate::error::Problems;

/// Models whose `config.json` holds that of their text part as `text_config`, the text part's
/// `model_type` if it names none, and whether their own class ties the head.
const NESTED: [(&str, &str, bool); 7] = [
    ("gemma4", "gemma4_text", true),
    ("gemma4_unified", "gemma4_unified_text", true),
    ("gemma3", "gemma3_text", true),
    ("mistral3", "mistral", true),
    ("qwen3_5", "qwen3_5_text", false),
    ("qwen3_5_moe", "qwen3_5_moe_text", false),
    ("llama4", "llama4_text", false),
];

/// Keys that the outer configuration may hold for the text part.
const OUTER_KEYS: [&str; 4] =
    ["bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"];
/// The key that the outer configuration decides: the head is the outer model's.
const TIED: &str = "tie_word_embeddings";

/// The text part of a model that also sees.
fn text_part(value: &Value) -> Option<Value> {
    let name = value.get("model_type")?.as_str()?;
    let (_, inner, ties) = NESTED.iter().find(|(outer, ..)| *outer == name)?;
    let mut text = value.get("text_config")?.as_object()?.clone();
    text.entry("model_type").or_insert_with(|| (*inner).into());
    for key in OUTER_KEYS {
        if text.get(key).is_none_or(Value::is_null)
            && let Some(outer) = value.get(key)
        {
            text.insert(key.into(), outer.clone());
        }
    }
    let outer = value.get(TIED).filter(|tied| !tied.is_null()).cloned();
    if let Some(tied) = outer.or(ties.then_some(Value::Bool(true))) {
        text.insert(TIED.into(), tied);
    }
    Some(Value::Object(text))
}

/// What is wrong with a model that also sees and is not known; other keys of it mean nothing here.
fn unknown_outer(value: &Value) -> Option<Problems> {
    let name = value.get("model_type")?.as_str()?;
    value.get("text_config")?.as_object()?;
    let known: Vec<&str> = NESTED.iter().map(|(outer, ..)| *outer).collect();
    if known.contains(&name) || Architecture::NAMES.iter().any(|(known, _)| *known == name) {
        return None;
    }
    let mut problems = Problems::default();
    let known = known.join(", ");
    problems.push(format!(
        "unknown architecture `{name}` of a model with a text part (known: {known})"
    ));
    Some(problems)
}

pub(super) fn read(value: &Value) -> Result<TargetConfig, Problems> {
    if let Some(problems) = unknown_outer(value) {
        return Err(problems);
    }
    match text_part(value) {
        None => read_text(value),
        Some(text) => {
            let mut config = read_text(&text)?;
            config.add_ends(end_tokens::named(value));
            Ok(config)
        }
    }
}

fn read_text(value: &Value) -> Result<TargetConfig, Problems> {
    let mut keys = Keys::of(value);
    let architecture = if let Some(name) = keys.present("model_type").and_then(Value::as_str) {
        Architecture::parse(name, &Architecture::NAMES, &mut keys.problems)
    } else {
        keys.problems.push("`model_type` is missing");
        Architecture::Llama
    };
    let defaults = Defaults::of(architecture);
    let (activation, known) = defaults.activation;
    if let Some(act) = keys.text(activation)
        && act != known
    {
        let message = format!("`{activation}` = \"{act}\" is not supported ({known} is)");
        keys.problems.push(message);
    }
    let hidden_size = keys.required_size("hidden_size");
    let num_attention_heads = keys.size_or("num_attention_heads", defaults.num_attention_heads);
    let num_key_value_heads = match value.get("num_key_value_heads") {
        None => defaults.num_key_value_heads,
        Some(_) => keys.size("num_key_value_heads"),
    };
    let default_head_dim = defaults.head_dim.unwrap_or(hidden_size / num_attention_heads.max(1));
    let head_dim = match architecture {
        Architecture::DeepseekV3 => families::deepseek::head_dim(&mut keys),
        _ => keys.size("head_dim").unwrap_or(default_head_dim),
    };
    let (qkv_bias, attention_output_bias) = keys.attention_biases(architecture);
    let sizes = Sizes {
        architecture,
        hidden_size,
        num_hidden_layers: keys.required_size("num_hidden_layers"),
        num_attention_heads,
        head_dim,
        max_position_embeddings: keys
            .size("max_position_embeddings")
            .unwrap_or(defaults.max_position_embeddings),
    };
    keys.check_rotary_kinds();
    keys.check_token_kinds();
    families::check_quantisation(&mut keys, architecture);
    families::check_layers(&mut keys, architecture);
    families::check_turning(&mut keys, architecture);
    let (rope, parts) = families::of_json(&mut keys, sizes);
    let experts = keys.experts(architecture);
    let intermediate_size = keys.inner_width(architecture, &defaults, experts.as_ref());
    let vocab_size = keys.size_or("vocab_size", defaults.vocab_size);
    let (eps_key, eps) = defaults.norm_eps;
    let config = TargetConfig {
        architecture,
        hidden_size,
        intermediate_size,
        num_hidden_layers: sizes.num_hidden_layers,
        num_attention_heads,
        num_key_value_heads: num_key_value_heads.unwrap_or(num_attention_heads),
        head_dim,
        vocab_size,
        max_position_embeddings: sizes.max_position_embeddings,
        rms_norm_eps: keys.number(eps_key, eps),
        rope,
        tie_word_embeddings: keys.ties_head(architecture, &defaults),
        qkv_bias,
        attention_output_bias,
        mlp_bias: defaults.reads_mlp_bias && keys.flag("mlp_bias", false),
        experts,
        initializer_range: keys.number("initializer_range", 0.02),
        bos_token_id: keys.token("bos_token_id"),
        eos_token_ids: end_tokens::of_text(value, architecture, vocab_size),
        pad_token_id: keys.token("pad_token_id"),
        parts,
        further_end_ids: Vec::new(),
    };
    let mut problems = keys.into_problems();
    config.validate(&mut problems);
    if problems.0.is_empty() { Ok(config) } else { Err(problems) }
}

impl Keys<'_> {
    /// Sizes of an architecture's experts. Newer files say `num_local_experts` where older ones say
    /// `num_experts`.
    fn experts(&mut self, architecture: Architecture) -> Option<ExpertsConfig> {
        if !architecture.is_mixture() {
            return None;
        }
        match architecture {
            Architecture::DeepseekV3 => return Some(families::deepseek::experts(self)),
            Architecture::Glm4Moe => return Some(families::glm::experts(self)),
            Architecture::GptOss => return Some(families::gpt_oss::experts(self)),
            Architecture::Gemma4 => return families::gemma4::experts(self),
            Architecture::Llama4 => return families::llama4::experts(self),
            _ => {}
        }
        let mixtral = architecture == Architecture::Mixtral;
        let always = mixtral || architecture == Architecture::Qwen35Moe;
        let newer = architecture == Architecture::Qwen3Next;
        if newer && self.present("num_experts").and_then(Value::as_u64) == Some(0) {
            return None;
        }
        let count = self.size("num_experts").or_else(|| self.size("num_local_experts"));
        let known = Defaults::of(architecture).experts;
        let num_experts = count.or(known.num_experts).unwrap_or_else(|| {
            let name = if mixtral { "num_local_experts" } else { "num_experts" };
            self.problems.push(format!("`{name}` is missing"));
            1
        });
        let width = if mixtral { "intermediate_size" } else { "moe_intermediate_size" };
        let shared = architecture
            .has_shared_expert()
            .then(|| self.size_or("shared_expert_intermediate_size", known.shared_width));
        Some(ExpertsConfig {
            num_experts,
            num_experts_per_tok: self.size_or("num_experts_per_tok", known.num_experts_per_tok),
            // A Mixtral's is reported as the MLP's.
            moe_intermediate_size: self.size(width).or(known.width).unwrap_or_else(|| {
                if !mixtral {
                    self.problems.push(format!("`{width}` is missing"));
                }
                1
            }),
            shared_expert_intermediate_size: shared,
            norm_topk_prob: always || self.flag("norm_topk_prob", newer),
            decoder_sparse_step: if architecture == Architecture::Qwen35Moe {
                1
            } else {
                self.size("decoder_sparse_step").unwrap_or(1)
            },
            mlp_only_layers: if architecture == Architecture::Qwen35Moe {
                Vec::new()
            } else {
                self.sizes("mlp_only_layers")
            },
        })
    }

    /// `I`; of files of nothing but experts, what a token visits of them.
    fn inner_width(
        &mut self,
        architecture: Architecture,
        defaults: &Defaults,
        experts: Option<&ExpertsConfig>,
    ) -> usize {
        let absent = match (architecture, experts) {
            (Architecture::Lfm2, _) => families::lfm::inner_width(self),
            (Architecture::Qwen35Moe, Some(experts)) => Some(experts.width_of_a_token()),
            _ => defaults.intermediate_size,
        };
        match absent {
            Some(width) if architecture == Architecture::Lfm2 => width,
            absent => self.size_or(defaults.mlp_width, absent),
        }
    }

    /// Whether the head is the embedding table; LFM2's older files have a name of their own for it, which wins.
    fn ties_head(&self, architecture: Architecture, defaults: &Defaults) -> bool {
        let tied = self.flag(TIED, defaults.tie_word_embeddings);
        if architecture == Architecture::Lfm2 { self.flag("tie_embedding", tied) } else { tied }
    }

    /// Bias on q, k and v, and on the attention's output.
    fn attention_biases(&self, architecture: Architecture) -> (bool, bool) {
        match architecture {
            // The class has no key for it.
            Architecture::Qwen2 => (true, false),
            Architecture::Glm | Architecture::Glm4 => (self.flag("attention_bias", true), false),
            Architecture::Qwen2Moe => (self.flag("qkv_bias", true), false),
            Architecture::Glm4Moe => (self.flag("attention_bias", false), false),
            Architecture::Phi3 => (false, false),
            _ => {
                let bias = self.flag("attention_bias", architecture == Architecture::GptOss);
                (bias, bias)
            }
        }
    }
}
