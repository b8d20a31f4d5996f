//! Attention of a few queries (decoding): dot products in an order that depends on a query's own
//! range only, so that a row's bits do not depend on the rows beside it.

use rayon::prelude::*;

use super::{Dims, KeyRanges};
use crate::simd::{axpy, dot, exp_in_place, max_of};

/// Output `[Tq, N, D]` and log-sum-exp `[Tq, N]`.
pub(super) fn forward(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dims: Dims,
    ranges: &KeyRanges,
) -> (Vec<f32>, Vec<f32>) {
    let mut out = vec![0.0; q.len()];
    let mut lse = vec![f32::NEG_INFINITY; ranges.queries() * dims.heads];
    out.par_chunks_mut(dims.head_dim.max(1)).zip(lse.par_iter_mut()).enumerate().for_each(
        |(row, (out, lse))| {
            let (t, head) = (row / dims.heads, row % dims.heads);
            let q = &q[row * dims.head_dim..][..dims.head_dim];
            let offset = head / dims.group() * dims.head_dim;
            let singles = ranges.singles_of(t).iter().map(|&key| key as usize);
            let visible = ranges.of(t).chain(singles);
            let at = |s: usize| s * dims.kv_stride() + offset;
            let mut weights: Vec<f32> = visible
                .clone()
                .map(|s| dims.scale() * dot(q, &k[at(s)..][..dims.head_dim]))
                .collect();
            if weights.is_empty() {
                return;
            }
            let max = max_of(&weights);
            let total = exp_in_place(&mut weights, max);
            for (&weight, s) in weights.iter().zip(visible) {
                axpy(weight, &v[at(s)..][..dims.head_dim], out);
            }
            out.iter_mut().for_each(|o| *o /= total);
            *lse = max + total.ln();
        },
    );
    (out, lse)
}
