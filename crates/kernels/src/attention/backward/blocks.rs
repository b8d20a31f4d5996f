//! Gradients of queries, keys and values together, by blocks of query tiles and of keys.

use std::ops::Range;

use rayon::prelude::*;

use super::super::tiled::{key_tile, tiles};
use super::super::{Dims, KeyRanges, TILE_KEYS};
use super::{QueryTile, Saved, single_keys, write_queries};
use crate::gemm::Mat;
use crate::simd::{by_chunk, zeros};

/// Tiles of queries, and of keys, of a block: two tasks a thread up to `4 K` threads, one up to `8 K`.
fn tiles_of_block(kv_heads: usize, threads: usize) -> usize {
    (2 * threads).div_ceil(kv_heads.max(1)).clamp(4, 8)
}

/// Score gradients that [`all`] holds at most.
pub(in super::super) fn held_values(
    dims: Dims,
    queries: usize,
    keys: usize,
    threads: usize,
) -> usize {
    let tiles = tiles_of_block(dims.kv_heads, threads);
    let tile = dims.tile_queries();
    let rows = queries.next_multiple_of(tile).min(tiles * tile) * dims.heads;
    rows * keys.next_multiple_of(TILE_KEYS).min(tiles * TILE_KEYS)
}

/// `dQ` `[Tq, N, D]`, `dK` and `dV` `[Tk, K, D]`. Scores are formed once: their gradients are held for some tiles of queries
/// and of keys, first for the sums over queries, then for those over keys. Their order is that of [`super::queries`], whatever
/// the number of threads.
pub(in super::super) fn all(saved: &Saved<'_>, dims: Dims, ranges: &KeyRanges) -> [Vec<f32>; 3] {
    let mut dq = zeros(saved.q.len());
    let (mut dk, mut dv) = (zeros(saved.k.len()), zeros(saved.v.len()));
    let tiles = tiles_of_block(dims.kv_heads, rayon::current_num_threads());
    let (queries_at_once, keys_at_once) = (tiles * dims.tile_queries(), tiles * TILE_KEYS);
    let mut held = Vec::new();
    for (index, dq) in dq.chunks_mut((queries_at_once * dims.q_stride()).max(1)).enumerate() {
        let first = index * queries_at_once;
        let queries = first..(first + queries_at_once).min(ranges.queries());
        let hull = ranges.hull(queries.clone());
        let mut block = QueryBlock::new(saved, dims, ranges, queries);
        for first_key in (hull.start / TILE_KEYS * TILE_KEYS..hull.end).step_by(keys_at_once) {
            let keys = first_key.max(hull.start)..(first_key + keys_at_once).min(hull.end);
            block.add_keys(saved, &keys, &mut held, (&mut dk, &mut dv));
        }
        block.write(saved, dq);
    }
    drop(held);
    // One after the other: each is there twice for a moment.
    let mut dk = by_token(dk, dims);
    let mut dv = by_token(dv, dims);
    single_keys(saved, dims, ranges, (&mut dk, &mut dv));
    [dq, dk, dv]
}

/// Rows of the heads `[K, Tk, D]` in the order of the tokens, `[Tk, K, D]`.
fn by_token(heads: Vec<f32>, dims: Dims) -> Vec<f32> {
    if dims.kv_heads == 1 {
        return heads;
    }
    let of_head = heads.len() / dims.kv_heads;
    let (tokens, _) = by_chunk(heads.len(), dims.kv_stride(), |token, out| {
        for (kv_head, out) in out.chunks_exact_mut(dims.head_dim).enumerate() {
            let at = kv_head * of_head + token * dims.head_dim;
            out.copy_from_slice(&heads[at..at + dims.head_dim]);
        }
    });
    tokens
}

/// Some query tiles of every head, one head after the other.
struct QueryBlock<'a> {
    dims: Dims,
    ranges: &'a KeyRanges,
    members: Vec<Member>,
    /// Members of a head.
    of_head: usize,
}

/// A query tile, the keys that it sees, and the sum of its gradients, `[rows, D]`.
struct Member {
    tile: QueryTile,
    kv_head: usize,
    hull: Range<usize>,
    /// Its first row among those of its head.
    first_row: usize,
    sum: Vec<f32>,
}

impl Member {
    /// What it sees of a tile of keys.
    fn seen(&self, keys: &Range<usize>) -> Range<usize> {
        self.hull.start.max(keys.start)..self.hull.end.min(keys.end)
    }

    /// Where a head's score gradients for a tile of keys hold this tile's.
    fn held(&self, keys: usize) -> Range<usize> {
        let first = self.first_row * TILE_KEYS;
        first..first + self.tile.rows() * keys
    }
}

impl<'a> QueryBlock<'a> {
    fn new(saved: &Saved<'_>, dims: Dims, ranges: &'a KeyRanges, queries: Range<usize>) -> Self {
        let (step, end) = (dims.tile_queries(), queries.end);
        let firsts: Vec<usize> = queries.clone().step_by(step).collect();
        let of_head = firsts.len();
        let members = (0..dims.kv_heads * of_head).into_par_iter().map(|index| {
            let (kv_head, first) = (index / of_head, firsts[index % of_head]);
            let tile = QueryTile::new(saved, dims, first..(first + step).min(end), kv_head);
            let hull = ranges.hull(tile.queries.clone());
            let first_row = (first - queries.start) * dims.group();
            let sum = vec![0.0; tile.rows() * dims.head_dim];
            Member { tile, kv_head, hull, first_row, sum }
        });
        Self { dims, ranges, members: members.collect(), of_head }
    }

    /// Adds the gradients of some keys `[K, Tk, D]`, and what these give to the queries'. `held` is room for score gradients.
    fn add_keys(
        &mut self,
        saved: &Saved<'_>,
        keys: &Range<usize>,
        held: &mut Vec<f32>,
        (dk, dv): (&mut [f32], &mut [f32]),
    ) {
        let Self { dims, ranges, ref mut members, of_head } = *self;
        let tiles: Vec<Range<usize>> = tiles(keys.clone()).collect();
        let rows: usize = members[..of_head].iter().map(|member| member.tile.rows()).sum();
        held.resize(dims.kv_heads * tiles.len() * rows * TILE_KEYS, 0.0);
        let mut held: Vec<&mut [f32]> = held.chunks_exact_mut(rows * TILE_KEYS).collect();
        let whole = dk.len() / dims.kv_heads;
        let heads = dk.chunks_exact_mut(whole).zip(dv.chunks_exact_mut(whole));
        let grads = heads.flat_map(|(dk, dv)| {
            let cut = |grad| cut(grad, &tiles, dims.head_dim);
            cut(dk).into_iter().zip(cut(dv)).collect::<Vec<_>>()
        });
        let tasks: Vec<_> = grads.zip(&mut held).enumerate().collect();
        tasks.into_par_iter().with_max_len(1).for_each(|(index, (grads, held))| {
            let (kv_head, keys) = (index / tiles.len(), &tiles[index % tiles.len()]);
            let members = &members[kv_head * of_head..][..of_head];
            key_tile_grad(saved, dims, ranges, members, keys, grads, held);
        });
        members.par_iter_mut().with_max_len(1).for_each(|member| {
            for (index, keys) in tiles.iter().enumerate() {
                let seen = member.seen(keys);
                if seen.is_empty() {
                    continue;
                }
                let (rows, width) = (member.tile.rows(), seen.len());
                let ds = &held[member.kv_head * tiles.len() + index][member.held(width)];
                let (ds, keys) = (
                    Mat::rows(ds, rows, width, width),
                    key_tile(saved.k, dims, &seen, member.kv_head),
                );
                dims.product(&mut member.sum, dims.head_dim, ds, keys, true);
            }
        });
    }

    /// Writes the gradients of the queries, `[queries, N, D]`, single keys included.
    fn write(mut self, saved: &Saved<'_>, dq: &mut [f32]) {
        let (dims, ranges) = (self.dims, self.ranges);
        let first = self.members.first().map_or(0, |member| member.tile.queries.start);
        self.members.par_iter_mut().for_each(|Member { tile, kv_head, sum, .. }| {
            tile.add_singles(saved, dims, ranges, *kv_head, sum);
        });
        for Member { tile, kv_head, sum, .. } in &self.members {
            let dq = &mut dq[(tile.queries.start - first) * dims.q_stride()..];
            write_queries(dims, *kv_head, sum, dq);
        }
    }
}

/// The rows of some tiles, which lie side by side.
fn cut<'g>(grad: &'g mut [f32], tiles: &[Range<usize>], head_dim: usize) -> Vec<&'g mut [f32]> {
    let first = tiles.first().map_or(0, |tile| tile.start);
    let mut rest = &mut grad[first * head_dim..];
    let mut parts = Vec::with_capacity(tiles.len());
    for tile in tiles {
        let (part, after) = rest.split_at_mut(tile.len() * head_dim);
        parts.push(part);
        rest = after;
    }
    parts
}

/// Adds the gradients of a tile of one head's keys from some query tiles, and leaves their score gradients in `held`.
fn key_tile_grad(
    saved: &Saved<'_>,
    dims: Dims,
    ranges: &KeyRanges,
    members: &[Member],
    keys: &Range<usize>,
    (dk, dv): (&mut [f32], &mut [f32]),
    held: &mut [f32],
) {
    let head_dim = dims.head_dim;
    let mut p = Vec::new();
    for member in members {
        let (seen, tile) = (member.seen(keys), &member.tile);
        if seen.is_empty() {
            continue;
        }
        let (rows, width) = (tile.rows(), seen.len());
        p.resize(rows * width, 0.0);
        let ds = &mut held[member.held(width)];
        tile.softmax_grad(saved, dims, ranges, &seen, member.kv_head, (&mut p, ds));
        let (p, ds) = (Mat::rows(&p, rows, width, width), Mat::rows(ds, rows, width, width));
        let at = (seen.start - keys.start) * head_dim;
        // The packed queries carry the 1/√D already.
        dims.product(&mut dk[at..], head_dim, ds.t(), tile.q_mat(head_dim), true);
        dims.product(&mut dv[at..], head_dim, p.t(), tile.grad_mat(head_dim), true);
    }
}
