//! Attention from tensor ops on any device, queries in blocks: nothing of size `[Tq, Tk]` exists.
//!
//! A block's scores reach from its first to its last visible key; single keys are gathered beside
//! them. Everything is computed in f32. The backward pass forms a block's weights again, as the
//! fused version does.

mod singles;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor};

use super::{KeyRanges, Scores};
use crate::composed::FULL_ROWS;
use crate::graph::differentiable;
use singles::{Singles, by_query, by_query_back, scattered};

/// Most queries of a block.
const BLOCK_QUERIES: usize = 1024;
/// Fewest, however many keys they see.
const SMALLEST_BLOCK: usize = 16;

/// As [`super::attention`], on any device, with at most so many scores at a time. Where these are bent or sinks take
/// part, there are no gradients.
pub(super) fn within(
    room: usize,
    [q, k, v]: [&Tensor; 3],
    ranges: &Arc<KeyRanges>,
    scores: Scores<'_>,
) -> Result<Tensor> {
    super::check_shapes(q, k, v, ranges)?;
    let dtype = q.dtype();
    let wide = |t: &Tensor| t.to_dtype(DType::F32);
    let (q, k, v) = (wide(q)?, wide(k)?, wide(v)?);
    let tracked = [&q, &k, &v].iter().any(|t| t.track_op());
    let queries = q.dim(0)?;
    let sinks = scores.sinks.map(wide).transpose()?;
    let call = Call { softcap: scores.softcap, sinks, ..Call::new(room, &q, &k, &v, ranges)? };
    if !tracked && (1..FULL_ROWS).contains(&queries) {
        let filled = q.pad_with_zeros(0, 0, FULL_ROWS - queries)?;
        let call = Call { q: filled, ranges: Arc::new(ranges.filled_up(FULL_ROWS)), ..call };
        return call.forward()?.narrow(0, 0, queries)?.contiguous()?.to_dtype(dtype);
    }
    let out = call.forward()?;
    let result = out.clone();
    let wanted = [q.track_op(), k.track_op() || v.track_op()];
    let node = differentiable("attention", [&q, &k, &v], out, move |gradient| {
        call.backward(&result, gradient, wanted)
    })?;
    node.to_dtype(dtype)
}

/// One call's arguments, detached and in f32.
struct Call {
    /// Most scores at a time.
    scores: usize,
    /// `[Tq, N, D]`
    q: Tensor,
    /// `[K, Tk, D]`
    k: Tensor,
    /// `[K, Tk, D]`
    v: Tensor,
    ranges: Arc<KeyRanges>,
    /// Where scores are bent; forward only, as the next.
    softcap: Option<f64>,
    /// Logits without values, `[N]`.
    sinks: Option<Tensor>,
}

/// A block's factors: `weights` are the normalised probabilities.
struct Block {
    /// Scaled by `1/√D`, `[K, G, B, D]`.
    q: Tensor,
    /// First and last visible key, and the weights of those between, `[K, G, B, keys]`.
    range: Option<(Range<usize>, Tensor)>,
    singles: Option<Singles>,
}

impl Call {
    fn new(
        scores: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        ranges: &Arc<KeyRanges>,
    ) -> Result<Self> {
        let by_head = |t: &Tensor| t.detach().transpose(0, 1)?.contiguous();
        let (k, v) = (by_head(k)?, by_head(v)?);
        let (q, ranges) = (q.detach().contiguous()?, Arc::clone(ranges));
        Ok(Self { scores, q, k, v, ranges, softcap: None, sinks: None })
    }

    /// `K`, `G`, `D`
    fn sizes(&self) -> Result<(usize, usize, usize)> {
        let (_, heads, head_dim) = self.q.dims3()?;
        let kv_heads = self.k.dim(0)?;
        Ok((kv_heads, heads / kv_heads, head_dim))
    }

    /// Blocks of queries whose scores fit the budget.
    fn blocks(&self) -> Result<Vec<Range<usize>>> {
        let (queries, heads, _) = self.q.dims3()?;
        let mut blocks = Vec::new();
        let mut first = 0;
        while first < queries {
            let mut count = BLOCK_QUERIES.min(queries - first);
            while count > SMALLEST_BLOCK
                && heads * count * self.ranges.hull(first..first + count).len() > self.scores
            {
                count = count.div_ceil(2);
            }
            blocks.push(first..first + count);
            first += count;
        }
        Ok(blocks)
    }

    /// Rows of `[Tq, N, D]` by head, `[K, G, B, D]`.
    fn by_head(&self, rows: &Tensor, block: &Range<usize>) -> Result<Tensor> {
        let (kv_heads, group, head_dim) = self.sizes()?;
        rows.narrow(0, block.start, block.len())?
            .reshape((block.len(), kv_heads, group, head_dim))?
            .permute((1, 2, 0, 3))?
            .contiguous()
    }

    /// The way back, `[B, N, D]`.
    fn by_token(&self, rows: &Tensor) -> Result<Tensor> {
        let (kv_heads, group, head_dim) = self.sizes()?;
        let rows = rows.permute((2, 0, 1, 3))?.contiguous()?;
        rows.reshape((rows.dim(0)?, kv_heads * group, head_dim))
    }

    fn capped(&self, scores: Tensor) -> Result<Tensor> {
        match self.softcap {
            Some(softcap) => (scores / softcap)?.tanh()? * softcap,
            None => Ok(scores),
        }
    }

    fn weigh(&self, block: &Range<usize>) -> Result<Block> {
        let (kv_heads, group, head_dim) = self.sizes()?;
        let queries = block.len();
        let q = (self.by_head(&self.q, block)? / (head_dim as f64).sqrt())?;
        let hull = self.ranges.hull(block.clone());
        let range = if hull.is_empty() {
            None
        } else {
            let keys = self.k.narrow(1, hull.start, hull.len())?;
            let scores = folded(&q)?.matmul(&keys.transpose(1, 2)?)?;
            let scores = self.capped(scores.reshape((kv_heads, group, queries, hull.len()))?)?;
            Some((scores, visible_in(&self.ranges, block, &hull, self.q.device())?))
        };
        let singles = self.gather(block)?;
        let of_singles = match &singles {
            None => None,
            Some((k, _, present)) => {
                let scores = by_query(&q)?.matmul(&k.flatten(0, 1)?.transpose(1, 2)?)?;
                let count = k.dim(2)?;
                let scores = self.capped(scores.reshape((kv_heads, queries, group, count))?)?;
                Some((scores.transpose(1, 2)?.contiguous()?, present.clone()))
            }
        };
        let sinks =
            self.sinks.as_ref().map(|sinks| sinks.reshape((kv_heads, group, 1, 1))).transpose()?;
        let [range_weights, single_weights] = softmax([range, of_singles], sinks.as_ref())?;
        let singles = match (singles, single_weights) {
            (Some((k, v, _)), Some(weights)) => Some(Singles { k, v, weights }),
            _ => None,
        };
        Ok(Block { q, range: range_weights.map(|weights| (hull, weights)), singles })
    }

    /// Single keys and values of a block and which of them there are, `[B, S]`.
    fn gather(&self, block: &Range<usize>) -> Result<Option<(Tensor, Tensor, Tensor)>> {
        let count = block.clone().map(|t| self.ranges.singles_of(t).len()).max().unwrap_or(0);
        if count == 0 {
            return Ok(None);
        }
        let (mut ids, mut present) = (Vec::new(), Vec::new());
        for t in block.clone() {
            let keys = self.ranges.singles_of(t);
            ids.extend(keys.iter().copied().chain(std::iter::repeat_n(0, count - keys.len())));
            present.extend((0..count).map(|i| if i < keys.len() { 1.0_f32 } else { 0.0 }));
        }
        let device = self.q.device();
        let ids = Tensor::from_vec(ids, block.len() * count, device)?;
        let (kv_heads, _, head_dim) = self.sizes()?;
        let shape = (kv_heads, block.len(), count, head_dim);
        let of = |all: &Tensor| all.index_select(&ids, 1)?.reshape(shape);
        let present = Tensor::from_vec(present, (block.len(), count), device)?;
        Ok(Some((of(&self.k)?, of(&self.v)?, present)))
    }

    fn forward(&self) -> Result<Tensor> {
        let mut parts = Vec::new();
        for block in self.blocks()? {
            let weighed = self.weigh(&block)?;
            let shape = weighed.q.shape().clone();
            let mut out = None;
            if let Some((hull, weights)) = &weighed.range {
                let values = self.v.narrow(1, hull.start, hull.len())?;
                out = Some(folded(weights)?.matmul(&values)?.reshape(&shape)?);
            }
            if let Some(singles) = &weighed.singles {
                let own = by_query(&singles.weights)?.matmul(&singles.v.flatten(0, 1)?)?;
                let own = by_query_back(&own, &shape)?;
                out = Some(match out {
                    Some(out) => (out + own)?,
                    None => own,
                });
            }
            let out = match out {
                Some(out) => out,
                None => weighed.q.zeros_like()?,
            };
            parts.push(self.by_token(&out)?);
        }
        if parts.is_empty() {
            return self.q.zeros_like();
        }
        Tensor::cat(&parts, 0)
    }

    /// Gradients of `q`, `k` and `v` in the layouts of the arguments.
    fn backward(
        &self,
        out: &Tensor,
        gradient: &Tensor,
        [want_q, want_keys]: [bool; 2],
    ) -> Result<[Option<Tensor>; 3]> {
        let (dk, dv) = (self.k.zeros_like()?, self.v.zeros_like()?);
        let mut of_queries = Vec::new();
        let mut of_singles = Vec::new();
        let gradient = gradient.contiguous()?;
        let (_, _, head_dim) = self.sizes()?;
        for block in self.blocks()? {
            let weighed = self.weigh(&block)?;
            let d_out = self.by_head(&gradient, &block)?;
            let delta = (&d_out * self.by_head(out, &block)?)?.sum_keepdim(D::Minus1)?;
            let mut dq = weighed.q.zeros_like()?;
            if let Some((hull, weights)) = &weighed.range {
                let (of_q, of_k, of_v) =
                    self.through_range(&weighed.q, hull, weights, &d_out, &delta)?;
                dq = (dq + of_q)?;
                if want_keys {
                    add_at(&dk, &of_k, hull)?;
                    add_at(&dv, &of_v, hull)?;
                }
            }
            if let Some(singles) = &weighed.singles {
                let (of_q, of_keys) = singles.through(&weighed.q, &d_out, &delta)?;
                dq = (dq + of_q)?;
                of_singles.push((block, of_keys));
            }
            if want_q {
                of_queries.push((self.by_token(&dq)? / (head_dim as f64).sqrt())?);
            }
        }
        let dq = match (want_q, of_queries.is_empty()) {
            (true, false) => Some(Tensor::cat(&of_queries, 0)?),
            _ => None,
        };
        if !want_keys {
            return Ok([dq, None, None]);
        }
        let (mut dk, mut dv) =
            (dk.transpose(0, 1)?.contiguous()?, dv.transpose(0, 1)?.contiguous()?);
        if !of_singles.is_empty() {
            let (k, v) = scattered(&self.ranges, &of_singles, dk.dim(0)?)?;
            (dk, dv) = ((dk + k)?, (dv + v)?);
        }
        Ok([dq, Some(dk), Some(dv)])
    }

    /// Gradients of scaled queries, and of the keys and values of a range, `[K, keys, D]`.
    fn through_range(
        &self,
        q: &Tensor,
        hull: &Range<usize>,
        weights: &Tensor,
        d_out: &Tensor,
        delta: &Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let (keys, values) =
            (self.k.narrow(1, hull.start, hull.len())?, self.v.narrow(1, hull.start, hull.len())?);
        let d_out_folded = folded(d_out)?;
        let d_weights = d_out_folded.matmul(&values.transpose(1, 2)?)?.reshape(weights.shape())?;
        let d_scores = folded(&(weights * d_weights.broadcast_sub(delta)?)?)?;
        let dq = d_scores.matmul(&keys)?.reshape(q.shape())?;
        let dk = d_scores.transpose(1, 2)?.matmul(&folded(q)?)?;
        let dv = folded(weights)?.transpose(1, 2)?.matmul(&d_out_folded)?;
        Ok((dq, dk, dv))
    }
}

/// `[K, G, B, x]` as `[K, G·B, x]`.
fn folded(t: &Tensor) -> Result<Tensor> {
    t.contiguous()?.flatten(1, 2)
}

/// Softmax over two groups of scores `[K, G, B, keys]` with their visibility `[B, keys]`; rows that
/// see nothing get zeros. Sinks `[K, G, 1, 1]` take part in it and have no weights of their own.
fn softmax(
    groups: [Option<(Tensor, Tensor)>; 2],
    sinks: Option<&Tensor>,
) -> Result<[Option<Tensor>; 2]> {
    let mut max: Option<Tensor> = None;
    let mut masked = [None, None];
    for (masked, group) in masked.iter_mut().zip(groups) {
        let Some((scores, visible)) = group else { continue };
        let scores = scores.broadcast_add(&((&visible - 1.0)? * 1e30)?)?;
        let own = scores.max_keepdim(D::Minus1)?;
        max = Some(match max {
            Some(max) => max.maximum(&own)?,
            None => own,
        });
        *masked = Some((scores, visible));
    }
    let Some(mut max) = max else { return Ok([None, None]) };
    if let Some(sinks) = sinks {
        max = max.broadcast_maximum(sinks)?;
    }
    let mut weights = [None, None];
    let mut total = max.zeros_like()?;
    for (weights, masked) in weights.iter_mut().zip(masked) {
        let Some((scores, visible)) = masked else { continue };
        let own = scores.broadcast_sub(&max)?.exp()?.broadcast_mul(&visible)?;
        total = (total + own.sum_keepdim(D::Minus1)?)?;
        *weights = Some(own);
    }
    if let Some(sinks) = sinks {
        total = (total + sinks.broadcast_sub(&max)?.exp()?)?;
    }
    // A row without keys divides 0 by 1.
    let total = (&total + total.eq(0.0)?.to_dtype(DType::F32)?)?;
    let mut normalised = [None, None];
    for (normalised, weights) in normalised.iter_mut().zip(weights) {
        *normalised = weights.map(|weights| weights.broadcast_div(&total)).transpose()?;
    }
    Ok(normalised)
}

/// 1 where a query of the block sees a key of `hull`, `[B, keys]`: made on the device from two
/// numbers a query.
fn visible_in(
    ranges: &KeyRanges,
    block: &Range<usize>,
    hull: &Range<usize>,
    device: &Device,
) -> Result<Tensor> {
    let column = |of: fn(Range<usize>) -> usize| {
        let values: Vec<u32> = block.clone().map(|t| of(ranges.of(t)) as u32).collect();
        Tensor::from_vec(values, (block.len(), 1), device)
    };
    let keys = Tensor::arange(hull.start as u32, hull.end as u32, device)?.unsqueeze(0)?;
    let shape = (block.len(), hull.len());
    let keys = keys.broadcast_as(shape)?;
    let from = keys.ge(&column(|range| range.start)?.broadcast_as(shape)?)?;
    let until = keys.lt(&column(|range| range.end)?.broadcast_as(shape)?)?;
    from.to_dtype(DType::F32)? * until.to_dtype(DType::F32)?
}

/// Adds to some keys of `[K, Tk, D]` in place.
fn add_at(sum: &Tensor, part: &Tensor, keys: &Range<usize>) -> Result<()> {
    let added = (sum.narrow(1, keys.start, keys.len())? + part)?;
    sum.slice_set(&added.contiguous()?, 1, keys.start)
}
