//! Types and values of a folder's tensors, against its keys and its manifest.

use std::collections::{BTreeMap, BTreeSet};

use longdraft_models::sha256;

use super::rules::{Rule, key_place, tensor_place};
use super::weights_file::{FoundTensor, WEIGHT_TYPES};
use super::{Checks, values};

const UNREADABLE: Rule = Rule::rejects("unreadable", "its bytes", "the file cannot be read");
const WEIGHT_TYPE: Rule =
    Rule::rejects("weight-type", "BF16, F16 or F32", "no weight of this type is loaded");
const DUPLICATE_VALUES: Rule =
    Rule::garbage("duplicate-values", "values of its own", "one of them was overwritten");
const DTYPE: Rule =
    Rule::garbage("dtype", "", "weights are converted on load, or memory is planned wrong");

/// Reads every tensor but those of a vocabulary map.
pub(crate) fn check(checks: &mut Checks<'_>) {
    let tensors: Vec<FoundTensor> = checks.tensors.values().cloned().collect();
    let mut hashes: BTreeMap<String, String> = BTreeMap::new();
    let mut types = BTreeSet::new();
    for tensor in &tensors {
        let FoundTensor { name, dtype, shape, .. } = tensor;
        let bytes = match tensor.read() {
            Ok(bytes) => bytes,
            Err(error) => {
                checks.broken(&UNREADABLE, tensor_place(name), error.to_string());
                continue;
            }
        };
        if name == "d2t" || name == "t2d" {
            continue;
        }
        if tensor.weight_type().is_none() {
            checks.broken(&WEIGHT_TYPE, tensor_place(name), dtype.clone());
            continue;
        }
        // A copy of the target's, which a tied head may equal.
        let is_copy = name == "embed_tokens.weight";
        if !is_copy {
            types.insert(dtype.clone());
        }
        values::check(checks, name, shape, dtype, &bytes);
        let hash = sha256::of_bytes(&bytes);
        if shape.len() > 1
            && !is_copy
            && let Some(other) = hashes.insert(format!("{shape:?} {hash}"), name.clone())
            && !name.contains("cross_attn")
        {
            let found = format!("the same values as `{other}`");
            checks.broken(&DUPLICATE_VALUES, tensor_place(name), found);
        }
        checks.compare(name, &hash);
    }
    compare_types(checks, &types);
}

/// The type that the keys name is that of the weights.
fn compare_types(checks: &mut Checks<'_>, types: &BTreeSet<String>) {
    let wanted = checks.config["torch_dtype"].as_str().or(checks.config["dtype"].as_str());
    let wanted = wanted.map(str::to_owned);
    let stored = WEIGHT_TYPES.iter().filter(|(stored, ..)| types.contains(*stored));
    let found: Vec<&str> = stored.map(|(_, name, _)| *name).collect();
    if let Some(wanted) = wanted.filter(|wanted| found != [wanted.as_str()] && !found.is_empty()) {
        let expected = format!("the tensors' {}", found.join(" and "));
        checks.differs(&DTYPE, key_place("torch_dtype"), wanted, expected);
    }
}
