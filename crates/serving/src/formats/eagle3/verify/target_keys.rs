//! Keys that repeat the target's: RoPE in both spellings, context, special tokens.

use longdraft_models::draft::eagle3::Eagle3Config;
use serde_json::Value;

use super::config::{layer_keys, place};
use crate::checks::{Checks, Effect, Problem, Severity};

pub(super) fn check(checks: &mut Checks<'_>) {
    rope(checks);
    special_tokens(checks);
}

fn rope(checks: &mut Checks<'_>) {
    let layer = layer_keys(checks);
    let (old, new) = (&layer["rope_scaling"], &layer["rope_parameters"]);
    let kind = |value: &Value| {
        let name = value["rope_type"].as_str().or(value["type"].as_str());
        name.filter(|name| *name != "default").map(str::to_owned)
    };
    let differ = !old.is_null()
        && !new.is_null()
        && (kind(old) != kind(new) || old["factor"] != new["factor"]);
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
    let nested = new["rope_theta"].as_f64();
    if let (Some(top), Some(nested)) = (layer["rope_theta"].as_f64(), nested)
        && (top - nested).abs() > 1e-6 * nested.abs()
    {
        checks.error(
            "rope-spellings",
            place("rope_theta"),
            top.to_string(),
            format!("{nested}, as in `rope_parameters`"),
            Effect::Garbage,
            "old readers rotate by one base, new ones by the other",
        );
    }
    let (Some(sizes), Some(target)) = (checks.sizes::<Eagle3Config>(), checks.target) else {
        return;
    };
    let config = target.config();
    if sizes.rope != config.rope {
        let problem = Problem::new(
            Severity::Warning,
            "rope-target",
            place("rope_theta"),
            format!("{:?}", sizes.rope),
            format!("the target's {:?}", config.rope),
        );
        checks.push(
            problem
                .effect_on(checks.profile, Effect::Garbage, "fine only if the draft was trained so")
                .remedy("train the draft with the target's rotary embedding"),
        );
    }
    if sizes.max_position_embeddings > config.max_position_embeddings {
        let problem = Problem::new(
            Severity::Warning,
            "context",
            place("max_position_embeddings"),
            sizes.max_position_embeddings.to_string(),
            format!("at most the target's {}", config.max_position_embeddings),
        );
        checks.push(problem.remedy("set the target's length"));
    }
    if (sizes.rms_norm_eps - config.rms_norm_eps).abs() > 1e-9 {
        let problem = Problem::new(
            Severity::Warning,
            "eps",
            place("rms_norm_eps"),
            sizes.rms_norm_eps.to_string(),
            format!("the target's {}", config.rms_norm_eps),
        );
        checks.push(problem.remedy("set the value of the training run"));
    }
}

fn special_tokens(checks: &mut Checks<'_>) {
    let Some(target) = checks.target else { return };
    let layer = layer_keys(checks);
    let config = target.config();
    let ids = |value: &Value| -> Vec<u64> {
        match value {
            Value::Array(ids) => ids.iter().filter_map(Value::as_u64).collect(),
            one => one.as_u64().into_iter().collect(),
        }
    };
    let eos: Vec<u64> = config.eos_token_ids.iter().map(|id| u64::from(*id)).collect();
    let optional = |id: Option<u32>| id.map(u64::from).into_iter().collect::<Vec<_>>();
    for (key, wanted) in [
        ("eos_token_id", eos),
        ("bos_token_id", optional(config.bos_token_id)),
        ("pad_token_id", optional(config.pad_token_id)),
    ] {
        let found = ids(&layer[key]);
        if !found.is_empty() && found != wanted {
            let problem = Problem::new(
                Severity::Error,
                "special-token",
                place(key),
                format!("{found:?}"),
                format!("the target's {wanted:?}"),
            );
            checks.push(problem.effect_on(
                checks.profile,
                Effect::Garbage,
                "texts end, or do not, where they should not",
            ));
        }
    }
}
