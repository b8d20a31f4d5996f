//! Tiled online softmax: the forward pass for many queries.

use std::ops::Range;

use rayon::prelude::*;

use super::{Dims, KeyRanges, TILE_KEYS};
use crate::gemm::{Mat, Threads, matmul};
use crate::simd::{axpy, dot, exp, exp_in_place, max_of};

/// Output `[Tq, N, D]` and log-sum-exp `[Tq, N]` (−∞ where nothing is visible).
pub(super) fn forward(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dims: Dims,
    ranges: &KeyRanges,
) -> (Vec<f32>, Vec<f32>) {
    let tile = dims.tile_queries();
    let mut out = vec![0.0; q.len()];
    let mut lse = vec![f32::NEG_INFINITY; ranges.queries() * dims.heads];
    out.par_chunks_mut((tile * dims.q_stride()).max(1))
        .zip(lse.par_chunks_mut((tile * dims.heads).max(1)))
        .enumerate()
        .for_each(|(index, (out, lse))| {
            let first = index * tile;
            let queries = first..(first + tile).min(ranges.queries());
            for kv_head in 0..dims.kv_heads {
                forward_tile(q, k, v, dims, ranges, queries.clone(), kv_head, out, lse);
            }
        });
    (out, lse)
}

/// Copies the queries of one group, scaled, into rows `[queries · G, D]`.
pub(super) fn pack_queries(
    source: &[f32],
    dims: Dims,
    queries: Range<usize>,
    kv_head: usize,
    scale: f32,
) -> Vec<f32> {
    let width = dims.group() * dims.head_dim;
    let mut packed = Vec::with_capacity(queries.len() * width);
    for t in queries {
        let start = t * dims.q_stride() + kv_head * width;
        packed.extend(source[start..start + width].iter().map(|x| x * scale));
    }
    packed
}

/// The tile of keys (or values) `range` of one key-value head, rows `[range, D]`.
pub(super) fn key_tile<'a>(
    source: &'a [f32],
    dims: Dims,
    range: &Range<usize>,
    kv_head: usize,
) -> Mat<'a> {
    let start = range.start * dims.kv_stride() + kv_head * dims.head_dim;
    Mat::rows(&source[start..], range.len(), dims.head_dim, dims.kv_stride())
}

/// Splits `range` at multiples of the tile size.
pub(super) fn tiles(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let (start, end) = (range.start, range.end);
    (start / TILE_KEYS * TILE_KEYS..end)
        .step_by(TILE_KEYS)
        .map(move |s| s.max(start)..(s + TILE_KEYS).min(end))
}

/// The part of a tile that one query sees, as indices into the tile.
pub(super) fn visible_in(tile: &Range<usize>, visible: &Range<usize>) -> Range<usize> {
    let start = visible.start.max(tile.start);
    let end = visible.end.min(tile.end);
    if start >= end { 0..0 } else { start - tile.start..end - tile.start }
}

#[expect(clippy::too_many_arguments, reason = "slices and sizes of one tile, called once")]
fn forward_tile(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dims: Dims,
    ranges: &KeyRanges,
    queries: Range<usize>,
    kv_head: usize,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let (group, head_dim) = (dims.group(), dims.head_dim);
    let rows = queries.len() * group;
    let packed = pack_queries(q, dims, queries.clone(), kv_head, dims.scale());
    let mut acc = vec![0.0_f32; rows * head_dim];
    let mut max = vec![f32::NEG_INFINITY; rows];
    let mut total = vec![0.0_f32; rows];
    let mut scores = vec![0.0_f32; rows * TILE_KEYS];
    for tile in tiles(ranges.hull(queries.clone())) {
        let width = tile.len();
        let keys = key_tile(k, dims, &tile, kv_head);
        let a = Mat::rows(&packed, rows, head_dim, head_dim);
        matmul(&mut scores, width, a, keys.t(), false, Threads::One);
        for row in 0..rows {
            let visible = visible_in(&tile, &ranges.of(queries.start + row / group));
            let scores = &mut scores[row * width..(row + 1) * width];
            let acc = &mut acc[row * head_dim..(row + 1) * head_dim];
            online_softmax(scores, visible, &mut max[row], &mut total[row], acc);
        }
        let weights = Mat::rows(&scores, rows, width, width);
        let values = key_tile(v, dims, &tile, kv_head);
        matmul(&mut acc, head_dim, weights, values, true, Threads::One);
    }
    for row in 0..rows {
        let q = &packed[row * head_dim..][..head_dim];
        let acc = &mut acc[row * head_dim..][..head_dim];
        for &key in ranges.singles_of(queries.start + row / group) {
            let at = key as usize * dims.kv_stride() + kv_head * head_dim;
            let mut score = [dot(q, &k[at..][..head_dim])];
            online_softmax(&mut score, 0..1, &mut max[row], &mut total[row], acc);
            axpy(score[0], &v[at..][..head_dim], acc);
        }
        if total[row] == 0.0 {
            continue;
        }
        let (t, head) = (row / group, kv_head * group + row % group);
        let out = &mut out[t * dims.q_stride() + head * head_dim..][..head_dim];
        for (out, acc) in out.iter_mut().zip(acc) {
            *out = *acc / total[row];
        }
        lse[t * dims.heads + head] = max[row] + total[row].ln();
    }
}

/// Turns a row of scores into weights relative to the running maximum, and rescales what was
/// accumulated under the old one. Hidden entries become 0.
fn online_softmax(
    scores: &mut [f32],
    visible: Range<usize>,
    max: &mut f32,
    total: &mut f32,
    acc: &mut [f32],
) {
    scores[..visible.start].fill(0.0);
    scores[visible.end..].fill(0.0);
    let row = &mut scores[visible];
    if row.is_empty() {
        return;
    }
    let new_max = max_of(row).max(*max);
    let shrink = exp(*max - new_max);
    *total = *total * shrink + exp_in_place(row, new_max);
    *max = new_max;
    if shrink < 1.0 {
        acc.iter_mut().for_each(|a| *a *= shrink);
    }
}
