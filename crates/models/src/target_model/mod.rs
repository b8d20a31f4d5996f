//! The frozen target: a Llama-family decoder with taps and a key-value cache.
//!
//! It runs without a gradient graph. One layer serves every architecture: attention (optional q/k/v bias,
//! optional norm per head on q and k, rotary embedding, grouped queries, a window in some layers) and a gated
//! MLP or a mixture of them, with norms before and, in some families, after each. What a family does
//! otherwise stands in the table of [`crate::config::Parts`].

mod build;
mod cache;
mod ends;
mod extend;
mod features;
mod feed_forward;
mod files;
mod fingerprint;
pub mod gguf;
mod latent;
mod layer;
mod layers;
mod load;
mod locate;
mod mtp;
pub(crate) mod names;
mod nested;
mod open;
mod pass;
mod per_layer;
mod recurrent;
mod renamed;
mod repeats;
mod row_cut;
mod run;
mod sequence_parallel;
mod specs;
mod spread;
mod tensor_parallel;
#[cfg(test)]
mod tests;
mod tied;
mod views;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::bend::Bend;
use longdraft_kernels::rope::{Rope, RopeTable};
use longdraft_kernels::token_ranges::TokenRanges;

use crate::config::TargetConfig;
use crate::error::{Result, refused};

pub use cache::{CacheType, KvCache};
pub use ends::Ends;
pub use extend::Extension;
pub use features::{Features, KeyValues, PackedSequence, Tap, Taps};
pub use fingerprint::is_same_target;
pub use load::{Layers, StoredType, TargetOptions};
pub use locate::locate;
pub use mtp::{MtpBlock, Pairs};
pub(crate) use names::norm_before_feed_forward;
pub use sequence_parallel::RowPart;
pub use specs::tensor_specs;
pub use spread::Ranks;

use layers::LayerSource;
use pass::Ropes;
use per_layer::PerLayerInputs;
use recurrent::Rule;
use repeats::Repeating;
use spread::Table;
use tensor_parallel::LayerShare;

/// A frozen decoder.
pub struct Target {
    config: TargetConfig,
    fingerprint: String,
    ropes: Ropes,
    embedding: Table,
    /// What tokens bring to every layer, in families where they do.
    per_layer: Option<PerLayerInputs>,
    /// All of them, the last one, or none.
    layers: Box<dyn LayerSource>,
    /// How the state of each layer steps, of those that have one.
    rules: Vec<Option<Arc<Rule>>>,
    /// `[H]`
    final_norm: Tensor,
    /// `None` if tied to the embedding.
    head: Option<Table>,
    device: Device,
    /// What keys and values are cached as.
    cache_dtype: DType,
    /// Whether matrices are held as quantised blocks.
    has_blocks: bool,
    /// Quantised types of the file that are held as floats although they were wanted as stored.
    widened: Vec<&'static str>,
    /// Bytes of matrices by the type in which they are held, the largest first.
    held: Vec<(&'static str, u64)>,
    /// What this rank holds of every layer.
    share: LayerShare,
    /// Whether passes are made of recorded starts.
    repeating: Repeating,
}

impl Target {
    /// Sizes and switches.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// Identifies the weights: a hash of the configuration and a sample of them. [`is_same_target`] compares two.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Where the weights lie.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether matrices are held as quantised blocks.
    pub fn holds_blocks(&self) -> bool {
        self.has_blocks
    }

    /// The type in which keys and values are cached, by its name.
    pub fn cache_type(&self) -> &'static str {
        match self.cache_dtype {
            DType::U8 => "q8",
            dtype => dtype.as_str(),
        }
    }

    /// Quantised types of the file (`Q4_K`, ...) that were wanted as stored and are held as floats, in
    /// order: products read others.
    pub fn widened(&self) -> &[&'static str] {
        &self.widened
    }

    /// Bytes of the matrices by the type in which they are held (`Q4_K`, `F32`), the largest first; of
    /// the whole target where ranks hold a part each.
    pub fn held(&self) -> &[(&'static str, u64)] {
        &self.held
    }

    /// Rotary frequencies of the last layer that attends, whose keys [`Tap::LastKv`] hands out; those of short
    /// sequences where they depend on the length.
    pub fn rope(&self) -> &Rope {
        self.rope_of_last(false)
    }

    /// The same for the sequence of a cache.
    pub fn rope_for(&self, cache: &KvCache) -> &Rope {
        self.rope_of_last(cache.is_long())
    }

    /// Angles of some tokens of a packed row in the last layer.
    ///
    /// # Shapes
    /// - `position_ids`, `document_ids`: `[T]` of the whole row → a table of `rows`
    ///
    /// # Errors
    /// - the device has no memory for them
    ///
    /// # Panics
    /// - `rows` are not in the row
    pub fn rope_table(
        &self,
        (position_ids, document_ids): (&[u32], &[i32]),
        rows: &TokenRanges,
    ) -> Result<RopeTable> {
        let long = self.long_tokens(position_ids, document_ids);
        let long = if long.is_empty() { long } else { rows.select(&long) };
        let positions = rows.select(position_ids);
        let slides =
            self.config.window_of(self.config.num_hidden_layers.saturating_sub(1)).is_some();
        self.ropes.last_table(slides, (&positions, &long), &self.device)
    }

    fn rope_of_last(&self, long: bool) -> &Rope {
        let last = self.config.last_attention_layer().unwrap_or(0);
        self.ropes.of_last_layer(self.config.window_of(last).is_some(), long)
    }

    /// Stretches RoPE's base for sequences `stretch` times as long as those of training (NTK):
    /// `theta · stretch^(D/(D−2))`. Returns the new base.
    ///
    /// # Errors
    /// - `stretch` is not positive, or layers have rotary bases of two kinds
    pub fn stretch_rope(&mut self, stretch: f64) -> Result<f64> {
        let is_even = self.config.parts.heads.is_empty();
        let Some(only) = self.ropes.only().filter(|_| is_even) else {
            return Err(refused("a target with two rotary bases is not stretched"));
        };
        let head_dim = self.config.parts.turning(self.config.head_dim);
        let mut rope = self.config.rope.clone();
        if head_dim > 2 {
            let dimensions = head_dim as f64;
            rope.theta *= stretch.powf(dimensions / (dimensions - 2.0));
        }
        *only = self.config.parts.build_rope(&rope, self.config.head_dim)?;
        Ok(rope.theta)
    }

    /// What becomes of the head's products before they are logits.
    pub fn bend(&self) -> Bend {
        self.config.bend()
    }

    /// Weight of the norm before the head, `[H]`.
    pub fn final_norm(&self) -> &Tensor {
        &self.final_norm
    }

    /// Tensors of the last decoder layer that attends (the last one if none does) under their published names
    /// without a prefix. All ranks of a spread target call it.
    ///
    /// # Errors
    /// - they are quantised and there is no memory for their values
    pub fn last_layer(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let (mut tensors, layers) = (Vec::new(), self.layers.len());
        let last = layers.saturating_sub(1);
        let place = if layers == self.config.num_hidden_layers {
            self.config.last_attention_layer().unwrap_or(last)
        } else {
            last
        };
        self.layers.visit(place..layers.min(place + 1), &mut |_, layer| {
            tensors = layer.tensors()?;
            Ok(())
        })?;
        Ok(tensors)
    }
}
