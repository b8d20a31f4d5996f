//! Weighted loss against distributions of which only the most likely tokens are known.
//!
//! `p̄_i` are true probabilities at a distribution's ids, `r` the mass of a tail bucket for all
//! other tokens,
//! `Z = Σ p̄_i + r`. Cross-entropy is that of `p = p̄ / Z` and `ρ = r / Z`:
//! `−Σ p_i log q_i − ρ log max(q_tail, 1e-6)`, and `α = Σ min(p̄_i, q_i)` over the ids, a lower
//! bound of the chance of acceptance. A distribution without entries or tail says nothing: its loss
//! is 0.

use candle_core::{D, DType, Result, Tensor, bail};

use super::reference::{log_softmax, weighted_output};
use super::row::{Row, Softmax};
use super::top_k::TopK;
use super::{Inputs, Output, TAIL_FLOOR, Weighted};
use crate::simd::scale;
use crate::storage::from_f64;

/// Distributions at their most likely tokens; rows may share one.
#[derive(Debug, Clone, Copy)]
pub struct SparseDistributions<'a> {
    /// Where the entries of every distribution begin, and where those of the last end, `[U + 1]`.
    pub starts: &'a [usize],
    /// Token ids, different ones in a distribution.
    pub ids: &'a [u32],
    /// Their true log-probabilities.
    pub log_probs: &'a [f32],
    /// Mass of the tail bucket, `[U]`; 0 for none.
    pub tails: &'a [f64],
    /// Distribution of every row, `[R]`.
    pub rows: &'a [u32],
}

/// One distribution.
#[derive(Debug, Clone, Copy)]
pub(super) struct SparseDistribution<'a> {
    pub(super) ids: &'a [u32],
    pub(super) log_probs: &'a [f32],
    pub(super) tail: f64,
}

impl SparseDistribution<'_> {
    /// What probabilities are divided by.
    pub(super) fn mass(&self) -> f64 {
        let mass = self.log_probs.iter().map(|lp| f64::from(*lp).exp()).sum::<f64>() + self.tail;
        if mass > 0.0 { mass } else { 1.0 }
    }
}

impl<'a> SparseDistributions<'a> {
    fn of_row(&self, row: usize) -> SparseDistribution<'a> {
        self.of_distribution(self.rows[row] as usize)
    }

    pub(super) fn of_distribution(&self, distribution: usize) -> SparseDistribution<'a> {
        let entries = self.starts[distribution]..self.starts[distribution + 1];
        SparseDistribution {
            ids: &self.ids[entries.clone()],
            log_probs: &self.log_probs[entries],
            tail: self.tails[distribution],
        }
    }

    pub(super) fn check(&self, rows: usize, vocabulary: usize) -> Result<()> {
        let distributions = self.tails.len();
        let entries = self.ids.len();
        let fits = self.starts.len() == distributions + 1
            && self.starts.is_sorted()
            && self.starts.last() == Some(&entries)
            && self.log_probs.len() == entries
            && self.rows.len() == rows
            && self.rows.iter().all(|distribution| (*distribution as usize) < distributions);
        if !fits {
            bail!(
                "linear_cross_entropy: {distributions} distributions of {entries} ids do not fit {rows} rows"
            );
        }
        if let Some(id) = self.ids.iter().find(|id| **id as usize >= vocabulary) {
            bail!("linear_cross_entropy: id {id} outside the vocabulary of {vocabulary}");
        }
        Ok(())
    }
}

/// Loss and statistics of one row; `z` becomes `dℓ/dz` if `want_grad`.
pub(super) fn row(
    inputs: &Inputs<'_>,
    (distributions, factors): (&SparseDistributions<'_>, &Weighted<'_>),
    index: usize,
    z: &mut [f32],
    want_grad: bool,
) -> Row {
    let label = inputs.labels[index] as usize;
    let label_logit = f64::from(z[label]);
    let entries = TopK::of_distribution(distributions.of_row(index), z);
    let q = Softmax::of(z);
    let hard = q.log_sum_exp() - label_logit;
    let mut out = Row { hard, ..Row::default() };
    let tail = entries.finish(&q, z, &mut out);
    out.agrees = q.argmax as usize == label;
    let (of_label, weight) = (inputs.label_weight(index), inputs.soft_weight);
    let cross_entropy = f64::from(factors.cross_entropy[index]);
    let rejection = f64::from(factors.rejection[index]);
    let rejected = rejection * factors.form.value(out.acceptance);
    out.loss = of_label * hard + weight * (cross_entropy * out.soft + rejected);
    if want_grad {
        let slope = weight * rejection * factors.form.slope(out.acceptance);
        let kept: Vec<f64> =
            entries.ids.iter().map(|&id| f64::from(z[id as usize]) / q.total).collect();
        let everywhere = of_label + slope * entries.mass_below(&kept);
        let cross_entropy = weight * cross_entropy;
        scale(z, ((everywhere + cross_entropy * tail.on_others) / q.total) as f32);
        entries.gradient(&kept, &tail, (everywhere, cross_entropy, slope), z);
        z[label] -= of_label as f32;
    }
    out
}

/// The same from plain tensor ops.
pub(super) fn reference(
    inputs: &Inputs<'_>,
    distributions: &SparseDistributions<'_>,
    factors: &Weighted<'_>,
    logits: &Tensor,
) -> Result<Output> {
    let rows = logits.dim(0)?;
    // Lists of one length: further entries have no probability and count for nothing.
    let longest =
        (0..rows).map(|row| distributions.of_row(row).ids.len()).max().unwrap_or(0).max(1);
    let (mut ids, mut p, mut listed) = (Vec::new(), Vec::new(), Vec::new());
    let (mut masses, mut tails) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
    for row in 0..rows {
        let distribution = distributions.of_row(row);
        ids.extend_from_slice(distribution.ids);
        p.extend(distribution.log_probs.iter().map(|log_prob| f64::from(*log_prob).exp()));
        listed.resize(p.len(), 1.0);
        let entries = (row + 1) * longest;
        ids.resize(entries, 0);
        p.resize(entries, 0.0);
        listed.resize(entries, 0.0);
        masses.push(distribution.mass());
        tails.push(distribution.tail / distribution.mass());
    }
    let wide = logits.dtype();
    let tensor =
        |values: &[f64], width: usize| from_f64(values, (rows, width), wide, logits.device());
    let ids = Tensor::from_vec(ids, (rows, longest), logits.device())?;
    let (true_p, listed) = (tensor(&p, longest)?, tensor(&listed, longest)?);
    let p = true_p.broadcast_div(&tensor(&masses, 1)?)?;
    let tails = tensor(&tails, 1)?.squeeze(1)?;
    let log_q = log_softmax(logits)?;
    let listed_log_q = log_q.gather(&ids, 1)?;
    let q = (listed_log_q.exp()? * listed)?;
    let q_tail = (1.0 - q.sum(D::Minus1)?)?;
    // Above the floor the value itself; at or below it a constant.
    let open = q_tail.gt(TAIL_FLOOR)?.to_dtype(wide)?;
    let q_tail = ((q_tail * &open)? + ((1.0 - open)? * TAIL_FLOOR)?)?;
    let soft = ((p * &listed_log_q)?.sum(D::Minus1)? + (tails * q_tail.log()?)?)?.neg()?;
    let alpha = true_p.minimum(&q)?.sum(D::Minus1)?;
    let labels = Tensor::from_slice(inputs.labels, (rows, 1), logits.device())?;
    let hard = log_q.gather(&labels.to_dtype(DType::U32)?, 1)?.squeeze(1)?.neg()?;
    weighted_output(inputs, factors, (&hard, &soft, &alpha), &log_q)
}
