//! GGUF files: header, keys, tensors, and the two conventions that differ from folders.

use std::path::{Path, PathBuf};

use longdraft_models::draft::eagle3::Eagle3Config;
use longdraft_models::draft::eagle3::gguf_file::{ARCHITECTURE, GgufDraftSource, LAYER_KEYS};
use longdraft_models::ids::EnteredLayerId;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::gguf::header::{ElementType, Header};

use super::tensors::expected;
use super::vocabulary;
use crate::checks::{Checks, Effect, Problem, Severity, nearest, values};
use crate::formats::eagle3::engine::{Fate, llamacpp};
use crate::hash::hash;
use crate::profile::Engine;

/// Keys without which loading ends.
const REQUIRED: [&str; 11] = [
    "eagle3.block_count",
    "eagle3.context_length",
    "eagle3.embedding_length",
    "eagle3.feed_forward_length",
    "eagle3.attention.head_count",
    "eagle3.attention.layer_norm_rms_epsilon",
    "eagle3.target_layers",
    "eagle3.target_hidden_size",
    "tokenizer.ggml.model",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
];

/// Checks a file, or the one in a folder; nothing if it cannot be read.
pub(super) fn check(checks: &mut Checks<'_>, path: &Path) -> Option<()> {
    let file = find(checks, path)?;
    checks.folder.clone_from(&file);
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let bytes = match std::fs::read(&file) {
        Ok(bytes) => bytes,
        Err(error) => {
            checks.error(
                "gguf",
                name,
                error.to_string(),
                "a GGUF file",
                Effect::Rejects,
                "it cannot be read",
            );
            return None;
        }
    };
    let header = match Header::read(&bytes) {
        Ok(header) => header,
        Err(problems) => {
            for problem in problems.0 {
                checks.error(
                    "gguf",
                    name.clone(),
                    problem,
                    "a whole GGUF file",
                    Effect::Rejects,
                    "it cannot be read",
                );
            }
            return None;
        }
    };
    if header.text("general.architecture") != Some(ARCHITECTURE) {
        let found = format!("{:?}", header.text("general.architecture"));
        checks.error(
            "architecture",
            format!("{name}: `general.architecture`"),
            found,
            ARCHITECTURE,
            Effect::Rejects,
            "it is loaded as another model",
        );
        return None;
    }
    keys(checks, &name, &header);
    tensors(checks, &header, &bytes);
    layers(checks, &name, &header);
    let source = GgufDraftSource::open(&file).ok()?;
    match source.config(checks.target.map(crate::TargetFacts::config)) {
        Ok(config) => {
            if let Some(target) = checks.target {
                for problem in config.problems_with(target.config()).0 {
                    checks.error(
                        "not-the-target",
                        name.clone(),
                        problem,
                        "the target's sizes",
                        Effect::Rejects,
                        "features of another width, or tokens of another vocabulary",
                    );
                }
            }
            shapes(checks, &source, &config);
            map(checks, &header, &source, config.vocab_size);
            checks.sizes = Some(Box::new(config));
        }
        Err(problems) => {
            for problem in problems.0 {
                checks.error(
                    "sizes",
                    name.clone(),
                    problem,
                    "sizes that fit together",
                    Effect::Rejects,
                    "the model cannot be built",
                );
            }
        }
    }
    Some(())
}

fn find(checks: &mut Checks<'_>, path: &Path) -> Option<PathBuf> {
    if path.is_file() {
        return Some(path.to_path_buf());
    }
    let entries = std::fs::read_dir(path).ok()?;
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut found: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "gguf"))
        .collect();
    found.sort();
    match found.as_slice() {
        [one] => Some(one.clone()),
        others => {
            let found = format!("{} GGUF files", others.len());
            checks.error(
                "gguf",
                "folder",
                found,
                "one",
                Effect::Rejects,
                "there is no draft to load, or no telling which",
            );
            None
        }
    }
}

fn keys(checks: &mut Checks<'_>, name: &str, header: &Header) {
    for key in REQUIRED {
        if !header.metadata.contains_key(key) {
            let words = if key.starts_with("tokenizer") {
                "the draft's vocabulary cannot be compared with the target's"
            } else {
                "loading ends: key not found"
            };
            checks.error(
                "missing-key",
                format!("{name}: `{key}`"),
                "missing",
                "the draft's value",
                Effect::Rejects,
                words,
            );
        }
    }
    if header.flag("eagle3.norm_before_residual").is_none() {
        checks.error(
            "missing-flag",
            format!("{name}: `eagle3.norm_before_residual`"),
            "missing",
            "true or false",
            Effect::Garbage,
            "false is taken",
        );
    }
    if header.number("eagle3.block_count").is_some_and(|count| (count - 1.0).abs() > 0.5) {
        checks.error(
            "sizes",
            format!("{name}: `eagle3.block_count`"),
            "more than one layer",
            "1",
            Effect::Rejects,
            "the number of tensors is not the one expected",
        );
    }
}

fn tensors(checks: &mut Checks<'_>, header: &Header, bytes: &[u8]) {
    for wanted in llamacpp::required() {
        if !header.tensors.contains_key(wanted) {
            checks.error(
                "missing-tensor",
                format!("tensor `{wanted}`"),
                "missing",
                "one",
                Effect::Rejects,
                "loading ends: tensor not found",
            );
        }
    }
    for (name, tensor) in &header.tensors {
        if let Fate::Rejected(words) = llamacpp::fate(name) {
            let near = nearest(name, llamacpp::required());
            let hint = near.map(|near| format!(" (is `{near}` meant?)")).unwrap_or_default();
            checks.error(
                "unexpected-tensor",
                format!("tensor `{name}`"),
                format!("not of this network{hint}"),
                "the published names alone",
                Effect::Rejects,
                &words,
            );
            continue;
        }
        let data = &bytes[tensor.bytes.clone()];
        let recorded = checks.manifest.as_ref().and_then(|manifest| manifest.tensors.get(name));
        if recorded.is_some_and(|recorded| *recorded != hash(data)) {
            let problem = Problem::new(
                Severity::Warning,
                "changed",
                format!("tensor `{name}`"),
                "other values than were exported",
                "the recorded ones",
            );
            checks.push(problem.remedy("export again, unless you changed it on purpose"));
        }
        let dtype = match tensor.element {
            ElementType::F32 => "F32",
            ElementType::F16 => "F16",
            ElementType::Bf16 => "BF16",
            ElementType::Blocks(_) => continue,
            ElementType::I64 | ElementType::I32 if name == "d2t" => continue,
            other => {
                checks.error(
                    "weight-type",
                    format!("tensor `{name}`"),
                    format!("{other:?}"),
                    "floats or blocks",
                    Effect::Rejects,
                    "no weight of this type is loaded",
                );
                continue;
            }
        };
        if tensor.shape.len() == 1 && dtype != "F32" {
            checks.error(
                "weight-type",
                format!("tensor `{name}`"),
                dtype,
                "F32: norms are not rounded",
                Effect::Rejects,
                "the operation is not defined on this type",
            );
        }
        values::check(checks, name, &tensor.shape, dtype, data);
    }
}

fn layers(checks: &mut Checks<'_>, name: &str, header: &Header) {
    let lists = LAYER_KEYS.map(|key| header.integers(key));
    if let [Some(new), Some(old)] = &lists
        && new != old
    {
        checks.error(
            "layers-contradict",
            format!("{name}: `{}`", LAYER_KEYS[1]),
            format!("{old:?}"),
            format!("{new:?}, as `{}` says", LAYER_KEYS[0]),
            Effect::Garbage,
            "old versions read one, new ones the other",
        );
    }
    let Some(entered) = lists.into_iter().flatten().next() else { return };
    let place = format!("{name}: `{}`", LAYER_KEYS[0]);
    if entered.len() != 3 {
        checks.error(
            "layer-count",
            place,
            format!("{} layers", entered.len()),
            "3",
            Effect::Rejects,
            "loading ends",
        );
        return;
    }
    let output = |id: &i64| {
        let layer = usize::try_from(*id).ok().and_then(|id| EnteredLayerId(id).output());
        layer.map_or(-1, |layer| layer.0 as i64)
    };
    let outputs: Vec<i64> = entered.iter().map(output).collect();
    if outputs.windows(2).any(|pair| pair[0] >= pair[1]) {
        checks.error(
            "layer-order",
            place.clone(),
            format!("{entered:?}"),
            "different layers, ascending",
            Effect::Garbage,
            "blocks of `fc` meet the features of other layers",
        );
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
    // Our names of what the file holds.
    let mut wanted = expected("midlayer.", config);
    let embeddings = vec![config.vocab_size, config.hidden_size];
    wanted.insert("embed_tokens.weight".to_owned(), embeddings);
    for (name, shape) in wanted {
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
        checks.error(
            "map-type",
            "tensor `d2t`",
            format!("{:?}", header.tensors["d2t"].element),
            "I64",
            Effect::Rejects,
            "the tensor is of another type",
        );
    }
    let Ok(offsets) = source.load_integers("d2t") else { return };
    let ids: Vec<i64> = offsets.iter().zip(0_i64..).map(|(offset, i)| offset + i).collect();
    let ascends = ids.windows(2).all(|pair| pair[0] < pair[1]);
    let grows = ids.windows(2).all(|pair| pair[0] <= pair[1]);
    if grows && !ascends {
        checks.error(
            "offset-d2t",
            "tensor `d2t`",
            "offsets where absolute ids are expected",
            "the target id of every draft token",
            Effect::Garbage,
            "draft tokens stand for wrong target tokens, without a message",
        );
        return;
    }
    vocabulary::check_offsets(checks, &offsets, None, target);
}
