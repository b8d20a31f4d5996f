//! SmolLM3 (<https://huggingface.co/HuggingFaceTB/SmolLM3-3B>): a Llama some of whose layers have no rotary
//! embedding; only those have windows, if any has.

use super::super::parts::Rotary;
use super::{Defaults, JsonKeys, Parts, STILL_INTERVAL, Sizes, every, still_layers};

pub(super) fn defaults() -> Defaults {
    Defaults {
        vocab_size: Some(128_256),
        num_attention_heads: Some(16),
        num_key_value_heads: Some(4),
        max_position_embeddings: 32_768,
        tie_word_embeddings: true,
        rope_theta: 2e6,
        ..Defaults::default()
    }
}

fn parts(still: Vec<bool>) -> Parts {
    Parts { rotary: Rotary { still, ..Rotary::default() }, ..Parts::default() }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> Parts {
    let listed = keys.each_layer("no_rope_layers", sizes.num_hidden_layers);
    let still = still_layers(keys, sizes, listed);
    let used = keys.flag("use_sliding_window", false);
    let window = if used { keys.window(None) } else { None };
    let pattern = still.iter().map(|still| *still && window.is_some()).collect();
    let sliding = keys.layer_types(sizes.num_hidden_layers).unwrap_or(pattern);
    let mut parts = parts(still);
    if !used && sliding.contains(&true) {
        keys.problems.push("`layer_types` has sliding layers, but `use_sliding_window` is false");
    } else {
        parts.set_windows(window, sliding, &mut keys.problems);
    }
    parts
}

/// `smollm3` files have no key for what their reader takes as given.
pub(super) fn of_gguf(sizes: Sizes) -> Parts {
    parts(every(sizes, STILL_INTERVAL))
}
