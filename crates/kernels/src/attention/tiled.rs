//! Tiled online softmax.
//!
//! A query's keys are cut into tiles at fixed places; each tile's part is formed for itself, and
//! parts are added in their order. So the bits of a result depend neither on the queries beside it
//! nor on which thread formed a part. Single keys count as if they stood after the end of the
//! query's range: a token of a tree gets the bits that it would have in a plain sequence.

use std::ops::Range;
use std::sync::OnceLock;

use rayon::prelude::*;

use super::keys::Keys;
use super::part::Part;
use super::{Dims, KeyRanges, TILE_KEYS};
use crate::bend::capped;
use crate::gemm::{Mat, rows_of_a_tile};
use crate::simd::{axpy, dot_in_order, exp, zeros};
use crate::threads::split;

/// What every tile reads.
#[derive(Clone, Copy)]
struct Inputs<'a, S> {
    q: &'a [f32],
    k: S,
    v: S,
    dims: Dims,
    ranges: &'a KeyRanges,
    /// A logit of each query head that has no value, `[N]`.
    sinks: Option<&'a [f32]>,
}

/// Output `[Tq, N, D]` and log-sum-exp of the scores `[Tq, N]` (−∞ where nothing is visible).
pub(super) fn forward<S: Keys>(
    q: &[f32],
    k: S,
    v: S,
    dims: Dims,
    (ranges, sinks): (&KeyRanges, Option<&[f32]>),
) -> (Vec<f32>, Vec<f32>) {
    let inputs = Inputs { q, k, v, dims, ranges, sinks };
    let tile = dims.tile_queries();
    let mut out = zeros(q.len());
    let mut lse = vec![f32::NEG_INFINITY; ranges.queries() * dims.heads];
    if ranges.queries() <= tile {
        few_queries(inputs, &mut out, &mut lse);
        return (out, lse);
    }
    out.par_chunks_mut((tile * dims.q_stride()).max(1))
        .zip(lse.par_chunks_mut((tile * dims.heads).max(1)))
        .enumerate()
        .for_each(|(index, (out, lse))| {
            let first = index * tile;
            let queries = first..(first + tile).min(ranges.queries());
            let groups: Vec<(Group<'_, S>, Part)> = (0..dims.kv_heads)
                .into_par_iter()
                .map(|kv_head| {
                    let group = Group::new(inputs, queries.clone(), kv_head);
                    let sum = group.all_tiles();
                    (group, sum)
                })
                .collect();
            for (group, sum) in &groups {
                group.write(sum, out, lse);
            }
        });
    (out, lse)
}

/// One tile of queries, as decoding has: its heads and tiles of keys are what there is to share out, and some
/// rows of each where these are few. A tile's heads lie side by side in memory, so a thread takes them one
/// after the other.
fn few_queries<S: Keys>(inputs: Inputs<'_, S>, out: &mut [f32], lse: &mut [f32]) {
    let (heads, queries) = (inputs.dims.kv_heads, 0..inputs.ranges.queries());
    let groups: Vec<Group<'_, S>> =
        (0..heads).map(|kv_head| Group::new(inputs, queries.clone(), kv_head)).collect();
    let rows = groups.first().map_or(0, Group::rows);
    let tiles: Vec<Range<usize>> = tiles(inputs.ranges.hull(queries)).collect();
    // A task of all rows turns its keys around once.
    let enough = tiles.len() * heads >= 4 * rayon::current_num_threads();
    let whole = enough && rows <= rows_of_a_tile::<S::Value>();
    let chunk = if whole { rows.max(1) } else { rows.div_ceil(2).max(FEW_ROWS) };
    let mut tasks = Vec::new();
    for tile in tiles {
        for kv_head in 0..heads {
            let chunks = (0..rows).step_by(chunk).map(|first| first..(first + chunk).min(rows));
            tasks.extend(chunks.map(|rows| (tile.clone(), kv_head, rows)));
        }
    }
    let parts: Vec<OnceLock<Part>> = tasks.iter().map(|_| OnceLock::new()).collect();
    split(tasks.len(), |index| {
        let (tile, kv_head, rows) = &tasks[index];
        let group = &groups[*kv_head];
        let (mut part, mut scores) = (group.nothing(rows.len()), scores(rows.len()));
        group.tile(tile, rows.clone(), &mut scores, &mut part);
        parts[index].get_or_init(|| part);
    });
    let mut sums: Vec<Part> = groups.iter().map(|group| group.nothing(rows)).collect();
    for ((_, kv_head, rows), part) in tasks.iter().zip(&parts) {
        let (sum, Some(part)) = (&mut sums[*kv_head], part.get()) else { continue };
        rows.clone().enumerate().for_each(|(from, row)| sum.add_row(row, part, from));
    }
    for (group, mut sum) in groups.iter().zip(sums) {
        group.add_remaining_singles(&mut sum);
        group.write(&sum, out, lse);
    }
}

/// Fewest rows of a head that are worth a task of their own.
const FEW_ROWS: usize = 8;

/// Room for a tile's scores.
fn scores(rows: usize) -> Vec<f32> {
    vec![0.0; rows * TILE_KEYS]
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
pub(super) fn key_tile<'a, T: Copy>(
    source: &'a [T],
    dims: Dims,
    range: &Range<usize>,
    kv_head: usize,
) -> Mat<'a, T> {
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

/// The query rows `[queries · G, D]` that share a key-value head.
struct Group<'a, S> {
    inputs: Inputs<'a, S>,
    queries: Range<usize>,
    kv_head: usize,
    /// Scaled queries.
    packed: Vec<f32>,
}

/// Weights of the single keys that stand in a tile: row, position of the first among the query's.
struct Joined {
    row: usize,
    first: usize,
    weights: Vec<f32>,
}

impl<'a, S: Keys> Group<'a, S> {
    fn new(inputs: Inputs<'a, S>, queries: Range<usize>, kv_head: usize) -> Self {
        let dims = inputs.dims;
        let packed = pack_queries(inputs.q, dims, queries.clone(), kv_head, dims.scale());
        Self { inputs, queries, kv_head, packed }
    }

    fn rows(&self) -> usize {
        self.queries.len() * self.inputs.dims.group()
    }

    fn nothing(&self, rows: usize) -> Part {
        Part::nothing(rows, self.inputs.dims.head_dim)
    }

    fn query_of(&self, row: usize) -> usize {
        self.queries.start + row / self.inputs.dims.group()
    }

    fn all_tiles(&self) -> Part {
        let rows = self.rows();
        let (mut sum, mut part) = (self.nothing(rows), self.nothing(rows));
        let mut scores = scores(rows);
        for tile in tiles(self.inputs.ranges.hull(self.queries.clone())) {
            self.tile(&tile, 0..rows, &mut scores, &mut part);
            sum.add(&part);
        }
        self.add_remaining_singles(&mut sum);
        sum
    }

    /// The part of one tile of keys, and of the single keys that stand in it, for some rows.
    fn tile(&self, tile: &Range<usize>, rows: Range<usize>, scores: &mut [f32], part: &mut Part) {
        let (dims, ranges, width) = (self.inputs.dims, self.inputs.ranges, tile.len());
        let (count, head_dim) = (rows.len(), dims.head_dim);
        let q = Mat::rows(&self.packed[rows.start * head_dim..], count, head_dim, head_dim);
        let mut wide = Vec::new();
        let keys = self.inputs.k.tile(dims, tile, self.kv_head, &mut wide);
        dims.product(&mut *scores, TILE_KEYS, q, keys.t(), false);
        let mut joined = Vec::new();
        for (index, row) in rows.clone().enumerate() {
            let query = self.query_of(row);
            let range = ranges.of(query);
            let mut visible = visible_in(tile, &range);
            let scores = &mut scores[index * TILE_KEYS..(index + 1) * TILE_KEYS];
            let (range_end, count) = (visible.end, joining(ranges, query));
            let ends_here = tile.start < range.end && range.end <= tile.end && count > 0;
            if ends_here {
                visible.end += count;
                self.single_scores(row, 0, &mut scores[range_end..visible.end]);
            }
            let used = width.max(visible.end);
            self.cap(&mut scores[visible.clone()]);
            part.soften(index, &mut scores[..used], visible.clone());
            if ends_here {
                let weights = &mut scores[range_end..visible.end];
                joined.push(Joined { row, first: 0, weights: weights.to_vec() });
                weights.fill(0.0);
            }
        }
        let weights = Mat::rows(scores, count, width, TILE_KEYS);
        let values = self.inputs.v.tile(dims, tile, self.kv_head, &mut wide);
        dims.product(&mut part.values, head_dim, weights, values, false);
        for joined in &joined {
            self.add_single_values(joined, part.values_of(joined.row - rows.start));
        }
    }

    /// Bends scores where they are soft-capped.
    fn cap(&self, scores: &mut [f32]) {
        if let Some(softcap) = self.inputs.dims.softcap {
            capped(scores, softcap, softcap);
        }
    }

    /// Single keys beyond the tile in which their query's range ends, in tiles of their own; these are cut
    /// where those of a plain sequence are.
    fn add_remaining_singles(&self, sum: &mut Part) {
        let mut part = Part::nothing(1, self.inputs.dims.head_dim);
        for row in 0..self.rows() {
            let query = self.query_of(row);
            let all = self.inputs.ranges.singles_of(query).len();
            let mut first = joining(self.inputs.ranges, query);
            while first < all {
                let place = self.inputs.ranges.of(query).end + first;
                let mut weights = vec![0.0; (TILE_KEYS - place % TILE_KEYS).min(all - first)];
                self.single_scores(row, first, &mut weights);
                self.cap(&mut weights);
                let visible = 0..weights.len();
                part.soften(0, &mut weights, visible);
                let next = first + weights.len();
                part.values.fill(0.0);
                self.add_single_values(&Joined { row, first, weights }, part.values_of(0));
                sum.add_row(row, &part, 0);
                first = next;
            }
        }
    }

    /// Scores of a row for its query's single keys from `first` on.
    fn single_scores(&self, row: usize, first: usize, scores: &mut [f32]) {
        let Inputs { k, dims, ranges, .. } = self.inputs;
        let q = &self.packed[row * dims.head_dim..][..dims.head_dim];
        let keys = &ranges.singles_of(self.query_of(row))[first..];
        let mut wide = Vec::new();
        for (score, &key) in scores.iter_mut().zip(keys) {
            *score = dot_in_order(q, k.row(dims, key as usize, self.kv_head, &mut wide));
        }
    }

    fn add_single_values(&self, joined: &Joined, values: &mut [f32]) {
        let Inputs { v, dims, ranges, .. } = self.inputs;
        let keys = &ranges.singles_of(self.query_of(joined.row))[joined.first..];
        let mut wide = Vec::new();
        for (&weight, &key) in joined.weights.iter().zip(keys) {
            axpy(weight, v.row(dims, key as usize, self.kv_head, &mut wide), values);
        }
    }

    /// Normalised output and log-sum-exp into a tile of the results.
    fn write(&self, sum: &Part, out: &mut [f32], lse: &mut [f32]) {
        let dims = self.inputs.dims;
        let (group, head_dim) = (dims.group(), dims.head_dim);
        for (row, values) in sum.values.chunks_exact(head_dim.max(1)).enumerate() {
            let (max, total) = sum.softmax_of(row);
            if total == 0.0 {
                continue;
            }
            let (t, head) = (row / group, self.kv_head * group + row % group);
            let out = &mut out[t * dims.q_stride() + head * head_dim..][..head_dim];
            let log_sum = max + total.ln();
            // What a sink takes of the softmax has no value.
            let sink = self.inputs.sinks.map_or(0.0, |sinks| exp(sinks[head] - log_sum));
            for (out, value) in out.iter_mut().zip(values) {
                *out = *value / total;
            }
            if self.inputs.sinks.is_some() {
                out.iter_mut().for_each(|out| *out /= 1.0 + sink);
            }
            lse[t * dims.heads + head] = log_sum;
        }
    }
}

/// How many of a query's single keys fit into the tile in which its range ends.
fn joining(ranges: &KeyRanges, query: usize) -> usize {
    let range = ranges.of(query);
    let room = range.end.next_multiple_of(TILE_KEYS) - range.end;
    if range.is_empty() { 0 } else { ranges.singles_of(query).len().min(room) }
}
