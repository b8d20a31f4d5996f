//! The loss of a selector: the label among a slot's candidates, given the token before it.
//!
//! ```text
//! ℓ = −log softmax_C(S(x_{t−1} → ·))[x_t]        rows whose label is no candidate learn nothing here
//! ```
//!
//! Earlier trainers put the label in the place of the weakest candidate instead (`keeps_labels`). Decoding knows no
//! such candidate: it counts as one that is not chosen.

use candle_core::{Result as TensorResult, Tensor};
use longdraft_kernels::bend::Bend;
use longdraft_kernels::chosen_products::chosen_products;
use longdraft_kernels::matrix::Matrix;
use longdraft_kernels::rows::select_rows;
use longdraft_kernels::top_k::bent_top_k;
use longdraft_models::draft::block::Selector;

use super::blocks::Slots;
use super::objective::BlockObjective;
use crate::error::Result;
use crate::metrics::DraftMetrics;

/// How a selector is trained beside the slots.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SelectorLoss {
    /// λ, its weight beside the loss of the slots.
    pub weight: f64,
    /// Whether it is divided by the weights of rows whose label is a candidate, instead of by those of
    /// all rows.
    pub over_hits: bool,
    /// Whether a label that is no candidate takes the place of the weakest one, so that every row learns.
    pub keeps_labels: bool,
    /// Whether its loss leaves the draft's states and logits alone.
    pub stops_gradient: bool,
}

/// Rows whose label is one of the candidates, or put among them.
#[derive(Debug, Clone, Default)]
pub(super) struct Hits {
    /// Learned rows, ascending.
    pub(super) rows: Vec<u32>,
    /// Their candidates, `K` each, most likely first.
    candidates: Vec<u32>,
    /// Where the label stands among them.
    labels: Vec<u32>,
    /// Whether it is there by itself.
    pub(super) found: Vec<bool>,
}

/// What a selector makes of hits.
pub(super) struct Selected {
    /// ℓ, `[hits]`.
    pub(super) losses: Tensor,
    /// Whether the label is chosen where it is a candidate by itself.
    pub(super) right: Vec<bool>,
}

impl Hits {
    /// Those among learned slots with states `[S, H]` under the target's head `[V, H]`.
    pub(super) fn of(
        states: &Tensor,
        head: &Matrix,
        slots: &Slots,
        (k, keeps_labels): (usize, bool),
    ) -> Result<Self> {
        let top = bent_top_k(&states.detach(), head, k, Bend::default())?;
        let mut hits = Self::default();
        for (row, candidates) in top.ids.chunks(k.max(1)).enumerate() {
            let label = slots.labels[row];
            let found = candidates.iter().position(|id| *id == label);
            let Some(place) = found.or(keeps_labels.then(|| candidates.len() - 1)) else {
                continue;
            };
            let first = hits.candidates.len();
            hits.candidates.extend_from_slice(candidates);
            hits.candidates[first + place] = label;
            hits.rows.push(row as u32);
            hits.labels.push(place as u32);
            hits.found.push(found.is_some());
        }
        Ok(hits)
    }

    /// Σ of the rows' weights.
    pub(super) fn total(&self, weights: &[f64]) -> f64 {
        self.rows.iter().map(|row| weights[*row as usize]).sum()
    }

    /// The selector's choice at the hits; `None` without any.
    pub(super) fn select(
        &self,
        selector: Selector<'_>,
        (states, head, bend): (&Tensor, &Matrix, Bend),
        slots: &Slots,
    ) -> Result<Option<Selected>> {
        if self.rows.is_empty() {
            return Ok(None);
        }
        let states = select_rows(states, &self.rows)?;
        let before: Vec<u32> = self.rows.iter().map(|row| slots.before[*row as usize]).collect();
        let logits = bend.of(chosen_products(&states, head, &self.candidates)?)?;
        let preferences =
            selector.preferences(&selector.project(&states)?, &before, &self.candidates)?;
        let scores = (logits + preferences)?;
        let losses = self.losses(&scores)?;
        let best: Vec<u32> = scores.detach().argmax(1)?.to_vec1()?;
        let chosen = best.iter().zip(&self.labels).map(|(best, label)| best == label);
        let right = chosen.zip(&self.found).map(|(chosen, found)| chosen && *found).collect();
        Ok(Some(Selected { losses, right }))
    }

    fn losses(&self, scores: &Tensor) -> TensorResult<Tensor> {
        let labels = Tensor::from_slice(&self.labels, (self.labels.len(), 1), scores.device())?;
        scores.log_sum_exp(1)? - scores.gather(&labels, 1)?.squeeze(1)?
    }
}

impl BlockObjective {
    /// Counters of a training row, in which a selector weighs what it weighs at the step.
    pub(super) fn of_step(&self, mut metrics: DraftMetrics) -> DraftMetrics {
        if let (Some(part), Some(loss)) = (metrics.parts.get_mut(1), self.loss.selector) {
            part.weight = self.selector_weight(loss);
        }
        metrics
    }

    /// λ at the step that comes.
    pub(super) fn selector_weight(&self, loss: SelectorLoss) -> f64 {
        loss.weight * self.loss.selector_share(self.step)
    }
}
