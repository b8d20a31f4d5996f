//! The gated delta rule (Yang et al. 2024, <https://arxiv.org/abs/2412.06464>): a matrix a head that forgets by
//! `γ` and is corrected by what it gets wrong.
//!
//! Of a row's channels `[q | k | v]`, with `q̂ = q / √(Σq² + 10⁻⁶) / √Dk`, `k̂ = k / √(Σk² + 10⁻⁶)` per head:
//!
//! ```text
//! S_t = γ S_{t−1} + k̂ (β (v − (γ S_{t−1})ᵀ k̂))ᵀ        S: [Dk, Dv] of every value head, f32
//! o_t = S_tᵀ q̂
//! ```
//!
//! Sums over `Dk` run in order, one value column beside the other.

use std::sync::{Mutex, PoisonError};

use candle_core::{D, DType, Result, Tensor, bail};

use super::Walk;
use super::walk::From;
use crate::simd::{dot, vectorised};
use crate::threads::split;

/// Added under the root of the length of queries and keys.
const LENGTH_EPS: f32 = 1e-6;

/// Sizes of the rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaSizes {
    /// `Nk`, heads of queries and keys.
    pub key_heads: usize,
    /// `Nv`, heads of values, a multiple of `Nk`.
    pub value_heads: usize,
    /// `Dk`
    pub key_dim: usize,
    /// `Dv`
    pub value_dim: usize,
    /// Whether value head `h` reads key head `h mod Nk`; else `⌊h / (Nv / Nk)⌋`.
    pub tiled: bool,
}

impl DeltaSizes {
    /// Values of all queries, or of all keys, of a token.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// All values of a token.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// `C = 2 Nk Dk + Nv Dv`: queries, keys and values of a token side by side.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Values of the state, `Nv Dk Dv`.
    pub fn state(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }

    fn key_head(&self, head: usize) -> usize {
        if self.tiled { head % self.key_heads } else { head / (self.value_heads / self.key_heads) }
    }
}

/// What the rows of a call bring.
#[derive(Debug, Clone, Copy)]
pub struct DeltaRows<'a> {
    /// Queries, keys and values, `[T, C]`.
    pub mixed: &'a [f32],
    /// `γ`, `[T, Nv]`.
    pub decay: &'a [f32],
    /// `β`, `[T, Nv]`.
    pub rate: &'a [f32],
}

/// Steps through the rows from the state `before`, and leaves the state after the last step in `after`, which
/// means something if the walk is a chain.
///
/// # Shapes
/// - `before`, `after`: `[Nv, Dk, Dv]` → `[T, Nv, Dv]`
///
/// # Errors
/// - lengths do not fit, or `Nk` does not divide `Nv`
pub fn gated_delta_rule(
    sizes: DeltaSizes,
    rows: DeltaRows<'_>,
    walk: &Walk,
    before: &[f32],
    after: &mut [f32],
) -> Result<Vec<f32>> {
    check(sizes, rows, walk.rows(), before.len(), after.len())?;
    let (head_state, width) = (sizes.key_dim * sizes.value_dim, sizes.value_dim);
    let mut by_head = vec![0.0; walk.rows() * sizes.values()];
    let outputs = by_head.chunks_mut((walk.rows() * width).max(1));
    // Every head has a state and outputs of its own: the locks are never waited for.
    let places: Vec<_> = after.chunks_mut(head_state).zip(outputs).map(Mutex::new).collect();
    split(places.len(), |head| {
        let mut place = places[head].lock().unwrap_or_else(PoisonError::into_inner);
        let (state, out) = &mut *place;
        let before = &before[head * head_state..][..head_state];
        Head { sizes, rows, index: head }.walk(walk, before, state, out);
    });
    drop(places);
    let mut out = vec![0.0; by_head.len()];
    for (head, of_head) in by_head.chunks(walk.rows() * width).enumerate() {
        for (row, values) in of_head.chunks_exact(width).enumerate() {
            out[row * sizes.values() + head * width..][..width].copy_from_slice(values);
        }
    }
    Ok(out)
}

fn check(
    sizes: DeltaSizes,
    rows: DeltaRows<'_>,
    count: usize,
    before: usize,
    after: usize,
) -> Result<()> {
    let DeltaSizes { key_heads, value_heads, .. } = sizes;
    if key_heads == 0 || sizes.state() == 0 || !value_heads.is_multiple_of(key_heads) {
        bail!("delta rule: {value_heads} value heads of {key_heads} key heads");
    }
    let gates = count * value_heads;
    let fits = rows.mixed.len() == count * sizes.channels()
        && rows.decay.len() == gates
        && rows.rate.len() == gates
        && [before, after] == [sizes.state(); 2];
    if !fits {
        bail!(
            "delta rule: {} channels, {} and {} gates, states of {before} and {after} values for {count} \
             rows of {sizes:?}",
            rows.mixed.len(),
            rows.decay.len(),
            rows.rate.len()
        );
    }
    Ok(())
}

/// One value head's part.
struct Head<'a> {
    sizes: DeltaSizes,
    rows: DeltaRows<'a>,
    index: usize,
}

impl Head<'_> {
    fn walk(&self, walk: &Walk, before: &[f32], state: &mut [f32], out: &mut [f32]) {
        let DeltaSizes { key_dim, value_dim, .. } = self.sizes;
        let (mut q, mut k) = (vec![0.0; key_dim], vec![0.0; key_dim]);
        let mut delta = vec![0.0; value_dim];
        let mut aside: Vec<Vec<f32>> = Vec::new();
        for place in &walk.steps {
            match place.from {
                From::Start => state.copy_from_slice(before),
                From::Last => {}
                From::Copied => {
                    if let Some(saved) = aside.last() {
                        state.copy_from_slice(saved);
                    }
                }
                From::Taken => {
                    if let Some(saved) = aside.pop() {
                        state.copy_from_slice(&saved);
                    }
                }
            }
            let gate = place.row * self.sizes.value_heads + self.index;
            let gates = (self.rows.decay[gate], self.rows.rate[gate]);
            let v = self.prepare(place.row, &mut q, &mut k);
            let out = &mut out[place.row * value_dim..][..value_dim];
            step(state, (&q, &k), v, gates, &mut delta, out);
            if place.branches {
                aside.push(state.to_vec());
            }
        }
    }

    /// A row's query and key of unit length, and its value.
    fn prepare(&self, row: usize, q: &mut [f32], k: &mut [f32]) -> &[f32] {
        let sizes = self.sizes;
        let channels = &self.rows.mixed[row * sizes.channels()..][..sizes.channels()];
        let first = sizes.key_head(self.index) * sizes.key_dim;
        let scale = 1.0 / (sizes.key_dim as f32).sqrt();
        unit(&channels[first..][..sizes.key_dim], scale, q);
        unit(&channels[sizes.keys() + first..][..sizes.key_dim], 1.0, k);
        &channels[2 * sizes.keys() + self.index * sizes.value_dim..][..sizes.value_dim]
    }
}

fn unit(x: &[f32], scale: f32, out: &mut [f32]) {
    let factor = scale / (dot(x, x) + LENGTH_EPS).sqrt();
    for (out, x) in out.iter_mut().zip(x) {
        *out = x * factor;
    }
}

vectorised! {
    /// One token of one head; `gates` are `γ` and `β`, `delta` is scratch.
    fn step(
        state: &mut [f32],
        qk: (&[f32], &[f32]),
        v: &[f32],
        gates: (f32, f32),
        delta: &mut [f32],
        out: &mut [f32],
    ) {
        let ((q, k), (decay, rate), width) = (qk, gates, v.len());
        delta.fill(0.0);
        for (row, k) in state.chunks_exact_mut(width).zip(k) {
            for (s, held) in row.iter_mut().zip(delta.iter_mut()) {
                *s *= decay;
                *held = s.mul_add(*k, *held);
            }
        }
        for (delta, v) in delta.iter_mut().zip(v) {
            *delta = rate * (v - *delta);
        }
        out.fill(0.0);
        for ((row, k), q) in state.chunks_exact_mut(width).zip(k).zip(q) {
            for ((s, delta), out) in row.iter_mut().zip(delta.iter()).zip(out.iter_mut()) {
                *s = delta.mul_add(*k, *s);
                *out = s.mul_add(*q, *out);
            }
        }
    }
}

/// The same for rows that follow one another, from plain tensor ops: outputs `[T, Nv, Dv]` and the state after
/// them.
///
/// # Shapes
/// - `mixed`: `[T, C]`, `decay`, `rate`: `[T, Nv]`, `state`: `[Nv, Dk, Dv]`
///
/// # Errors
/// - shapes do not fit
pub fn reference(
    sizes: DeltaSizes,
    mixed: &Tensor,
    (decay, rate): (&Tensor, &Tensor),
    state: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let rows = mixed.dim(0)?;
    let heads = |first: usize, count: usize, dim: usize| {
        mixed.narrow(1, first, count * dim)?.contiguous()?.reshape((rows, count, dim))
    };
    let unit = |x: Tensor| -> Result<Tensor> {
        let length = (x.sqr()?.sum_keepdim(D::Minus1)? + f64::from(LENGTH_EPS))?.sqrt()?;
        x.broadcast_div(&length)
    };
    let DeltaSizes { key_heads, value_heads, key_dim, value_dim, .. } = sizes;
    let order: Vec<u32> = (0..value_heads).map(|head| sizes.key_head(head) as u32).collect();
    let order = Tensor::new(order, mixed.device())?;
    let q = (unit(heads(0, key_heads, key_dim)?)? / (key_dim as f64).sqrt())?;
    let q = q.index_select(&order, 1)?;
    let k = unit(heads(sizes.keys(), key_heads, key_dim)?)?.index_select(&order, 1)?;
    let v = heads(2 * sizes.keys(), value_heads, value_dim)?;
    let (mut state, mut out) = (state.clone(), Vec::with_capacity(rows));
    for row in 0..rows {
        let gate = |of: &Tensor| of.get(row)?.reshape((value_heads, 1, 1));
        let k = k.get(row)?.unsqueeze(2)?;
        state = state.broadcast_mul(&gate(decay)?)?;
        let held = state.broadcast_mul(&k)?.sum(1)?;
        let wrong = (v.get(row)? - held)?.unsqueeze(1)?.broadcast_mul(&gate(rate)?)?;
        state = (state + k.broadcast_mul(&wrong)?)?;
        out.push(state.broadcast_mul(&q.get(row)?.unsqueeze(2)?)?.sum(1)?);
    }
    let out = if out.is_empty() {
        Tensor::zeros((0, value_heads, value_dim), DType::F32, mixed.device())?
    } else {
        Tensor::stack(&out, 0)?
    };
    Ok((out, state))
}
