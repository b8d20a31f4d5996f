//! Phi-3 and Phi-4-mini (Abdin et al. 2024, <https://arxiv.org/abs/2404.14219>): fused projections, a part of the
//! head turns, frequencies by the sequence's length, a window where there is one.

use serde_json::Value;

use super::super::parts::{LongRope, Rotary};
use super::{
    Defaults, FACTORS_BY_LENGTH, GgufKeys, JsonKeys, Parts, RopeParameters, Sizes, limits,
};

/// Longest sequence that is short, where a file leaves it out.
const ORIGINAL_CONTEXT: usize = 4096;
/// Names of the scaling by length; the others are those of older files.
const BY_LENGTH: [&str; 3] = ["longrope", "su", "yarn"];

pub(super) fn defaults() -> Defaults {
    Defaults {
        vocab_size: Some(32_064),
        max_position_embeddings: 4096,
        intermediate_size: Some(8192),
        norm_eps: ("rms_norm_eps", 1e-5),
        reads_mlp_bias: false,
        ..Defaults::default()
    }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> (RopeParameters, Parts) {
    let turning = keys.turning(sizes, 1.0);
    let mut parts = Parts::default();
    parts.rotary.dimensions = Some(turning).filter(|turning| *turning < sizes.head_dim);
    let window = keys.window(None);
    let pattern = sizes.each_layer(|_| window.is_some());
    let sliding = keys.layer_types(sizes.num_hidden_layers).unwrap_or(pattern);
    parts.set_windows(window, sliding, &mut keys.problems);
    let scaling = keys.rotary_keys();
    let kind = scaling.and_then(|scaling| {
        ["rope_type", "type"].iter().find_map(|key| scaling.get(*key).and_then(Value::as_str))
    });
    let Some((scaling, _)) = scaling.zip(kind).filter(|(_, kind)| BY_LENGTH.contains(kind)) else {
        return (keys.rope(sizes), parts);
    };
    parts.rotary.by_length = Some(by_length(keys, scaling, sizes, turning));
    let theta = scaling.get("rope_theta").filter(|theta| !theta.is_null());
    let theta = theta.or_else(|| keys.present("rope_theta"));
    let theta = theta.map_or(Some(defaults().rope_theta), Value::as_f64);
    if theta.is_none() {
        keys.problems.push("`rope_theta` is not a number");
    }
    (RopeParameters::plain(theta.unwrap_or(1.0)), parts)
}

/// Divisors by length, and the factor of cos and sin: `√(1 + ln s / ln o)` unless it is given.
fn by_length(keys: &mut JsonKeys<'_>, scaling: &Value, sizes: Sizes, turning: usize) -> LongRope {
    const ORIGINAL: &str = "original_max_position_embeddings";
    let mut inner = JsonKeys::of(scaling);
    let original = keys.size_from_one(ORIGINAL).or_else(|| inner.size_from_one(ORIGINAL));
    let original = original.unwrap_or(ORIGINAL_CONTEXT);
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

/// The divisors are tensors of the file; they are read with it.
pub(super) fn of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> Parts {
    let dimensions = keys.turning(sizes.head_dim);
    let mut parts =
        Parts { rotary: Rotary { dimensions, ..Rotary::default() }, ..Parts::default() };
    let window = keys.number("attention.sliding_window").filter(|window| *window != 0.0);
    let window = window.and_then(|_| keys.whole("attention.sliding_window"));
    if window.is_some() {
        parts.set_windows(window, sizes.each_layer(|_| true), &mut keys.problems);
    }
    let held = FACTORS_BY_LENGTH.map(|name| keys.has(name));
    if held.contains(&true) {
        if held.contains(&false) {
            let [short, long] = FACTORS_BY_LENGTH;
            keys.problems.push(format!("`{short}` and `{long}` belong together"));
        }
        let original = keys.whole("rope.scaling.original_context_length");
        parts.rotary.by_length = Some(LongRope {
            short: Vec::new(),
            long: Vec::new(),
            original_context: original.unwrap_or(ORIGINAL_CONTEXT),
            attention_factor: keys.scale("rope.scaling.attn_factor").unwrap_or(1.0),
        });
    }
    parts
}
