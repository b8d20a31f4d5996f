//! Keys of `config.json`: present, of the right kind, consistent, and computed by the engines.

use longdraft_models::draft::eagle3::Eagle3Config;
use serde_json::Value;

use super::{NOT_THE_TARGET, SIZES};
use crate::checks::{Checks, Effect, Problem, Rule, Severity};
use crate::formats::eagle3::engine::{sglang, vllm};
use crate::formats::of_target::{self, place};
use crate::formats::speculators;
use crate::profile::{Engine, Profile};

const NULL: Rule =
    Rule::rejects("null", "a value, or no such key", "strict readers refuse null for a typed key");
const MISSING_FLAG: Rule = Rule::garbage(
    "missing-flag",
    "true or false",
    "readers disagree on the default: the network may be another one",
);
const FLAG: Rule = Rule::rejects("flag", "true or false", "strict readers refuse it");
const BOTH_NORMS: Rule = Rule::rejects("both-norms", "one of them", "the two exclude each other");
const NO_STATES: Rule = Rule::garbage(
    "aux-hidden-state",
    "true",
    "where it is false, the draft gets one layer's states alone",
);

const FILE: &str = "config.json";

/// Keys that readers need, beside layer ids.
const REQUIRED: [&str; 15] = [
    "architectures",
    "model_type",
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

/// A window of the draft, among the features that engines differ in.
const WINDOW: &str = "sliding_window";

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
    let sizes = checks.sizes::<Eagle3Config>();
    if let Some(window) = sizes.as_ref().and_then(|sizes| sizes.attention_window) {
        unsupported(checks, WINDOW, &format!("{window} tokens before its own"), "none");
    }
    let is_plain = checks.profile != Profile::Speculators;
    let repeated = sizes.as_ref().map(super::repeated);
    of_target::check_folder(checks, is_plain.then_some("llama"), repeated.as_ref());
    if is_plain {
        states(checks);
    } else {
        speculators::check(checks, "eagle3", "llama");
    }
}

/// Whether engines hand out the tapped layers; they do unless they are told not to.
fn states(checks: &mut Checks<'_>) {
    const KEY: &str = "use_aux_hidden_state";
    let place = format!("{FILE}: `eagle_config.{KEY}`");
    match checks.config["eagle_config"].get(KEY).cloned() {
        Some(Value::Bool(true)) => {}
        Some(other) => checks.broken(&NO_STATES, place, other.to_string()),
        None => checks.doubtful(&NO_STATES, place, "missing"),
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
        checks.broken(&NULL, place(&key), "null");
    }
}

fn flags(checks: &mut Checks<'_>) {
    for key in FLAGS {
        match checks.config.get(key) {
            None => checks.broken(&MISSING_FLAG, place(key), "missing"),
            Some(value) if !value.is_boolean() => {
                checks.broken(&FLAG, place(key), value.to_string());
            }
            Some(_) => {}
        }
    }
    let on = |checks: &Checks<'_>, key: &str| checks.config[key] == true;
    if on(checks, "norm_before_fc") && on(checks, "fc_norm") {
        checks.broken(&BOTH_NORMS, place("norm_before_fc"), "true beside `fc_norm` = true");
    }
    for key in FLAGS {
        if on(checks, key) {
            unsupported(checks, key, "true", "false");
        }
    }
}

/// What each engine of the profile makes of a feature.
fn unsupported(checks: &mut Checks<'_>, key: &str, found: &str, wanted: &str) {
    for engine in checks.engines() {
        let differs = match (engine, key) {
            (Engine::Sglang, "norm_before_residual" | "norm_before_fc") => true,
            // A folder for several engines is right for the others.
            (Engine::Sglang | Engine::Llamacpp, WINDOW) => checks.engines().len() == 1,
            _ => false,
        };
        let (severity, effect, words) = match (engine, key) {
            _ if differs => {
                (Severity::Error, Effect::Garbage, "it computes another network, without a message")
            }
            (Engine::Llamacpp, "fc_norm" | "norm_output") => {
                (Severity::Error, Effect::Rejects, "it has no place for it")
            }
            (_, "norm_before_residual") => continue,
            _ => (
                Severity::Warning,
                Effect::Garbage,
                "only new versions compute it, older ones run another network without a message",
            ),
        };
        let wanted = format!("{wanted} for {}", engine.name());
        let problem = Problem::new(severity, "flag-unsupported", place(key), found, wanted);
        let problem = problem.effect(*engine, effect, words);
        checks.push(problem.remedy("train without it, or serve with an engine that computes it"));
    }
}

fn sizes(checks: &mut Checks<'_>) {
    let layers = checks.target_layers();
    // Tapped layers have checks of their own: a stand-in keeps them out of this one.
    let mut value = checks.config.clone();
    if let Some(keys) = value.as_object_mut() {
        keys.remove(super::super::config::LAYER_IDS);
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
        Ok(sizes) => checks.sizes = Some(Box::new(sizes)),
        Err(problems) => {
            for problem in problems.0 {
                checks.broken(&SIZES, FILE, problem);
            }
        }
    }
    if let (Some(sizes), Some(target)) = (checks.sizes::<Eagle3Config>(), checks.target) {
        for problem in sizes.size_problems(target.config()).0 {
            checks.broken(&NOT_THE_TARGET, FILE, problem);
        }
    }
}
