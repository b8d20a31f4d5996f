//! The k most likely tokens of every row with their log-probabilities under the full softmax.
//!
//! Logits are ordered as [`f32::total_cmp`] orders them, of equal ones the lower id comes first: NaN is
//! larger than everything, −inf smaller than every number, and where a row holds NaN or nothing but −inf
//! its log-probabilities are NaN. The softmax's sum is formed in f64, in `LANES` parts: the `i`-th
//! logit belongs to part `i mod LANES`, and parts are added by halves. A GPU's kernel does the same.

mod gpu;

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use crate::bend::Bend;
use crate::composed::{CHUNK_VALUES, FULL_ROWS};
use crate::linear::{factor_type, linear};

/// Rows whose logits exist at the same time on the host.
const CHUNK_ROWS: usize = 128;
/// Parts of the softmax's sum, and threads of a block of the kernel.
const LANES: usize = 512;

/// `[R, k]` ids and log-probabilities, most likely first, ties to the lower id.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TopK {
    /// Token ids.
    pub ids: Vec<u32>,
    /// `log softmax(h Wᵀ)` at the ids.
    pub log_probs: Vec<f32>,
}

/// Top k of `softmax(hidden · headᵀ)`, chunk by chunk; nothing of size `[R, V]` is stored. An NVIDIA GPU
/// finds up to 256 itself; else the logits come to the host.
///
/// # Shapes
/// - `hidden`: `[R, H]`, `head`: `[V, H]` → `[R, min(k, V)]`
///
/// # Errors
/// - shapes do not fit
pub fn linear_top_k(hidden: &Tensor, head: &Tensor, k: usize) -> Result<TopK> {
    bent_top_k(hidden, head, k, Bend::default())
}

/// The same of bent logits.
///
/// # Errors
/// - as [`linear_top_k`]
pub fn bent_top_k(hidden: &Tensor, head: &Tensor, k: usize, bend: Bend) -> Result<TopK> {
    let (rows, vocabulary) = (hidden.dim(0)?, head.dim(0)?);
    let logits = |head: &Tensor, first: usize, chunk: usize| {
        bend.of(linear(&hidden.narrow(0, first, chunk.min(rows - first))?, head, None)?)
    };
    if gpu::finds(hidden, vocabulary, k.min(vocabulary)) {
        let chunk = (CHUNK_VALUES / vocabulary).max(1);
        // Turned into the type of the products once, not for every chunk.
        let head = if rows < FULL_ROWS {
            head.clone()
        } else {
            head.detach().to_dtype(factor_type(hidden, head))?
        };
        let parts = (0..rows).step_by(chunk);
        let parts = parts.map(|first| gpu::top_k(&logits(&head, first, chunk)?, k.min(vocabulary)));
        return gpu::downloaded(&parts.collect::<Result<Vec<_>>>()?);
    }
    let mut out = TopK::default();
    for first in (0..rows).step_by(CHUNK_ROWS) {
        out.append(&logits(head, first, CHUNK_ROWS)?, k)?;
    }
    Ok(out)
}

/// Top k of every row's softmax.
///
/// # Shapes
/// - `logits`: `[R, V]` in f32 → `[R, min(k, V)]`
///
/// # Errors
/// - `logits` is no matrix of f32 values
pub fn row_top_k(logits: &Tensor, k: usize) -> Result<TopK> {
    let (rows, vocabulary) = logits.dims2()?;
    if rows > 0 && gpu::finds(logits, vocabulary, k.min(vocabulary)) {
        return gpu::downloaded(&[gpu::top_k(logits, k.min(vocabulary))?]);
    }
    let mut out = TopK::default();
    out.append(logits, k)?;
    Ok(out)
}

impl TopK {
    /// Adds rows of logits.
    fn append(&mut self, logits: &Tensor, k: usize) -> Result<()> {
        let logits = logits.to_vec2::<f32>()?;
        let chosen: Vec<(Vec<u32>, Vec<f32>)> =
            logits.par_iter().map(|row| top_k_of_row(row, k)).collect();
        for (ids, log_probs) in chosen {
            self.ids.extend(ids);
            self.log_probs.extend(log_probs);
        }
        Ok(())
    }
}

/// Ids and log-probabilities of one row.
fn top_k_of_row(logits: &[f32], k: usize) -> (Vec<u32>, Vec<f32>) {
    let k = k.min(logits.len());
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_logit =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if k > 0 && k < order.len() {
        order.select_nth_unstable_by(k - 1, by_logit);
    }
    order.truncate(k);
    order.sort_unstable_by(by_logit);
    let max = order.first().map_or(0.0, |id| logits[*id as usize]);
    let log_sum_exp = f64::from(max) + exp_sum(logits, max).ln();
    let log_prob = |id: &u32| (f64::from(logits[*id as usize]) - log_sum_exp) as f32;
    let log_probs = order.iter().map(log_prob).collect();
    (order, log_probs)
}

/// `Σ exp(z − max)`
fn exp_sum(logits: &[f32], max: f32) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    for part in logits.chunks(LANES) {
        for (lane, z) in lanes.iter_mut().zip(part) {
            *lane += f64::from(z - max).exp();
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests;
