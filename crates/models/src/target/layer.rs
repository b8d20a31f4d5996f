//! One decoder layer.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use longdraft_kernels::attention::{KeyRanges, Scores, attention, frozen_attention};
use longdraft_kernels::matrix::linear_each;
use longdraft_kernels::rms_norm::rms_norm;
use longdraft_kernels::rope::rope;

use super::cache::KvCache;
use super::features::KeyValues;
use super::feed_forward::{FeedForward, Projection};
use super::names::{self, Norms};
use super::part::RowPart;
use super::pass::{Angles, Visible};
use super::tensor::LayerShare;
use crate::config::{NormPlaces, QkNorm, TargetConfig};
use crate::error::Result;

/// What the tokens of a forward pass attend to.
pub(super) enum Context<'a> {
    /// Themselves, within their documents.
    Packed(Visible),
    /// Those of a whole row, of which this rank runs a part.
    Part(RowPart, Visible),
    /// Caches of sequences whose rows stand one after the other.
    Cached(Vec<Appended<'a>>),
}

/// Rows that are appended to one sequence; they see its cache and some of each other.
pub(super) struct Appended<'a> {
    pub(super) cache: &'a mut KvCache,
    pub(super) visible: Visible,
    pub(super) rows: usize,
}

impl Appended<'_> {
    /// Attention of these rows, from `first` on of all rows.
    fn attend(
        &self,
        (index, layer): (usize, &DecoderLayer),
        heads: &Heads,
        first: usize,
    ) -> Result<Tensor> {
        let own = |tensor: &Tensor| tensor.narrow(0, first, self.rows);
        let (k, v) = self.cache.append(index, &own(&heads.k)?, &own(&heads.v)?)?;
        layer.attend([&own(&heads.q)?, &k, &v], self.visible.of(layer.sizes.slides))
    }
}

/// Rotated queries and keys, and values: `[T, N, D]`, `[T, K, D]`, `[T, K, D]`, `N` and `K` being this
/// rank's heads where ranks share the layer.
pub(super) struct Heads {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    /// Keys before rotary embedding.
    pub(super) unrotated_k: Tensor,
    pub(super) v: Tensor,
}

pub(super) struct DecoderLayer {
    /// `[H]` each.
    pub(super) norms: Norms<Tensor>,
    pub(super) norm_places: NormPlaces,
    pub(super) q_proj: Projection,
    pub(super) k_proj: Projection,
    pub(super) v_proj: Projection,
    pub(super) o_proj: Projection,
    /// Norms of queries and keys, `[D]`, or `[N·D]` and `[K·D]`.
    pub(super) qk_norm: Option<(Tensor, Tensor)>,
    /// Logits of the heads without values, `[N]`.
    pub(super) sinks: Option<Tensor>,
    pub(super) feed_forward: FeedForward,
    pub(super) sizes: LayerSizes,
    /// What this rank holds of it.
    pub(super) share: LayerShare,
}

/// The sizes and switches that a layer needs at run time.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerSizes {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f64,
    /// Whether tokens see a window only.
    slides: bool,
    /// Factor of queries where scores are scaled by something else than `1/√D`.
    query_factor: Option<f64>,
    /// Where scores are bent.
    softcap: Option<f64>,
    /// What norms of queries and keys reach over.
    qk_norm: QkNorm,
    /// Whether there is no rotary embedding.
    still: bool,
    /// Whether queries grow with their position.
    grows: bool,
    /// Factor of what is added to the stream.
    residual_scale: Option<f64>,
}

impl LayerSizes {
    pub(super) fn new(config: &TargetConfig, index: usize, share: &LayerShare) -> Self {
        Self {
            slides: config.window_of(index).is_some(),
            query_factor: config.parts.query_factor(config.head_dim),
            softcap: config.parts.attention_softcap,
            qk_norm: config.qk_norm(),
            still: config.parts.is_still(index),
            grows: config
                .parts
                .query_growth
                .is_some_and(|growth| !growth.only_still || config.parts.is_still(index)),
            residual_scale: config.parts.residual_scale,
            heads: config.num_attention_heads / share.size(),
            kv_heads: config.num_key_value_heads / share.size(),
            head_dim: config.head_dim,
            eps: config.rms_norm_eps,
        }
    }
}

impl DecoderLayer {
    fn attend(&self, [q, k, v]: [&Tensor; 3], ranges: &Arc<KeyRanges>) -> Result<Tensor> {
        let scores = Scores { softcap: self.sizes.softcap, sinks: self.sinks.as_ref() };
        Ok(match scores {
            Scores { softcap: None, sinks: None } => attention(q, k, v, ranges)?,
            bent => frozen_attention(q, k, v, ranges, bent)?,
        })
    }

    /// Heads turned by their tokens' angles, if the layer turns any.
    fn rotated(&self, heads: &Tensor, angles: &Angles) -> Result<Tensor> {
        if self.sizes.still {
            return Ok(heads.clone());
        }
        Ok(rope(heads, angles.of(self.sizes.slides))?)
    }

    /// First half: norm, projections, rotary embedding. `hidden`: `[T, H]`.
    pub(super) fn project(&self, hidden: &Tensor, angles: &Angles) -> Result<Heads> {
        let LayerSizes { heads, kv_heads, head_dim, eps, qk_norm, .. } = self.sizes;
        let tokens = hidden.dim(0)?;
        let normed = self.normed(hidden, self.norms.before_attention.as_ref())?;
        let maps = [self.q_proj.map(), self.k_proj.map(), self.v_proj.map()];
        let [mut q, mut k, v] = linear_each(&normed, maps)?;
        if let (QkNorm::Whole, Some((q_norm, k_norm))) = (qk_norm, &self.qk_norm) {
            q = rms_norm(&q, q_norm, eps)?;
            k = rms_norm(&k, k_norm, eps)?;
        }
        let mut q = q.reshape((tokens, heads, head_dim))?;
        let mut k = k.reshape((tokens, kv_heads, head_dim))?;
        let v = v.reshape((tokens, kv_heads, head_dim))?;
        match (qk_norm, &self.qk_norm) {
            (QkNorm::PerHead, Some((q_norm, k_norm))) => {
                (q, k) = (rms_norm(&q, q_norm, eps)?, rms_norm(&k, k_norm, eps)?);
            }
            (QkNorm::Unweighted, _) if !self.sizes.still => {
                let ones = Tensor::ones(head_dim, DType::F32, hidden.device())?;
                (q, k) = (rms_norm(&q, &ones, eps)?, rms_norm(&k, &ones, eps)?);
            }
            _ => {}
        }
        let mut q = self.rotated(&q, angles)?;
        if let Some(factor) = self.sizes.query_factor {
            q = (q * factor)?;
        }
        if let Some(growth) = angles.query_growth.as_ref().filter(|_| self.sizes.grows) {
            q = q.broadcast_mul(growth)?;
        }
        Ok(Heads { q, k: self.rotated(&k, angles)?, unrotated_k: k, v })
    }

    /// The stream as a norm leaves it, or as it is.
    fn normed(&self, hidden: &Tensor, norm: Option<&Tensor>) -> Result<Tensor> {
        Ok(match norm {
            Some(norm) => rms_norm(hidden, norm, self.sizes.eps)?,
            None => hidden.clone(),
        })
    }

    /// Keys and values of all heads, whichever rank holds them, and the keys before rotary embedding.
    /// The ranks that share the layer all call it.
    pub(super) fn all_heads(&self, heads: &Heads, angles: &Angles) -> Result<(KeyValues, Tensor)> {
        if self.share.size() == 1 {
            let kv = KeyValues { k: heads.k.clone(), v: heads.v.clone() };
            return Ok((kv, heads.unrotated_k.clone()));
        }
        let unrotated = self.share.whole(&heads.unrotated_k, 1)?;
        let v = self.share.whole(&heads.v, 1)?;
        Ok((KeyValues { k: self.rotated(&unrotated, angles)?, v }, unrotated))
    }

    /// Second half: attention, output projection, feed-forward, with both residual additions. The ranks
    /// that share the layer sum their parts after either projection.
    pub(super) fn finish(
        &self,
        hidden: &Tensor,
        heads: &Heads,
        index: usize,
        context: &Context<'_>,
    ) -> Result<Tensor> {
        let LayerSizes { heads: count, head_dim, .. } = self.sizes;
        let tokens = hidden.dim(0)?;
        let attended = match context {
            Context::Packed(visible) | Context::Part(_, visible) => {
                let ranges = visible.of(self.sizes.slides);
                self.attend([&heads.q, &heads.k, &heads.v], ranges)?
            }
            Context::Cached(sequences) => {
                let mut first = 0;
                let mut attended = Vec::with_capacity(sequences.len());
                for sequence in sequences {
                    attended.push(sequence.attend((index, self), heads, first)?);
                    first += sequence.rows;
                }
                if attended.len() == 1 { attended.remove(0) } else { Tensor::cat(&attended, 0)? }
            }
        };
        let attended = attended.reshape((tokens, count * head_dim))?;
        let Norms { after_attention, before_feed_forward, after_feed_forward, .. } = &self.norms;
        let hidden = self
            .onto(hidden, after_attention.as_ref(), |sum| self.o_proj.apply_onto(sum, &attended))?;
        let normed = self.normed(&hidden, before_feed_forward.as_ref())?;
        self.onto(&hidden, after_feed_forward.as_ref(), |sum| {
            self.feed_forward.apply_onto(sum, &normed)
        })
    }

    /// `residual` plus what every rank's part adds to the sum that it is given, normed and scaled first where
    /// the family does so.
    fn onto(
        &self,
        residual: &Tensor,
        norm: Option<&Tensor>,
        part: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let scale = self.sizes.residual_scale;
        if norm.is_none() && scale.is_none() {
            return self.share.onto(residual, part);
        }
        let sum = self.share.onto(&residual.zeros_like()?, part)?;
        let sum = self.normed(&sum, norm)?;
        Ok(match scale {
            Some(scale) => (residual + (sum * scale)?)?,
            None => (residual + sum)?,
        })
    }

    /// Tensors by published name (norms as they multiply, whatever the file holds), without the layer's prefix; quantised ones widened to f32. Of a
    /// mixture of experts only what is not the experts'. The ranks that share the layer all call it.
    pub(super) fn tensors(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let names = names::norms(self.norm_places);
        let mut tensors: Vec<_> = names.all().copied().zip(self.norms.all().cloned()).collect();
        let mut by_outputs = vec![
            ("self_attn.q_proj.weight", "self_attn.q_proj.bias", &self.q_proj),
            ("self_attn.k_proj.weight", "self_attn.k_proj.bias", &self.k_proj),
            ("self_attn.v_proj.weight", "self_attn.v_proj.bias", &self.v_proj),
        ];
        let mut by_inputs =
            vec![("self_attn.o_proj.weight", "self_attn.o_proj.bias", &self.o_proj)];
        if let Some(mlp) = self.feed_forward.dense() {
            by_outputs.extend([
                ("mlp.gate_proj.weight", "mlp.gate_proj.bias", &mlp.gate),
                ("mlp.up_proj.weight", "mlp.up_proj.bias", &mlp.up),
            ]);
            by_inputs.push(("mlp.down_proj.weight", "mlp.down_proj.bias", &mlp.down));
        }
        let share = &self.share;
        for (weight, bias, projection) in by_outputs {
            tensors.push((weight, share.whole(&projection.weight.to_dense()?, 0)?));
            if let Some(values) = &projection.bias {
                tensors.push((bias, share.whole(values, 0)?));
            }
        }
        for (weight, bias, projection) in by_inputs {
            tensors.push((weight, share.whole(&projection.weight.to_dense()?, 1)?));
            if let Some(values) = &projection.bias {
                tensors.push((bias, share.sum(values.clone())?));
            }
        }
        let qk_norm = self.qk_norm.as_ref().filter(|_| self.sizes.qk_norm == QkNorm::PerHead);
        if let Some((q_norm, k_norm)) = qk_norm {
            let [q_name, k_name] = names::QK_NORMS;
            tensors.extend([(q_name, q_norm.clone()), (k_name, k_norm.clone())]);
        }
        Ok(tensors)
    }
}
