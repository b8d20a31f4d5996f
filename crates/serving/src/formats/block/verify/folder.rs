//! Folders: keys that readers default differently, and tensors.

use longdraft_models::draft::block::key_names::{
    BLOCK_SIZE, BONUS_ANCHOR, CAUSAL, CHAIN, COUNTED_LAYERS, ENTERED_LAYERS, FROM_ANCHOR,
    MASK_TOKEN, OWN, TARGET_LAYERS,
};
use longdraft_models::draft::block::{BlockConfig, FROZEN, LayerKind};
use serde_json::Value;

use super::super::described;
use super::{LAYOUT, MISSING_LAYOUT, NETWORK, engines};
use super::{network, speculators, written};
use crate::checks::rules::{KeyRule, Rule, is_given, key_place, tensor_place};
use crate::checks::{Checks, weights};
use crate::formats::{of_target, vocabulary};
use crate::profile::Profile;

const MISSING_INSIDE: Rule = Rule::garbage(
    "missing-key",
    "a value",
    "readers look for it here, and have defaults of their own",
);
const CAUSALITY: Rule = Rule::garbage(
    "causality",
    "true or false, as it was trained",
    "blocks run causally, and a draft trained otherwise loses acceptance without a message",
);
const OLDER_CAUSALITY: Rule = Rule::garbage(
    "causality",
    "false",
    "older versions of engines look for it here alone, and run blocks causally without it",
)
.doubtful();
const OTHER_COPY: Rule = Rule::garbage(
    "frozen-tensor",
    "the target's bits, or no such tensor",
    "readers that take the copy draft with another table or head than in training",
)
.doubtful();

/// Keys that some reader takes from another place, or has another default for.
const WRITTEN: [KeyRule; 9] = [
    written("model_type", "no class of configurations is known by it"),
    written(BLOCK_SIZE, "readers look for it here or among the draft's own keys"),
    written(COUNTED_LAYERS, "the converter cannot tell the layers"),
    written("layer_types", "older switches are read differently"),
    written("rope_theta", "vLLM takes 1e6 for it, llama.cpp 1e4"),
    written("rope_parameters", "newer readers look for the rotary base here"),
    written("head_dim", "it is not hidden_size / num_attention_heads everywhere"),
    written("tie_word_embeddings", "its default differs by reader"),
    written("vocab_size", "the mask token cannot be checked"),
];

/// Keys of the same kind in [`OWN`]; of a chain, other readers' second place for them.
const WRITTEN_INSIDE: [&str; 3] = [BLOCK_SIZE, TARGET_LAYERS, MASK_TOKEN];

pub(super) fn check(checks: &mut Checks<'_>, method: &str) {
    if !checks.config.is_object() {
        return;
    }
    let is_nested = checks.profile == Profile::Speculators;
    let is_chain = said(checks, CHAIN[0]).is_some();
    if is_nested {
        speculators::keys(checks, method);
    } else {
        keys(checks, is_chain);
        layout(checks, is_chain);
    }
    weights::check(checks);
    let described = described(checks);
    let repeated = described.as_ref().ok().and_then(|config| config.as_ref().map(super::repeated));
    // The keys of a chain are a copy of its target's.
    let model_type = (!is_nested && !is_chain).then_some("qwen3");
    of_target::check_folder(checks, model_type, repeated.as_ref());
    let config = match described {
        Ok(Some(config)) => config,
        Ok(None) => return,
        Err(error) => return checks.broken(&NETWORK, "config.json", error.to_string()),
    };
    if is_nested {
        speculators::network(checks, &config);
    } else {
        causality(checks, &config);
    }
    let own = format!("{OWN}.{TARGET_LAYERS}");
    engines(checks, &config, "config.json");
    network::layers(checks, &config, &key_place(if is_nested { ENTERED_LAYERS } else { &own }));
    network::target(checks, &config, key_place);
    let shapes = checks.shapes();
    network::tensors(checks, &config, &shapes);
    if config.has_own_head() {
        vocabulary::check(checks, [config.draft_vocab_size, config.vocab_size]);
    }
    copies(checks, &config);
    checks.sizes = Some(Box::new(config));
}

/// What a plain folder says under a key, at the top or in [`OWN`].
fn said<'a>(checks: &'a Checks<'_>, key: &str) -> Option<&'a Value> {
    let places = [&checks.config[key], &checks.config[OWN][key]];
    places.into_iter().find(|value| !value.is_null())
}

fn keys(checks: &mut Checks<'_>, is_chain: bool) {
    checks.keys(WRITTEN);
    if is_chain {
        let of_chain = [TARGET_LAYERS, MASK_TOKEN].into_iter().chain(CHAIN);
        checks
            .keys(of_chain.map(|key| written(key, "engines look for the Markov head's keys here")));
    }
    let rule = if is_chain { MISSING_INSIDE.doubtful() } else { MISSING_INSIDE };
    for key in WRITTEN_INSIDE {
        if !is_given(checks.config[OWN].get(key)) {
            checks.broken(&rule, key_place(&format!("{OWN}.{key}")), "missing");
        }
    }
}

/// Readers run sliding layers causally unless they are told, and full ones not.
fn causality(checks: &mut Checks<'_>, config: &BlockConfig) {
    let slides = config.layers.contains(&LayerKind::Sliding);
    let is_mixed = config.layers.contains(&LayerKind::Full);
    let places = [&checks.config, &checks.config[OWN]];
    let said = CAUSAL.iter().any(|key| places.iter().any(|table| table[*key].is_boolean()));
    if slides && !is_mixed && !said && config.is_causal.is_none() {
        checks.broken(&CAUSALITY, key_place(CAUSAL[0]), "missing for a draft of sliding layers");
    } else if slides
        && !config.is_causal_in(LayerKind::Sliding)
        && !checks.config[OWN][CAUSAL[1]].is_boolean()
    {
        let place = key_place(&format!("{OWN}.{}", CAUSAL[1]));
        checks.broken(&OLDER_CAUSALITY, place, "missing for a draft of sliding layers");
    }
}

/// Whether slot 0 proposes: what is said must fit the heads.
fn layout(checks: &mut Checks<'_>, is_chain: bool) {
    // The older opposite counts where it is true.
    let is_off = || said(checks, BONUS_ANCHOR).is_some_and(|value| *value == true);
    let proposes = said(checks, FROM_ANCHOR).and_then(Value::as_bool);
    let place = key_place(FROM_ANCHOR);
    match proposes.or_else(|| is_off().then_some(false)) {
        Some(proposes) if proposes == is_chain => {
            if checks.config[OWN][FROM_ANCHOR] == true {
                let place = key_place(&format!("{OWN}.{FROM_ANCHOR}"));
                checks.broken(&LAYOUT.doubtful(), place, "vLLM does not start with it");
            }
        }
        Some(proposes) => checks.broken(&LAYOUT, place, proposes.to_string()),
        None => checks.broken(&LAYOUT.doubtful(), place, MISSING_LAYOUT),
    }
}

/// Copies of the target's table and head, which some readers take in their place.
fn copies(checks: &mut Checks<'_>, config: &BlockConfig) {
    // A GGUF file's values are rounded otherwise than those of a folder.
    let Some(facts) = checks.target.filter(|facts| !facts.is_gguf) else { return };
    let Ok(ends) = facts.target.hold_ends() else { return };
    for name in FROZEN.into_iter().take(if config.has_own_head() { 1 } else { FROZEN.len() }) {
        let Some(tensor) = checks.tensors.get(name) else { continue };
        let own = if name == FROZEN[0] { ends.embedding() } else { ends.head() };
        let same = own.ok().and_then(|own| of_target::is_copy(tensor, &own));
        if same == Some(false) {
            checks.broken(&OTHER_COPY, tensor_place(name), "differs from the target's");
        }
    }
}
