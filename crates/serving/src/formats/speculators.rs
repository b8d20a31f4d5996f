//! What folders of the speculators library have in common: keys around a draft's own, and what it asks
//! of them.

use serde_json::{Value, json};

use crate::checks::{Checks, Effect};
use crate::target::TargetFacts;

/// Version of the library whose layout is written.
const VERSION: &str = "0.9.0";

/// The keys of every folder: a type, the class that readers take for it, and `tokens` to draft in a
/// round.
pub(super) fn folder(kind: &str, architecture: &str, target: &TargetFacts, tokens: usize) -> Value {
    json!({
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": tokens,
                "verifier_accept_k": 1, "accept_tolerance": 0.0
            }],
            "verifier": {
                "name_or_path": target.name, "architectures": target.architectures
            }
        },
    })
}

/// Lists what is wrong in a folder of a type; a layer without a type of its own should be `layer_type`.
pub(super) fn check(checks: &mut Checks<'_>, kind: &str, layer_type: &str) {
    let config = checks.config.clone();
    let place = |key: &str| format!("config.json: `{key}`");
    let mut wrong = |key: &str, found: String, expected: &str, effect, words: &str| {
        checks.error("speculators", place(key), found, expected, effect, words);
    };
    if config["speculators_model_type"] != kind {
        let found = config["speculators_model_type"].to_string();
        wrong(
            "speculators_model_type",
            found,
            &format!("\"{kind}\""),
            Effect::Rejects,
            "no such class is registered",
        );
    }
    let inner = &config["speculators_config"];
    let default = &inner["default_proposal_method"];
    let methods = inner["proposal_methods"].as_array().cloned().unwrap_or_default();
    if !methods.iter().any(|method| !default.is_null() && method["proposal_type"] == *default) {
        wrong(
            "speculators_config.proposal_methods",
            format!("{methods:?} for {default}"),
            "the default method among them",
            Effect::Rejects,
            "the configuration is refused",
        );
    }
    let tokens =
        methods.first().map(|method| method["speculative_tokens"].clone()).unwrap_or_default();
    if !tokens.as_u64().is_some_and(|tokens| (1..=64).contains(&tokens)) {
        wrong(
            "speculators_config.proposal_methods.speculative_tokens",
            tokens.to_string(),
            "the depth to draft, 1 to 64",
            Effect::Rejects,
            "the configuration is refused",
        );
    }
    if inner["verifier"]["name_or_path"].as_str().is_none_or(str::is_empty) {
        wrong(
            "speculators_config.verifier.name_or_path",
            inner["verifier"]["name_or_path"].to_string(),
            "the target's name",
            Effect::Rejects,
            "the verifier cannot be loaded",
        );
    }
    if inner["verifier"]["architectures"].as_array().is_none_or(Vec::is_empty) {
        wrong(
            "speculators_config.verifier.architectures",
            inner["verifier"]["architectures"].to_string(),
            "the target's class",
            Effect::Rejects,
            "the configuration is refused",
        );
    }
    let layer = &config["transformer_layer_config"];
    if layer["model_type"].as_str().is_none() {
        wrong(
            "transformer_layer_config.model_type",
            layer["model_type"].to_string(),
            &format!("\"{layer_type}\""),
            Effect::Garbage,
            "the layer is read as Qwen3's, with other defaults and norms",
        );
    }
    for key in [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    ] {
        if layer.is_object() && layer[key].is_null() {
            wrong(
                &format!("transformer_layer_config.{key}"),
                "missing".into(),
                "the draft's value",
                Effect::Garbage,
                "the class's own default is taken",
            );
        }
    }
}
