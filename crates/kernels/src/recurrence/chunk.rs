//! The rule over chunks of rows, as products (the WY form of Yang et al. 2024, section 3.3).
//!
//! Within a chunk the matrix `S` stays as it was before, and every row leaves its key `k̂` and a correction `u`:
//!
//! ```text
//! u_r = β_r (v_r − G_r Sᵀ k̂_r − Σ_{j<r} w_rj (k̂_j·k̂_r) u_j)      G_r = Π_{i≤r} γ_i,  w_rj = Π_{j<i≤r} γ_i
//! o_r = G_r Sᵀ q̂_r + Σ_{j≤r} w_rj (k̂_j·q̂_r) u_j
//! S ← G S + Σ_j w_j k̂_j u_jᵀ                                     after the chunk's last row
//! ```
//!
//! Rows come one by one or many at a time. An element of a product depends on its row and its column alone, sums
//! that are no products run in the order of rows, and a chunk is closed after the same row however it came. So a
//! row has the same bits in every case.

use std::sync::Arc;

use super::delta::{DeltaRows, DeltaSizes};
use super::walk::{From, Walk};
use crate::gemm::{Mat, Threads, matmul};
use crate::simd::{dot, scale, vectorised};

/// Rows of a chunk.
pub(super) const CHUNK: usize = 64;

/// Rows whose corrections follow from one another one by one; those of earlier rows come in by a product.
const GROUP: usize = 16;

/// Added under the root of the length of queries and keys.
pub(super) const LENGTH_EPS: f32 = 1e-6;

/// What a gated delta net remembers of the rows so far: the matrices before the current chunk, and keys, corrections
/// and decays of the chunk's rows. States of one chunk share the matrices.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaState {
    /// A part a value head; all hold the same rows.
    pub(super) heads: Vec<HeadState>,
}

/// One value head's part.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HeadState {
    /// `S`, `[Dk, Dv]`
    pub(super) matrix: Arc<Vec<f32>>,
    /// `[n, Dk]` of the `n` rows of the chunk.
    keys: Vec<f32>,
    /// `[n, Dv]`
    corrections: Vec<f32>,
    /// `w` of the last row, `[n]`.
    weights: Vec<f32>,
    /// `G` of the last row.
    decay: f32,
}

impl DeltaState {
    /// Before any row.
    pub fn new(sizes: DeltaSizes) -> Self {
        let matrix = Arc::new(vec![0.0; sizes.key_dim * sizes.value_dim]);
        Self {
            heads: (0..sizes.value_heads).map(|_| HeadState::new(Arc::clone(&matrix))).collect(),
        }
    }

    /// From matrices `[Nv, Dk, Dv]`, at the beginning of a chunk.
    pub fn of_matrices(sizes: DeltaSizes, matrices: &[f32]) -> Self {
        let heads = matrices.chunks((sizes.key_dim * sizes.value_dim).max(1));
        Self { heads: heads.map(|matrix| HeadState::new(Arc::new(matrix.to_vec()))).collect() }
    }

    /// The matrices after all rows, `[Nv, Dk, Dv]`.
    pub fn matrices(&self, sizes: DeltaSizes) -> Vec<f32> {
        let mut matrices = Vec::with_capacity(sizes.matrices());
        let mut scaled = vec![0.0; CHUNK * sizes.key_dim];
        for head in &self.heads {
            let mut head = head.clone();
            head.fold(sizes, &mut scaled);
            matrices.extend_from_slice(&head.matrix);
        }
        matrices
    }
}

/// Values of a head's state, at most.
pub(super) fn values_of(sizes: DeltaSizes) -> usize {
    let DeltaSizes { key_dim, value_dim, .. } = sizes;
    key_dim * value_dim + CHUNK * (key_dim + value_dim + 1) + 1
}

impl HeadState {
    fn new(matrix: Arc<Vec<f32>>) -> Self {
        let (keys, corrections, weights) = (Vec::new(), Vec::new(), Vec::new());
        Self { matrix, keys, corrections, weights, decay: 1.0 }
    }

    /// Rows of the chunk.
    fn held(&self) -> usize {
        self.weights.len()
    }

    /// Brings the chunk's rows into the matrix, `S ← G S + Σ_j w_j k̂_j u_jᵀ`, and begins a chunk.
    fn fold(&mut self, sizes: DeltaSizes, scaled: &mut [f32]) {
        let (DeltaSizes { key_dim, value_dim, .. }, rows) = (sizes, self.held());
        if rows == 0 {
            return;
        }
        let keys = self.keys.chunks_exact(key_dim).zip(scaled.chunks_exact_mut(key_dim));
        for ((key, scaled), weight) in keys.zip(&self.weights) {
            scale_into(scaled, key, *weight);
        }
        let matrix = Arc::make_mut(&mut self.matrix);
        scale(matrix, self.decay);
        let keys = Mat::rows(scaled, rows, key_dim, key_dim).t();
        let corrections = Mat::rows(&self.corrections, rows, value_dim, value_dim);
        matmul(matrix, value_dim, keys, corrections, true, Threads::One);
        self.keys.clear();
        self.corrections.clear();
        self.weights.clear();
        self.decay = 1.0;
    }
}

/// One value head's part of a call.
pub(super) struct Head<'a> {
    pub(super) sizes: DeltaSizes,
    pub(super) rows: DeltaRows<'a>,
    pub(super) index: usize,
}

/// What is computed of up to a chunk's rows at a time.
struct Scratch {
    /// Keys, then queries, `[2n, Dk]`.
    vectors: Vec<f32>,
    /// `Sᵀ` times these, `[2n, Dv]`.
    of_matrix: Vec<f32>,
    /// These times the chunk's keys, `[2n, 64]`.
    scores: Vec<f32>,
    /// `[n, Dv]`
    out: Vec<f32>,
    /// Keys times their weights, `[64, Dk]`.
    scaled: Vec<f32>,
}

impl Scratch {
    fn new(sizes: DeltaSizes, rows: usize) -> Self {
        let most = rows.min(CHUNK);
        let DeltaSizes { key_dim, value_dim, .. } = sizes;
        Self {
            vectors: vec![0.0; 2 * most * key_dim],
            of_matrix: vec![0.0; 2 * most * value_dim],
            scores: vec![0.0; 2 * most * CHUNK],
            out: vec![0.0; most * value_dim],
            scaled: vec![0.0; CHUNK * key_dim],
        }
    }
}

impl Head<'_> {
    /// Steps through a walk's rows from the state `before`; outputs are `[T, Dv]`.
    pub(super) fn walk(
        &self,
        walk: &Walk,
        before: &HeadState,
        state: &mut HeadState,
        out: &mut [f32],
    ) {
        let mut scratch = Scratch::new(self.sizes, walk.rows());
        let (mut aside, mut run): (Vec<HeadState>, Vec<usize>) = (Vec::new(), Vec::new());
        for place in &walk.steps {
            if place.from != From::Last {
                self.advance(&mut run, state, &mut scratch, out);
            }
            match place.from {
                From::Start => state.clone_from(before),
                From::Last => {}
                From::Copied => {
                    if let Some(saved) = aside.last() {
                        state.clone_from(saved);
                    }
                }
                From::Taken => {
                    if let Some(saved) = aside.pop() {
                        *state = saved;
                    }
                }
            }
            run.push(place.row);
            if place.branches {
                self.advance(&mut run, state, &mut scratch, out);
                aside.push(state.clone());
            }
        }
        self.advance(&mut run, state, &mut scratch, out);
    }

    /// Takes in rows that follow one another, a chunk's share at a time, and empties their list.
    fn advance(
        &self,
        run: &mut Vec<usize>,
        state: &mut HeadState,
        scratch: &mut Scratch,
        out: &mut [f32],
    ) {
        let width = self.sizes.value_dim;
        let mut rest = run.as_slice();
        while !rest.is_empty() {
            let (rows, later) = rest.split_at(rest.len().min(CHUNK - state.held()));
            rest = later;
            self.take_in(rows, state, scratch);
            for (row, values) in rows.iter().zip(scratch.out.chunks_exact(width)) {
                out[row * width..][..width].copy_from_slice(values);
            }
            if state.held() == CHUNK {
                state.fold(self.sizes, &mut scratch.scaled);
            }
        }
        run.clear();
    }

    /// The chunk's next rows, which all fit in; leaves their outputs.
    fn take_in(&self, rows: &[usize], state: &mut HeadState, scratch: &mut Scratch) {
        let DeltaSizes { key_dim, value_dim, .. } = self.sizes;
        let (count, held) = (rows.len(), state.held());
        let end = held + count;
        let Scratch { vectors, of_matrix, scores, out, .. } = scratch;
        let (keys, queries) = vectors[..2 * count * key_dim].split_at_mut(count * key_dim);
        let lines = keys.chunks_exact_mut(key_dim).zip(queries.chunks_exact_mut(key_dim));
        for (row, (key, query)) in rows.iter().zip(lines) {
            self.prepare(*row, query, key);
        }
        state.keys.extend_from_slice(keys);
        state.corrections.resize(end * value_dim, 0.0);
        let both = Mat::rows(vectors, 2 * count, key_dim, key_dim);
        let matrix = Mat::rows(&state.matrix, key_dim, value_dim, value_dim);
        matmul(&mut *of_matrix, value_dim, both, matrix, false, Threads::One);
        let all_keys = Mat::rows(&state.keys, end, key_dim, key_dim).t();
        matmul(&mut *scores, CHUNK, both, all_keys, false, Threads::One);
        let (of_keys, of_queries) = of_matrix.split_at(count * value_dim);
        let (among_keys, to_keys) = scores[..2 * count * CHUNK].split_at_mut(count * CHUNK);
        for (i, row) in rows.iter().enumerate() {
            let (own, v) = (held + i, self.value(*row));
            let gate = row * self.sizes.value_heads + self.index;
            let (decay, rate) = (self.rows.decay[gate], self.rows.rate[gate]);
            scale(&mut state.weights, decay);
            state.decay *= decay;
            scale_each(&mut among_keys[i * CHUNK..][..own], &state.weights, -rate);
            state.weights.push(1.0);
            scale_each(&mut to_keys[i * CHUNK..][..=own], &state.weights, 1.0);
            let line = i * value_dim..(i + 1) * value_dim;
            let correction = &mut state.corrections[own * value_dim..][..value_dim];
            correct(correction, v, &of_keys[line.clone()], (state.decay, rate));
            scale_into(&mut out[line.clone()], &of_queries[line], state.decay);
        }
        let sums = Sums { held, end, width: value_dim };
        sums.add(&mut state.corrections, (among_keys, to_keys), out);
    }

    /// A row's query and key of unit length.
    fn prepare(&self, row: usize, q: &mut [f32], k: &mut [f32]) {
        let sizes = self.sizes;
        let channels = &self.rows.mixed[row * sizes.channels()..][..sizes.channels()];
        let first = sizes.key_head(self.index) * sizes.key_dim;
        let length = 1.0 / (sizes.key_dim as f32).sqrt();
        unit(&channels[first..][..sizes.key_dim], length, q);
        unit(&channels[sizes.keys() + first..][..sizes.key_dim], 1.0, k);
    }

    fn value(&self, row: usize) -> &[f32] {
        let sizes = self.sizes;
        let first = row * sizes.channels() + 2 * sizes.keys() + self.index * sizes.value_dim;
        &self.rows.mixed[first..][..sizes.value_dim]
    }
}

fn unit(x: &[f32], length: f32, out: &mut [f32]) {
    scale_into(out, x, length / (dot(x, x) + LENGTH_EPS).sqrt());
}

/// The rows `held..end` of a chunk.
struct Sums {
    held: usize,
    end: usize,
    /// `Dv`
    width: usize,
}

impl Sums {
    /// Adds to the rows' corrections `[64, Dv]` those of earlier rows times their scores `[n, 64]`, and to the
    /// outputs `[n, Dv]` those of earlier rows and their own. Rows of earlier groups come in by products, the others
    /// one by one.
    fn add(&self, corrections: &mut [f32], scores: (&[f32], &[f32]), out: &mut [f32]) {
        let Self { held, end, width } = *self;
        for first in (held / GROUP * GROUP..end).step_by(GROUP) {
            let (start, stop) = (first.max(held), (first + GROUP).min(end));
            let (earlier, own) = corrections.split_at_mut(start * width);
            let i = start - held;
            if first > 0 {
                let earlier = Mat::rows(&*earlier, first, width, width);
                let among = Mat::rows(&scores.0[i * CHUNK..], stop - start, first, CHUNK);
                let to = Mat::rows(&scores.1[i * CHUNK..], stop - start, first, CHUNK);
                let own = &mut own[..(stop - start) * width];
                matmul(own, width, among, earlier, true, Threads::One);
                let out = &mut out[i * width..][..(stop - start) * width];
                matmul(out, width, to, earlier, true, Threads::One);
            }
            for row in start..stop {
                let (earlier, own) = corrections.split_at_mut(row * width);
                let line = (row - held) * CHUNK + first;
                let (own, others) = (&mut own[..width], row - first);
                add_rows(own, &earlier[first * width..], &scores.0[line..][..others]);
                let out = &mut out[(row - held) * width..][..width];
                add_rows(out, &corrections[first * width..], &scores.1[line..][..=others]);
            }
        }
    }
}

vectorised! {
    /// `values ← factor · values ∘ weights`
    fn scale_each(values: &mut [f32], weights: &[f32], factor: f32) {
        for (value, weight) in values.iter_mut().zip(weights) {
            *value *= weight * factor;
        }
    }

    /// `out = factor · x`
    fn scale_into(out: &mut [f32], x: &[f32], factor: f32) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = x * factor;
        }
    }

    /// `out = β (v − G held)`; `gates` are `G` and `β`.
    fn correct(out: &mut [f32], v: &[f32], held: &[f32], gates: (f32, f32)) {
        let (decay, rate) = gates;
        for ((out, v), held) in out.iter_mut().zip(v).zip(held) {
            *out = rate * (v - decay * held);
        }
    }

    /// `out += Σ_j factor_j · row_j`, one row after the other.
    fn add_rows(out: &mut [f32], rows: &[f32], factors: &[f32]) {
        for (row, factor) in rows.chunks_exact(out.len()).zip(factors) {
            for (out, x) in out.iter_mut().zip(row) {
                *out = x.mul_add(*factor, *out);
            }
        }
    }
}
