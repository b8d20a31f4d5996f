//! Granite (<https://huggingface.co/ibm-granite>): a Llama with four multipliers.

use super::{GgufKeys, JsonKeys, Parts};

/// Scores are `q · k` times the multiplier.
fn parts([embedding, attention, residual, logits]: [Option<f64>; 4]) -> Parts {
    let other = |scale: Option<f64>| scale.filter(|scale| (scale - 1.0).abs() > f64::EPSILON);
    Parts {
        embedding_scale: other(embedding),
        query_scalar: attention.map(|scale| scale.powi(-2)),
        residual_scale: other(residual),
        logits_divisor: other(logits),
        ..Parts::default()
    }
}

/// A multiplier that is left out is 1, that of scores too.
pub(super) fn of_json(keys: &mut JsonKeys<'_>) -> Parts {
    let names =
        ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"];
    parts(names.map(|name| keys.scale(name, Some(1.0))))
}

/// A scale that is left out or 0 is none.
pub(super) fn of_gguf(keys: &mut GgufKeys<'_>) -> Parts {
    let names = ["embedding_scale", "attention.scale", "residual_scale", "logit_scale"];
    if keys.flag("rope.scaling.finetuned") == Some(false) {
        keys.problems.push(
            "`granite.rope.scaling.finetuned` = false (no rotary embedding) is not supported",
        );
    }
    parts(names.map(|name| keys.scale_or_none(name)))
}
