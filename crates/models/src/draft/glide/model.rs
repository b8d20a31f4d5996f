//! Forward pass of the GLIDE layer.

use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::attention::{KeyRanges, attention};
use longdraft_kernels::linear::linear;
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_kernels::rope::{RopeTable, rope};
use longdraft_kernels::swiglu::swiglu;

use super::config::{FinalNorm, GlideConfig};
use crate::draft::blocks::Blocks;
use crate::draft::{Draft, Parameter};
use crate::error::{ModelError, Result};
use crate::target::{LastKv, Tap};

/// Named intermediate values, `[T, H]` each, for comparison with reference cases.
pub type Trace = Vec<(&'static str, Tensor)>;

/// Rotated keys and values of the draft's own self-attention, `[T, K, D]` each. They depend on
/// token embeddings and positions only.
#[derive(Debug, Clone)]
pub struct SelfKv {
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
}

/// The target's keys and values and which of them each token may see.
#[derive(Debug, Clone)]
pub struct CrossContext<'a> {
    /// Last-layer keys and values.
    pub last_kv: &'a LastKv,
    /// Keys up to `t − δ_t` of the token's document.
    pub ranges: Arc<KeyRanges>,
}

/// The trainable layer.
pub struct GlideDraft {
    pub(super) config: GlideConfig,
    pub(super) parameters: Vec<Parameter>,
    /// The target's frozen final norm `[H]`, with `final_norm: target`.
    pub(super) target_norm: Option<Tensor>,
    pub(super) blocks: Blocks,
}

impl Draft for GlideDraft {
    fn taps(&self) -> Vec<Tap> {
        vec![Tap::LastKv]
    }

    fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    fn parameters_mut(&mut self) -> &mut [Parameter] {
        &mut self.parameters
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

    /// From now on computes with its matrices rounded to blocks of 8 bits, where they allow it:
    /// for proposing. What [`Draft::parameters`] gives stays as it is.
    ///
    /// # Errors
    /// - there is no memory for them
    pub fn hold_as_blocks(&mut self) -> Result<()> {
        self.blocks = Blocks::of(&self.parameters)?;
        Ok(())
    }

    pub(super) fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.optional(name).ok_or_else(|| {
            ModelError::Tensor(candle_core::Error::Msg(format!("the draft has no `{name}`")))
        })
    }

    fn optional(&self, name: &str) -> Option<&Tensor> {
        let parameter = self.parameters.iter().find(|p| p.name == name)?;
        Some(parameter.var.as_tensor())
    }

    fn project(&self, x: &Tensor, module: &str) -> Result<Tensor> {
        let bias = self.optional(&format!("{module}.bias"));
        let weight = format!("{module}.weight");
        match self.blocks.project(x, &weight, bias)? {
            Some(projected) => Ok(projected),
            None => Ok(linear(x, self.tensor(&weight)?, bias)?),
        }
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        Ok(rms_norm(x, self.tensor(name)?, self.config.rms_norm_eps)?)
    }

    fn heads(&self, x: &Tensor, module: &str, count: usize) -> Result<Tensor> {
        let tokens = x.dim(0)?;
        Ok(self.project(x, module)?.reshape((tokens, count, self.config.head_dim))?)
    }

    /// Keys and values of tokens, all that a prompt needs before drafting.
    ///
    /// # Shapes
    /// - `embeddings`: `[T, H]`, `table` over the same tokens → `[T, K, D]` each
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn self_kv(&self, embeddings: &Tensor, table: &RopeTable) -> Result<SelfKv> {
        self.kv_of(&self.norm(embeddings, "input_layernorm.weight")?, table)
    }

    fn kv_of(&self, normed: &Tensor, table: &RopeTable) -> Result<SelfKv> {
        let kv_heads = self.config.num_key_value_heads;
        let k = rope(&self.heads(normed, "self_attn.k_proj", kv_heads)?, table)?;
        let v = self.heads(normed, "self_attn.v_proj", kv_heads)?;
        Ok(SelfKv { k, v })
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
        let normed = self.norm(embeddings, "input_layernorm.weight")?;
        trace.push(("input_layernorm", normed.clone()));
        let own = self.kv_of(&normed, table)?;
        self.finish(embeddings, &normed, table, (&own, self_ranges), cross, trace)
    }

    /// The layer for tokens whose self-attention keys lie in a cache that already holds their
    /// own: the decoding step.
    ///
    /// # Shapes
    /// - `embeddings`: `[T, H]`, `keys`: `[S, K, D]`, ranges over `T` queries and `S` keys → `[T, H]`
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn forward_cached(
        &self,
        embeddings: &Tensor,
        table: &RopeTable,
        keys: &SelfKv,
        self_ranges: &Arc<KeyRanges>,
        cross: &CrossContext<'_>,
    ) -> Result<Tensor> {
        let normed = self.norm(embeddings, "input_layernorm.weight")?;
        self.finish(embeddings, &normed, table, (keys, self_ranges), cross, &mut Vec::new())
    }

    fn finish(
        &self,
        embeddings: &Tensor,
        normed: &Tensor,
        table: &RopeTable,
        (keys, self_ranges): (&SelfKv, &Arc<KeyRanges>),
        cross: &CrossContext<'_>,
        trace: &mut Trace,
    ) -> Result<Tensor> {
        let heads = self.config.num_attention_heads;
        let q = rope(&self.heads(normed, "self_attn.q_proj", heads)?, table)?;
        let attended = self.output(&attention(&q, &keys.k, &keys.v, self_ranges)?, "self_attn")?;
        trace.push(("self_attn", attended.clone()));
        let h1 = (embeddings + attended)?;

        let normed = self.norm(&h1, "post_self_attention_layernorm.weight")?;
        trace.push(("post_self_attention_layernorm", normed.clone()));
        let q = rope(&self.heads(&normed, "cross_attn.q_proj", heads)?, table)?;
        let LastKv { k, v } = cross.last_kv;
        let attended = self.output(&attention(&q, k, v, &cross.ranges)?, "cross_attn")?;
        trace.push(("cross_attn", attended.clone()));
        let h2 = (h1 + attended)?;

        let normed = self.norm(&h2, "post_cross_attention_layernorm.weight")?;
        trace.push(("post_cross_attention_layernorm", normed.clone()));
        let gate = self.project(&normed, "mlp.gate_proj")?;
        let gated = swiglu(&gate, &self.project(&normed, "mlp.up_proj")?)?;
        let mlp = self.project(&gated, "mlp.down_proj")?;
        trace.push(("mlp", mlp.clone()));
        let h3 = (h2 + mlp)?;
        trace.push(("output", h3.clone()));
        match (self.config.final_norm, &self.target_norm) {
            (FinalNorm::None, _) => Ok(h3),
            (FinalNorm::Trained, _) => self.norm(&h3, "final_layernorm.weight"),
            (FinalNorm::Target, Some(weight)) => {
                Ok(rms_norm(&h3, weight, self.config.rms_norm_eps)?)
            }
            (FinalNorm::Target, None) => Err(ModelError::Tensor(candle_core::Error::Msg(
                "`final_norm: target` without the target's norm".into(),
            ))),
        }
    }

    /// `[T, N, D]` heads through the output projection of a branch.
    fn output(&self, heads: &Tensor, branch: &str) -> Result<Tensor> {
        let flat = heads.reshape((heads.dim(0)?, self.config.query_size()))?;
        self.project(&flat, &format!("{branch}.o_proj"))
    }
}
