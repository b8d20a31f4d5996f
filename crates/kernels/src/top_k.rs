//! The k most likely tokens of every row with their log-probabilities under the full softmax.

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use crate::linear::linear;

/// Rows whose logits exist at the same time.
const CHUNK_ROWS: usize = 128;

/// `[R, k]` ids and log-probabilities, most likely first, ties to the lower id.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TopK {
    /// Token ids.
    pub ids: Vec<u32>,
    /// `log softmax(h Wᵀ)` at the ids.
    pub log_probs: Vec<f32>,
}

/// Top k of `softmax(hidden · headᵀ)`, chunk by chunk; nothing of size `[R, V]` is stored.
///
/// # Shapes
/// - `hidden`: `[R, H]`, `head`: `[V, H]` → `[R, min(k, V)]`
///
/// # Errors
/// - shapes do not fit
pub fn linear_top_k(hidden: &Tensor, head: &Tensor, k: usize) -> Result<TopK> {
    let mut out = TopK::default();
    let rows = hidden.dim(0)?;
    for first in (0..rows).step_by(CHUNK_ROWS) {
        let count = CHUNK_ROWS.min(rows - first);
        let logits = linear(&hidden.narrow(0, first, count)?, head, None)?.to_vec2::<f32>()?;
        let chunk: Vec<(Vec<u32>, Vec<f32>)> =
            logits.par_iter().map(|row| top_k_of_row(row, k)).collect();
        for (ids, log_probs) in chunk {
            out.ids.extend(ids);
            out.log_probs.extend(log_probs);
        }
    }
    Ok(out)
}

/// Ids and log-probabilities of one row.
pub(crate) fn top_k_of_row(logits: &[f32], k: usize) -> (Vec<u32>, Vec<f32>) {
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
    let total: f64 = logits.iter().map(|z| f64::from(z - max).exp()).sum();
    let log_sum_exp = f64::from(max) + total.ln();
    let log_prob = |id: &u32| (f64::from(logits[*id as usize]) - log_sum_exp) as f32;
    let log_probs = order.iter().map(log_prob).collect();
    (order, log_probs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_likely_first_with_full_softmax_and_ties_to_the_lower_id() {
        let logits = [0.0, 2.0, 1.0, 2.0];
        let (ids, log_probs) = top_k_of_row(&logits, 3);
        assert_eq!(ids, [1, 3, 2]);
        let total: f64 = logits.iter().map(|z| f64::from(*z).exp()).sum();
        assert!((f64::from(log_probs[2]) - (1.0 - total.ln())).abs() < 1e-6);
        assert_eq!(top_k_of_row(&logits, 9).0.len(), 4);
    }
}
