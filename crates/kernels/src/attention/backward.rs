//! Backward passes over tiles: for queries alone, or for queries, keys and values together. Every gradient is
//! summed in a fixed order, whatever the number of threads.

mod blocks;

use std::ops::Range;

use rayon::prelude::*;

use super::tiled::{key_tile, pack_queries, tiles, visible_in};
use super::{Dims, KeyRanges, TILE_KEYS};
use crate::gemm::Mat;
use crate::simd::{axpy, dot, exp, vectorised};

pub(super) use blocks::{all, held_values};

/// Keys whose single queries one task adds up.
const SINGLES_PER_TASK: usize = 64;

/// Inputs, outputs and log-sum-exp of the forward pass, and the output's gradient.
pub(super) struct Saved<'a> {
    pub(super) q: &'a [f32],
    pub(super) k: &'a [f32],
    pub(super) v: &'a [f32],
    pub(super) out: &'a [f32],
    pub(super) grad: &'a [f32],
    pub(super) lse: &'a [f32],
}

/// One group of query rows with what the softmax gradient needs: `[rows, D]`, `[rows]`.
struct QueryTile {
    queries: Range<usize>,
    /// Scaled queries.
    q: Vec<f32>,
    /// Output gradients.
    grad: Vec<f32>,
    lse: Vec<f32>,
    /// `Σ_d dO ∘ O`.
    delta: Vec<f32>,
}

impl QueryTile {
    fn new(saved: &Saved<'_>, dims: Dims, queries: Range<usize>, kv_head: usize) -> Self {
        let q = pack_queries(saved.q, dims, queries.clone(), kv_head, dims.scale());
        let grad = pack_queries(saved.grad, dims, queries.clone(), kv_head, 1.0);
        let out = pack_queries(saved.out, dims, queries.clone(), kv_head, 1.0);
        let rows = grad.chunks_exact(dims.head_dim).zip(out.chunks_exact(dims.head_dim));
        let delta = rows.map(|(g, o)| dot(g, o)).collect();
        let lse = queries
            .clone()
            .flat_map(|t| {
                let start = t * dims.heads + kv_head * dims.group();
                saved.lse[start..start + dims.group()].iter().copied()
            })
            .collect();
        Self { queries, q, grad, lse, delta }
    }

    fn rows(&self) -> usize {
        self.lse.len()
    }

    fn q_mat(&self, head_dim: usize) -> Mat<'_> {
        Mat::rows(&self.q, self.rows(), head_dim, head_dim)
    }

    fn grad_mat(&self, head_dim: usize) -> Mat<'_> {
        Mat::rows(&self.grad, self.rows(), head_dim, head_dim)
    }

    /// Probability and score gradient of one row and one key.
    fn single_grad(&self, row: usize, dims: Dims, k: &[f32], v: &[f32]) -> (f32, f32) {
        let range = row * dims.head_dim..(row + 1) * dims.head_dim;
        let p = probability(dot(&self.q[range.clone()], k), self.lse[row]);
        (p, p * (dot(&self.grad[range], v) - self.delta[row]))
    }

    /// Fills `p` with probabilities and `ds` with score gradients for one tile of keys.
    fn softmax_grad(
        &self,
        saved: &Saved<'_>,
        dims: Dims,
        ranges: &KeyRanges,
        tile: &Range<usize>,
        kv_head: usize,
        (p, ds): (&mut [f32], &mut [f32]),
    ) {
        let (width, head_dim) = (tile.len(), dims.head_dim);
        let keys = key_tile(saved.k, dims, tile, kv_head);
        dims.product(&mut *p, width, self.q_mat(head_dim), keys.t(), false);
        let values = key_tile(saved.v, dims, tile, kv_head);
        dims.product(&mut *ds, width, self.grad_mat(head_dim), values.t(), false);
        for row in 0..self.rows() {
            let query = self.queries.start + row / dims.group();
            let visible = visible_in(tile, &ranges.of(query));
            let p = &mut p[row * width..(row + 1) * width];
            let ds = &mut ds[row * width..(row + 1) * width];
            for x in [&mut *p, &mut *ds] {
                x[..visible.start].fill(0.0);
                x[visible.end..].fill(0.0);
            }
            let (p, ds) = (&mut p[visible.clone()], &mut ds[visible]);
            softmax_grad_row(p, ds, self.lse[row], self.delta[row]);
        }
    }

    /// Adds what single keys give to the queries' sums.
    fn add_singles(
        &self,
        saved: &Saved<'_>,
        dims: Dims,
        ranges: &KeyRanges,
        kv_head: usize,
        sums: &mut [f32],
    ) {
        let head_dim = dims.head_dim;
        for (row, sum) in sums.chunks_exact_mut(head_dim).enumerate() {
            for &key in ranges.singles_of(self.queries.start + row / dims.group()) {
                let at = key as usize * dims.kv_stride() + kv_head * head_dim;
                let (k, v) = (&saved.k[at..][..head_dim], &saved.v[at..][..head_dim]);
                axpy(self.single_grad(row, dims, k, v).1, k, sum);
            }
        }
    }
}

/// Writes sums of one key-value head's queries, `[queries · G, D]`, into `dQ`, `[queries, N, D]`.
fn write_queries(dims: Dims, kv_head: usize, sums: &[f32], dq: &mut [f32]) {
    let width = dims.group() * dims.head_dim;
    for (t, sum) in sums.chunks_exact(width).enumerate() {
        let out = &mut dq[t * dims.q_stride() + kv_head * width..][..width];
        for (out, sum) in out.iter_mut().zip(sum) {
            *out = sum * dims.scale();
        }
    }
}

/// Smallest probability that has a gradient, 2^-60: beside a sum of 1, f32 keeps nothing of it. Gradients of smaller ones
/// may be subnormal numbers, with which products take a hundred times as long.
const LEAST_PROBABILITY: f32 = f32::from_bits((127 - 60) << 23);

/// `e^(score − lse)`, or 0 below [`LEAST_PROBABILITY`].
#[allow(clippy::inline_always, reason = "loops over it are compiled per instruction set")]
#[inline(always)]
fn probability(score: f32, lse: f32) -> f32 {
    let p = exp(score - lse);
    // A comparison that is false for NaN lets it through.
    if p < LEAST_PROBABILITY { 0.0 } else { p }
}

vectorised! {
    /// Scores and `dO · v` of one row become probabilities and score gradients.
    fn softmax_grad_row(p: &mut [f32], ds: &mut [f32], lse: f32, delta: f32) {
        for (p, ds) in p.iter_mut().zip(ds) {
            *p = probability(*p, lse);
            *ds = *p * (*ds - delta);
        }
    }
}

/// `dQ`, `[Tq, N, D]`.
pub(super) fn queries(saved: &Saved<'_>, dims: Dims, ranges: &KeyRanges) -> Vec<f32> {
    let tile_queries = dims.tile_queries();
    let mut dq = vec![0.0; saved.q.len()];
    dq.par_chunks_mut((tile_queries * dims.q_stride()).max(1)).enumerate().for_each(
        |(index, dq)| {
            let first = index * tile_queries;
            let queries = first..(first + tile_queries).min(ranges.queries());
            let hull = ranges.hull(queries.clone());
            for kv_head in 0..dims.kv_heads {
                let tile = QueryTile::new(saved, dims, queries.clone(), kv_head);
                query_tile_grad(saved, dims, ranges, &tile, hull.clone(), kv_head, dq);
            }
        },
    );
    dq
}

fn query_tile_grad(
    saved: &Saved<'_>,
    dims: Dims,
    ranges: &KeyRanges,
    tile: &QueryTile,
    hull: Range<usize>,
    kv_head: usize,
    dq: &mut [f32],
) {
    let (rows, head_dim) = (tile.rows(), dims.head_dim);
    let mut acc = vec![0.0_f32; rows * head_dim];
    let (mut p, mut ds) = (vec![0.0_f32; rows * TILE_KEYS], vec![0.0_f32; rows * TILE_KEYS]);
    for key_range in tiles(hull) {
        tile.softmax_grad(saved, dims, ranges, &key_range, kv_head, (&mut p, &mut ds));
        let width = key_range.len();
        let keys = key_tile(saved.k, dims, &key_range, kv_head);
        dims.product(&mut acc, head_dim, Mat::rows(&ds, rows, width, width), keys, true);
    }
    tile.add_singles(saved, dims, ranges, kv_head, &mut acc);
    write_queries(dims, kv_head, &acc, dq);
}

/// Adds what single keys contribute: each key's queries in ascending order, by one task.
fn single_keys(
    saved: &Saved<'_>,
    dims: Dims,
    ranges: &KeyRanges,
    (dk, dv): (&mut [f32], &mut [f32]),
) {
    let pairs = ranges.singles_by_key();
    if pairs.is_empty() {
        return;
    }
    let (stride, head_dim) = (dims.kv_stride(), dims.head_dim);
    dk.par_chunks_mut(SINGLES_PER_TASK * stride)
        .zip(dv.par_chunks_mut(SINGLES_PER_TASK * stride))
        .enumerate()
        .for_each(|(index, (dk, dv))| {
            let first = index * SINGLES_PER_TASK;
            let from = pairs.partition_point(|&(key, _)| (key as usize) < first);
            let to = pairs.partition_point(|&(key, _)| (key as usize) < first + SINGLES_PER_TASK);
            for &(key, query) in &pairs[from..to] {
                let (key, query) = (key as usize, query as usize);
                for kv_head in 0..dims.kv_heads {
                    let tile = QueryTile::new(saved, dims, query..query + 1, kv_head);
                    let at = key * stride + kv_head * head_dim;
                    let (k, v) = (&saved.k[at..][..head_dim], &saved.v[at..][..head_dim]);
                    let out = at - first * stride..at - first * stride + head_dim;
                    for row in 0..tile.rows() {
                        let (p, ds) = tile.single_grad(row, dims, k, v);
                        let range = row * head_dim..(row + 1) * head_dim;
                        axpy(ds, &tile.q[range.clone()], &mut dk[out.clone()]);
                        axpy(p, &tile.grad[range], &mut dv[out.clone()]);
                    }
                }
            }
        });
}
