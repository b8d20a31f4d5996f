//! OLMo 2 and 3 (OLMo Team 2025, <https://arxiv.org/abs/2501.00656>): norms after attention and MLP alone, and over
//! all of the queries and keys; in 3 three layers with windows before each full one, which alone are stretched.

use serde_json::{Value, json};

use super::super::parts::{NormPlaces, QkNorm};
use super::{
    Architecture, Defaults, GgufKeys, JsonKeys, Parts, RopeParameters, Sizes, every,
    sliding_of_gguf,
};

/// Olmo 3's window, pattern and rotary base where a file leaves them out.
const WINDOW: usize = 4096;
const PATTERN: usize = 4;
const BASE: f64 = 5e5;

pub(super) fn defaults(architecture: Architecture) -> Defaults {
    Defaults {
        vocab_size: Some(50_304),
        rope_theta: if architecture == Architecture::Olmo3 { BASE } else { 10_000.0 },
        norm_eps: ("rms_norm_eps", 1e-5),
        reads_mlp_bias: false,
        ..Defaults::default()
    }
}

fn parts() -> Parts {
    Parts { norms: NormPlaces::After, qk_norm: QkNorm::Whole, ..Parts::default() }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> (RopeParameters, Parts) {
    let mut parts = parts();
    if sizes.architecture == Architecture::Olmo2 {
        return (keys.rope(sizes), parts);
    }
    let window = keys.window(Some(WINDOW));
    let pattern = every(sizes, PATTERN).into_iter().map(|full| !full).collect();
    let sliding = keys.layer_types(sizes.num_hidden_layers).unwrap_or(pattern);
    parts.set_windows(window, sliding, &mut keys.problems);
    let (full, sliding) = ropes(keys, sizes);
    parts.sliding_rope = Some(sliding);
    (full, parts)
}

/// Rotary embeddings of full and of sliding layers, from a map by kind or from the older keys, whose base and
/// scaling are those of full layers: the class gives sliding ones its own base.
fn ropes(keys: &mut JsonKeys<'_>, sizes: Sizes) -> (RopeParameters, RopeParameters) {
    let (map, [of_full, of_sliding]) = keys.ropes_by_kind();
    if map.is_some() && of_full.is_none() && of_sliding.is_none() {
        // One base for all layers; what stretches it is for full ones.
        let full = keys.rope(sizes);
        let sliding = RopeParameters::plain(full.theta);
        return (full, sliding);
    }
    let (full, own) = (keys.full_rope(of_full), keys.present("rope_theta"));
    let mut read = |scaling: Option<&Value>, own: Option<&Value>| {
        let theta = scaling.and_then(|scaling| scaling.get("rope_theta"));
        let theta = theta.filter(|theta| !theta.is_null()).or(own);
        let value = json!({
            "rope_theta": theta.cloned().unwrap_or_else(|| BASE.into()),
            "rope_parameters": scaling.cloned().unwrap_or(Value::Null),
        });
        RopeParameters::from_json(&value, sizes.max_position_embeddings, &mut keys.problems)
    };
    (read(full.as_ref(), own), read(of_sliding, None))
}

/// `olmo2` files hold both; full layers alone are stretched beside those with windows.
pub(super) fn of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> Parts {
    let mut parts = parts();
    let window = keys.number("attention.sliding_window").filter(|window| *window != 0.0);
    let Some(window) = window.and_then(|_| keys.whole("attention.sliding_window")) else {
        return parts;
    };
    let sliding = sliding_of_gguf(keys, sizes, PATTERN);
    parts.set_windows(Some(window), sliding, &mut keys.problems);
    let base = keys.number("rope.freq_base").unwrap_or(10_000.0);
    let own_base = keys.positive("rope.freq_base_swa").unwrap_or(base);
    parts.sliding_rope = Some(RopeParameters::plain(own_base));
    parts
}
