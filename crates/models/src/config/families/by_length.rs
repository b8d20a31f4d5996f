//! Frequencies by the sequence's length (LongRoPE; Ding et al. 2024, <https://arxiv.org/abs/2402.13753>), whose divisors
//! stand in the file.

use serde_json::Value;

use super::super::parts::LongRope;
use super::super::rope;
use super::{Architecture, JsonKeys, Parts, Sizes, limits};

/// The rule's name.
const NAME: &str = "longrope";
/// The key of the longest sequence that is short.
const ORIGINAL: &str = "original_max_position_embeddings";

/// Rotary parameters that follow the rule, under one of these names.
pub(super) fn stated<'a>(keys: &JsonKeys<'a>, names: &[&str]) -> Option<&'a Value> {
    keys.rotary_keys().filter(|stated| names.contains(&rope::kind_of(stated)))
}

/// Whether frequencies depend on the length by the rule's own name.
pub(in super::super) fn is_stated(keys: &JsonKeys<'_>) -> bool {
    stated(keys, &[NAME]).is_some()
}

/// Adds the rule to the parts of a family that has no rotary parameters of its own.
pub(super) fn add(keys: &mut JsonKeys<'_>, sizes: Sizes, parts: &mut Parts) {
    // These read their own.
    if matches!(sizes.architecture, Architecture::Phi3 | Architecture::Gemma4) {
        return;
    }
    let Some(scaling) = stated(keys, &[NAME]) else { return };
    if parts.sliding_rope.is_some() {
        keys.problems.push(format!(
            "rope scaling `{NAME}` is not supported where layers with windows have a rotary embedding of their own"
        ));
        return;
    }
    let turning = parts.turning(sizes.head_dim);
    let absent = sizes.max_position_embeddings;
    parts.rotary.by_length = Some(read(keys, (scaling, sizes), turning, absent));
}

/// Divisors by length for a head of which `turning` dimensions turn, and the factor of cos and sin: `√(1 + ln s / ln o)`
/// unless it is given. `absent` is the longest short sequence where the file leaves it out.
pub(super) fn read(
    keys: &mut JsonKeys<'_>,
    (scaling, sizes): (&Value, Sizes),
    turning: usize,
    absent: usize,
) -> LongRope {
    let mut inner = JsonKeys::of(scaling);
    // What stands at top level wins.
    let original = keys.size_from_one(ORIGINAL).or_else(|| inner.size_from_one(ORIGINAL));
    let original = original.unwrap_or(absent);
    let stretch = inner.scale("factor", None);
    let stretch = stretch.unwrap_or(sizes.max_position_embeddings as f64 / original as f64);
    let computed = if stretch <= 1.0 || original < 2 {
        1.0
    } else {
        (1.0 + stretch.ln() / (original as f64).ln()).sqrt()
    };
    let given = inner.scale("attention_factor", None);
    let mut divisors = |key: &str| {
        let listed = inner.numbers(key).unwrap_or_default();
        let scales = listed.iter().all(|divisor| limits::SCALES.contains(&f64::from(*divisor)));
        if listed.len() != turning / 2 || !scales {
            let count = turning / 2;
            inner
                .problems
                .push(format!("rope scaling by length needs {count} positive numbers in `{key}`"));
        }
        listed
    };
    let (short, long) = (divisors("short_factor"), divisors("long_factor"));
    keys.problems.0.append(&mut inner.into_problems().0);
    let attention_factor = given.unwrap_or(computed);
    LongRope { short, long, original_context: original, attention_factor }
}
