//! The text, or the target's distribution, at the slots of drawn blocks: `Σ w ℓ / Σ w`, with the loss
//! of a selector beside it.

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, FeatureNeeds, TeacherKind, untapped};
use longdraft_kernels::linear_cross_entropy::{
    Inputs, Output, RowStatistics, linear_cross_entropy,
};
use longdraft_kernels::rows::select_rows;
use longdraft_models::draft::Draft;
use longdraft_models::draft::block::Selector;

use super::blocks::{Slots, give_keys};
use super::drawn::DrawnBlocks;
use super::selected::{Hits, Selected, SelectorLoss};
use super::teacher::{SoftLoss, teacher_rows};
use super::weights::SlotWeights;
use crate::error::Result;
use crate::loss::Share;
use crate::metrics::{DraftMetrics, LossPart, Quantities};
use crate::objective::{Normalisation, Objective, Prepared, TeacherDistribution, mixed_in_words};

/// What is minimised.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockLoss {
    /// What a slot's loss is multiplied by.
    pub weights: SlotWeights,
    /// γ of [`SlotWeights::Decay`], in slots.
    pub decay: f64,
    /// α of D-PACE.
    pub alpha: f64,
    /// Whether rows divide the loss of D-PACE.
    pub divide_by_rows: bool,
    /// The part of the target's distribution; without it slots learn the text alone.
    pub soft: Option<SoftLoss>,
    /// The part of the draft's selector; without it a selector is neither trained nor asked.
    pub selector: Option<SelectorLoss>,
}

impl BlockLoss {
    /// Whether weights or divisors wait for the draft's pass over all rows of a step.
    pub(in crate::method) fn waits(&self) -> bool {
        let of_weights = self.weights.look_at_the_draft() && !self.divide_by_rows;
        of_weights || self.selector.is_some_and(|selector| selector.over_hits)
    }
}

/// A block draft with its loss.
pub type BlockObjective = DrawnBlocks<BlockLoss>;

/// What is learned of a row.
pub(super) struct Plan {
    slots: Slots,
    /// Weights of the learned slots.
    weights: Vec<f32>,
    /// What a row adds to the divisor of each part of the loss.
    denominators: Vec<f64>,
}

impl BlockObjective {
    pub(super) fn slots(&self, batch: &Batch) -> Slots {
        Slots::new(batch, &self.starts(batch), self.draft.config())
    }

    /// The learned slots' states, `[S, H]`.
    fn states(&self, batch: &Batch, features: &BatchFeatures, slots: &Slots) -> Result<Tensor> {
        let states = slots.states(&self.draft, batch, features)?;
        Ok(select_rows(&states, &slots.learned)?)
    }

    /// Weights of the learned slots, given the labels' probabilities where they matter.
    fn weights(&self, slots: &Slots, chances: Option<&[f64]>) -> Vec<f32> {
        let size = self.draft.config().block_size;
        let mut of_slots = vec![None; slots.ids.len()];
        for (row, slot) in slots.learned.iter().enumerate() {
            of_slots[*slot as usize] = Some(chances.map_or(1.0, |chances| chances[row]));
        }
        let BlockLoss { weights, decay, alpha, .. } = self.loss;
        let blocks = of_slots.chunks(size).flat_map(|b| weights.of_block(b, (decay, alpha)));
        let all: Vec<f64> = blocks.collect();
        slots.learned.iter().map(|slot| all[*slot as usize] as f32).collect()
    }

    /// The slots' losses under `weights`, of their states `[S, H]`, and what the head makes of these.
    fn judge(
        &self,
        states: &Tensor,
        of: (&Batch, &Slots),
        features: &BatchFeatures,
        weights: &[f32],
    ) -> Result<(Tensor, RowStatistics)> {
        let labels = Inputs::of_labels(states, &self.head, &of.1.labels).bent(self.bend);
        let Output { loss_sum, rows } = match self.loss.soft {
            None => linear_cross_entropy(&Inputs { label_weights: Some(weights), ..labels })?,
            Some(soft) => soft.cross_entropy(&labels, of, features, weights)?,
        };
        Ok((loss_sum, rows))
    }

    /// What the head makes of learned slots' states `[S, H]`, without a gradient.
    pub(super) fn observe(&self, states: &Tensor, slots: &Slots) -> Result<RowStatistics> {
        let states = states.detach();
        let labels = Inputs::of_labels(&states, &self.head, &slots.labels).bent(self.bend);
        Ok(linear_cross_entropy(&labels)?.rows)
    }

    fn plan(&self, batch: &Batch, features: &BatchFeatures) -> Result<Plan> {
        let slots = self.slots(batch);
        let hits_divide = self.loss.selector.is_some_and(|selector| selector.over_hits);
        let looks = self.loss.weights.look_at_the_draft();
        if !self.prepares_with_draft() {
            return Ok(self.planned(batch, slots, None, None));
        }
        if slots.learned.is_empty() {
            give_keys(&self.draft, batch, features)?;
            return Ok(self.planned(batch, slots, None, None));
        }
        let states = self.states(batch, features, &slots)?.detach();
        let losses = if looks { Some(self.observe(&states, &slots)?.hard) } else { None };
        let hits = if hits_divide { self.hits(&states, &slots)? } else { None };
        Ok(self.planned(batch, slots, losses.as_deref(), hits.as_ref()))
    }

    /// The plan of a row, from the draft's own losses and hits where they matter.
    pub(super) fn planned(
        &self,
        batch: &Batch,
        slots: Slots,
        losses: Option<&[f64]>,
        hits: Option<&Hits>,
    ) -> Plan {
        let chances =
            losses.map(|losses| losses.iter().map(|loss| (-loss).exp()).collect::<Vec<_>>());
        let weights = self.weights(&slots, chances.as_deref());
        let total: f64 = weights.iter().map(|weight| f64::from(*weight)).sum();
        let by_rows = self.loss.divide_by_rows && self.loss.weights.look_at_the_draft();
        let of_slots = if by_rows { of_row(batch) } else { total };
        let mut denominators = vec![of_slots];
        if let Some(selector) = self.loss.selector {
            let of_hits = || hits.map_or(0.0, |hits| hits.total(&weights));
            denominators.push(if selector.over_hits { of_hits() } else { of_slots });
        }
        Plan { slots, weights, denominators }
    }

    /// The draft's selector, where it is trained.
    fn selector(&self) -> Option<(SelectorLoss, Selector<'_>)> {
        self.loss.selector.zip(self.draft.selector())
    }

    /// Rows whose label is a candidate, where a selector is trained.
    fn hits(&self, states: &Tensor, slots: &Slots) -> Result<Option<Hits>> {
        let Some((_, selector)) = self.selector() else { return Ok(None) };
        Ok(Some(Hits::of(states, &self.head, slots, selector.sizes().top_k)?))
    }

    /// What the selector chooses at the hits, where one is trained.
    pub(super) fn select(
        &self,
        states: &Tensor,
        slots: &Slots,
    ) -> Result<Option<(Hits, Option<Selected>)>> {
        let Some(hits) = self.hits(states, slots)? else { return Ok(None) };
        let Some((_, selector)) = self.selector() else { return Ok(None) };
        let selected = hits.select(selector, (states, &self.head, self.bend), slots)?;
        Ok(Some((hits, selected)))
    }

    /// Counters of a row; a delay is a slot here. What a selector chooses counts where there is one.
    pub(super) fn metrics(
        &self,
        plan: &Plan,
        rows: &RowStatistics,
        selected: Option<&(Hits, Option<Selected>)>,
    ) -> Result<DraftMetrics> {
        let Plan { slots, weights, denominators } = plan;
        let mut metrics = DraftMetrics::default();
        let (mut right, mut chances) = (rows.agrees.clone(), rows.acceptance.clone());
        // Without a distribution to learn, labels are no soft targets.
        let soft = self.loss.soft.map_or(0.0, |soft| soft.weight);
        let soft_of = |row: usize| if soft > 0.0 { rows.soft[row] } else { 0.0 };
        let loss_of = |row: usize| (1.0 - soft) * rows.hard[row] + soft * soft_of(row);
        let sum = (0..weights.len()).map(|row| f64::from(weights[row]) * loss_of(row)).sum();
        metrics.parts = vec![LossPart { weight: 1.0, sum, denominator: denominators[0] }];
        if let (Some((hits, selected)), Some(loss)) = (selected, self.loss.selector) {
            (metrics.candidate_rows, metrics.candidate_hits) = (weights.len(), hits.rows.len());
            right.fill(false);
            chances.fill(0.0);
            let mut sum = 0.0;
            if let Some(Selected { losses, right: chosen }) = selected {
                let losses: Vec<f64> = losses.detach().to_dtype(DType::F64)?.to_vec1()?;
                for ((row, loss), chosen) in hits.rows.iter().zip(losses).zip(chosen) {
                    let row = *row as usize;
                    sum += f64::from(weights[row]) * loss;
                    (right[row], chances[row]) = (*chosen, (-loss).exp());
                }
            }
            metrics.parts.push(LossPart { weight: loss.weight, sum, denominator: denominators[1] });
        }
        let size = self.draft.config().block_size;
        for (row, slot) in slots.learned.iter().enumerate() {
            let delay = *slot % size as u32;
            metrics.add_row(delay, rows.hard[row], soft_of(row), right[row], chances[row]);
        }
        Ok(metrics)
    }
}

/// What a row counts where rows divide a loss: once, whichever ranks share it.
fn of_row(batch: &Batch) -> f64 {
    f64::from(u8::from(batch.owns(0)))
}

impl Objective for BlockObjective {
    fn draft(&self) -> &dyn Draft {
        &self.draft
    }

    fn draft_mut(&mut self) -> &mut dyn Draft {
        &mut self.draft
    }

    fn needs(&self) -> FeatureNeeds {
        let (taps, ahead) = (self.draft.taps(), self.draft.config().block_size);
        match self.loss.soft {
            None => FeatureNeeds { taps, teacher: TeacherKind::None, ahead: 0 },
            Some(soft) => FeatureNeeds { taps, teacher: soft.distribution.needs(), ahead },
        }
    }

    /// The whole distribution where one is learned, so that acceptance is exact.
    fn held_out_needs(&self) -> FeatureNeeds {
        let needs = self.needs();
        match needs.teacher {
            TeacherKind::None => needs,
            _ => FeatureNeeds { teacher: TeacherKind::EveryToken, ..needs },
        }
    }

    fn normalisation(&self) -> Normalisation {
        Normalisation::WholeStep
    }

    fn denominators_of_masks(&self, batch: &Batch) -> Option<Vec<f64>> {
        if self.loss.waits() {
            return None;
        }
        if self.loss.weights.look_at_the_draft() {
            return Some(vec![of_row(batch); 1 + usize::from(self.loss.selector.is_some())]);
        }
        Some(self.planned(batch, self.slots(batch), None, None).denominators)
    }

    fn prepares_with_draft(&self) -> bool {
        let hits_divide = self.loss.selector.is_some_and(|selector| selector.over_hits);
        self.loss.weights.look_at_the_draft() || hits_divide
    }

    /// The draft runs here only where weights or divisors depend on it.
    fn prepare(&self, batch: &Batch, features: &BatchFeatures) -> Result<Prepared> {
        let plan = self.plan(batch, features)?;
        Ok(Prepared::new(plan.denominators.clone(), plan))
    }

    fn share(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        prepared: &Prepared,
        denominators: &[f64],
        train: bool,
    ) -> Result<Share> {
        let plan: &Plan = prepared.plan().ok_or_else(|| untapped("the plan of a block draft"))?;
        let Plan { slots, weights, .. } = plan;
        if slots.learned.is_empty() {
            let loss = give_keys(&self.draft, batch, features)?.filter(|_| train);
            return Ok(Share { loss, metrics: self.metrics_of_nothing(plan)? });
        }
        let states = self.states(batch, features, slots)?;
        let states = if train { states } else { states.detach() };
        let (loss_sum, rows) = self.judge(&states, (batch, slots), features, weights)?;
        let selected = self.select(&states, slots)?;
        let metrics = self.metrics(plan, &rows, selected.as_ref())?;
        let divisor = |part: usize| denominators.get(part).copied().filter(|d| *d > 0.0);
        let mut loss = (loss_sum / divisor(0).unwrap_or(1.0))?;
        if let (Some((hits, Some(selected))), Some(part)) = (&selected, self.loss.selector) {
            let factor = part.weight / divisor(1).unwrap_or(1.0);
            let weights: Vec<f64> =
                hits.rows.iter().map(|row| factor * f64::from(weights[*row as usize])).collect();
            let weights = Tensor::from_vec(weights, selected.losses.dims(), states.device())?;
            let weights = weights.to_dtype(selected.losses.dtype())?;
            loss = (loss + (&selected.losses * weights)?.sum_all()?)?;
        }
        Ok(Share { loss: Some(loss), metrics })
    }

    fn quantities(&self, teacher: TeacherKind) -> Quantities {
        let (text, target) = (Quantities::TEXT, Quantities::TARGET.to_owned());
        let (soft, acceptance) = match (teacher, self.loss.soft.map(|soft| soft.distribution)) {
            (_, None) => (text.to_owned(), text.to_owned()),
            (TeacherKind::EveryTokenTopK(k), Some(TeacherDistribution::TopK { tail, .. })) => {
                (tail.in_words(k), format!("{target}'s top {k}"))
            }
            _ => (target.clone(), target),
        };
        let learned = mixed_in_words(self.loss.soft.map_or(0.0, |soft| soft.weight), &soft);
        let slots = format!("slots 1 to {} of drawn blocks", self.draft_len());
        let weights = match self.loss.weights {
            SlotWeights::Decay => format!("; weights fall by 1/e every {} slots", self.loss.decay),
            SlotWeights::Uniform => String::new(),
            _ => format!("; D-PACE weights, α = {}", self.loss.alpha),
        };
        let selector = match self.loss.selector {
            Some(part) => format!("; plus {} × the selector's loss", part.weight),
            None => String::new(),
        };
        Quantities {
            loss: format!("{learned}; {slots}{weights}{selector}"),
            hard_loss: format!("{text}; {slots}"),
            agreement: text.to_owned(),
            // That of a selector is its chance of the text's token.
            acceptance: if self.loss.selector.is_some() { text.to_owned() } else { acceptance },
        }
    }

    fn measure(&self, batch: &Batch, features: &BatchFeatures) -> Result<DraftMetrics> {
        self.measure_row(batch, features)
    }

    fn draft_len(&self) -> usize {
        self.draft.config().block_size - 1
    }

    fn teacher_rows(&self, batch: &Batch) -> Vec<u32> {
        match self.loss.soft {
            None => batch.learned.clone(),
            Some(_) => teacher_rows(batch, self.draft.config().block_size),
        }
    }
}
