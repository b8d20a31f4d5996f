//! What the speculators library and vLLM take from a folder of theirs.

use longdraft_models::draft::block::{BlockConfig, LayerKind};
use serde_json::Value;

use crate::checks::{Checks, Effect, Problem, Rule, Severity};
use crate::formats::speculators;
use crate::profile::Engine;

const DROPPED_KEY: Rule = Rule::garbage(
    "dropped-key",
    "none: these folders have no place for it",
    "it is dropped without a message, and logits are off by it",
);

/// The key of the layers, which counts from 1.
pub(super) const LAYERS: &str = "aux_hidden_state_layer_ids";

/// Keys beside the layer's own.
const WRITTEN: [(&str, &str); 4] = [
    (LAYERS, "loading ends"),
    ("mask_token_id", "loading ends"),
    ("block_size", "the library takes 8"),
    ("draft_vocab_size", "the library takes 32000, and a head of its own"),
];

/// Keys of the layer that readers default differently.
const OF_LAYER: [(&str, &str); 2] =
    [("layer_types", "every layer is full"), ("rope_parameters", "the class's own base is taken")];

/// Numbers that a plain folder may hold, and vLLM drops from these.
const DROPPED: [&str; 3] =
    ["output_multiplier", "final_logit_softcapping", "input_embedding_scale"];

/// Where proposals are counted.
const TOKENS: &str = "speculators_config.proposal_methods.speculative_tokens";

fn place(key: &str) -> String {
    format!("config.json: `{key}`")
}

/// Keys that every reader needs.
pub(super) fn keys(checks: &mut Checks<'_>, method: &str) {
    speculators::check(checks, method, "qwen3");
    let config = checks.config.clone();
    let layer = &config["transformer_layer_config"];
    let missing = |value: &Value, key: &str| value.get(key).is_none_or(Value::is_null);
    let outer = WRITTEN.iter().filter(|(key, _)| missing(&config, key));
    let inner = OF_LAYER.iter().filter(|(key, _)| missing(layer, key));
    for (key, words) in outer.chain(inner) {
        checks.error("missing-key", place(key), "missing", "a value", Effect::Garbage, words);
    }
    for key in DROPPED {
        if !missing(&config, key) || !missing(layer, key) {
            checks.broken(&DROPPED_KEY, place(key), "a number that changes logits");
        }
    }
}

/// Keys that must say what the network is.
pub(super) fn network(checks: &mut Checks<'_>, config: &BlockConfig) {
    causality(checks, config);
    let said = checks.config["sample_from_anchor"].as_bool();
    let wanted = config.chain.is_some();
    if said != Some(wanted) {
        checks.error(
            "layout",
            place("sample_from_anchor"),
            said.map_or_else(|| "missing".to_owned(), |said| said.to_string()),
            wanted.to_string(),
            Effect::Garbage,
            "readers differ in what they take for it: slots propose the token beside their own, and nearly \
             nothing is accepted",
        );
    }
    let methods = &checks.config["speculators_config"]["proposal_methods"];
    let tokens = methods[0]["speculative_tokens"].as_u64();
    if let Some(tokens) = tokens.filter(|tokens| *tokens as usize > config.proposals()) {
        checks.error(
            "proposals",
            place(TOKENS),
            tokens.to_string(),
            format!(
                "at most {}, what a block of {} proposes",
                config.proposals(),
                config.block_size
            ),
            Effect::Garbage,
            "slots are filled that were never trained",
        );
    }
}

/// The library reads the switch for sliding layers alone, vLLM for all of them; without one they differ.
fn causality(checks: &mut Checks<'_>, config: &BlockConfig) {
    const KEY: &str = "sliding_window_non_causal";
    let said = checks.config[KEY].as_bool();
    let has = |kind| config.layers.contains(&kind);
    let problem = if said.is_none() && has(LayerKind::Sliding) {
        let problem = Problem::new(
            Severity::Error,
            "causality",
            place(KEY),
            "missing for a draft of sliding layers",
            "true or false, as it was trained",
        );
        problem
            .effect(Engine::Speculators, Effect::Garbage, "its class's own default is taken")
            .effect(Engine::Vllm, Effect::Garbage, "no layer is causal")
    } else if said == Some(false) && has(LayerKind::Full) && config.chain.is_none() {
        let problem = Problem::new(
            Severity::Error,
            "causality",
            place(KEY),
            "false for a draft with full layers",
            "true: full layers see the whole block",
        );
        problem.effect(
            Engine::Vllm,
            Effect::Garbage,
            "every layer runs causally, and acceptance falls without a message",
        )
    } else {
        return;
    };
    checks.push(problem);
}
