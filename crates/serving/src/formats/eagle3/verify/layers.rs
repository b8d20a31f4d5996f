//! Which layers each engine hands to the draft: the fault that loads, runs and costs acceptance.

use longdraft_models::draft::eagle3::{Eagle3Config, LAYER_IDS};
use serde_json::Value;

use super::super::engine::layers;
use crate::checks::rules::{Rule, key_place};
use crate::checks::{Checks, Effect, Problem, Severity};
use crate::formats::of_target::shift;
use crate::profile::{Engine, Profile};

const NO_LAYERS: Rule = Rule::garbage(
    "no-layers",
    "the three tapped layers",
    "its default layers are taken without a message",
);
const MISPLACED: Rule = Rule::garbage(
    "misplaced-layers",
    "one list, where the engine reads it",
    "versions differ in which list they read, and how it counts",
)
.remedy("remove the list, or export again");
const CONTRADICTION: Rule = Rule::garbage(
    "layers-contradict",
    "the top level one more than `eagle_config`",
    "one of the engines reads other layers than the draft was trained on",
);
pub(super) const ORDER: Rule = Rule::garbage(
    "layer-order",
    "different layers, ascending",
    "blocks of `fc` meet the features of other layers",
);
pub(super) const RANGE: Rule = Rule::rejects("layer-range", "", "the target has no such layer");
const LAST: Rule = Rule::garbage(
    "last-layer",
    "a layer below it",
    "some readers hand out the state after the final norm",
);
const COUNT: Rule = Rule::rejects("layer-count", "", "features and `fc` differ in width");
const SHIFTED: Rule = other("layer-shift");
const OTHERS: Rule = other("other-layers");

/// The rule that the layers are those of training.
const fn other(code: &'static str) -> Rule {
    Rule::garbage(code, "", "it loads and runs; acceptance falls by several tenths of tau")
}

pub(super) fn check(checks: &mut Checks<'_>) {
    if !checks.config.is_object() {
        return;
    }
    presence(checks);
    let truth = checks.exported_layers();
    let target_layers = checks.target_layers();
    for engine in checks.engines() {
        let seen = layers(*engine, &checks.config, target_layers);
        let Some(outputs) = seen.outputs else { continue };
        shape(checks, *engine, &outputs, target_layers);
        if let Some(truth) = &truth {
            compare(checks, *engine, &outputs, truth, seen.from);
        }
    }
    disagreement(checks, target_layers);
}

fn place(nested: bool) -> String {
    let table = if nested { "eagle_config." } else { "" };
    key_place(&format!("{table}{LAYER_IDS}"))
}

fn reads_nested(engine: Engine) -> bool {
    engine == Engine::Sglang
}

/// Lists where the profile's engines read them, and nowhere else.
fn presence(checks: &mut Checks<'_>) {
    let top = checks.config.get(LAYER_IDS).is_some();
    let nested = checks.config["eagle_config"].get(LAYER_IDS).is_some();
    let (wants_top, wants_nested) = match checks.profile {
        Profile::Sglang => (false, true),
        Profile::Hf => (true, true),
        _ => (true, false),
    };
    for (has, wants, is_nested) in [(top, wants_top, false), (nested, wants_nested, true)] {
        if wants && !has {
            checks.broken(&NO_LAYERS, place(is_nested), "missing");
        } else if has && !wants {
            checks.broken(&MISPLACED, place(is_nested), "a list that this profile does not hold");
        }
    }
    if checks.profile == Profile::Hf && top && nested {
        let found = "two lists that count differently";
        let problem = Problem::new(Severity::Note, "two-lists", place(false), found, "");
        let words = "it prefers the top level; profiles vllm and sglang hold one list each";
        checks.push(problem.effect(Engine::Vllm, Effect::Works, words));
    }
}

/// Three different ascending layers below the last one, as many as `fc` has blocks.
fn shape(checks: &mut Checks<'_>, engine: Engine, outputs: &[i64], target_layers: Option<usize>) {
    let place = || place(reads_nested(engine));
    if outputs.windows(2).any(|pair| pair[0] >= pair[1]) {
        let found = format!("outputs of layers {outputs:?}");
        checks.differs_in(engine, &ORDER, place(), found, ORDER.expected);
    }
    let last = target_layers.map(|n| (n as i64).saturating_sub(1));
    let outside = |layer: &&i64| **layer < 0 || last.is_some_and(|last| **layer > last);
    if let Some(layer) = outputs.iter().find(outside) {
        let expected = format!("layers 0 to {}", last.unwrap_or(0));
        checks.differs_in(engine, &RANGE, place(), format!("output of layer {layer}"), expected);
    } else if last.is_some_and(|last| outputs.contains(&last)) {
        let found = "the output of the last layer";
        checks.differs_in(engine, &LAST, place(), found, LAST.expected);
    }
    let Some(fc) = checks.tensors.get("fc.weight") else { return };
    let width = checks.sizes::<Eagle3Config>().map(|sizes| sizes.target_hidden_size);
    if let (&[_, columns], Some(width)) = (fc.shape.as_slice(), width)
        && width > 0
        && columns != outputs.len() * width
    {
        let wanted = columns / width;
        let expected = format!("{wanted} (`fc.weight` has {columns} columns of width {width})");
        let found = format!("{} layers", outputs.len());
        checks.differs_in(engine, &COUNT, place(), found, expected);
    }
}

/// Against the layers that the draft was trained on.
pub(super) fn compare(
    checks: &mut Checks<'_>,
    engine: Engine,
    seen: &[i64],
    truth: &[i64],
    from: &str,
) {
    if seen == truth {
        return;
    }
    let (rule, what) = match shift(seen, truth) {
        Some(shift) => (&SHIFTED, shift),
        None => (&OTHERS, "other layers than the draft was trained on"),
    };
    let name = engine.name();
    let found = format!("{name} hands out the outputs of layers {seen:?} (from {from}): {what}");
    let expected = format!("outputs of layers {truth:?}, as the manifest says");
    checks.differs_in(engine, rule, place(reads_nested(engine)), found, expected);
}

/// Without a manifest, engines that see different layers are the only evidence.
fn disagreement(checks: &mut Checks<'_>, target_layers: Option<usize>) {
    let both = checks.config.get(LAYER_IDS).is_some_and(Value::is_array)
        && checks.config["eagle_config"].get(LAYER_IDS).is_some_and(Value::is_array);
    if !both {
        return;
    }
    let seen = |engine: Engine| layers(engine, &checks.config, target_layers).outputs;
    let (top, nested) = (seen(Engine::Vllm), seen(Engine::Sglang));
    if top != nested {
        let found = format!("vLLM sees outputs of layers {top:?}, SGLang {nested:?}");
        checks.broken(&CONTRADICTION, place(false), found);
    }
}
