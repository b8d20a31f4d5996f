//! Qwen2, Qwen3 and their mixtures: `use_sliding_window` switches the windows of late layers on.

use super::{JsonKeys, Parts, Sizes};

/// The class's own window and number of full layers.
const WINDOW: usize = 4096;
const FULL_LAYERS: usize = 28;

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> Parts {
    let mut parts = Parts::default();
    let used = keys.flag("use_sliding_window", false);
    let window = if used { keys.window(Some(WINDOW)) } else { None };
    let full = keys.size("max_window_layers").unwrap_or(FULL_LAYERS);
    let pattern = sizes.each_layer(|layer| window.is_some() && layer >= full);
    let sliding = keys.layer_types(sizes.num_hidden_layers).unwrap_or(pattern);
    if !used && sliding.contains(&true) {
        keys.problems.push("`layer_types` has sliding layers, but `use_sliding_window` is false");
    } else {
        parts.set_windows(window, sliding, &mut keys.problems);
    }
    parts
}
