//! Which layers each engine hands to the draft: the fault that loads, runs and costs acceptance.

use longdraft_models::draft::eagle3::Eagle3Config;
use serde_json::Value;

use super::super::config::LAYER_IDS;
use super::super::engine::layers;
use crate::checks::{Checks, Effect, Problem, Rule, Severity};
use crate::profile::{Engine, Profile};

const NO_LAYERS: Rule = Rule::garbage(
    "no-layers",
    "the three tapped layers",
    "its default layers are taken without a message",
);
const CONTRADICTION: Rule = Rule::garbage(
    "layers-contradict",
    "the top level one more than `eagle_config`",
    "one of the engines reads other layers than the draft was trained on",
);

pub(super) fn check(checks: &mut Checks<'_>) {
    if !checks.config.is_object() {
        return;
    }
    presence(checks);
    let truth: Option<Vec<i64>> = checks
        .manifest
        .as_ref()
        .map(|manifest| manifest.target_layers.iter().map(|layer| *layer as i64).collect());
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
    format!("config.json: `{table}{LAYER_IDS}`")
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
            let problem = Problem::new(
                Severity::Error,
                "misplaced-layers",
                place(is_nested),
                "a list that this profile does not hold",
                "one list, where the engine reads it",
            );
            checks.push(
                problem
                    .effect_on(
                        checks.profile,
                        Effect::Garbage,
                        "versions differ in which list they read, and how it counts",
                    )
                    .remedy("remove the list, or export again"),
            );
        }
    }
    if checks.profile == Profile::Hf && top && nested {
        let problem = Problem::new(
            Severity::Note,
            "two-lists",
            place(false),
            "two lists that count differently",
            "",
        );
        checks.push(problem.effect(
            Engine::Vllm,
            Effect::Works,
            "it prefers the top level; profiles vllm and sglang hold one list each",
        ));
    }
}

/// Three different ascending layers below the last one, as many as `fc` has blocks.
fn shape(checks: &mut Checks<'_>, engine: Engine, outputs: &[i64], target_layers: Option<usize>) {
    let place = place(reads_nested(engine));
    let mut wrong = |code, found: String, expected: String, effect, words: &str| {
        let problem = Problem::new(Severity::Error, code, place.clone(), found, expected);
        checks.push(problem.effect(engine, effect, words));
    };
    if outputs.windows(2).any(|pair| pair[0] >= pair[1]) {
        wrong(
            "layer-order",
            format!("outputs of layers {outputs:?}"),
            "different layers, ascending".into(),
            Effect::Garbage,
            "blocks of `fc` meet the features of other layers",
        );
    }
    let last = target_layers.map(|n| (n as i64).saturating_sub(1));
    let outside = |layer: &&i64| **layer < 0 || last.is_some_and(|last| **layer > last);
    if let Some(layer) = outputs.iter().find(outside) {
        wrong(
            "layer-range",
            format!("output of layer {layer}"),
            format!("layers 0 to {}", last.unwrap_or(0)),
            Effect::Rejects,
            "the target has no such layer",
        );
    } else if last.is_some_and(|last| outputs.contains(&last)) {
        wrong(
            "last-layer",
            "the output of the last layer".into(),
            "a layer below it".into(),
            Effect::Garbage,
            "some readers hand out the state after the final norm",
        );
    }
    let Some(fc) = checks.tensors.get("fc.weight").map(|tensor| tensor.shape.clone()) else {
        return;
    };
    let width = checks.sizes::<Eagle3Config>().map(|sizes| sizes.target_hidden_size);
    if let (&[_, columns], Some(width)) = (fc.as_slice(), width)
        && width > 0
        && columns != outputs.len() * width
    {
        let problem = Problem::new(
            Severity::Error,
            "layer-count",
            place,
            format!("{} layers", outputs.len()),
            format!("{} (`fc.weight` has {columns} columns of width {width})", columns / width),
        );
        checks.push(problem.effect(engine, Effect::Rejects, "features and `fc` differ in width"));
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
    let shifted = |by: i64| {
        seen.len() == truth.len() && seen.iter().zip(truth).all(|(a, b)| a.saturating_sub(*b) == by)
    };
    let (code, what) = if shifted(1) {
        ("layer-shift", "every layer is one too high (+1): the list counts as another engine does")
    } else if shifted(-1) {
        ("layer-shift", "every layer is one too low (-1): the list counts as another engine does")
    } else {
        ("other-layers", "other layers than the draft was trained on")
    };
    let problem = Problem::new(
        Severity::Error,
        code,
        place(reads_nested(engine)),
        format!("{} hands out the outputs of layers {seen:?} (from {from}): {what}", engine.name()),
        format!("outputs of layers {truth:?}, as the manifest says"),
    );
    let words = "it loads and runs; acceptance falls by several tenths of tau";
    checks.push(problem.effect(engine, Effect::Garbage, words));
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
