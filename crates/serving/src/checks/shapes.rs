//! Names and shapes of tensors, against those of a network.

use std::collections::BTreeMap;

use longdraft_models::weights::TensorSpec;

use super::rules::{Rule, tensor_place};
use super::{Checks, meant, nearest};

const SHAPE: Rule = Rule::rejects("shape", "", "the parameter has another size");

/// Shapes by name.
pub(crate) type Shapes = BTreeMap<String, Vec<usize>>;

/// Reports tensors of a network that are missing, which breaks a rule, or of another shape.
pub(crate) fn check(
    checks: &mut Checks<'_>,
    wanted: &[TensorSpec],
    found: &Shapes,
    missing: &Rule,
) {
    for TensorSpec { name, shape, .. } in wanted {
        let place = tensor_place(name);
        match found.get(name) {
            Some(found) => compare(checks, place, found, shape),
            None => checks.differs(missing, place, "missing", format!("shape {shape:?}")),
        }
    }
}

/// Reports a tensor of another shape than is wanted.
pub(crate) fn compare(checks: &mut Checks<'_>, place: String, found: &[usize], wanted: &[usize]) {
    if found == wanted {
        return;
    }
    let is_turned = matches!((found, wanted), ([a, b], [c, d]) if (a, b) == (d, c));
    let hint = if is_turned { " (transposed: rows are outputs)" } else { "" };
    checks.differs(&SHAPE, place, format!("shape {found:?}{hint}"), format!("{wanted:?}"));
}

/// What is found of a tensor that a network does not have, with the one that may be meant; `None` if it has it.
pub(crate) fn stranger(name: &str, wanted: &[TensorSpec]) -> Option<String> {
    let names = || wanted.iter().map(|spec| spec.name.as_str());
    let is_own = names().any(|known| known == name);
    (!is_own).then(|| format!("not of this network{}", meant(nearest(name, names()))))
}
