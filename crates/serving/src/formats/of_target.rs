//! What files of every method repeat of their target: RoPE, context, special tokens, table and head.

use candle_core::{Device, Tensor};
use longdraft_models::config::RopeParameters;
use longdraft_models::weights::safetensors::tensor_bytes;
use serde_json::Value;

use crate::checks::gguf::GgufFile;
use crate::checks::weights_file::FoundTensor;
use crate::checks::{Checks, Effect, Problem, Rule, Severity};

const TIED: Rule = Rule::garbage("tied", "false", "the head is replaced by the embeddings");

/// Numbers of a network that are its target's.
pub(super) struct Repeated {
    pub(super) rope: RopeParameters,
    pub(super) head_dim: usize,
    /// Longest context in tokens.
    pub(super) context: usize,
    pub(super) eps: f64,
}

/// The place of a folder's key in findings.
pub(super) fn place(key: &str) -> String {
    format!("config.json: `{key}`")
}

/// Checks a folder's keys; plain folders name the `model_type` of their layer.
pub(super) fn check_folder(
    checks: &mut Checks<'_>,
    model_type: Option<&str>,
    repeated: Option<&Repeated>,
) {
    if let (Some(wanted), Some(found)) = (model_type, checks.config["model_type"].as_str())
        && found != wanted
    {
        let problem =
            Problem::new(Severity::Warning, "model-type", place("model_type"), found, wanted);
        let words = "what is left out is taken from another class";
        checks.push(problem.effect_on(checks.profile, Effect::Garbage, words));
    }
    if let Some(tied) = checks.config.get("tie_word_embeddings").filter(|tied| **tied != false) {
        let found = tied.to_string();
        checks.broken(&TIED, place("tie_word_embeddings"), found);
    }
    let layer = match checks.config.get("transformer_layer_config") {
        Some(layer) => layer.clone(),
        None => checks.config.clone(),
    };
    spellings(checks, &layer);
    if let Some(repeated) = repeated {
        numbers(checks, repeated, place);
    }
    let ids = |key: &str| -> Vec<u64> {
        match &layer[key] {
            Value::Array(ids) => ids.iter().filter_map(Value::as_u64).collect(),
            one => one.as_u64().into_iter().collect(),
        }
    };
    special_tokens(checks, ids, |found, wanted| found == wanted, place);
}

/// Checks a GGUF file's keys, which name one of the tokens that end a text.
pub(super) fn check_file(checks: &mut Checks<'_>, file: &GgufFile, repeated: &Repeated) {
    numbers(checks, repeated, |key| file.place_of(key));
    let ids = |key: &str| -> Vec<u64> {
        let id = file.header.number(&file.key_of(key));
        id.map(|id| id as u64).into_iter().collect()
    };
    let alike = |found: &[u64], wanted: &[u64]| {
        wanted.is_empty() || found.iter().all(|id| wanted.contains(id))
    };
    special_tokens(checks, ids, alike, |key| file.place_of(key));
}

/// RoPE in the older and in the newer spelling.
fn spellings(checks: &mut Checks<'_>, layer: &Value) {
    let (old, new) = (&layer["rope_scaling"], &layer["rope_parameters"]);
    let kind = |value: &Value| {
        let name = value["rope_type"].as_str().or(value["type"].as_str());
        name.filter(|name| *name != "default").map(str::to_owned)
    };
    let same = |a: &Value, b: &Value| match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => (a - b).abs() <= 1e-6 * b.abs(),
        _ => a == b,
    };
    let scales = old.as_object().into_iter().flatten();
    let mut scales =
        scales.filter(|(key, _)| !["type", "rope_type", "rope_theta"].contains(&key.as_str()));
    let differ = !old.is_null()
        && !new.is_null()
        && (kind(old) != kind(new)
            || !same(&old["factor"], &new["factor"])
            || scales.any(|(key, value)| new.get(key).is_some_and(|new| !same(value, new))));
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
    let (top, nested) = (&layer["rope_theta"], &new["rope_theta"]);
    if top.is_number() && nested.is_number() && !same(top, nested) {
        checks.error(
            "rope-spellings",
            place("rope_theta"),
            top.to_string(),
            format!("{nested}, as in `rope_parameters`"),
            Effect::Garbage,
            "old readers rotate by one base, new ones by the other",
        );
    }
}

/// Numbers against the target's; `place` of a folder's key in findings.
fn numbers(checks: &mut Checks<'_>, repeated: &Repeated, place: impl Fn(&str) -> String) {
    let Some(target) = checks.target else { return };
    let config = target.config();
    for (is_other, code, key, found, wanted) in [
        (
            !turn_alike(&repeated.rope, &config.rope, repeated.head_dim),
            "rope-target",
            "rope_theta",
            format!("{:?}", repeated.rope),
            format!("the target's {:?}", config.rope),
        ),
        (
            repeated.context > config.max_position_embeddings,
            "context",
            "max_position_embeddings",
            repeated.context.to_string(),
            format!("at most the target's {}", config.max_position_embeddings),
        ),
        (
            (repeated.eps - config.rms_norm_eps).abs() > 1e-9,
            "eps",
            "rms_norm_eps",
            repeated.eps.to_string(),
            format!("the target's {}", config.rms_norm_eps),
        ),
    ] {
        if is_other {
            let problem = Problem::new(Severity::Warning, code, place(key), found, wanted);
            let words = "fine only if the draft was trained so";
            let problem = problem.effect_on(checks.profile, Effect::Garbage, words);
            checks.push(problem.remedy("set the training run's value, or train with the target's"));
        }
    }
}

/// Whether heads turn alike: files spell a rule in several ways, and round its numbers.
fn turn_alike(a: &RopeParameters, b: &RopeParameters, head_dim: usize) -> bool {
    let turned = |rope: &RopeParameters| -> candle_core::Result<Vec<f32>> {
        let table = rope.build(head_dim)?.table(&[1], &Device::Cpu)?;
        Tensor::cat(&[table.cos(), table.sin()], 1)?.flatten_all()?.to_vec1()
    };
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * a.abs().max(b.abs());
    match (turned(a), turned(b)) {
        (Ok(a), Ok(b)) => a.len() == b.len() && a.iter().zip(&b).all(close),
        _ => a == b,
    }
}

/// Special tokens under the keys of folders: `found` has a file's ids, which may be `alike` to the target's.
fn special_tokens(
    checks: &mut Checks<'_>,
    found: impl Fn(&str) -> Vec<u64>,
    alike: impl Fn(&[u64], &[u64]) -> bool,
    place: impl Fn(&str) -> String,
) {
    let Some(target) = checks.target else { return };
    let config = target.config();
    let optional = |id: Option<u32>| id.map(u64::from).into_iter().collect::<Vec<_>>();
    let eos: Vec<u64> = config.eos_token_ids.iter().map(|id| u64::from(*id)).collect();
    for (key, wanted) in [
        ("eos_token_id", eos),
        ("bos_token_id", optional(config.bos_token_id)),
        ("pad_token_id", optional(config.pad_token_id)),
    ] {
        let found = found(key);
        if !found.is_empty() && !alike(&found, &wanted) {
            checks.error(
                "special-token",
                place(key),
                format!("{found:?}"),
                format!("the target's {wanted:?}"),
                Effect::Garbage,
                "texts end, or do not, where they should not",
            );
        }
    }
}

/// Whether a folder's tensor is one of the target's, bit for bit in its own type; `None` if that cannot be told.
pub(super) fn is_copy(tensor: &FoundTensor, of: &Tensor) -> Option<bool> {
    let wanted = of.to_dtype(tensor.weight_type()?).ok()?;
    Some(tensor.read().ok()? == tensor_bytes(&wanted).ok()?)
}
