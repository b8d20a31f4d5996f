//! The frozen target: a Llama-family decoder with taps and a key-value cache.
//!
//! It runs without a gradient graph. One layer serves every architecture: attention (optional q/k/v bias,
//! optional norm per head on q and k, rotary embedding, grouped queries, a window in some layers) and a gated
//! MLP or a mixture of them, with norms before and, in some families, after each. What a family does
//! otherwise stands in the table of [`crate::config::Parts`].

mod build;
mod cache;
mod extend;
mod features;
mod feed_forward;
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
mod part;
mod pass;
mod per_layer;
mod recurrent;
mod renamed;
mod run;
mod spread;
mod tensor;
#[cfg(test)]
mod tests;
mod tied;
mod views;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::bend::Bend;
use longdraft_kernels::log_sum_exp::{HeadSummary, bent_log_sum_exp};
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::rope::{Rope, RopeTable};
use longdraft_kernels::top_k::{TopK, bent_top_k, row_top_k};

use crate::config::TargetConfig;
use crate::error::{ModelError, Result};

pub use cache::{CacheType, KvCache};
pub use extend::Extension;
pub use features::{Features, KeyValues, PackedSequence, Tap, Taps};
pub use load::{Layers, StoredType, TargetOptions};
pub use locate::locate;
pub use mtp::{MtpBlock, Pairs};
pub(crate) use names::norm_before_feed_forward;
pub use names::tensor_specs;
pub use part::RowPart;
pub use spread::Ranks;

use layers::LayerSource;
use pass::Ropes;
use per_layer::PerLayerInputs;
use recurrent::Rule;
use spread::{Held, Table};
use tensor::LayerShare;

/// Rows whose logits exist at the same time where the head is held as quantised blocks.
const LOGIT_ROWS: usize = 64;

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
}

/// Keeps embedding table and head of a spread target whole ([`Target::hold_ends`]).
pub struct Ends<'a> {
    _tables: [Held<'a>; 2],
}

impl Target {
    /// Sizes and switches.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// Identifies the weights: a hash of the configuration and a sample of them.
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
        rows: Range<usize>,
    ) -> Result<RopeTable> {
        let long = self.long_tokens(position_ids, document_ids);
        let long = long.get(rows.clone()).unwrap_or_default();
        let slides =
            self.config.window_of(self.config.num_hidden_layers.saturating_sub(1)).is_some();
        self.ropes.last_table(slides, (&position_ids[rows], long), &self.device)
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

    /// Puts embedding table and head of a spread target together until the guard goes. All ranks
    /// call it; where the target is not spread nothing happens.
    ///
    /// # Errors
    /// - they cannot be put together
    pub fn hold_ends(&self) -> Result<Ends<'_>> {
        Ok(Ends { _tables: [self.embedding.hold()?, self.head_table().hold()?] })
    }

    /// Output head, `[V, H]`; [`Self::bend`] makes logits of its products.
    ///
    /// # Errors
    /// - it is quantised and there is no memory for its values, or it is spread and not held
    pub fn head(&self) -> Result<Tensor> {
        self.head_table().tensor()
    }

    /// What becomes of the head's products before they are logits.
    pub fn bend(&self) -> Bend {
        self.config.bend()
    }

    /// The `k` most likely tokens after final hidden states, of `k` up to the vocabulary.
    ///
    /// # Shapes
    /// - `[R, H]` → `[R, k]`
    ///
    /// # Errors
    /// - as [`Self::head`], or the width differs
    pub fn top_k(&self, final_hidden: &Tensor, k: usize) -> Result<TopK> {
        let k = k.min(self.config.vocab_size);
        if !self.has_blocks {
            return Ok(bent_top_k(final_hidden, &self.head()?, k, self.bend())?);
        }
        let mut all = TopK::default();
        self.each_logits(final_hidden, |logits| {
            let TopK { ids, log_probs } = row_top_k(logits, k)?;
            all.ids.extend(ids);
            all.log_probs.extend(log_probs);
            Ok(())
        })?;
        Ok(all)
    }

    /// Normaliser and most likely token after final hidden states.
    ///
    /// # Shapes
    /// - `[R, H]` → `[R]`
    ///
    /// # Errors
    /// - as [`Self::head`], or the width differs
    pub fn head_summary(&self, final_hidden: &Tensor) -> Result<HeadSummary> {
        if !self.has_blocks {
            return Ok(bent_log_sum_exp(final_hidden, &self.head()?, self.bend())?);
        }
        let mut all = HeadSummary::default();
        self.each_logits(final_hidden, |logits| Ok(all.append(logits)?))?;
        Ok(all)
    }

    /// Logits of some rows at a time, from the head as it is held.
    fn each_logits(
        &self,
        final_hidden: &Tensor,
        mut of: impl FnMut(&Tensor) -> Result<()>,
    ) -> Result<()> {
        let rows = final_hidden.dim(0)?;
        for first in (0..rows).step_by(LOGIT_ROWS) {
            of(&self.logits(&final_hidden.narrow(0, first, LOGIT_ROWS.min(rows - first))?)?)?;
        }
        Ok(())
    }

    /// Output head as it is held; [`Self::bend`] makes logits of its products.
    ///
    /// # Errors
    /// - it is spread and not held
    pub fn head_matrix(&self) -> Result<Matrix> {
        self.head_table().matrix()
    }

    fn head_table(&self) -> &Table {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// Embedding table, `[V, H]`, as the file holds it: [`Self::embed`] scales where the family does.
    ///
    /// # Errors
    /// - it is quantised and there is no memory for its values, or it is spread and not held
    pub fn embedding(&self) -> Result<Tensor> {
        self.embedding.tensor()
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

    /// Embeddings of `ids` in f32, as the first layer reads them.
    ///
    /// # Shapes
    /// - `ids`: `[T]` → `[T, H]`
    ///
    /// # Errors
    /// - an id lies outside the vocabulary, or the table is spread and not held
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        self.check_ids(ids)?;
        let rows = self.embedding.matrix()?.rows(ids)?;
        Ok(match self.config.parts.embedding_scale {
            Some(scale) => (rows * scale)?,
            None => rows,
        })
    }

    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        let Some(id) = ids.iter().find(|id| **id as usize >= self.config.vocab_size) else {
            return Ok(());
        };
        let vocabulary = self.config.vocab_size;
        let message = format!("token {id} lies outside the vocabulary of {vocabulary}");
        Err(ModelError::Tokenizer(message))
    }

    /// Logits of final hidden states (after the final norm), in f32.
    ///
    /// # Shapes
    /// - `[T, H]` → `[T, V]`
    ///
    /// # Errors
    /// - the width differs
    pub fn logits(&self, final_hidden: &Tensor) -> Result<Tensor> {
        Ok(self.bend().of(self.head_matrix()?.linear(final_hidden, None)?)?)
    }
}

/// What a target does not do.
fn refused(problem: &str) -> ModelError {
    ModelError::Tensor(candle_core::Error::Msg(problem.to_owned()))
}
