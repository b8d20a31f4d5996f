//! Single keys beside the ranges of a block: their gradients, and the shapes in which they are multiplied.

use std::ops::Range;

use candle_core::{Result, Shape, Tensor};

use super::super::KeyRanges;

/// Keys beside the range, `S` a query, filled up with keys of weight 0.
pub(super) struct Singles {
    /// `[K, B, S, D]`
    pub(super) k: Tensor,
    /// `[K, B, S, D]`
    pub(super) v: Tensor,
    /// `[K, G, B, S]`
    pub(super) weights: Tensor,
}

/// Gradients of gathered keys and values, `[B, S, K, D]` each.
pub(super) type OfSingles = (Tensor, Tensor);

impl Singles {
    /// Gradients of scaled queries, and of the gathered keys and values.
    pub(super) fn through(
        &self,
        q: &Tensor,
        d_out: &Tensor,
        delta: &Tensor,
    ) -> Result<(Tensor, OfSingles)> {
        let (keys, values) = (self.k.flatten(0, 1)?, self.v.flatten(0, 1)?);
        let (d_out, delta) = (by_query(d_out)?, by_query(delta)?);
        let weights = by_query(&self.weights)?;
        let d_weights = d_out.matmul(&values.transpose(1, 2)?)?;
        let d_scores = (&weights * d_weights.broadcast_sub(&delta)?)?;
        let dq = by_query_back(&d_scores.matmul(&keys)?, q.shape())?;
        let by_token = |t: Tensor| t.reshape(self.k.shape())?.permute((1, 2, 0, 3))?.contiguous();
        let dk = by_token(d_scores.transpose(1, 2)?.matmul(&by_query(q)?)?)?;
        let dv = by_token(weights.transpose(1, 2)?.matmul(&d_out)?)?;
        Ok((dq, (dk, dv)))
    }
}

/// `[K, G, B, x]` as `[K·B, G, x]`.
pub(super) fn by_query(t: &Tensor) -> Result<Tensor> {
    t.transpose(1, 2)?.contiguous()?.flatten(0, 1)
}

/// The way back to `shape`, `[K, G, B, x]`.
pub(super) fn by_query_back(t: &Tensor, shape: &Shape) -> Result<Tensor> {
    let (kv_heads, group, queries, width) = shape.dims4()?;
    t.reshape((kv_heads, queries, group, width))?.transpose(1, 2)?.contiguous()
}

/// Gradients of single keys and values, `[Tk, K, D]`: every key gathers those of the queries that
/// see it, in the order of the queries. Adding at indices would be serial on a GPU.
pub(super) fn scattered(
    ranges: &KeyRanges,
    parts: &[(Range<usize>, OfSingles)],
    keys: usize,
) -> Result<(Tensor, Tensor)> {
    // Where the gradient of every (query, key) stands, all parts laid end to end.
    let mut of_key: Vec<Vec<u32>> = vec![Vec::new(); keys];
    let mut at = 0;
    for (block, (dk, _)) in parts {
        let count = dk.dim(1)?;
        for t in block.clone() {
            for (i, &key) in ranges.singles_of(t).iter().enumerate() {
                of_key[key as usize].push((at + i) as u32);
            }
            at += count;
        }
    }
    let most = of_key.iter().map(Vec::len).max().unwrap_or(0);
    let gather = |choose: fn(&OfSingles) -> &Tensor| -> Result<Tensor> {
        let flat = parts.iter().map(|(_, part)| choose(part).flatten(0, 1));
        let all = Tensor::cat(&flat.collect::<Result<Vec<_>>>()?, 0)?;
        // A row of zeros for keys that nobody else sees.
        let all = all.pad_with_zeros(0, 0, 1)?;
        let mut sum: Option<Tensor> = None;
        for turn in 0..most {
            let rows = of_key.iter().map(|rows| rows.get(turn).copied().unwrap_or(at as u32));
            let rows = Tensor::from_vec(rows.collect::<Vec<u32>>(), keys, all.device())?;
            let part = all.index_select(&rows, 0)?;
            sum = Some(match sum {
                Some(sum) => (sum + part)?,
                None => part,
            });
        }
        sum.map_or_else(|| all.narrow(0, 0, keys), Ok)
    };
    Ok((gather(|part| &part.0)?, gather(|part| &part.1)?))
}
