//! Keys of `config.json`: present, of the right kind, consistent, and computed by the engines.

use longdraft_models::draft::eagle3::{Eagle3Config, LAYER_IDS};
use serde_json::Value;

use super::{NOT_THE_TARGET, SIZES};
use crate::checks::rules::{KeyRule, Rule, is_there, key, key_place};
use crate::checks::{Checks, Effect};
use crate::formats::eagle3::engine::{sglang, vllm};
use crate::formats::of_target;
use crate::formats::speculators;
use crate::profile::{Engine, Profile};

const ARCHITECTURE: Rule =
    Rule::rejects("architecture", "", "no model class of this name, or the plain model's");
const MISSING_KEY: Rule = Rule::garbage(
    "missing-key",
    "the draft's value",
    "the reader's own default is taken, which differs, or loading ends",
);
const NO_VOCABULARY: Rule =
    Rule::garbage("missing-key", "the draft's value", "the head is taken from the target");
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

/// What engines make of a feature that they do not all compute.
const OTHER_NETWORK: Rule =
    unsupported("it computes another network, without a message").effect(Effect::Garbage);
const NO_PLACE: Rule = unsupported("it has no place for it");
const NEW_ONLY: Rule =
    unsupported("only new versions compute it, older ones run another network without a message")
        .effect(Effect::Garbage)
        .doubtful();

const fn unsupported(words: &'static str) -> Rule {
    Rule::rejects("flag-unsupported", "", words)
        .remedy("train without it, or serve with an engine that computes it")
}

const FILE: &str = "config.json";

/// Keys that readers need, beside layer ids.
const REQUIRED: [&str; 14] = [
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "tie_word_embeddings",
];

/// The same for speculators, where sizes stand in the layer's own table.
const REQUIRED_SPECULATORS: [&str; 4] = [
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
];

/// Tokens that the draft proposes.
const VOCABULARY: &str = "draft_vocab_size";

/// Switches whose default differs between readers: they have to be written.
const FLAGS: [&str; 4] = ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"];

const STATES_KEY: &str = "eagle_config.use_aux_hidden_state";

/// Whether engines hand out the tapped layers; they do unless they are told not to.
const STATES: [KeyRule; 2] = [
    key(STATES_KEY, |said| said.is_none_or(|said| *said == true), NO_STATES),
    key(STATES_KEY, is_there, NO_STATES.doubtful()),
];

/// A window of the draft, among the features that engines differ in.
const WINDOW: &str = "sliding_window";

/// Keys whose values are numbers, flags or lists: null is none.
const UNTYPED: [&str; 2] = ["target_hidden_size", "rope_scaling"];

pub(super) fn check(checks: &mut Checks<'_>) {
    if !checks.config.is_object() {
        return;
    }
    let is_plain = checks.profile != Profile::Speculators;
    architecture(checks);
    presence(checks, is_plain);
    flags(checks);
    sizes(checks);
    let sizes = checks.sizes::<Eagle3Config>();
    if let Some(window) = sizes.as_ref().and_then(|sizes| sizes.attention_window) {
        feature(checks, WINDOW, &format!("{window} tokens before its own"), "none");
    }
    let repeated = sizes.as_ref().map(super::repeated);
    of_target::check_folder(checks, is_plain.then_some("llama"), repeated.as_ref());
    if is_plain {
        checks.keys(STATES);
    } else {
        speculators::check(checks, "eagle3", "llama");
    }
}

fn architecture(checks: &mut Checks<'_>) {
    let names: Vec<String> = checks.config["architectures"]
        .as_array()
        .map(|names| names.iter().filter_map(|n| n.as_str().map(str::to_owned)).collect())
        .unwrap_or_default();
    let is_one_of = |known: &[&str]| names.iter().any(|name| known.contains(&name.as_str()));
    for engine in checks.engines() {
        let (holds, wanted) = match engine {
            Engine::Sglang => {
                (names == [sglang::ARCHITECTURE], format!("[{:?}] alone", sglang::ARCHITECTURE))
            }
            Engine::Speculators => {
                let own = ["Eagle3DraftModel", "Eagle3Speculator"];
                (is_one_of(&own), format!("one of {own:?}"))
            }
            _ => (is_one_of(&vllm::ARCHITECTURES), format!("one of {:?}", vllm::ARCHITECTURES)),
        };
        if !holds {
            let (place, found) = (key_place("architectures"), format!("{names:?}"));
            checks.differs_in(*engine, &ARCHITECTURE, place, found, wanted);
        }
    }
}

/// Keys that have to be there, and none that is null.
fn presence(checks: &mut Checks<'_>, is_plain: bool) {
    let required: &[&'static str] = if is_plain { &REQUIRED } else { &REQUIRED_SPECULATORS };
    checks.keys(required.iter().copied().map(|path| key(path, is_there, MISSING_KEY)));
    let is_sglang = checks.profile == Profile::Sglang;
    let rule = if is_sglang { NO_VOCABULARY } else { MISSING_KEY };
    checks.keys([key(VOCABULARY, is_there, rule)]);
    let keys = checks.config.as_object().into_iter().flatten();
    let null = keys.filter(|(key, value)| value.is_null() && !UNTYPED.contains(&key.as_str()));
    let null: Vec<String> = null.map(|(key, _)| key_place(key)).collect();
    null.iter().for_each(|place| checks.broken(&NULL, place, "null"));
}

fn flags(checks: &mut Checks<'_>) {
    checks.keys(FLAGS.map(|path| key(path, is_there, MISSING_FLAG)));
    let is_flag = |said: Option<&Value>| said.is_none_or(Value::is_boolean);
    checks.keys(FLAGS.map(|path| key(path, is_flag, FLAG)));
    let on = FLAGS.map(|key| checks.config[key] == true);
    if let [_, true, true, _] = on {
        let place = key_place("norm_before_fc");
        checks.broken(&BOTH_NORMS, place, "true beside `fc_norm` = true");
    }
    for (key, _) in FLAGS.into_iter().zip(on).filter(|(_, on)| *on) {
        feature(checks, key, "true", "false");
    }
}

/// What each engine of the profile makes of a feature.
fn feature(checks: &mut Checks<'_>, key: &str, found: &str, wanted: &str) {
    // A folder for several engines is right for the others.
    let is_alone = checks.engines().len() == 1;
    for engine in checks.engines() {
        let rule = match (engine, key) {
            (Engine::Sglang, "norm_before_residual" | "norm_before_fc") => &OTHER_NETWORK,
            (Engine::Sglang | Engine::Llamacpp, WINDOW) if is_alone => &OTHER_NETWORK,
            (Engine::Llamacpp, "fc_norm" | "norm_output") => &NO_PLACE,
            (_, "norm_before_residual") => continue,
            _ => &NEW_ONLY,
        };
        let wanted = format!("{wanted} for {}", engine.name());
        checks.differs_in(*engine, rule, key_place(key), found, wanted);
    }
}

fn sizes(checks: &mut Checks<'_>) {
    let layers = checks.target_layers();
    // Tapped layers have checks of their own: a stand-in keeps them out of this one.
    let mut value = checks.config.clone();
    if let Some(keys) = value.as_object_mut() {
        keys.remove(LAYER_IDS);
        keys.remove("eagle_config");
        // This program does not run it; engines that do are told above.
        keys.insert("norm_before_fc".into(), false.into());
        keys.insert("tie_word_embeddings".into(), false.into());
        for flag in FLAGS {
            if !keys.get(flag).is_some_and(Value::is_boolean) {
                keys.insert(flag.into(), false.into());
            }
        }
    }
    match Eagle3Config::from_json(&value, Some(layers.unwrap_or(32).max(8))) {
        Ok(sizes) => checks.sizes = Some(Box::new(sizes)),
        Err(problems) => checks.each(&SIZES, FILE, problems.0),
    }
    if let (Some(sizes), Some(target)) = (checks.sizes::<Eagle3Config>(), checks.target) {
        checks.each(&NOT_THE_TARGET, FILE, sizes.size_problems(target.config()).0);
    }
}
