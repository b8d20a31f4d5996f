//! What the speculators library and vLLM take from a folder of theirs.

use longdraft_models::draft::block::key_names::{
    BEND, BLOCK_SIZE, EMBEDDING_SCALE, ENTERED_LAYERS, FROM_ANCHOR, MASK_TOKEN, NON_CAUSAL,
};
use longdraft_models::draft::block::{BlockConfig, LayerKind};

use super::written;
use crate::checks::rules::{KeyRule, Rule, is_given, key_place};
use crate::checks::{Checks, Effect};
use crate::formats::speculators::{self, PROPOSED};
use crate::profile::Engine;

const DROPPED_KEY: Rule = Rule::garbage(
    "dropped-key",
    "none: these folders have no place for it",
    "it is dropped without a message, and logits are off by it",
);
const LAYOUT: Rule = Rule::garbage(
    "layout",
    "",
    "readers differ in what they take for it: slots propose the token beside their own, and nearly \
     nothing is accepted",
);
const PROPOSALS: Rule = Rule::garbage("proposals", "", "slots are filled that were never trained");
const NO_CAUSALITY: Rule =
    Rule::garbage("causality", "true or false, as it was trained", "no layer is causal");
const CAUSAL_EVERYWHERE: Rule = Rule::garbage(
    "causality",
    "true: full layers see the whole block",
    "every layer runs causally, and acceptance falls without a message",
);

/// Keys beside the layer's own, and some of it that readers default differently.
const WRITTEN: [KeyRule; 6] = [
    written(ENTERED_LAYERS, "loading ends"),
    written(MASK_TOKEN, "loading ends"),
    written(BLOCK_SIZE, "the library takes 8"),
    written("draft_vocab_size", "the library takes 32000, and a head of its own"),
    written("transformer_layer_config.layer_types", "every layer is full"),
    written("transformer_layer_config.rope_parameters", "the class's own base is taken"),
];

/// Numbers that a plain folder may hold, and vLLM drops from these.
const DROPPED: [&str; 3] = [BEND[0], BEND[1], EMBEDDING_SCALE];

/// Keys that every reader needs.
pub(super) fn keys(checks: &mut Checks<'_>, method: &str) {
    speculators::check(checks, method, "qwen3");
    checks.keys(WRITTEN);
    for key in DROPPED {
        let places = [&checks.config, &checks.config["transformer_layer_config"]];
        if places.into_iter().any(|table| is_given(table.get(key))) {
            checks.broken(&DROPPED_KEY, key_place(key), "a number that changes logits");
        }
    }
}

/// Keys that must say what the network is.
pub(super) fn network(checks: &mut Checks<'_>, config: &BlockConfig) {
    causality(checks, config);
    let (said, wanted) = (checks.config[FROM_ANCHOR].as_bool(), config.chain.is_some());
    if said != Some(wanted) {
        let found = said.map_or_else(|| "missing".to_owned(), |said| said.to_string());
        checks.differs(&LAYOUT, key_place(FROM_ANCHOR), found, wanted.to_string());
    }
    let methods = &checks.config["speculators_config"]["proposal_methods"];
    let tokens = methods[0]["speculative_tokens"].as_u64();
    let (most, slots) = (config.proposals(), config.block_size);
    if let Some(tokens) = tokens.filter(|tokens| *tokens as usize > most) {
        let expected = format!("at most {most}, what a block of {slots} proposes");
        checks.differs(&PROPOSALS, key_place(PROPOSED), tokens.to_string(), expected);
    }
}

/// The library reads the switch for sliding layers alone, vLLM for all of them; without one they differ.
fn causality(checks: &mut Checks<'_>, config: &BlockConfig) {
    let said = checks.config[NON_CAUSAL].as_bool();
    let has = |kind| config.layers.contains(&kind);
    let (rule, found) = match said {
        None if has(LayerKind::Sliding) => (&NO_CAUSALITY, "missing for a draft of sliding layers"),
        Some(false) if has(LayerKind::Full) && config.chain.is_none() => {
            (&CAUSAL_EVERYWHERE, "false for a draft with full layers")
        }
        _ => return,
    };
    let mut problem = rule.finding(key_place(NON_CAUSAL), found, rule.expected);
    if said.is_none() {
        let words = "its class's own default is taken";
        problem = problem.effect(Engine::Speculators, Effect::Garbage, words);
    }
    checks.push(problem.effect(Engine::Vllm, rule.effect, rule.words));
}
