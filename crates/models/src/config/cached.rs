//! What a cache holds of a sequence: keys and values of the tokens that are seen again, and states.

use longdraft_kernels::attention::{Reach, TILE_KEYS};

use super::{LayerHeads, Mixer, TargetConfig};

/// Lengths at which states are put aside, at most. Each takes as much as the states themselves.
pub(crate) const STATES_ASIDE: usize = 4;

/// Tokens that a layer of a reach holds at most around a pass of `rows`: those that the pass sees, what is left of
/// the tile in which they begin, its own, and as many more as make dropping rare. The whole sequence without a
/// window.
pub(crate) fn most_held(reach: Reach, rows: usize) -> usize {
    let seen = match reach {
        Reach::All => return usize::MAX,
        Reach::Window(tokens) | Reach::Chunk(tokens) => tokens,
    };
    seen.saturating_add(rows).saturating_add(2 * TILE_KEYS)
}

impl TargetConfig {
    /// Dim of what is cached of a head.
    pub fn cached_dim(&self) -> usize {
        self.parts.latent.map_or(self.head_dim, |latent| latent.cached())
    }

    /// Values that layer `index` caches of a token in keys and values.
    pub fn cached_values(&self, index: usize) -> usize {
        let LayerHeads { kv_heads, head_dim } = self.heads_of(index);
        match (self.mixer_of(index), self.parts.latent) {
            (Mixer::Attention, None) if self.keys_owner(index).is_some() => 0,
            (Mixer::Attention, None) => 2 * kv_heads * head_dim,
            (Mixer::Attention, Some(latent)) => latent.cached(),
            _ => 0,
        }
    }

    /// Tokens whose keys and values layer `index` holds at most of a sequence of `tokens` that is read in passes
    /// of up to `rows`: all of them, or what a window leaves ([`Self::window_of`]).
    pub fn cached_tokens(&self, index: usize, tokens: usize, rows: usize) -> usize {
        let reach = self.parts.reach().filter(|_| self.window_of(index).is_some());
        most_held(reach.unwrap_or(Reach::All), rows).min(tokens)
    }

    /// Values of keys and values that a cache holds at most of a sequence of `tokens` that is read in passes of up
    /// to `rows`. The room of layers without a window grows by doubling.
    pub fn cache_values(&self, tokens: usize, rows: usize) -> usize {
        let of_layer = |layer| self.cached_values(layer) * self.cached_tokens(layer, tokens, rows);
        (0..self.num_hidden_layers).map(of_layer).sum()
    }

    /// Values of the states of a sequence, those among them that are put aside.
    pub fn cached_state_values(&self) -> usize {
        // Before and after the last pass.
        (2 + STATES_ASIDE) * self.state_values()
    }
}
