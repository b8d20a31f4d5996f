//! What folders of the speculators library have in common: keys around a draft's own, and what it asks
//! of them.

use serde_json::{Value, json};

use crate::checks::Checks;
use crate::checks::rules::{KeyRule, Rule, is_list, is_text, key, key_place};
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

/// The code of these findings.
const CODE: &str = "speculators";

const TYPE: Rule = Rule::rejects(CODE, "", "no such class is registered");
const LAYER_TYPE: Rule =
    Rule::garbage(CODE, "", "the layer is read as Qwen3's, with other defaults and norms");
const METHODS: Rule =
    Rule::rejects(CODE, "the default method among them", "the configuration is refused");
const TOKENS: Rule =
    Rule::rejects(CODE, "the depth to draft, 1 to 64", "the configuration is refused");
const OF_LAYER: Rule = Rule::garbage(CODE, "the draft's value", "the class's own default is taken");

const NO_NAME: Rule = Rule::rejects(CODE, "the target's name", "the verifier cannot be loaded");
const NO_CLASS: Rule = Rule::rejects(CODE, "the target's class", "the configuration is refused");
const VERIFIER: [KeyRule; 2] = [
    key("speculators_config.verifier.name_or_path", is_text, NO_NAME),
    key("speculators_config.verifier.architectures", is_list, NO_CLASS),
];

const NUMBERS: [&str; 9] = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
];

/// Where proposals are counted.
pub(super) const PROPOSED: &str = "speculators_config.proposal_methods.speculative_tokens";

/// Lists what is wrong in a folder of a type; a layer without a type of its own should be `layer_type`.
pub(super) fn check(checks: &mut Checks<'_>, kind: &str, layer_type: &str) {
    let config = checks.config.clone();
    let quoted = |name: &str| format!("\"{name}\"");
    let found = &config["speculators_model_type"];
    if found != kind {
        let place = key_place("speculators_model_type");
        checks.differs(&TYPE, place, found.to_string(), quoted(kind));
    }
    let layer = &config["transformer_layer_config"];
    let found = &layer["model_type"];
    if !found.is_string() {
        let place = key_place("transformer_layer_config.model_type");
        checks.differs(&LAYER_TYPE, place, found.to_string(), quoted(layer_type));
    }
    let inner = &config["speculators_config"];
    let default = &inner["default_proposal_method"];
    let methods = inner["proposal_methods"].as_array().cloned().unwrap_or_default();
    if !methods.iter().any(|method| !default.is_null() && method["proposal_type"] == *default) {
        let found = format!("{methods:?} for {default}");
        checks.broken(&METHODS, key_place("speculators_config.proposal_methods"), found);
    }
    let tokens = &inner["proposal_methods"][0]["speculative_tokens"];
    if !tokens.as_u64().is_some_and(|tokens| (1..=64).contains(&tokens)) {
        checks.broken(&TOKENS, key_place(PROPOSED), tokens.to_string());
    }
    checks.keys(VERIFIER);
    for key in NUMBERS.into_iter().filter(|key| layer.is_object() && layer[*key].is_null()) {
        let place = key_place(&format!("transformer_layer_config.{key}"));
        checks.broken(&OF_LAYER, place, "missing");
    }
}
