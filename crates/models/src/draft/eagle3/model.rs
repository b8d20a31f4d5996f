//! The layer's parts, on any rows.

use candle_core::Tensor;
use longdraft_kernels::graph::{cat, reshape};
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::rope::{Rope, RopeScaling, RopeTable, rope};
use longdraft_kernels::rows::beside;

use super::config::Eagle3Config;
use super::weights::{EMBEDDING, HEAD};
use crate::draft::seen::{Seen, attention_each};
use crate::draft::{Draft, DraftWeights, VocabularyMap};
use crate::error::Result;
use crate::ids::check_ids;
use crate::target_model::{KeyValues, Tap};

/// The trainable draft.
pub struct Eagle3Draft {
    pub(super) config: Eagle3Config,
    pub(super) weights: DraftWeights,
    pub(super) vocabulary: VocabularyMap,
    /// Frozen: the target's `[V, Ht]` as the target holds it, or the draft's own `[V, H]`.
    pub(in crate::draft) embedding: Matrix,
    /// Whether `embedding` is the draft's own, so that it has to be saved with it.
    pub(super) own_embedding: bool,
    /// The target's head `[V, H]` as the target holds it, where the draft has none of its own.
    pub(super) shared_head: Option<Matrix>,
    pub(super) rope: Rope,
}

impl Draft for Eagle3Draft {
    fn method(&self) -> &'static str {
        super::KIND.name
    }

    fn taps(&self) -> Vec<Tap> {
        self.config.target_layers.iter().map(|layer| Tap::Hidden(*layer)).collect()
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        Some(&self.vocabulary)
    }

    fn weights(&self) -> &DraftWeights {
        &self.weights
    }

    fn weights_mut(&mut self) -> &mut DraftWeights {
        &mut self.weights
    }

    fn held_bytes(&self) -> usize {
        let own = if self.own_embedding { self.embedding.held_bytes() } else { 0 };
        self.weights.held_bytes() + own
    }

    /// The vocabulary map unless every token is kept, embeddings if they are the draft's own.
    fn fixed_tensors(&self) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        if !self.vocabulary.is_identity() {
            all.extend(self.vocabulary.tensors()?);
        }
        if self.own_embedding {
            all.push((EMBEDDING.into(), self.embedding.to_dense()?));
        }
        Ok(all)
    }

    fn config_json(&self) -> serde_json::Value {
        self.config.to_json()
    }
}

impl Eagle3Draft {
    /// Sizes and switches.
    pub fn config(&self) -> &Eagle3Config {
        &self.config
    }

    /// What draft tokens stand for.
    pub fn vocabulary(&self) -> &VocabularyMap {
        &self.vocabulary
    }

    /// Its own output head over the draft's vocabulary, `[Vd, H]` in f32, which trains.
    ///
    /// # Errors
    /// - it was opened without one, or is held for proposing alone: [`Self::head_matrix`]
    pub fn head(&self) -> Result<&Tensor> {
        self.weights.tensor(HEAD)
    }

    /// The head that it proposes through, `[Vd, H]`, as it is held: f32, bf16, or blocks, or the target's.
    ///
    /// # Errors
    /// - never for a draft that was built
    pub fn head_matrix(&self) -> Result<Matrix> {
        match &self.shared_head {
            Some(head) => Ok(head.clone()),
            None => self.weights.matrix("lm_head"),
        }
    }

    fn heads(&self, x: &Tensor, module: &str, count: usize) -> Result<Tensor> {
        let module = format!("midlayer.self_attn.{module}");
        self.weights.heads(x, &module, count, self.config.head_dim)
    }

    /// Embeddings of target tokens at the draft's width, in f32.
    ///
    /// # Shapes
    /// - `ids`: `[T]` → `[T, H]`
    ///
    /// # Errors
    /// - an id lies outside the target's vocabulary
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        check_ids(ids, self.config.vocab_size)?;
        let embedded = self.embedding.rows(ids)?;
        if self.config.embed_proj {
            self.weights.project(&embedded, "embed_proj")
        } else {
            Ok(embedded)
        }
    }

    /// The state that the first step reads, from the tapped layers side by side.
    ///
    /// # Shapes
    /// - `aux`: `[T, 3·Ht]` → `[T, H]`
    ///
    /// # Errors
    /// - the width differs
    pub fn fuse(&self, aux: &Tensor) -> Result<Tensor> {
        if !self.config.fc_norm {
            return self.weights.project(aux, "fc");
        }
        let width = self.config.target_hidden_size;
        let layers = (0..self.config.target_layers.len())
            .map(|i| self.weights.norm(&aux.narrow(1, i * width, width)?, &format!("fc_norm.{i}")))
            .collect::<Result<Vec<_>>>()?;
        self.weights.project(&cat(&layers, 1)?, "fc")
    }

    /// What attention projects: embeddings and states, each through its norm, side by side.
    ///
    /// # Shapes
    /// - `embeddings`, `state`: `[T, H]` → `[T, 2·H]`
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn attention_input(&self, embeddings: &Tensor, state: &Tensor) -> Result<Tensor> {
        let embeddings = self.weights.norm(embeddings, "midlayer.input_layernorm")?;
        let state = self.weights.norm(state, "midlayer.hidden_norm")?;
        Ok(beside(&embeddings, &state)?)
    }

    /// Rotated keys, and values.
    ///
    /// # Shapes
    /// - `input`: `[T, 2·H]`, `table` over the same rows → `[T, K, D]` each
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn key_values(&self, input: &Tensor, table: &RopeTable) -> Result<KeyValues> {
        let kv_heads = self.config.num_key_value_heads;
        let k = rope(&self.heads(input, "k_proj", kv_heads)?, table)?;
        Ok(KeyValues { k, v: self.heads(input, "v_proj", kv_heads)? })
    }

    /// Attention and MLP on top of the states that the input was made of. A row's bits do not depend on the
    /// sequences beside its own.
    ///
    /// # Shapes
    /// - `state`: `[T, H]`, `input`: `[T, 2·H]`, `T` rows of all `sequences`, one after the other → `[T, H]`
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn layer(
        &self,
        state: &Tensor,
        input: &Tensor,
        table: &RopeTable,
        sequences: &[Seen],
    ) -> Result<Tensor> {
        let q = rope(&self.heads(input, "q_proj", self.config.num_attention_heads)?, table)?;
        let attended = attention_each(&q, sequences)?;
        let attended = reshape(&attended, (state.dim(0)?, self.config.query_size()))?;
        let start = if self.config.norm_before_residual {
            self.weights.norm(state, "midlayer.hidden_norm")?
        } else {
            state.clone()
        };
        let output = "midlayer.self_attn.o_proj";
        let residual = self.weights.project_onto(&start, &attended, output)?;
        let normed = self.weights.norm(&residual, "midlayer.post_attention_layernorm")?;
        self.weights.mlp_onto(&residual, &normed, "midlayer.mlp")
    }

    /// What the head reads: `RMS_norm(h)`.
    ///
    /// # Shapes
    /// - `[T, H]` → `[T, H]`
    ///
    /// # Errors
    /// - the width differs
    pub fn head_input(&self, hidden: &Tensor) -> Result<Tensor> {
        self.weights.norm(hidden, "norm")
    }

    /// What the next step reads: `h`, or `RMS_norm(h)` with `norm_output`.
    ///
    /// # Shapes
    /// - `[T, H]` → `[T, H]`
    ///
    /// # Errors
    /// - the width differs
    pub fn fed_back(&self, hidden: &Tensor) -> Result<Tensor> {
        if self.config.norm_output { self.head_input(hidden) } else { Ok(hidden.clone()) }
    }

    /// Cos and sin for tokens at `positions` of documents of `lengths` tokens.
    ///
    /// # Errors
    /// - the tables cannot be made
    pub fn rope_table(&self, positions: &[u32], lengths: &[u32]) -> Result<RopeTable> {
        let device = self.embedding.device();
        let Some(factor) = self.config.dynamic_ntk else {
            return Ok(self.rope.table(positions, device)?);
        };
        let mut tables = Vec::new();
        let mut start = 0;
        for run in lengths.chunk_by(|a, b| a == b) {
            let positions = &positions[start..start + run.len()];
            start += run.len();
            tables.push(self.dynamic_rope(factor, run[0])?.table(positions, device)?);
        }
        Ok(RopeTable::concatenated(&tables)?)
    }

    /// `θ' = θ (s·n/m − (s − 1))^{D/(D−2)}` for documents of `n > m` tokens, `m` the context.
    fn dynamic_rope(&self, factor: f64, length: u32) -> Result<Rope> {
        let ratio = f64::from(length) / self.config.max_position_embeddings as f64;
        if ratio <= 1.0 {
            return Ok(self.rope.clone());
        }
        let dim = self.config.head_dim as f64;
        let growth = (factor * ratio - (factor - 1.0)).powf(dim / (dim - 2.0));
        let theta = self.config.rope.theta * growth;
        Ok(Rope::new(self.config.head_dim, theta, RopeScaling::None)?)
    }
}
