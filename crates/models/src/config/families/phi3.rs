//! Phi-3 and Phi-4-mini (Abdin et al. 2024, <https://arxiv.org/abs/2404.14219>): fused projections, a part of the
//! head turns, frequencies by the sequence's length, a window where there is one.

use super::super::parts::{LongRope, Rotary};
use super::{
    Defaults, FACTORS_BY_LENGTH, GgufKeys, JsonKeys, Parts, RopeParameters, Sizes, by_length,
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
    let Some(scaling) = by_length::stated(keys, &BY_LENGTH) else {
        return (keys.rope(sizes), parts);
    };
    let by_length = by_length::read(keys, (scaling, sizes), turning, ORIGINAL_CONTEXT);
    parts.rotary.by_length = Some(by_length);
    (keys.plain_rope(sizes), parts)
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
