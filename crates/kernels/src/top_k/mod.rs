//! The k most likely tokens of every row with their log-probabilities under the full softmax.
//!
//! Logits are ordered as [`f32::total_cmp`] orders them, of equal ones the lower id comes first: NaN is
//! larger than everything, −inf smaller than every number, and where a row holds NaN, +inf or nothing but −inf
//! its log-probabilities are NaN. A GPU's kernel finds the same ids; log-probabilities agree to some 1e-6.

mod gpu;

use candle_core::{Device, Result, Tensor};
use rayon::prelude::*;

use crate::bend::Bend;
use crate::chunks::{logits_on, rows_at_once};
use crate::composed::FULL_ROWS;
use crate::linear::factor_type;
use crate::log_sum_exp::row_log_sum_exp;
use crate::matrix::Head;
use crate::settings::rounded_as_of_rows;
use crate::simd::max_of;
use crate::storage::with_f32;

#[cfg(all(test, feature = "cuda"))]
pub(crate) use gpu::compiled;

/// Rows whose logits exist at the same time on the host.
const CHUNK_ROWS: usize = 128;
/// Logits of which only the largest is looked at first.
const BLOCK: usize = 64;

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

/// The same of bent logits, of any head.
///
/// # Errors
/// - as [`linear_top_k`]
pub fn bent_top_k<'a>(
    hidden: &Tensor,
    head: impl Into<Head<'a>>,
    k: usize,
    bend: Bend,
) -> Result<TopK> {
    let head: Head<'_> = head.into();
    let (rows, (vocabulary, _)) = (hidden.dim(0)?, head.dims()?);
    let logits = |head: Head<'_>, first: usize, chunk: usize| {
        bend.of(head.linear(&hidden.narrow(0, first, chunk.min(rows - first))?)?)
    };
    if gpu::finds(hidden, vocabulary, k.min(vocabulary)) {
        let chunk = rows_at_once(logits_on(hidden.device(), bend)?, vocabulary);
        // Turned into the type of the products once, not for every chunk.
        let head = head.to_tensor()?;
        let head = if rows < FULL_ROWS {
            head
        } else {
            head.detach().to_dtype(factor_type(hidden, head.dtype()))?
        };
        let (head, k) = (Head::from(&head), k.min(vocabulary));
        let parts = (0..rows).step_by(chunk);
        let parts = parts.map(|first| gpu::top_k(&logits(head, first, chunk)?, k));
        return gpu::downloaded(&parts.collect::<Result<Vec<_>>>()?);
    }
    let mut out = TopK::default();
    for first in (0..rows).step_by(CHUNK_ROWS) {
        // A store keeps what was found beside other rows than a step's.
        let logits = rounded_as_of_rows(CHUNK_ROWS, || logits(head, first, CHUNK_ROWS))?;
        out.append(&logits, k)?;
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
        let vocabulary = logits.dims2()?.1.max(1);
        let of_row = |row: &[f32]| top_k_of_row(row, k);
        let chosen: Vec<(Vec<u32>, Vec<f32>)> = with_f32(&logits.to_device(&Device::Cpu)?, |z| {
            Ok(z.par_chunks(vocabulary).map(of_row).collect())
        })?;
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
    let log_sum_exp = row_log_sum_exp(logits);
    let mut order: Vec<u32> = match bound(logits, k).filter(|_| log_sum_exp.is_finite()) {
        Some(bound) => {
            let all = (0..).zip(logits);
            all.filter(|(_, z)| **z >= bound).map(|(id, _)| id).collect()
        }
        None => (0..logits.len() as u32).collect(),
    };
    let by_logit =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if k > 0 && k < order.len() {
        order.select_nth_unstable_by(k - 1, by_logit);
    }
    order.truncate(k);
    order.sort_unstable_by(by_logit);
    let log_prob = |id: &u32| {
        let log_prob = f64::from(logits[*id as usize]) - log_sum_exp;
        if log_sum_exp.is_finite() { log_prob as f32 } else { f32::NAN }
    };
    let log_probs = order.iter().map(log_prob).collect();
    (order, log_probs)
}

/// A number that at least `k` logits reach, none of which is NaN: the `k`-th of the largest ones of all blocks. `None`
/// where there are not so many blocks.
fn bound(logits: &[f32], k: usize) -> Option<f32> {
    let mut largest: Vec<f32> = logits.chunks(BLOCK).map(max_of).collect();
    if k == 0 || k > largest.len() {
        return None;
    }
    let (_, bound, _) = largest.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    Some(*bound)
}

#[cfg(test)]
mod tests;
