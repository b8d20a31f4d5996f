//! Heads that differ from layer to layer, and layers that read the keys and values of earlier ones.

use super::{Mixer, RopeParameters, TargetConfig, limits};
use crate::error::Problems;

/// Heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerHeads {
    /// `K`
    pub kv_heads: usize,
    /// `D`
    pub head_dim: usize,
}

impl TargetConfig {
    /// Heads of layer `index`.
    pub fn heads_of(&self, index: usize) -> LayerHeads {
        let plain = LayerHeads { kv_heads: self.num_key_value_heads, head_dim: self.head_dim };
        self.parts.heads.get(index).copied().unwrap_or(plain)
    }

    /// The earlier layer whose keys and values layer `index` reads, if it has none of its own: the last one of
    /// its kind that has.
    pub fn keys_owner(&self, index: usize) -> Option<usize> {
        let first = self.parts.shared_keys_from.filter(|first| index >= *first)?;
        let slides = |layer: usize| self.window_of(layer).is_some();
        (0..first).rev().find(|layer| slides(*layer) == slides(index))
    }

    /// Whether a later layer reads the keys and values of layer `index`.
    pub fn owns_keys(&self, index: usize) -> bool {
        self.parts.shared_keys_from.is_some()
            && (0..self.num_hidden_layers).any(|layer| self.keys_owner(layer) == Some(index))
    }

    /// Inner width of the MLP of layer `index`.
    pub fn inner_of(&self, index: usize) -> usize {
        let is_wide = self.parts.wide_after_sharing
            && self.parts.shared_keys_from.is_some_and(|first| index >= first);
        if is_wide { self.intermediate_size.saturating_mul(2) } else { self.intermediate_size }
    }

    /// The layer whose keys and values the last layer that attends reads; drafts may read them. `None` if no
    /// layer attends.
    pub fn last_attention_layer(&self) -> Option<usize> {
        let attends = |layer: &usize| self.mixer_of(*layer) == Mixer::Attention;
        let last = (0..self.num_hidden_layers).rev().find(attends)?;
        Some(self.keys_owner(last).unwrap_or(last))
    }

    /// Heads of that layer.
    pub fn last_heads(&self) -> LayerHeads {
        self.heads_of(self.last_attention_layer().unwrap_or(0))
    }

    /// Rotary embedding of a draft's own heads. Divisors of heads of another width are left out.
    pub(crate) fn rope_of_drafts(&self) -> RopeParameters {
        let rope = self.rope.clone();
        let fits = |divisors: &Vec<f32>| 2 * divisors.len() == self.head_dim;
        RopeParameters { divisors: rope.divisors.clone().filter(fits), ..rope }
    }

    pub(super) fn check_heads(&self, problems: &mut Problems) {
        let mut seen = Vec::new();
        for heads in &self.parts.heads {
            if seen.contains(heads) {
                continue;
            }
            seen.push(*heads);
            let LayerHeads { kv_heads, head_dim } = *heads;
            limits::check(
                problems,
                &[
                    ("num_key_value_heads", kv_heads, limits::HEADS),
                    ("head_dim", head_dim, limits::HEAD_DIM),
                ],
            );
            limits::heads(problems, (self.num_attention_heads, kv_heads), head_dim);
        }
        // Heads of one kind of layers have one rotary embedding.
        let of_kind = |slides: bool| {
            let layers = 0..self.parts.heads.len().min(limits::LAYERS);
            let dims = layers.filter(move |layer| self.window_of(*layer).is_some() == slides);
            dims.map(|layer| self.parts.heads[layer].head_dim)
        };
        for slides in [false, true] {
            let mut dims = of_kind(slides);
            let first = dims.next();
            if dims.any(|dim| Some(dim) != first) {
                problems.push("layers of one kind have heads of several widths");
            }
        }
        let Some(first) = self.parts.shared_keys_from else { return };
        let layers = first..self.num_hidden_layers.min(limits::LAYERS);
        if layers.clone().any(|layer| self.keys_owner(layer).is_none()) {
            problems.push("`num_kv_shared_layers`: no earlier layer of the same kind has keys");
        }
        let differs = |layer: &usize| {
            let owner = self.keys_owner(*layer).unwrap_or(*layer);
            self.heads_of(owner) != self.heads_of(*layer)
        };
        if layers.clone().any(|layer| differs(&layer)) {
            problems.push(
                "`num_kv_shared_layers`: a layer's heads differ from those whose keys it reads",
            );
        }
    }
}
