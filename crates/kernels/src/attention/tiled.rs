//! Tiled online softmax.
//!
//! A query's keys are cut into tiles at fixed places, and each tile's part is formed in a fixed
//! order, so that the bits of its result do not depend on the queries beside it. Single keys count
//! as if they stood behind the end of the query's range: a token of a tree gets the bits that it
//! would have in a plain sequence.

use std::ops::Range;

use rayon::prelude::*;

use super::{Dims, KeyRanges, TILE_KEYS};
use crate::gemm::{Mat, Threads, matmul};
use crate::simd::{axpy, dot_in_order, exp, exp_in_place, max_of};

/// What every tile reads.
struct Inputs<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    dims: Dims,
    ranges: &'a KeyRanges,
}

/// Output `[Tq, N, D]` and log-sum-exp `[Tq, N]` (−∞ where nothing is visible).
pub(super) fn forward(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dims: Dims,
    ranges: &KeyRanges,
) -> (Vec<f32>, Vec<f32>) {
    let inputs = Inputs { q, k, v, dims, ranges };
    let tile = dims.tile_queries();
    let mut out = vec![0.0; q.len()];
    let mut lse = vec![f32::NEG_INFINITY; ranges.queries() * dims.heads];
    out.par_chunks_mut((tile * dims.q_stride()).max(1))
        .zip(lse.par_chunks_mut((tile * dims.heads).max(1)))
        .enumerate()
        .for_each(|(index, (out, lse))| {
            let first = index * tile;
            let queries = first..(first + tile).min(ranges.queries());
            // Decoding has one tile of queries: its heads are what there is to share out.
            let groups: Vec<Group> = (0..dims.kv_heads)
                .into_par_iter()
                .map(|kv_head| Group::attend(&inputs, queries.clone(), kv_head))
                .collect();
            for (kv_head, group) in groups.iter().enumerate() {
                group.write(dims, kv_head, out, lse);
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

/// The query rows `[queries · G, D]` that share a key-value head, and their running softmax.
struct Group {
    queries: Range<usize>,
    kv_head: usize,
    /// Scaled queries.
    packed: Vec<f32>,
    max: Vec<f32>,
    total: Vec<f32>,
    acc: Vec<f32>,
}

/// Weights of the single keys that stand in a tile: row, position of the first among the query's.
struct Joined {
    row: usize,
    first: usize,
    weights: Vec<f32>,
}

impl Group {
    fn attend(inputs: &Inputs<'_>, queries: Range<usize>, kv_head: usize) -> Self {
        let dims = inputs.dims;
        let packed = pack_queries(inputs.q, dims, queries.clone(), kv_head, dims.scale());
        let rows = queries.len() * dims.group();
        let mut group = Self {
            packed,
            kv_head,
            max: vec![f32::NEG_INFINITY; rows],
            total: vec![0.0; rows],
            acc: vec![0.0; rows * dims.head_dim],
            queries: queries.clone(),
        };
        let mut scores = vec![0.0; rows * TILE_KEYS];
        for tile in tiles(inputs.ranges.hull(queries)) {
            group.add_tile(inputs, &tile, &mut scores);
        }
        group.add_remaining_singles(inputs);
        group
    }

    fn query_of(&self, row: usize, dims: Dims) -> usize {
        self.queries.start + row / dims.group()
    }

    fn add_tile(&mut self, inputs: &Inputs<'_>, tile: &Range<usize>, scores: &mut [f32]) {
        let (dims, rows, width) = (inputs.dims, self.max.len(), tile.len());
        let head_dim = dims.head_dim;
        let q = Mat::rows(&self.packed, rows, head_dim, head_dim);
        let keys = key_tile(inputs.k, dims, tile, self.kv_head);
        matmul(scores, TILE_KEYS, q, keys.t(), false, Threads::One);
        let mut joined = Vec::new();
        for row in 0..rows {
            let query = self.query_of(row, dims);
            let range = inputs.ranges.of(query);
            let mut visible = visible_in(tile, &range);
            let scores = &mut scores[row * TILE_KEYS..(row + 1) * TILE_KEYS];
            let (range_end, count) = (visible.end, joining(inputs.ranges, query));
            let ends_here = tile.start < range.end && range.end <= tile.end && count > 0;
            if ends_here {
                visible.end += count;
                self.single_scores(inputs, row, 0, &mut scores[range_end..visible.end]);
            }
            let used = width.max(visible.end);
            self.soften(row, &mut scores[..used], visible.clone(), head_dim);
            if ends_here {
                let weights = &mut scores[range_end..visible.end];
                joined.push(Joined { row, first: 0, weights: weights.to_vec() });
                weights.fill(0.0);
            }
        }
        let weights = Mat::rows(scores, rows, width, TILE_KEYS);
        let values = key_tile(inputs.v, dims, tile, self.kv_head);
        if joined.is_empty() {
            matmul(&mut self.acc, head_dim, weights, values, true, Threads::One);
            return;
        }
        let mut sums = vec![0.0; rows * head_dim];
        matmul(&mut sums, head_dim, weights, values, false, Threads::One);
        for joined in &joined {
            let sum = &mut sums[joined.row * head_dim..][..head_dim];
            self.add_single_values(inputs, joined, sum);
        }
        self.acc.iter_mut().zip(&sums).for_each(|(acc, sum)| *acc += sum);
    }

    /// Single keys beyond the tile in which their query's range ends, in tiles of their own.
    fn add_remaining_singles(&mut self, inputs: &Inputs<'_>) {
        let head_dim = inputs.dims.head_dim;
        for row in 0..self.max.len() {
            let query = self.query_of(row, inputs.dims);
            let (mut first, all) =
                (joining(inputs.ranges, query), inputs.ranges.singles_of(query).len());
            while first < all {
                let mut weights = vec![0.0; TILE_KEYS.min(all - first)];
                self.single_scores(inputs, row, first, &mut weights);
                let visible = 0..weights.len();
                self.soften(row, &mut weights, visible, head_dim);
                let mut sum = vec![0.0; head_dim];
                let next = first + weights.len();
                self.add_single_values(inputs, &Joined { row, first, weights }, &mut sum);
                let acc = &mut self.acc[row * head_dim..][..head_dim];
                acc.iter_mut().zip(&sum).for_each(|(acc, sum)| *acc += sum);
                first = next;
            }
        }
    }

    fn soften(&mut self, row: usize, scores: &mut [f32], visible: Range<usize>, head_dim: usize) {
        let acc = &mut self.acc[row * head_dim..][..head_dim];
        online_softmax(scores, visible, &mut self.max[row], &mut self.total[row], acc);
    }

    /// Scores of a row for its query's single keys from `first` on.
    fn single_scores(&self, inputs: &Inputs<'_>, row: usize, first: usize, scores: &mut [f32]) {
        let head_dim = inputs.dims.head_dim;
        let q = &self.packed[row * head_dim..][..head_dim];
        let keys = &inputs.ranges.singles_of(self.query_of(row, inputs.dims))[first..];
        for (score, &key) in scores.iter_mut().zip(keys) {
            *score = dot_in_order(q, row_of(inputs.k, inputs.dims, key, self.kv_head));
        }
    }

    fn add_single_values(&self, inputs: &Inputs<'_>, joined: &Joined, sum: &mut [f32]) {
        let query = self.query_of(joined.row, inputs.dims);
        let keys = &inputs.ranges.singles_of(query)[joined.first..];
        for (&weight, &key) in joined.weights.iter().zip(keys) {
            axpy(weight, row_of(inputs.v, inputs.dims, key, self.kv_head), sum);
        }
    }

    /// Normalised output and log-sum-exp into a tile of the results.
    fn write(&self, dims: Dims, kv_head: usize, out: &mut [f32], lse: &mut [f32]) {
        let (group, head_dim) = (dims.group(), dims.head_dim);
        for (row, acc) in self.acc.chunks_exact(head_dim.max(1)).enumerate() {
            if self.total[row] == 0.0 {
                continue;
            }
            let (t, head) = (row / group, kv_head * group + row % group);
            let out = &mut out[t * dims.q_stride() + head * head_dim..][..head_dim];
            for (out, acc) in out.iter_mut().zip(acc) {
                *out = *acc / self.total[row];
            }
            lse[t * dims.heads + head] = self.max[row] + self.total[row].ln();
        }
    }
}

/// How many of a query's single keys fit into the tile in which its range ends.
fn joining(ranges: &KeyRanges, query: usize) -> usize {
    let range = ranges.of(query);
    let room = range.end.next_multiple_of(TILE_KEYS) - range.end;
    if range.is_empty() { 0 } else { ranges.singles_of(query).len().min(room) }
}

/// One key (or value) `[D]` of one key-value head.
fn row_of(source: &[f32], dims: Dims, key: u32, kv_head: usize) -> &[f32] {
    &source[key as usize * dims.kv_stride() + kv_head * dims.head_dim..][..dims.head_dim]
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
