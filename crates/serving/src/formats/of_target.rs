//! What files of every method repeat of their target: RoPE, context, special tokens, table and head.

use candle_core::{Device, Tensor};
use longdraft_models::config::RopeParameters;
use longdraft_models::weights::safetensors::tensor_bytes;
use serde_json::Value;

use crate::checks::Checks;
use crate::checks::gguf::GgufFile;
use crate::checks::rules::{KeyRule, Rule, key, key_place};
use crate::checks::weights_file::FoundTensor;

const MODEL_TYPE: Rule =
    Rule::garbage("model-type", "", "what is left out is taken from another class").doubtful();
const TIED: KeyRule = key(
    "tie_word_embeddings",
    |tied| tied.is_none_or(|tied| *tied == false),
    Rule::garbage("tied", "false", "the head is replaced by the embeddings"),
);
const OTHER_ROPE: Rule = Rule::garbage(
    "rope-spellings",
    "",
    "old readers rotate by one rule or base, new ones by the other",
);
const SPECIAL_TOKEN: Rule =
    Rule::garbage("special-token", "", "texts end, or do not, where they should not");

const fn of_target(code: &'static str) -> Rule {
    Rule::garbage(code, "", "fine only if the draft was trained so")
        .doubtful()
        .remedy("set the training run's value, or train with the target's")
}

/// Numbers of a network that are its target's.
pub(super) struct Repeated {
    pub(super) rope: RopeParameters,
    pub(super) head_dim: usize,
    /// Longest context in tokens.
    pub(super) context: usize,
    pub(super) eps: f64,
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
        let found = found.to_owned();
        checks.differs(&MODEL_TYPE, key_place("model_type"), found, wanted);
    }
    checks.keys([TIED]);
    let layer = match checks.config.get("transformer_layer_config") {
        Some(layer) => layer.clone(),
        None => checks.config.clone(),
    };
    spellings(checks, &layer);
    if let Some(repeated) = repeated {
        numbers(checks, repeated, key_place);
    }
    let ids = |key: &str| -> Vec<u64> {
        match &layer[key] {
            Value::Array(ids) => ids.iter().filter_map(Value::as_u64).collect(),
            one => one.as_u64().into_iter().collect(),
        }
    };
    special_tokens(checks, ids, |found, wanted| found == wanted, key_place);
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
        let expected = format!("what `rope_parameters` says: {new}");
        checks.differs(&OTHER_ROPE, key_place("rope_scaling"), old.to_string(), expected);
    }
    let (top, nested) = (&layer["rope_theta"], &new["rope_theta"]);
    if top.is_number() && nested.is_number() && !same(top, nested) {
        let expected = format!("{nested}, as in `rope_parameters`");
        checks.differs(&OTHER_ROPE, key_place("rope_theta"), top.to_string(), expected);
    }
}

/// Numbers against the target's; `place` of a folder's key in findings.
fn numbers(checks: &mut Checks<'_>, repeated: &Repeated, place: impl Fn(&str) -> String) {
    let Some(target) = checks.target else { return };
    let config = target.config();
    for (is_other, rule, key, found, wanted) in [
        (
            !turn_alike(&repeated.rope, &config.rope, repeated.head_dim),
            of_target("rope-target"),
            "rope_theta",
            format!("{:?}", repeated.rope),
            format!("the target's {:?}", config.rope),
        ),
        (
            repeated.context > config.max_position_embeddings,
            of_target("context"),
            "max_position_embeddings",
            repeated.context.to_string(),
            format!("at most the target's {}", config.max_position_embeddings),
        ),
        (
            (repeated.eps - config.rms_norm_eps).abs() > 1e-9,
            of_target("eps"),
            "rms_norm_eps",
            repeated.eps.to_string(),
            format!("the target's {}", config.rms_norm_eps),
        ),
    ] {
        if is_other {
            checks.differs(&rule, place(key), found, wanted);
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
            let expected = format!("the target's {wanted:?}");
            checks.differs(&SPECIAL_TOKEN, place(key), format!("{found:?}"), expected);
        }
    }
}

/// Whether a folder's tensor is one of the target's, bit for bit in its own type; `None` if that cannot be told.
pub(super) fn is_copy(tensor: &FoundTensor, of: &Tensor) -> Option<bool> {
    let wanted = of.to_dtype(tensor.weight_type()?).ok()?;
    Some(tensor.read().ok()? == tensor_bytes(&wanted).ok()?)
}

/// In which way every layer of a list is off by one, if it is.
pub(super) fn shift(found: &[i64], wanted: &[i64]) -> Option<&'static str> {
    let is_off = |by: i64| {
        let mut pairs = found.iter().zip(wanted);
        found.len() == wanted.len() && pairs.all(|(a, b)| a.saturating_sub(*b) == by)
    };
    if is_off(1) {
        return Some("every layer is one too high (+1): the list counts as another engine does");
    }
    is_off(-1).then_some("every layer is one too low (-1): the list counts as another engine does")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_that_count_from_one_more_or_less_are_told() {
        let told = |found: &[i64]| shift(found, &[1, 3, 4]).is_some();
        assert!(told(&[2, 4, 5]) && told(&[0, 2, 3]));
        assert!(shift(&[2, 4, 5], &[1, 3, 4]).is_some_and(|words| words.contains("(+1)")));
        assert!(!told(&[2, 4, 6]) && !told(&[2, 4]) && !told(&[3, 5, 6]));
    }
}
