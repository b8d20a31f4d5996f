//! Gemma 2 and 3 (Riviere et al. 2024, <https://arxiv.org/abs/2408.00118>; Kamath et al. 2025,
//! <https://arxiv.org/abs/2503.19786>): norms on both sides, layers with windows among full ones, a GELU in the
//! MLP, scaled embeddings; soft-caps in 2, norms on queries and keys and a second rotary base in 3.

use serde_json::{Value, json};

use super::super::parts::{Activation, NormPlaces};
use super::{
    Architecture, Defaults, GgufKeys, JsonKeys, Parts, RopeParameters, Sizes, sliding_of_gguf,
};

/// What both classes have where a file leaves the key out.
const WINDOW: usize = 4096;
const QUERY_SCALAR: f64 = 256.0;
/// Gemma 2's soft-caps.
const ATTENTION_SOFTCAP: f64 = 50.0;
const LOGITS_SOFTCAP: f64 = 30.0;
/// Gemma 3: every so manieth layer is full.
const PATTERN: usize = 6;
/// Gemma 3's rotary bases.
const FULL_BASE: f64 = 1e6;
const SLIDING_BASE: f64 = 1e4;
/// Number of layers of the 27B models, whose query scalar is `H / N` and has no key in GGUF files.
const LAYERS_OF_27B: [(Architecture, usize); 2] =
    [(Architecture::Gemma2, 46), (Architecture::Gemma3, 62)];

pub(super) fn defaults(architecture: Architecture) -> Defaults {
    let newer = architecture == Architecture::Gemma3;
    Defaults {
        vocab_size: Some(if newer { 262_208 } else { 256_000 }),
        num_attention_heads: Some(8),
        num_key_value_heads: Some(4),
        head_dim: Some(256),
        max_position_embeddings: if newer { 131_072 } else { 8192 },
        tie_word_embeddings: true,
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        ..Defaults::default()
    }
}

/// What every file of the families has in common.
fn common(sizes: Sizes) -> Parts {
    Parts {
        norms: NormPlaces::BeforeAndAfter,
        embedding_scale: Some((sizes.hidden_size as f64).sqrt()),
        activation: Activation::GeluTanh,
        ..Parts::default()
    }
}

/// Whether layer `index` slides where a file lists no kinds.
fn slides(architecture: Architecture, pattern: usize, index: usize) -> bool {
    match architecture {
        Architecture::Gemma2 => index.is_multiple_of(2),
        _ => !(index + 1).is_multiple_of(pattern.max(1)),
    }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> (RopeParameters, Parts) {
    let architecture = sizes.architecture;
    let mut parts = Parts { norms_less_one: true, ..common(sizes) };
    if keys.flag("use_bidirectional_attention", false) {
        keys.problems.push("`use_bidirectional_attention` = true is not supported");
    }
    if architecture == Architecture::Gemma2 {
        parts.attention_softcap = keys.scale("attn_logit_softcapping", Some(ATTENTION_SOFTCAP));
    }
    let softcap = (architecture == Architecture::Gemma2).then_some(LOGITS_SOFTCAP);
    parts.logits_softcap = keys.scale("final_logit_softcapping", softcap);
    parts.query_scalar = keys.scale("query_pre_attn_scalar", Some(QUERY_SCALAR));
    let window = keys.window(Some(WINDOW));
    let pattern = ["sliding_window_pattern", "_sliding_window_pattern"]
        .into_iter()
        .find_map(|key| keys.size_from_one(key))
        .unwrap_or(PATTERN);
    let pattern = sizes.each_layer(|layer| slides(architecture, pattern, layer));
    let sliding = keys.layer_types(sizes.num_hidden_layers).unwrap_or(pattern);
    parts.set_windows(window, sliding, &mut keys.problems);
    if architecture == Architecture::Gemma2 {
        return (keys.rope(sizes), parts);
    }
    let (full, sliding) = ropes(keys, sizes);
    parts.sliding_rope = Some(sliding);
    (full, parts)
}

/// Rotary embeddings of full and of sliding layers, from a map by kind or from the older keys, whose
/// scaling is that of full layers.
fn ropes(keys: &mut JsonKeys<'_>, sizes: Sizes) -> (RopeParameters, RopeParameters) {
    let (map, [of_full, of_sliding]) = keys.ropes_by_kind();
    let older = map.filter(|_| of_full.is_none() && of_sliding.is_none());
    let scaling = keys.full_rope(of_full.or(older));
    let base = |stated: Option<&Value>| {
        let theta = stated.and_then(|stated| stated.get("rope_theta"));
        theta.filter(|theta| !theta.is_null()).cloned()
    };
    let theta = base(scaling.as_ref()).or_else(|| keys.present("rope_theta").cloned());
    let full = json!({
        "rope_theta": theta.unwrap_or_else(|| FULL_BASE.into()),
        "rope_parameters": scaling.unwrap_or(Value::Null),
    });
    let theta = base(of_sliding).or_else(|| keys.present("rope_local_base_freq").cloned());
    let sliding = json!({
        "rope_theta": theta.unwrap_or_else(|| SLIDING_BASE.into()),
        "rope_parameters": of_sliding.cloned().unwrap_or(Value::Null),
    });
    let mut read = |name: &str, theta: &Value| {
        if theta["rope_theta"].as_f64().is_none() {
            keys.problems.push(format!("`{name}` = {} is not a number", theta["rope_theta"]));
        }
        let context = sizes.max_position_embeddings;
        RopeParameters::from_json(theta, context, &mut keys.problems)
    };
    (read("rope_theta", &full), read("rope_local_base_freq", &sliding))
}

pub(super) fn of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> Parts {
    let architecture = sizes.architecture;
    // Norms are stored with the 1 added.
    let mut parts = common(sizes);
    let older = architecture == Architecture::Gemma2;
    if older {
        let softcap = keys.scale("attn_logit_softcapping");
        parts.attention_softcap = softcap.or(Some(ATTENTION_SOFTCAP));
    }
    parts.logits_softcap = match keys.number("final_logit_softcapping") {
        Some(_) => keys.scale_or_none("final_logit_softcapping"),
        None => older.then_some(LOGITS_SOFTCAP),
    };
    if LAYERS_OF_27B.contains(&(architecture, sizes.num_hidden_layers)) {
        let heads = sizes.num_attention_heads.max(1);
        parts.query_scalar = Some(sizes.hidden_size as f64 / heads as f64);
    }
    // Of a Gemma 3 whose layers are all full, files have no window or 0.
    let given = keys.number("attention.sliding_window").filter(|window| older || *window != 0.0);
    let window = given.and_then(|_| keys.whole("attention.sliding_window"));
    if let Some(window) = window.or(older.then_some(WINDOW)) {
        let sliding = sliding_of_gguf(keys, sizes, if older { 2 } else { PATTERN });
        parts.set_windows(Some(window), sliding, &mut keys.problems);
    }
    if !older {
        let base = keys.positive("rope.freq_base_swa").unwrap_or(SLIDING_BASE);
        parts.sliding_rope = Some(RopeParameters::plain(base));
    }
    parts
}
