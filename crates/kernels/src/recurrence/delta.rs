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
//! What is computed of it, and in which order, stands in `chunk.rs`.

use std::sync::{Mutex, PoisonError};

use candle_core::{D, DType, Result, Tensor, bail};

use super::Walk;
use super::chunk::{DeltaState, Head, LENGTH_EPS, values_of};
use crate::threads::split;

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

    /// Values of the matrices, `Nv Dk Dv`.
    pub fn matrices(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }

    /// Values of a state, at most: the matrices and the rows of a chunk.
    pub fn state(&self) -> usize {
        self.value_heads * values_of(*self)
    }

    pub(super) fn key_head(&self, head: usize) -> usize {
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
/// means something if the walk is a chain. Outputs are `[T, Nv, Dv]`.
///
/// # Errors
/// - lengths do not fit, or `Nk` does not divide `Nv`
pub fn gated_delta_rule(
    sizes: DeltaSizes,
    rows: DeltaRows<'_>,
    walk: &Walk,
    before: &DeltaState,
    after: &mut DeltaState,
) -> Result<Vec<f32>> {
    check(sizes, rows, walk.rows())?;
    let matrix = sizes.key_dim * sizes.value_dim;
    let fits = |state: &DeltaState| {
        state.heads.len() == sizes.value_heads
            && state.heads.iter().all(|head| head.matrix.len() == matrix)
    };
    if !fits(before) || !fits(after) {
        bail!("delta rule: a state of {} heads for {sizes:?}", before.heads.len());
    }
    if walk.rows() == 0 {
        after.clone_from(before);
        return Ok(Vec::new());
    }
    let width = sizes.value_dim;
    let mut by_head = vec![0.0; walk.rows() * sizes.values()];
    let outputs = by_head.chunks_mut(walk.rows() * width);
    // Every head has a state and outputs of its own: the locks are never waited for.
    let places: Vec<_> = after.heads.iter_mut().zip(outputs).map(Mutex::new).collect();
    split(places.len(), |head| {
        let mut place = places[head].lock().unwrap_or_else(PoisonError::into_inner);
        let (state, out) = &mut *place;
        Head { sizes, rows, index: head }.walk(walk, &before.heads[head], state, out);
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

fn check(sizes: DeltaSizes, rows: DeltaRows<'_>, count: usize) -> Result<()> {
    let DeltaSizes { key_heads, value_heads, .. } = sizes;
    if key_heads == 0 || sizes.matrices() == 0 || !value_heads.is_multiple_of(key_heads) {
        bail!("delta rule: {value_heads} value heads of {key_heads} key heads");
    }
    let gates = count * value_heads;
    let fits = rows.mixed.len() == count * sizes.channels()
        && rows.decay.len() == gates
        && rows.rate.len() == gates;
    if !fits {
        bail!(
            "delta rule: {} channels, {} and {} gates for {count} rows of {sizes:?}",
            rows.mixed.len(),
            rows.decay.len(),
            rows.rate.len()
        );
    }
    Ok(())
}

/// The same for rows that follow one another, from plain tensor ops: outputs `[T, Nv, Dv]` and the state after
/// them.
///
/// # Shapes
/// - `mixed`: `[T, C]`, `decay`, `rate`: `[T, Nv]`, `state`: `[Nv, Dk, Dv]`
pub(crate) fn reference(
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
