//! Keys of `config.json`: present, of the right kind, consistent, and computed by the engines.

use longdraft_models::draft::eagle3::Eagle3Config;
use serde_json::Value;

use super::Checks;
use super::report::{Effect, Problem, Severity};
use crate::engine::{Engine, sglang, vllm};
use crate::profile::Profile;

const FILE: &str = "config.json";

/// Keys that readers need, beside layer ids.
const REQUIRED: [&str; 14] = [
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "tie_word_embeddings",
];

/// The same for speculators, where sizes stand in the layer's own table.
const REQUIRED_SPECULATORS: [&str; 5] = [
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    "draft_vocab_size",
];

/// Switches whose default differs between readers: they have to be written.
const FLAGS: [&str; 4] = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"];

/// Keys whose values are numbers, flags or lists: null is none.
const UNTYPED: [&str; 2] = ["target_hidden_size", "rope_scaling"];

pub(super) fn check(checks: &mut Checks<'_>) {
    if !checks.config.is_object() {
        return;
    }
    architecture(checks);
    presence(checks);
    nulls(checks);
    flags(checks);
    sizes(checks);
    rope(checks);
    special_tokens(checks);
    if checks.profile == Profile::Speculators {
        speculators(checks);
    }
}

fn place(key: &str) -> String {
    format!("{FILE}: `{key}`")
}

/// The table with the decoder layer's keys.
fn layer_keys(checks: &Checks<'_>) -> Value {
    match checks.config.get("transformer_layer_config") {
        Some(layer) => layer.clone(),
        None => checks.config.clone(),
    }
}

fn architecture(checks: &mut Checks<'_>) {
    let names: Vec<String> = checks.config["architectures"]
        .as_array()
        .map(|names| names.iter().filter_map(|n| n.as_str().map(str::to_owned)).collect())
        .unwrap_or_default();
    let found = format!("{names:?}");
    for engine in checks.engines() {
        let (holds, wanted) = match engine {
            Engine::Sglang => {
                (names == [sglang::ARCHITECTURE], format!("[{:?}] alone", sglang::ARCHITECTURE))
            }
            Engine::Speculators => {
                let own = ["Eagle3DraftModel", "Eagle3Speculator"];
                (names.iter().any(|n| own.contains(&n.as_str())), format!("one of {own:?}"))
            }
            _ => (
                names.iter().any(|n| vllm::ARCHITECTURES.contains(&n.as_str())),
                format!("one of {:?}", vllm::ARCHITECTURES),
            ),
        };
        if !holds {
            let problem = Problem::new(
                Severity::Error,
                "architecture",
                place("architectures"),
                found.clone(),
                wanted,
            );
            checks.push(problem.effect(
                *engine,
                Effect::Rejects,
                "no model class of this name, or the plain model's",
            ));
        }
    }
}

fn presence(checks: &mut Checks<'_>) {
    let required: &[&str] =
        if checks.profile == Profile::Speculators { &REQUIRED_SPECULATORS } else { &REQUIRED };
    for key in required {
        if checks.config.get(*key).is_none() {
            let words = if *key == "draft_vocab_size" && checks.profile == Profile::Sglang {
                "the head is taken from the target"
            } else {
                "the reader's own default is taken, which differs, or loading ends"
            };
            checks.error(
                "missing-key",
                place(key),
                "missing",
                "the draft's value",
                Effect::Garbage,
                words,
            );
        }
    }
}

fn nulls(checks: &mut Checks<'_>) {
    let Some(keys) = checks.config.as_object() else { return };
    let null: Vec<String> = keys
        .iter()
        .filter(|(key, value)| value.is_null() && !UNTYPED.contains(&key.as_str()))
        .map(|(key, _)| key.clone())
        .collect();
    for key in null {
        checks.error(
            "null",
            place(&key),
            "null",
            "a value, or no such key",
            Effect::Rejects,
            "strict readers refuse null for a typed key",
        );
    }
}

fn flags(checks: &mut Checks<'_>) {
    for key in FLAGS {
        match checks.config.get(key) {
            None => checks.error(
                "missing-flag",
                place(key),
                "missing",
                "true or false",
                Effect::Garbage,
                "readers disagree on the default: the network may be another one",
            ),
            Some(value) if !value.is_boolean() => {
                checks.error(
                    "flag",
                    place(key),
                    value.to_string(),
                    "true or false",
                    Effect::Rejects,
                    "strict readers refuse it",
                );
            }
            Some(_) => {}
        }
    }
    let on = |checks: &Checks<'_>, key: &str| checks.config[key] == true;
    if on(checks, "norm_before_fc") && on(checks, "fc_norm") {
        checks.error(
            "both-norms",
            place("norm_before_fc"),
            "true beside `fc_norm` = true",
            "one of them",
            Effect::Rejects,
            "the two exclude each other",
        );
    }
    if checks.config["tie_word_embeddings"] != false
        && checks.config.get("tie_word_embeddings").is_some()
    {
        checks.error(
            "tied",
            place("tie_word_embeddings"),
            checks.config["tie_word_embeddings"].to_string(),
            "false",
            Effect::Garbage,
            "the head is replaced by the embeddings",
        );
    }
    for engine in checks.engines() {
        for key in FLAGS {
            if !on(checks, key) {
                continue;
            }
            let (severity, effect, words) = match (engine, key) {
                (Engine::Sglang, "norm_before_residual" | "norm_before_fc") => (
                    Severity::Error,
                    Effect::Garbage,
                    "it computes another network, without a message",
                ),
                (Engine::Llamacpp, "fc_norm" | "norm_output") => {
                    (Severity::Error, Effect::Rejects, "it has no place for it")
                }
                (_, "norm_before_residual") => continue,
                _ => (
                    Severity::Warning,
                    Effect::Garbage,
                    "only new versions compute it, older ones do so without a message",
                ),
            };
            let problem = Problem::new(
                severity,
                "flag-unsupported",
                place(key),
                "true",
                format!("false for {}", engine.name()),
            );
            checks.push(
                problem
                    .effect(*engine, effect, words)
                    .remedy("train without it, or serve with an engine that computes it"),
            );
        }
    }
}

fn sizes(checks: &mut Checks<'_>) {
    let layers = checks.target_layers();
    // Tapped layers have checks of their own: a stand-in keeps them out of this one.
    let mut value = checks.config.clone();
    if let Some(keys) = value.as_object_mut() {
        keys.remove(crate::render::eagle3_config::LAYER_IDS);
        keys.remove("eagle_config");
        // This program does not run it; engines that do are told above.
        keys.insert("norm_before_fc".into(), false.into());
        keys.insert("tie_word_embeddings".into(), false.into());
        for flag in ["fc_norm", "norm_output", "norm_before_residual"] {
            if !keys.get(flag).is_some_and(Value::is_boolean) {
                keys.insert(flag.into(), false.into());
            }
        }
    }
    match Eagle3Config::from_json(&value, Some(layers.unwrap_or(32).max(8))) {
        Ok(sizes) => checks.sizes = Some(sizes),
        Err(problems) => {
            for problem in problems.0 {
                checks.error(
                    "sizes",
                    FILE,
                    problem,
                    "sizes that fit together",
                    Effect::Rejects,
                    "the model cannot be built",
                );
            }
        }
    }
    if let (Some(sizes), Some(target)) = (checks.sizes.clone(), checks.target) {
        for problem in sizes.problems_with(target.config()).0 {
            if !problem.starts_with("tapped layer") {
                checks.error(
                    "not-the-target",
                    FILE,
                    problem,
                    "the target's sizes",
                    Effect::Rejects,
                    "features of another width, or tokens of another vocabulary",
                );
            }
        }
    }
}

fn rope(checks: &mut Checks<'_>) {
    let layer = layer_keys(checks);
    let (old, new) = (&layer["rope_scaling"], &layer["rope_parameters"]);
    let kind = |value: &Value| {
        let name = value["rope_type"].as_str().or(value["type"].as_str());
        name.filter(|name| *name != "default").map(str::to_owned)
    };
    let differ = !old.is_null()
        && !new.is_null()
        && (kind(old) != kind(new) || old["factor"] != new["factor"]);
    let lost = old.is_null() && kind(new).is_some();
    if differ || lost {
        checks.error(
            "rope-spellings",
            place("rope_scaling"),
            old.to_string(),
            format!("what `rope_parameters` says: {new}"),
            Effect::Garbage,
            "old readers rotate by one rule, new ones by the other",
        );
    }
    let nested = new["rope_theta"].as_f64();
    if let (Some(top), Some(nested)) = (layer["rope_theta"].as_f64(), nested)
        && (top - nested).abs() > 1e-6 * nested.abs()
    {
        checks.error(
            "rope-spellings",
            place("rope_theta"),
            top.to_string(),
            format!("{nested}, as in `rope_parameters`"),
            Effect::Garbage,
            "old readers rotate by one base, new ones by the other",
        );
    }
    let (Some(sizes), Some(target)) = (checks.sizes.clone(), checks.target) else { return };
    let config = target.config();
    if sizes.rope != config.rope {
        let problem = Problem::new(
            Severity::Warning,
            "rope-target",
            place("rope_theta"),
            format!("{:?}", sizes.rope),
            format!("the target's {:?}", config.rope),
        );
        checks.push(
            problem
                .effect_on(checks.profile, Effect::Garbage, "fine only if the draft was trained so")
                .remedy("train the draft with the target's rotary embedding"),
        );
    }
    if sizes.max_position_embeddings > config.max_position_embeddings {
        let problem = Problem::new(
            Severity::Warning,
            "context",
            place("max_position_embeddings"),
            sizes.max_position_embeddings.to_string(),
            format!("at most the target's {}", config.max_position_embeddings),
        );
        checks.push(problem.remedy("set the target's length"));
    }
    if (sizes.rms_norm_eps - config.rms_norm_eps).abs() > 1e-9 {
        let problem = Problem::new(
            Severity::Warning,
            "eps",
            place("rms_norm_eps"),
            sizes.rms_norm_eps.to_string(),
            format!("the target's {}", config.rms_norm_eps),
        );
        checks.push(problem.remedy("set the value of the training run"));
    }
}

fn special_tokens(checks: &mut Checks<'_>) {
    let Some(target) = checks.target else { return };
    let layer = layer_keys(checks);
    let config = target.config();
    let ids = |value: &Value| -> Vec<u64> {
        match value {
            Value::Array(ids) => ids.iter().filter_map(Value::as_u64).collect(),
            one => one.as_u64().into_iter().collect(),
        }
    };
    let eos: Vec<u64> = config.eos_token_ids.iter().map(|id| u64::from(*id)).collect();
    let optional = |id: Option<u32>| id.map(u64::from).into_iter().collect::<Vec<_>>();
    for (key, wanted) in [
        ("eos_token_id", eos),
        ("bos_token_id", optional(config.bos_token_id)),
        ("pad_token_id", optional(config.pad_token_id)),
    ] {
        let found = ids(&layer[key]);
        if !found.is_empty() && found != wanted {
            let problem = Problem::new(
                Severity::Error,
                "special-token",
                place(key),
                format!("{found:?}"),
                format!("the target's {wanted:?}"),
            );
            checks.push(problem.effect_on(
                checks.profile,
                Effect::Garbage,
                "texts end, or do not, where they should not",
            ));
        }
    }
}

fn speculators(checks: &mut Checks<'_>) {
    let config = checks.config.clone();
    let mut wrong = |key: &str, found: String, expected: &str, effect, words: &str| {
        checks.error("speculators", place(key), found, expected, effect, words);
    };
    if config["speculators_model_type"] != "eagle3" {
        let found = config["speculators_model_type"].to_string();
        wrong(
            "speculators_model_type",
            found,
            "\"eagle3\"",
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
            "\"llama\"",
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
