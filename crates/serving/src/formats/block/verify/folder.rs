//! Folders: keys that readers default differently, and tensors.

use longdraft_models::draft::block::{BONUS_ANCHOR, BlockConfig, LayerKind, OWN};
use serde_json::Value;

use super::super::described;
use super::{LAYOUT, MISSING_LAYOUT, NETWORK};
use super::{network, speculators};
use crate::checks::{Checks, Effect, Rule, weights};
use crate::formats::of_target::{self, place};
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
const OTHER_COPY: Rule = Rule::garbage(
    "frozen-tensor",
    "the target's bits, or no such tensor",
    "readers that take the copy draft with another table or head than in training",
);

/// Keys that some reader takes from another place, or has another default for.
const WRITTEN: [(&str, &str); 9] = [
    ("model_type", "no class of configurations is known by it"),
    ("block_size", "readers look for it here or among the draft's own keys"),
    ("num_target_layers", "the converter cannot tell the layers"),
    ("layer_types", "older switches are read differently"),
    ("rope_theta", "vLLM takes 1e6 for it, llama.cpp 1e4"),
    ("rope_parameters", "newer readers look for the rotary base here"),
    ("head_dim", "it is not hidden_size / num_attention_heads everywhere"),
    ("tie_word_embeddings", "its default differs by reader"),
    ("vocab_size", "the mask token cannot be checked"),
];

/// The same of a chain: readers look for them at the top alone.
const OF_CHAIN: [&str; 6] = [
    "target_layer_ids",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
];

/// Keys of the same kind in [`OWN`]; of a chain, other readers' second place for them.
const WRITTEN_INSIDE: [&str; 3] = ["block_size", "target_layer_ids", "mask_token_id"];

pub(super) fn check(checks: &mut Checks<'_>, method: &str) {
    if !checks.config.is_object() {
        return;
    }
    let is_nested = checks.profile == Profile::Speculators;
    let is_chain = said(checks, "markov_rank").is_some();
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
        Err(error) => {
            return checks.broken(&NETWORK, "config.json", error.to_string());
        }
    };
    if is_nested {
        speculators::network(checks, &config);
    } else {
        causality(checks, &config);
    }
    let layers =
        if is_nested { speculators::LAYERS.to_owned() } else { format!("{OWN}.target_layer_ids") };
    network::layers(checks, &config, &place(&layers));
    network::target(checks, &config, place);
    let shapes = checks.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape.clone()));
    let shapes = shapes.collect();
    network::tensors(checks, &config, &shapes);
    copies(checks);
    checks.sizes = Some(Box::new(config));
}

/// What a plain folder says under a key, at the top or in [`OWN`].
fn said<'a>(checks: &'a Checks<'_>, key: &str) -> Option<&'a Value> {
    let places = [&checks.config[key], &checks.config[OWN][key]];
    places.into_iter().find(|value| !value.is_null())
}

fn keys(checks: &mut Checks<'_>, is_chain: bool) {
    let of_chain = OF_CHAIN.map(|key| (key, "engines look for a chain's keys here"));
    for (key, why) in WRITTEN.into_iter().chain(of_chain.into_iter().filter(|_| is_chain)) {
        if checks.config.get(key).is_none_or(Value::is_null) {
            checks.error("missing-key", place(key), "missing", "a value", Effect::Garbage, why);
        }
    }
    for key in WRITTEN_INSIDE {
        if checks.config[OWN].get(key).is_some_and(|value| !value.is_null()) {
            continue;
        }
        let place = place(&format!("{OWN}.{key}"));
        if is_chain {
            checks.doubtful(&MISSING_INSIDE, place, "missing");
        } else {
            checks.broken(&MISSING_INSIDE, place, "missing");
        }
    }
}

/// Readers run sliding layers causally unless they are told, and full ones not.
fn causality(checks: &mut Checks<'_>, config: &BlockConfig) {
    let slides = config.layers.contains(&LayerKind::Sliding);
    let said = ["is_causal", "causal"]
        .iter()
        .any(|key| checks.config[*key].is_boolean() || checks.config[OWN][*key].is_boolean());
    let mixed = slides && config.layers.contains(&LayerKind::Full);
    if slides && !mixed && !said {
        checks.broken(
            &CAUSALITY,
            "config.json: `is_causal`",
            "missing for a draft of sliding layers",
        );
    }
}

/// Whether slot 0 proposes: what is said must fit the heads.
fn layout(checks: &mut Checks<'_>, is_chain: bool) {
    const KEY: &str = "sample_from_anchor";
    // The older opposite counts where it is true.
    let is_off = || said(checks, BONUS_ANCHOR).is_some_and(|value| *value == true);
    let proposes = said(checks, KEY).and_then(Value::as_bool).or_else(|| is_off().then_some(false));
    match proposes {
        Some(proposes) if proposes == is_chain => {}
        Some(proposes) => checks.broken(&LAYOUT, place(KEY), proposes.to_string()),
        None => checks.doubtful(&LAYOUT, place(KEY), MISSING_LAYOUT),
    }
}

/// Copies of the target's table and head, which some readers take in their place.
fn copies(checks: &mut Checks<'_>) {
    // A GGUF file's values are rounded otherwise than those of a folder.
    let Some(facts) = checks.target.filter(|facts| !facts.is_gguf) else { return };
    for name in network::FROZEN {
        let Some(tensor) = checks.tensors.get(name) else { continue };
        let own =
            if name == network::FROZEN[0] { facts.target.embedding() } else { facts.target.head() };
        let same = own.ok().and_then(|own| of_target::is_copy(tensor, &own));
        if same == Some(false) {
            checks.doubtful(&OTHER_COPY, format!("tensor `{name}`"), "differs from the target's");
        }
    }
}
