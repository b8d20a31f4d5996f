//! Forward pass of the GLIDE layer.

use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::attention::KeyRanges;
use longdraft_kernels::graph::{add, reshape};
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_kernels::rope::{RopeTable, rope};

use super::config::{FinalNorm, GlideConfig};
use crate::draft::seen::{Seen, attention_each};
use crate::draft::{Draft, DraftWeights, VocabularyMap};
use crate::error::{Result, refused};
use crate::target_model::{KeyValues, Tap};

/// Named intermediate values, `[T, H]` each, for comparison with reference cases.
pub type Trace = Vec<(&'static str, Tensor)>;

/// The target's keys and values and which of them each token may see.
#[derive(Debug, Clone)]
pub struct CrossContext<'a> {
    /// Last-layer keys and values.
    pub last_kv: &'a KeyValues,
    /// Keys up to `t − δ_t` of the token's document.
    pub ranges: Arc<KeyRanges>,
}

/// The trainable layer.
pub struct GlideDraft {
    pub(super) config: GlideConfig,
    pub(super) weights: DraftWeights,
    /// The target's frozen final norm `[H]`, with `final_norm: target`.
    pub(super) target_norm: Option<Tensor>,
}

impl Draft for GlideDraft {
    fn method(&self) -> &'static str {
        super::KIND.name
    }

    fn taps(&self) -> Vec<Tap> {
        vec![Tap::LastKv]
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        None
    }

    fn most_frequent(&self) -> Option<usize> {
        self.config.draft_vocab_size
    }

    fn weights(&self) -> &DraftWeights {
        &self.weights
    }

    fn weights_mut(&mut self) -> &mut DraftWeights {
        &mut self.weights
    }

    fn config_json(&self) -> serde_json::Value {
        serde_json::to_value(&self.config).unwrap_or_default()
    }
}

impl GlideDraft {
    /// Sizes and modes.
    pub fn config(&self) -> &GlideConfig {
        &self.config
    }

    fn heads(&self, x: &Tensor, module: &str, count: usize) -> Result<Tensor> {
        self.weights.heads(x, module, count, self.config.head_dim)
    }

    /// Rotated keys, and values, of the draft's own self-attention: all that a prompt needs before
    /// drafting. They depend on token embeddings and positions only.
    ///
    /// # Shapes
    /// - `embeddings`: `[T, H]`, `table` over the same tokens → `[T, K, D]` each
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn self_kv(&self, embeddings: &Tensor, table: &RopeTable) -> Result<KeyValues> {
        self.kv_of(&self.weights.norm(embeddings, "input_layernorm")?, table)
    }

    fn kv_of(&self, normed: &Tensor, table: &RopeTable) -> Result<KeyValues> {
        let kv_heads = self.config.num_key_value_heads;
        let k = rope(&self.heads(normed, "self_attn.k_proj", kv_heads)?, table)?;
        let v = self.heads(normed, "self_attn.v_proj", kv_heads)?;
        Ok(KeyValues { k, v })
    }

    /// The whole layer on packed tokens; returns what the head reads.
    ///
    /// # Shapes
    /// - `embeddings`: `[T, H]`, ranges over `T` queries → `[T, H]`
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn forward(
        &self,
        embeddings: &Tensor,
        table: &RopeTable,
        self_ranges: &Arc<KeyRanges>,
        cross: &CrossContext<'_>,
        trace: &mut Trace,
    ) -> Result<Tensor> {
        let normed = self.weights.norm(embeddings, "input_layernorm")?;
        trace.push(("input_layernorm", normed.clone()));
        let keys = self.kv_of(&normed, table)?;
        let own = [Seen { keys, ranges: Arc::clone(self_ranges) }];
        let cross = [Seen { keys: cross.last_kv.clone(), ranges: Arc::clone(&cross.ranges) }];
        self.finish((embeddings, &normed), table, (&own, &cross), trace)
    }

    /// The layer for tokens whose self-attention keys are there already, their own among them, of several sequences,
    /// one after the other: the decoding step. A token's bits do not depend on the sequences beside its own.
    ///
    /// # Shapes
    /// - `embeddings`: `[T, H]`, `T` tokens of all sequences; what each sequence sees of its own keys, and of the
    ///   target's → `[T, H]`
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn forward_each(
        &self,
        embeddings: &Tensor,
        table: &RopeTable,
        seen: (&[Seen], &[Seen]),
    ) -> Result<Tensor> {
        let normed = self.weights.norm(embeddings, "input_layernorm")?;
        self.finish((embeddings, &normed), table, seen, &mut Vec::new())
    }

    fn finish(
        &self,
        (embeddings, normed): (&Tensor, &Tensor),
        table: &RopeTable,
        (own, cross): (&[Seen], &[Seen]),
        trace: &mut Trace,
    ) -> Result<Tensor> {
        let heads = self.config.num_attention_heads;
        let q = rope(&self.heads(normed, "self_attn.q_proj", heads)?, table)?;
        let attended = self.output(&attention_each(&q, own)?, "self_attn")?;
        trace.push(("self_attn", attended.clone()));
        let h1 = add(embeddings, &attended)?;

        let normed = self.weights.norm(&h1, "post_self_attention_layernorm")?;
        trace.push(("post_self_attention_layernorm", normed.clone()));
        let q = rope(&self.heads(&normed, "cross_attn.q_proj", heads)?, table)?;
        let attended = self.output(&attention_each(&q, cross)?, "cross_attn")?;
        trace.push(("cross_attn", attended.clone()));
        let h2 = add(&h1, &attended)?;

        let normed = self.weights.norm(&h2, "post_cross_attention_layernorm")?;
        trace.push(("post_cross_attention_layernorm", normed.clone()));
        let mlp = self.weights.mlp(&normed, "mlp")?;
        trace.push(("mlp", mlp.clone()));
        let h3 = add(&h2, &mlp)?;
        trace.push(("output", h3.clone()));
        match (self.config.final_norm, &self.target_norm) {
            (FinalNorm::None, _) => Ok(h3),
            (FinalNorm::Trained, _) => self.weights.norm(&h3, "final_layernorm"),
            (FinalNorm::Target, Some(weight)) => {
                Ok(rms_norm(&h3, weight, self.config.rms_norm_eps)?)
            }
            (FinalNorm::Target, None) => {
                Err(refused("`final_norm: target` without the target's norm"))
            }
        }
    }

    /// `[T, N, D]` heads through the output projection of a branch.
    fn output(&self, heads: &Tensor, branch: &str) -> Result<Tensor> {
        let flat = reshape(heads, (heads.dim(0)?, self.config.query_size()))?;
        self.weights.project(&flat, &format!("{branch}.o_proj"))
    }
}
