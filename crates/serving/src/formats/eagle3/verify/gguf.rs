//! GGUF files: header, keys, tensors, and the two conventions that differ from folders.

use std::path::Path;

use longdraft_models::draft::eagle3::Eagle3Config;
use longdraft_models::draft::eagle3::gguf_file::{ARCHITECTURE, GgufDraftSource, LAYER_KEYS};
use longdraft_models::ids::EnteredLayerId;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::gguf::header::{ElementType, Header};

use super::tensors::{EMBEDDINGS, HEAD, expected, is_lent};
use super::vocabulary;
use super::{NOT_THE_TARGET, SIZES};
use crate::checks::gguf::{self, GgufFile};
use crate::checks::{Checks, Effect, Rule, meant, nearest};
use crate::formats::eagle3::engine::{Fate, llamacpp};
use crate::formats::of_target;
use crate::profile::Engine;

const MISSING_FLAG: Rule = Rule::garbage("missing-flag", "true or false", "false is taken");
const ONE_LAYER: Rule =
    Rule::rejects("sizes", "1", "the number of tensors is not the one expected");
const MISSING_TENSOR: Rule =
    Rule::rejects("missing-tensor", "one", "loading ends: tensor not found");
const LAYER_COUNT: Rule = Rule::rejects("layer-count", "3", "loading ends");
const LAYER_ORDER: Rule = Rule::garbage(
    "layer-order",
    "different layers, ascending",
    "blocks of `fc` meet the features of other layers",
);
const MAP_TYPE: Rule = Rule::rejects("map-type", "I64", "the tensor is of another type");
const OFFSETS: Rule = Rule::garbage(
    "offset-d2t",
    "the target id of every draft token",
    "draft tokens stand for wrong target tokens, without a message",
);

/// Keys without which loading ends, or heads turn by another base.
const REQUIRED: [&str; 12] = [
    "eagle3.block_count",
    "eagle3.context_length",
    "eagle3.embedding_length",
    "eagle3.feed_forward_length",
    "eagle3.attention.head_count",
    "eagle3.attention.layer_norm_rms_epsilon",
    "eagle3.rope.freq_base",
    "eagle3.target_layers",
    "eagle3.target_hidden_size",
    "tokenizer.ggml.model",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
];

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
                for problem in config.problems_with(target.config()).0 {
                    checks.broken(&NOT_THE_TARGET, file.name.clone(), problem);
                }
            }
            of_target::check_file(checks, &file, &super::repeated(&config));
            shapes(checks, &source, &config);
            map(checks, &file.header, &source, config.vocab_size);
            checks.sizes = Some(Box::new(config));
        }
        Err(problems) => {
            for problem in problems.0 {
                checks.broken(&SIZES, file.name.clone(), problem);
            }
        }
    }
    Some(())
}

fn keys(checks: &mut Checks<'_>, file: &GgufFile) {
    file.require(checks, REQUIRED);
    if file.header.flag("eagle3.norm_before_residual").is_none() {
        checks.broken(&MISSING_FLAG, file.place("eagle3.norm_before_residual"), "missing");
    }
    if file.header.number("eagle3.block_count").is_some_and(|count| (count - 1.0).abs() > 0.5) {
        checks.broken(&ONE_LAYER, file.place("eagle3.block_count"), "more than one layer");
    }
}

fn tensors(checks: &mut Checks<'_>, file: &GgufFile) {
    for wanted in llamacpp::required() {
        if !file.header.tensors.contains_key(wanted) {
            checks.broken(&MISSING_TENSOR, format!("tensor `{wanted}`"), "missing");
        }
    }
    for name in file.header.tensors.keys() {
        let Fate::Rejected(words) = llamacpp::fate(name) else {
            file.check_values(checks, name);
            continue;
        };
        let hint = meant(nearest(name, llamacpp::required()));
        checks.error(
            "unexpected-tensor",
            format!("tensor `{name}`"),
            format!("not of this network{hint}"),
            "the published names alone",
            Effect::Rejects,
            &words,
        );
    }
}

fn layers(checks: &mut Checks<'_>, file: &GgufFile) {
    let lists = LAYER_KEYS.map(|key| file.header.integers(key));
    if let [Some(new), Some(old)] = &lists
        && new != old
    {
        checks.error(
            "layers-contradict",
            file.place(LAYER_KEYS[1]),
            format!("{old:?}"),
            format!("{new:?}, as `{}` says", LAYER_KEYS[0]),
            Effect::Garbage,
            "old versions read one, new ones the other",
        );
    }
    let Some(entered) = lists.into_iter().flatten().next() else { return };
    let place = file.place(LAYER_KEYS[0]);
    if entered.len() != 3 {
        checks.broken(&LAYER_COUNT, place, format!("{} layers", entered.len()));
        return;
    }
    let output = |id: &i64| {
        let layer = usize::try_from(*id).ok().and_then(|id| EnteredLayerId(id).output());
        layer.map_or(-1, |layer| layer.0 as i64)
    };
    let outputs: Vec<i64> = entered.iter().map(output).collect();
    if outputs.windows(2).any(|pair| pair[0] >= pair[1]) {
        checks.broken(&LAYER_ORDER, place.clone(), format!("{entered:?}"));
    }
    if let Some(n) = checks.target_layers()
        && entered.iter().any(|id| *id < 0 || *id > n as i64)
    {
        checks.error(
            "layer-range",
            place,
            format!("{entered:?}"),
            format!("0 to {n}"),
            Effect::Rejects,
            "the target has no such layer",
        );
        return;
    }
    let truth: Option<Vec<i64>> = checks
        .manifest
        .as_ref()
        .map(|manifest| manifest.target_layers.iter().map(|layer| *layer as i64).collect());
    if let Some(truth) = truth {
        super::layers::compare(
            checks,
            Engine::Llamacpp,
            &outputs,
            &truth,
            "`eagle3.target_layers`",
        );
    }
}

fn shapes(checks: &mut Checks<'_>, source: &GgufDraftSource, config: &Eagle3Config) {
    for (stored, name) in [("output.weight", HEAD), ("token_embd.weight", EMBEDDINGS)] {
        if source.shape(name).is_none() && !is_lent(name, config) {
            let found = "missing, and the target's is of another size";
            checks.broken(&MISSING_TENSOR, format!("tensor `{stored}`"), found);
        }
    }
    // Our names of what the file holds.
    for (name, shape) in expected("midlayer.", config) {
        if let Some(found) = source.shape(&name).filter(|found| *found != shape) {
            checks.error(
                "shape",
                format!("tensor for `{name}`"),
                format!("shape {found:?}"),
                format!("{shape:?}"),
                Effect::Rejects,
                "the tensor has another size",
            );
        }
    }
}

/// `d2t` holds absolute ids here: offsets are the mistake.
fn map(checks: &mut Checks<'_>, header: &Header, source: &GgufDraftSource, target: usize) {
    if !header.tensors.contains_key("d2t") {
        let head = header.tensors.get("output.weight").and_then(|tensor| tensor.shape.first());
        if let Some(rows) = head.filter(|rows| **rows != target) {
            checks.error(
                "no-map",
                "tensor `d2t`",
                "missing",
                format!("I64 [{rows}]: the head has {rows} rows, the target {target} tokens"),
                Effect::Rejects,
                "head and vocabulary differ in size",
            );
        }
        return;
    }
    if header.tensors["d2t"].element != ElementType::I64 {
        checks.broken(&MAP_TYPE, "tensor `d2t`", format!("{:?}", header.tensors["d2t"].element));
    }
    let Ok(offsets) = source.load_integers("d2t") else { return };
    let ids: Vec<i64> = offsets.iter().zip(0_i64..).map(|(offset, i)| offset + i).collect();
    let ascends = ids.windows(2).all(|pair| pair[0] < pair[1]);
    let grows = ids.windows(2).all(|pair| pair[0] <= pair[1]);
    if grows && !ascends {
        checks.broken(&OFFSETS, "tensor `d2t`", "offsets where absolute ids are expected");
        return;
    }
    vocabulary::check_offsets(checks, &offsets, None, target);
}
