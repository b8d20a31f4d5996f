//! Folders: keys that readers default differently, and tensors.

use longdraft_models::draft::block::{BlockConfig, LayerKind, OWN, tensor_specs};
use serde_json::Value;

use super::super::described;
use super::NETWORK;
use super::{network, speculators};
use crate::checks::{Checks, Effect, Rule, values};
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

/// Keys that some reader takes from another place, or has another default for.
const WRITTEN: [(&str, &str); 8] = [
    ("block_size", "readers look for it here or among the draft's own keys"),
    ("num_target_layers", "the converter cannot tell the layers"),
    ("layer_types", "older switches are read differently"),
    ("rope_theta", "vLLM takes 1e6 for it, llama.cpp 1e4"),
    ("rope_parameters", "newer readers look for the rotary base here"),
    ("head_dim", "it is not hidden_size / num_attention_heads everywhere"),
    ("tie_word_embeddings", "its default differs by reader"),
    ("vocab_size", "the mask token cannot be checked"),
];

/// Keys of the same kind in [`OWN`].
const WRITTEN_INSIDE: [&str; 3] = ["block_size", "target_layer_ids", "mask_token_id"];

pub(super) fn check(checks: &mut Checks<'_>, method: &str) {
    if !checks.config.is_object() {
        return;
    }
    let is_nested = checks.profile == Profile::Speculators;
    if is_nested {
        speculators::keys(checks, method);
    } else {
        keys(checks);
    }
    let config = match described(checks) {
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
        layout(checks, &config);
    }
    let place =
        if is_nested { speculators::LAYERS.to_owned() } else { format!("{OWN}.target_layer_ids") };
    network::layers(checks, &config, &format!("config.json: `{place}`"));
    network::target(checks, &config, |key| format!("config.json: `{key}`"));
    tensors(checks, &config);
    checks.sizes = Some(Box::new(config));
}

fn keys(checks: &mut Checks<'_>) {
    for (key, why) in WRITTEN {
        if checks.config.get(key).is_none_or(Value::is_null) {
            checks.error(
                "missing-key",
                format!("config.json: `{key}`"),
                "missing",
                "a value",
                Effect::Garbage,
                why,
            );
        }
    }
    for key in WRITTEN_INSIDE {
        if checks.config[OWN].get(key).is_none_or(Value::is_null) {
            checks.broken(&MISSING_INSIDE, format!("config.json: `{OWN}.{key}`"), "missing");
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

/// Whether slot 0 proposes is a default that differs by reader.
fn layout(checks: &mut Checks<'_>, config: &BlockConfig) {
    let key = "sample_from_anchor";
    let said =
        [&checks.config[key], &checks.config[OWN][key]].iter().find_map(|value| value.as_bool());
    let wanted = config.chain.is_some();
    if said.is_some_and(|said| said != wanted) || (wanted && said.is_none()) {
        checks.error(
            "layout",
            format!("config.json: `{key}`"),
            said.map_or_else(|| "missing".to_owned(), |said| said.to_string()),
            wanted.to_string(),
            Effect::Garbage,
            "slots propose the token beside their own, and nearly nothing is accepted",
        );
    }
}

fn tensors(checks: &mut Checks<'_>, config: &BlockConfig) {
    let shapes = checks.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape.clone()));
    let found = shapes.collect();
    network::tensors(checks, &tensor_specs(config), &found);
    let tensors: Vec<_> = checks.tensors.values().cloned().collect();
    for tensor in tensors {
        if let Ok(bytes) = tensor.read() {
            values::check(checks, &tensor.name, &tensor.shape, &tensor.dtype, &bytes);
        }
    }
}
