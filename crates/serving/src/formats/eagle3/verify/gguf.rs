//! GGUF files: header, keys, tensors, and the two conventions that differ from folders.

use std::path::Path;

use longdraft_models::draft::eagle3::Eagle3Config;
use longdraft_models::draft::eagle3::gguf_file::{ARCHITECTURE, GgufDraftSource, LAYER_KEYS};
use longdraft_models::ids::EnteredLayerId;
use longdraft_models::weights::{TensorSpec, WeightSource};

use super::layers::{ORDER, RANGE, compare};
use super::tensors::{EMBEDDINGS, HEAD, expected, is_lent};
use super::{NOT_THE_TARGET, SIZES};
use crate::checks::gguf::{self, GgufFile};
use crate::checks::rules::{Rule, tensor_place};
use crate::checks::{Checks, meant, nearest, shapes};
use crate::formats::eagle3::engine::Fate;
use crate::formats::eagle3::engine::llamacpp::{OTHER_COUNT, fate, required};
use crate::formats::{of_target, vocabulary};
use crate::profile::Engine;

const MISSING_FLAG: Rule = Rule::garbage("missing-flag", "true or false", "false is taken");
const ONE_LAYER: Rule = Rule::rejects("sizes", "1", OTHER_COUNT);
const MISSING_TENSOR: Rule =
    Rule::rejects("missing-tensor", "one", "loading ends: tensor not found");
const UNEXPECTED_TENSOR: Rule =
    Rule::rejects("unexpected-tensor", "the published names alone", OTHER_COUNT);
const TWO_LISTS: Rule =
    Rule::garbage("layers-contradict", "", "old versions read one, new ones the other");
const LAYER_COUNT: Rule = Rule::rejects("layer-count", "3", "loading ends");

/// Checks a file, or the one in a folder; nothing if it cannot be read.
pub(super) fn check(checks: &mut Checks<'_>, path: &Path) -> Option<()> {
    let file = gguf::open(checks, path, ARCHITECTURE)?;
    keys(checks, &file);
    tensors(checks, &file);
    layers(checks, &file);
    let source = GgufDraftSource::open(&file.path).ok()?;
    match source.config(checks.target.map(crate::TargetFacts::config)) {
        Ok(config) => {
            if let Some(target) = checks.target {
                let problems = config.problems_with(target.config());
                checks.each(&NOT_THE_TARGET, &file.name, problems.0);
            }
            of_target::check_file(checks, &file, &super::repeated(&config));
            tensor_shapes(checks, &source, &config);
            vocabulary::check_absolute(checks, &file, &source, config.vocab_size);
            checks.sizes = Some(Box::new(config));
        }
        Err(problems) => checks.each(&SIZES, &file.name, problems.0),
    }
    Some(())
}

fn keys(checks: &mut Checks<'_>, file: &GgufFile) {
    const FLAG: &str = "norm_before_residual";
    const LAYERS: &str = "block_count";
    file.require(checks, &["target_hidden_size"]);
    if file.flag(FLAG).is_none() {
        checks.broken(&MISSING_FLAG, file.place(FLAG), "missing");
    }
    let layers = file.header.number(&file.key(LAYERS));
    if layers.is_some_and(|count| (count - 1.0).abs() > 0.5) {
        checks.broken(&ONE_LAYER, file.place(LAYERS), "more than one layer");
    }
}

fn tensors(checks: &mut Checks<'_>, file: &GgufFile) {
    let found = &file.header.tensors;
    for wanted in required().filter(|name| !found.contains_key(*name)) {
        checks.broken(&MISSING_TENSOR, tensor_place(wanted), "missing");
    }
    for name in found.keys() {
        if let Fate::Rejected(_) = fate(name) {
            let found = format!("not of this network{}", meant(nearest(name, required())));
            checks.broken(&UNEXPECTED_TENSOR, tensor_place(name), found);
        } else {
            file.check_values(checks, name);
        }
    }
}

fn layers(checks: &mut Checks<'_>, file: &GgufFile) {
    let lists = LAYER_KEYS.map(|key| file.header.integers(key));
    if let [Some(new), Some(old)] = &lists
        && new != old
    {
        let expected = format!("{new:?}, as `{}` says", LAYER_KEYS[0]);
        checks.differs(&TWO_LISTS, file.place(LAYER_KEYS[1]), format!("{old:?}"), expected);
    }
    let Some(entered) = lists.into_iter().flatten().next() else { return };
    let place = file.place(LAYER_KEYS[0]);
    if entered.len() != 3 {
        return checks.broken(&LAYER_COUNT, place, format!("{} layers", entered.len()));
    }
    let output = |id: &i64| {
        let layer = usize::try_from(*id).ok().and_then(|id| EnteredLayerId(id).output());
        layer.map_or(-1, |layer| layer.0 as i64)
    };
    let outputs: Vec<i64> = entered.iter().map(output).collect();
    if outputs.windows(2).any(|pair| pair[0] >= pair[1]) {
        checks.broken(&ORDER, place.clone(), format!("{entered:?}"));
    }
    if let Some(n) = checks.target_layers()
        && entered.iter().any(|id| *id < 0 || *id > n as i64)
    {
        return checks.differs(&RANGE, place, format!("{entered:?}"), format!("0 to {n}"));
    }
    if let Some(truth) = checks.exported_layers() {
        let from = format!("`{}`", LAYER_KEYS[0]);
        compare(checks, Engine::Llamacpp, &outputs, &truth, &from);
    }
}

fn tensor_shapes(checks: &mut Checks<'_>, source: &GgufDraftSource, config: &Eagle3Config) {
    for (stored, name) in [("output.weight", HEAD), ("token_embd.weight", EMBEDDINGS)] {
        if source.shape(name).is_none() && !is_lent(name, config) {
            let found = "missing, and the target's is of another size";
            checks.broken(&MISSING_TENSOR, tensor_place(stored), found);
        }
    }
    // Our names of what the file holds.
    for TensorSpec { name, shape, .. } in expected("midlayer.", config) {
        if let Some(found) = source.shape(&name) {
            shapes::compare(checks, format!("tensor for `{name}`"), &found, &shape);
        }
    }
}
