//! Qwen2, Qwen3 and their mixtures: `use_sliding_window` switches the windows of some layers on.

use super::{Architecture, Defaults, JsonKeys, Parts, Sizes};

/// The class's own window, and `max_window_layers`.
const WINDOW: usize = 4096;
const BORDER: usize = 28;

pub(super) fn defaults(architecture: Architecture) -> Defaults {
    let (key_value_heads, head_dim) = match architecture {
        Architecture::Qwen2Moe => (16, None),
        Architecture::Qwen3Moe => (4, None),
        Architecture::Qwen3 => (32, Some(128)),
        _ => (32, None),
    };
    Defaults {
        num_key_value_heads: Some(key_value_heads),
        head_dim,
        max_position_embeddings: 32_768,
        ..Defaults::default()
    }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> Parts {
    let mut parts = Parts::default();
    let used = keys.flag("use_sliding_window", false);
    let window = if used { keys.window(Some(WINDOW)) } else { None };
    let border = keys.size("max_window_layers").unwrap_or(BORDER);
    let slides = |layer: usize| match sizes.architecture {
        Architecture::Qwen2Moe => layer < border && layer.is_multiple_of(2),
        Architecture::Qwen3Moe => true,
        _ => layer >= border,
    };
    let pattern = sizes.each_layer(|layer| window.is_some() && slides(layer));
    let sliding = keys.layer_types(sizes.num_hidden_layers).unwrap_or(pattern);
    if !used && sliding.contains(&true) {
        keys.problems.push("`layer_types` has sliding layers, but `use_sliding_window` is false");
    } else {
        parts.set_windows(window, sliding, &mut keys.problems);
    }
    parts
}
