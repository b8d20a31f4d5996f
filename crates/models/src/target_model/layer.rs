//! One decoder layer.

mod projections;
mod sizes;
mod tensors;

use std::sync::Arc;

use candle_core::{DType, Tensor};
use longdraft_kernels::attention::{KeyRanges, Scores, attention, frozen_attention};
use longdraft_kernels::dispatch::inner_type;
use longdraft_kernels::rms_norm::{rms_norm, rms_norm_as};
use longdraft_kernels::rope::rope;

use super::cache::KvCache;
use super::features::KeyValues;
use super::feed_forward::FeedForward;
use super::latent::Latent;
use super::names::Norms;
use super::pass::{Angles, Visible};
use super::per_layer::LayerEnd;
use super::recurrent::{Recurrent, Rule, of_documents};
use super::sequence_parallel::RowPart;
use super::tensor_parallel::LayerShare;
use crate::config::{NormPlaces, QkNorm};
use crate::error::{Result, refused};

pub(super) use projections::Attention;
pub(super) use sizes::LayerSizes;

/// What the tokens of a forward pass attend to.
pub(super) enum Context<'a> {
    /// Themselves, within their documents, whose ids these are.
    Packed(Visible, &'a [i32]),
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
    /// Whether no more than the last row is taken back.
    pub(super) is_text: bool,
    /// The cache's length on the device, for kernels that write there; the whole cache is read then.
    pub(super) place: Option<Arc<Tensor>>,
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
        let (k, v) = if let Some(owner) = layer.sizes.keys_owner {
            self.cache.appended(owner, self.rows)?
        } else {
            let (k, v) = (own(&heads.k)?, own(&heads.v)?);
            match &self.place {
                Some(place) => self.cache.append_at(index, (&k, &v), place)?,
                None => self.cache.append(index, &k, &v)?,
            }
        };
        let first = self.cache.first_held_by(layer.sizes.keys_owner.unwrap_or(index));
        let ranges = self.visible.held(layer.sizes.slides, first);
        layer.scored([&own(&heads.q)?, &k, &v], ranges)
    }
}

/// Rotated queries and keys, and values: `[T, N, D]`, `[T, K, D]`, `[T, K, D]`, `N` and `K` being this
/// rank's heads where ranks share the layer. They are f32, or of [`DecoderLayer::inner_type`].
#[derive(Clone)]
pub(super) struct Heads {
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    /// Keys before rotary embedding.
    pub(super) unrotated_k: Tensor,
    pub(super) v: Tensor,
    /// What outputs are multiplied by the logistic of, `[T, N·D]`.
    pub(super) gate: Option<Tensor>,
}

/// What mixes the tokens of a layer.
pub(super) enum Mixer {
    Attention(Attention),
    /// Over latent rows.
    Latent(Box<Latent>),
    Recurrent(Recurrent, Arc<Rule>),
}

pub(super) struct DecoderLayer {
    /// `[H]` each.
    pub(super) norms: Norms<Tensor>,
    pub(super) norm_places: NormPlaces,
    pub(super) mixer: Mixer,
    pub(super) feed_forward: FeedForward,
    pub(super) end: LayerEnd,
    pub(super) sizes: LayerSizes,
    /// What this rank holds of it.
    pub(super) share: LayerShare,
}

/// What heads attended to side by side, `[T, N·D]`, times the logistic of the gate where there is one.
fn gated(attended: &Tensor, heads: &Heads) -> Result<Tensor> {
    let attended = attended.flatten_from(1)?;
    Ok(match &heads.gate {
        Some(gate) => (attended * (gate.neg()?.exp()? + 1.0)?.recip()?)?,
        None => attended,
    })
}

impl DecoderLayer {
    fn scored(&self, [q, k, v]: [&Tensor; 3], ranges: &Arc<KeyRanges>) -> Result<Tensor> {
        let sinks = match &self.mixer {
            Mixer::Attention(own) => own.sinks.as_ref(),
            Mixer::Latent(_) | Mixer::Recurrent(..) => None,
        };
        let scores = Scores { softcap: self.sizes.softcap, sinks };
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

    /// The type in which the layer attends, from the stream `hidden`: bf16 where many rows are multiplied in it.
    pub(super) fn inner_type(&self, hidden: &Tensor) -> DType {
        match &self.mixer {
            Mixer::Attention(own) if self.sizes.half_heads && own.takes_halves() => {
                inner_type(hidden)
            }
            _ => hidden.dtype(),
        }
    }

    /// First half of a layer that attends: norm, projections, rotary embedding. `hidden`: `[T, H]`. A layer
    /// with a state has no heads; one that reads an earlier layer's keys takes those of `shared`. Heads are of `dtype`:
    /// that of `hidden`, or [`Self::inner_type`].
    pub(super) fn project(
        &self,
        (hidden, dtype): (&Tensor, DType),
        angles: &Angles,
        shared: Option<&Heads>,
    ) -> Result<Option<Heads>> {
        let normed = || self.normed_as(hidden, self.norms.before_attention.as_ref(), dtype);
        match &self.mixer {
            Mixer::Attention(own) => self.heads(own, &normed()?, angles, shared).map(Some),
            Mixer::Latent(own) => {
                let mut heads = own.project(&normed()?, angles.of(self.sizes.slides))?;
                if let Some(factor) = self.sizes.query_factor {
                    heads.q = (heads.q * factor)?;
                }
                Ok(Some(heads))
            }
            Mixer::Recurrent(..) => Ok(None),
        }
    }

    /// Heads of normed states, `[T, H]`.
    fn heads(
        &self,
        own: &Attention,
        normed: &Tensor,
        angles: &Angles,
        shared: Option<&Heads>,
    ) -> Result<Heads> {
        let LayerSizes { heads, kv_heads, head_dim, .. } = self.sizes;
        let tokens = normed.dim(0)?;
        let (q, kv) = own.project(normed)?;
        let gate = own.gate.as_ref().map(|gate| gate.apply(normed)).transpose()?;
        let norms = own.qk_norm.as_ref();
        let q = self.normed_heads(&q, heads, norms.map(|(q_norm, _)| q_norm))?;
        let mut q = self.rotated(&q, angles)?;
        if let Some(factor) = self.sizes.query_factor {
            q = (q * factor)?;
        }
        if let Some(growth) = angles.query_growth.as_ref().filter(|_| self.sizes.grows) {
            q = q.broadcast_mul(growth)?;
        }
        let Some((k, v)) = kv else {
            let Some(Heads { k, unrotated_k, v, .. }) = shared else {
                return Err(refused("keys of an earlier layer that did not run"));
            };
            let (k, unrotated_k, v) = (k.clone(), unrotated_k.clone(), v.clone());
            return Ok(Heads { q, k, unrotated_k, v, gate });
        };
        let mut v = v.unwrap_or_else(|| k.clone()).reshape((tokens, kv_heads, head_dim))?;
        let k = self.normed_heads(&k, kv_heads, norms.and_then(|(_, k_norm)| k_norm.as_ref()))?;
        if let Some(ones) = &own.v_norm {
            v = rms_norm(&v, ones, self.sizes.eps)?;
        }
        Ok(Heads { q, k: self.rotated(&k, angles)?, unrotated_k: k, v, gate })
    }

    /// Queries or keys `[T, N·D]` as heads `[T, N, D]`, normed as the family does.
    fn normed_heads(&self, all: &Tensor, heads: usize, norm: Option<&Tensor>) -> Result<Tensor> {
        let LayerSizes { head_dim, eps, qk_norm, still, .. } = self.sizes;
        let shape = (all.dim(0)?, heads, head_dim);
        Ok(match (qk_norm, norm) {
            (QkNorm::Whole, Some(norm)) => rms_norm(all, norm, eps)?.reshape(shape)?,
            (QkNorm::PerHead, Some(norm)) => rms_norm(&all.reshape(shape)?, norm, eps)?,
            (QkNorm::Unweighted, _) if !still => {
                let ones = Tensor::ones(head_dim, DType::F32, all.device())?;
                rms_norm(&all.reshape(shape)?, &ones, eps)?
            }
            _ => all.reshape(shape)?,
        })
    }

    /// The stream as a norm leaves it, or as it is.
    fn normed(&self, hidden: &Tensor, norm: Option<&Tensor>) -> Result<Tensor> {
        self.normed_as(hidden, norm, hidden.dtype())
    }

    /// The same in a type.
    fn normed_as(&self, hidden: &Tensor, norm: Option<&Tensor>, dtype: DType) -> Result<Tensor> {
        Ok(match norm {
            Some(norm) => rms_norm_as(hidden, norm, self.sizes.eps, dtype)?,
            None => hidden.to_dtype(dtype)?,
        })
    }

    /// Keys and values of all heads, whichever rank holds them, and the keys before rotary embedding.
    /// The ranks that share the layer all call it.
    pub(super) fn all_heads(&self, heads: &Heads, angles: &Angles) -> Result<(KeyValues, Tensor)> {
        if let Mixer::Latent(own) = &self.mixer {
            return Ok((own.expanded(&heads.k)?, heads.unrotated_k.clone()));
        }
        if self.share.size() == 1 {
            let kv = KeyValues { k: heads.k.clone(), v: heads.v.clone() };
            return Ok((kv, heads.unrotated_k.clone()));
        }
        let unrotated = self.share.whole(&heads.unrotated_k, 1)?;
        let v = self.share.whole(&heads.v, 1)?;
        Ok((KeyValues { k: self.rotated(&unrotated, angles)?, v }, unrotated))
    }

    /// Second half: attention or a state, output projection, feed-forward, with both residual additions. The ranks
    /// that share the layer sum their parts after either projection.
    pub(super) fn finish(
        &self,
        hidden: &Tensor,
        heads: Option<&Heads>,
        index: usize,
        context: &mut Context<'_>,
    ) -> Result<Tensor> {
        let Norms { after_attention, before_feed_forward, after_feed_forward, .. } = &self.norms;
        let hidden = match (&self.mixer, heads) {
            (Mixer::Attention(own), Some(heads)) => {
                let attended = gated(&self.attend(heads, index, context)?, heads)?;
                self.onto(hidden, after_attention.as_ref(), |sum| {
                    own.o_proj.apply_onto(sum, &attended)
                })?
            }
            (Mixer::Latent(own), Some(heads)) => {
                let attended = own.values(&self.attend(heads, index, context)?)?;
                self.onto(hidden, after_attention.as_ref(), |sum| {
                    own.o_proj.apply_onto(sum, &attended)
                })?
            }
            (Mixer::Recurrent(own, rule), _) => self.recur((own, rule), hidden, index, context)?,
            (Mixer::Attention(_) | Mixer::Latent(_), None) => {
                return Err(refused("attention without heads"));
            }
        };
        let dtype = self.feed_forward.inner_type(&hidden);
        let normed = self.normed_as(&hidden, before_feed_forward.as_ref(), dtype)?;
        let adds = after_feed_forward.is_none() && self.sizes.residual_scale.is_none();
        // The sum was made above: nobody else has it.
        if let FeedForward::Dense(mlp) = &self.feed_forward
            && adds
            && self.share.size() == 1
            && mlp.add_to(&hidden, &normed)?
        {
            return Ok(hidden);
        }
        self.onto(&hidden, after_feed_forward.as_ref(), |sum| {
            self.feed_forward.apply_onto(sum, &normed, &hidden)
        })
    }

    /// What heads attend to, `[T, N, D]`.
    fn attend(&self, heads: &Heads, index: usize, context: &Context<'_>) -> Result<Tensor> {
        match context {
            Context::Packed(visible, _) | Context::Part(_, visible) => {
                let ranges = visible.of(self.sizes.slides);
                self.scored([&heads.q, &heads.k, &heads.v], ranges)
            }
            Context::Cached(sequences) => {
                let mut first = 0;
                let mut attended = Vec::with_capacity(sequences.len());
                for sequence in sequences {
                    attended.push(sequence.attend((index, self), heads, first)?);
                    first += sequence.rows;
                }
                Ok(if attended.len() == 1 {
                    attended.remove(0)
                } else {
                    Tensor::cat(&attended, 0)?
                })
            }
        }
    }

    /// `hidden` plus the output of a layer with a state.
    fn recur(
        &self,
        (own, rule): (&Recurrent, &Rule),
        hidden: &Tensor,
        index: usize,
        context: &mut Context<'_>,
    ) -> Result<Tensor> {
        let normed = self.normed(hidden, self.norms.before_attention.as_ref())?;
        let inputs = own.inputs(&normed)?;
        let mixed = match context {
            Context::Packed(_, document_ids) => of_documents(rule, &inputs.rows, document_ids)?,
            Context::Part(..) => {
                return Err(refused(
                    "ranks do not share the rows of layers with a recurrent state",
                ));
            }
            Context::Cached(sequences) => {
                let (mut first, mut mixed) = (0, Vec::new());
                for Appended { cache, rows, is_text, .. } in sequences.iter_mut() {
                    let of_sequence: Vec<usize> = (first..first + *rows).collect();
                    let inputs = rule.select(&inputs.rows, &of_sequence);
                    mixed.extend(cache.step(index, inputs, *is_text)?);
                    first += *rows;
                }
                mixed
            }
        };
        self.onto(hidden, self.norms.after_attention.as_ref(), |sum| {
            own.apply_onto(sum, mixed, inputs.gate())
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
}
