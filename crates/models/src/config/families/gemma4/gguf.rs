//! Gemma 4's keys in GGUF headers.

use super::super::super::shared_keys::LayerHeads;
use super::super::{GgufKeys, OwnSizes, Parts, RopeParameters, Sizes};
use super::{PER_LAYER_VOCABULARY, SLIDING_BASE, common, set_windows};

/// A GGUF file tells the sizes of full layers by the common keys, and those of sliding ones by others.
pub(in super::super) fn own_sizes(keys: &GgufKeys<'_>) -> OwnSizes {
    let first = |key: &str, wanted: &dyn Fn(usize) -> bool| {
        let listed = keys.integers(key).unwrap_or_default();
        let found = (0..listed.len()).find(|layer| wanted(*layer)).unwrap_or(0);
        listed.get(found).copied().filter(|size| *size >= 0)
    };
    let sliding = keys.flags(PATTERN_KEY).unwrap_or_default();
    let slides = |layer: usize| sliding.get(layer).copied().unwrap_or(false);
    OwnSizes {
        head_dim: keys.number("attention.key_length_swa").map(|dim| dim as usize),
        kv_heads: first("attention.head_count_kv", &slides).map(|heads| heads as usize),
        intermediate_size: first("feed_forward_length", &|_| true).map(|width| width as f64),
    }
}

const PATTERN_KEY: &str = "attention.sliding_window_pattern";

pub(in super::super) fn of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> Parts {
    let layers = sizes.layers();
    let sliding = keys.flags(PATTERN_KEY).unwrap_or_default();
    if sliding.len() != sizes.num_hidden_layers {
        let (listed, layers) = (sliding.len(), sizes.num_hidden_layers);
        keys.problems.push(format!("`gemma4.{PATTERN_KEY}` lists {listed} of {layers} layers"));
        return common(sizes);
    }
    check_heads_of_gguf(keys, &sliding);
    let heads = heads_of_gguf(keys, sizes, &sliding);
    let shared = match keys.number("attention.shared_kv_layers").filter(|count| *count != 0.0) {
        Some(_) => keys.whole("attention.shared_kv_layers").unwrap_or(0),
        None => 0,
    };
    if shared >= layers && shared > 0 {
        let key = "attention.shared_kv_layers";
        keys.problems.push(format!("`gemma4.{key}` = {shared} of {layers} layers"));
    }
    let own_keys = layers.saturating_sub(shared);
    let base = keys.positive("rope.freq_base_swa").unwrap_or(SLIDING_BASE);
    let table = keys.shape("per_layer_token_embd.weight").and_then(|shape| shape.first().copied());
    let mut parts = Parts {
        per_layer_vocabulary: table.unwrap_or(PER_LAYER_VOCABULARY),
        per_layer_input: keys
            .number("embedding_length_per_layer_input")
            .map_or(0, |width| width as usize),
        logits_softcap: keys.scale_or_none("final_logit_softcapping"),
        sliding_rope: Some(RopeParameters::plain(base)),
        heads,
        shared_keys_from: (shared > 0).then_some(own_keys),
        wide_after_sharing: is_wide_after(keys, own_keys, layers),
        values_are_keys: values_are_keys(keys, &sliding[..own_keys.min(sliding.len())]),
        layer_scalars: keys.holds("layer_output_scale.weight"),
        ..common(sizes)
    };
    let window = keys.whole("attention.sliding_window");
    set_windows(&mut parts, window, sliding, &mut keys.problems);
    parts
}

/// Refuses heads that turn in part but for the table of frequencies, full layers without it, and values that are
/// not as long as keys.
fn check_heads_of_gguf(keys: &mut GgufKeys<'_>, sliding: &[bool]) {
    if sliding.contains(&false) && !keys.has("rope_freqs.weight") {
        keys.problems.push("tensor `rope_freqs.weight` of full layers is missing");
    }
    if sliding.contains(&true) && keys.number("attention.key_length_swa").is_none() {
        keys.problems.push("`gemma4.attention.key_length_swa` is missing");
    }
    for (key, other) in [
        ("attention.value_length", "attention.key_length"),
        ("attention.value_length_swa", "attention.key_length_swa"),
        ("rope.dimension_count", "attention.key_length"),
        ("rope.dimension_count_swa", "attention.key_length_swa"),
    ] {
        let (Some(number), Some(length)) = (keys.number(key), keys.number(other)) else { continue };
        if (number - length).abs() > 0.0 || number.is_nan() {
            keys.problems.push(format!("`gemma4.{key}` = {number} is not `{other}` = {length}"));
        }
    }
}

/// Heads of every layer.
fn heads_of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes, sliding: &[bool]) -> Vec<LayerHeads> {
    let full_dim = keys.size("attention.key_length");
    let listed = keys.integers("attention.head_count_kv").unwrap_or_default();
    let one = match listed.len() {
        0 => keys.size("attention.head_count_kv"),
        length if length != sliding.len() => {
            let (key, layers) = ("attention.head_count_kv", sliding.len());
            keys.problems.push(format!("`gemma4.{key}` lists {length} of {layers} layers"));
            1
        }
        _ => 1,
    };
    let of_layer = |(layer, slides): (usize, &bool)| LayerHeads {
        kv_heads: listed.get(layer).map_or(one, |heads| usize::try_from(*heads).unwrap_or(0)),
        head_dim: if *slides { sizes.head_dim } else { full_dim },
    };
    sliding.iter().enumerate().map(of_layer).collect()
}

/// Whether MLPs are twice as wide where keys are shared; other widths by layer are refused.
fn is_wide_after(keys: &mut GgufKeys<'_>, first_shared: usize, layers: usize) -> bool {
    let Some(widths) = keys.integers("feed_forward_length") else { return false };
    let plain = widths.first().copied().unwrap_or(0);
    let wide = widths.get(first_shared).is_some_and(|width| *width == plain.saturating_mul(2));
    let wanted = |layer: usize| {
        if wide && layer >= first_shared { plain.saturating_mul(2) } else { plain }
    };
    let fits = widths.iter().enumerate().all(|(layer, width)| *width == wanted(layer));
    if widths.len() != layers || !fits {
        keys.problems.push(
            "`gemma4.feed_forward_length` is not one width a layer, twice as wide at most where keys \
             are shared",
        );
    }
    wide
}

/// Whether full layers among those with keys of their own have no projection of values: all of them or none.
fn values_are_keys(keys: &mut GgufKeys<'_>, sliding: &[bool]) -> bool {
    let full =
        || sliding.iter().enumerate().filter(|(_, slides)| !**slides).map(|(layer, _)| layer);
    let has = |layer: usize, tensor: &str| keys.has(&format!("blk.{layer}.{tensor}.weight"));
    let lacks = |layer: usize| !has(layer, "attn_v") && !has(layer, "attn_qkv");
    let (some, all) = (full().any(lacks), full().all(lacks));
    if some && !all {
        keys.problems.push("some full layers have no `attn_v`, others do");
    }
    some
}
