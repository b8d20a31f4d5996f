//! The text, or the target's distribution, at the slots of drawn blocks: `Σ w ℓ / Σ w` (or another divisor), with
//! the loss of a selector beside it.

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, FeatureNeeds, TeacherKind};
use longdraft_kernels::linear_cross_entropy::{Output, RowStatistics};
use longdraft_models::draft::Draft;
use longdraft_models::draft::block::Selector;
use longdraft_models::target_model::KeyValues;

use super::blocks::{Slots, context, give_keys};
use super::drawn::DrawnBlocks;
use super::heads::learned_loss;
use super::labels::SlotLabels;
use super::loss::BlockLoss;
use super::selected::{Hits, Selected, SelectorLoss};
use super::slot_loss::{Factors, Terms};
use super::teacher::{SoftLoss, against_labels, teacher_tokens};
use super::weights::divisor;
use crate::error::Result;
use crate::loss::Share;
use crate::metrics::{DraftMetrics, LossPart, Quantities};
use crate::objective::{Objective, Prepared, TeacherDistribution, mixed_in_words};

/// A block draft with its loss.
pub type BlockObjective = DrawnBlocks<BlockLoss>;

/// What is learned of a row.
pub(super) struct Plan {
    slots: Slots,
    /// Weights of the learned slots.
    weights: Vec<f64>,
    /// What a row adds to the divisor of each part of the loss.
    pub(super) denominators: Vec<f64>,
}

/// What the head makes of learned slots.
struct Judged {
    /// Under their weights, a scalar with gradients.
    loss_sum: Tensor,
    rows: RowStatistics,
    factors: Vec<Factors>,
}

impl BlockObjective {
    /// The slots of a row's blocks, which learn the text.
    pub(super) fn slots(&self, batch: &Batch) -> Slots {
        Slots::new(batch, &self.starts(batch), self.draft.config())
    }

    /// The same with the labels that they learn.
    pub(super) fn labelled(&self, batch: &Batch, features: &BatchFeatures) -> Result<Slots> {
        let slots = self.slots(batch);
        match self.loss.labels {
            SlotLabels::Text => Ok(slots),
            SlotLabels::Target => {
                slots.with_likely_labels((batch, features), (&self.head, self.bend))
            }
        }
    }

    /// The learned slots' states over the [`context`] of a row of `tokens`, `[S, H]`.
    pub(super) fn states(
        &self,
        slots: &Slots,
        context: &[KeyValues],
        tokens: usize,
    ) -> Result<Tensor> {
        slots.learned_states(&self.draft, context, tokens)
    }

    /// Weights of the learned slots, given their chances where they matter.
    fn weights(&self, slots: &Slots, chances: Option<&[f64]>) -> Vec<f64> {
        let BlockLoss { weights, decay, alpha, .. } = self.loss;
        let all = slots.by_block(chances, |block| weights.of_block(block, 1, (decay, alpha)));
        // As the loss takes them.
        all.into_iter().map(|weight| f64::from(weight as f32)).collect()
    }

    /// The slots' losses under `weights`, of their states `[S, H]`; `mean` is the step's chance of acceptance.
    fn judge(
        &self,
        states: &Tensor,
        of: (&Batch, &Slots),
        features: &BatchFeatures,
        (weights, mean): (&[f64], f64),
    ) -> Result<Judged> {
        let form = self.loss.own_form();
        let chances = if form.follows_slots() {
            self.statistics(self.loss.soft, states, of, features)?.acceptance
        } else {
            Vec::new()
        };
        let factors = form.factors(weights.len(), &chances, mean);
        let terms = Terms::new(form.loss, weights, self.loss.shares(), &factors);
        let Output { loss_sum, rows } =
            self.learned(self.loss.soft, (states, of), features, terms)?;
        Ok(Judged { loss_sum, rows, factors })
    }

    /// The losses of slots with these states `[S, H]` under some terms: beside a distribution, else beside their labels.
    fn learned(
        &self,
        soft: Option<SoftLoss>,
        (states, of): (&Tensor, (&Batch, &Slots)),
        features: &BatchFeatures,
        terms: Terms,
    ) -> Result<Output> {
        match soft {
            None => self.losses((states, of.1), (terms, true), |_, labels, terms| {
                against_labels(labels, terms)
            }),
            Some(soft) => self.losses((states, of.1), (terms, false), |heads, labels, terms| {
                soft.against((heads, labels), of, features, terms)
            }),
        }
    }

    /// What the head makes of learned slots' states `[S, H]` beside a distribution, else beside their labels, without a
    /// gradient.
    pub(super) fn statistics(
        &self,
        soft: Option<SoftLoss>,
        states: &Tensor,
        of: (&Batch, &Slots),
        features: &BatchFeatures,
    ) -> Result<RowStatistics> {
        let terms = Terms::none(self.loss.form.loss, of.1.learned.len());
        Ok(self.learned(soft, (&states.detach(), of), features, terms)?.rows)
    }

    fn plan(&self, batch: &Batch, features: &BatchFeatures) -> Result<Plan> {
        let slots = self.labelled(batch, features)?;
        if !self.loss.looks_at_the_draft() {
            return Ok(self.planned(batch, slots, None, None));
        }
        if slots.learned.is_empty() {
            give_keys(&self.draft, batch, features)?;
            return Ok(self.planned(batch, slots, None, None));
        }
        let states =
            self.states(&slots, &context(&self.draft, batch, features)?, batch.ids.len())?.detach();
        let reads = self.loss.weights.look_at_the_draft() || self.loss.form.follows_the_step();
        let statistics = || self.statistics(self.loss.soft, &states, (batch, &slots), features);
        let rows = if reads { Some(statistics()?) } else { None };
        let hits = if self.loss.hits_divide() { self.hits(&states, &slots)? } else { None };
        Ok(self.planned(batch, slots, rows.as_ref(), hits.as_ref()))
    }

    /// The plan of a row, from what the head makes of its slots and their hits where these matter. What a slot
    /// learns accepts it with its chance: that is the label's own where no distribution is learned.
    pub(super) fn planned(
        &self,
        batch: &Batch,
        slots: Slots,
        rows: Option<&RowStatistics>,
        hits: Option<&Hits>,
    ) -> Plan {
        let chances = rows.map(|rows| self.loss.weights.chances(rows));
        let weights = self.weights(&slots, chances.as_deref());
        let of_slots = self.loss.divide_by.of_row(batch, slots.learned.len(), weights.iter().sum());
        let mut denominators = vec![of_slots];
        if self.loss.selector.is_some() {
            let of_hits = || hits.map_or(0.0, |hits| hits.total(&weights));
            denominators.push(if self.loss.hits_divide() { of_hits() } else { of_slots });
        }
        if self.loss.form.follows_the_step() {
            let accepted = rows.map_or(0.0, |rows| rows.acceptance.iter().sum::<f64>());
            denominators.extend([accepted, slots.learned.len() as f64]);
        }
        Plan { slots, weights, denominators }
    }

    /// The draft's selector, where it is trained.
    fn selector(&self) -> Option<(SelectorLoss, Selector<'_>)> {
        self.loss.selector.zip(self.draft.selector())
    }

    /// Rows whose label is a candidate, where a selector is trained.
    fn hits(&self, states: &Tensor, slots: &Slots) -> Result<Option<Hits>> {
        let Some((part, selector)) = self.selector() else { return Ok(None) };
        Ok(Some(Hits::of(states, &self.head, slots, (selector.sizes().top_k, part.keeps_labels))?))
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
        (rows, factors): (&RowStatistics, &[Factors]),
        selected: Option<&(Hits, Option<Selected>)>,
    ) -> Result<DraftMetrics> {
        let Plan { slots, weights, denominators } = plan;
        let mut metrics = DraftMetrics::default();
        let (mut right, mut chances) = (rows.agrees.clone(), rows.acceptance.clone());
        let (label, distribution) = self.loss.shares();
        // Without a distribution to learn, labels are no soft targets.
        let soft_of = |row: usize| if self.loss.soft.is_some() { rows.soft[row] } else { 0.0 };
        let loss_of = |row: usize| {
            let hard = learned_loss(rows.hard[row]);
            let divergence = match self.loss.soft {
                Some(_) => rows.soft[row],
                // A label that is not proposed is not learned.
                None if rows.hard[row] > hard => return 0.0,
                None => hard,
            };
            let learned = factors[row].loss(self.loss.form.loss, divergence, rows.acceptance[row]);
            label * hard + distribution * learned
        };
        let sum = weights.iter().enumerate().map(|(row, weight)| weight * loss_of(row)).sum();
        metrics.parts = vec![LossPart { weight: 1.0, sum, denominator: denominators[0] }];
        if let (Some((hits, selected)), Some(loss)) = (selected, self.loss.selector) {
            let found = hits.found.iter().filter(|found| **found).count();
            (metrics.candidate_rows, metrics.candidate_hits) = (weights.len(), found);
            right.fill(false);
            chances.fill(0.0);
            let mut sum = 0.0;
            if let Some(Selected { losses, right: chosen }) = selected {
                let losses: Vec<f64> = losses.detach().to_dtype(DType::F64)?.to_vec1()?;
                let rows = hits.rows.iter().zip(&hits.found).zip(chosen);
                for (((row, found), chosen), loss) in rows.zip(losses) {
                    let row = *row as usize;
                    sum += weights[row] * loss;
                    right[row] = *chosen;
                    chances[row] = if *found { (-loss).exp() } else { 0.0 };
                }
            }
            metrics.parts.push(LossPart { weight: loss.weight, sum, denominator: denominators[1] });
        }
        let size = self.draft.config().block_size;
        for (row, slot) in slots.learned.iter().enumerate() {
            let delay = *slot % size as u32;
            metrics.add_row(
                delay,
                learned_loss(rows.hard[row]),
                soft_of(row),
                right[row],
                chances[row],
            );
        }
        Ok(metrics)
    }
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
        match self.loss.reads() {
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

    fn begin_step(&mut self, step: u64, steps: u64) {
        self.step = Some((step, steps));
    }

    fn denominators_of_masks(&self, batch: &Batch) -> Option<Vec<f64>> {
        if self.loss.waits() {
            return None;
        }
        // Weights may look at the draft all the same: then they divide nothing.
        Some(self.planned(batch, self.slots(batch), None, None).denominators)
    }

    fn prepares_with_draft(&self) -> bool {
        self.loss.looks_at_the_draft()
    }

    /// The draft runs here only where weights, divisors or mixes depend on it.
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
        let plan: &Plan = prepared.plan()?;
        let Plan { slots, weights, .. } = plan;
        if slots.learned.is_empty() {
            let loss = give_keys(&self.draft, batch, features)?.filter(|_| train);
            return Ok(Share { loss, metrics: self.of_step(self.metrics_of_nothing(plan)?) });
        }
        let states =
            self.states(slots, &context(&self.draft, batch, features)?, batch.ids.len())?;
        let states = if train { states } else { states.detach() };
        let of_step = (weights.as_slice(), self.loss.form.mean_of_step(denominators));
        let Judged { loss_sum, rows, factors } =
            self.judge(&states, (batch, slots), features, of_step)?;
        let stops = self.loss.selector.is_some_and(|selector| selector.stops_gradient);
        let read = if stops { states.detach() } else { states };
        let selected = self.select(&read, slots)?;
        let metrics = self.of_step(self.metrics(plan, (&rows, &factors), selected.as_ref())?);
        let mut loss = (loss_sum / divisor(denominators, 0))?;
        if let (Some((hits, Some(selected))), Some(part)) = (&selected, self.loss.selector) {
            let factor = self.selector_weight(part) / divisor(denominators, 1);
            let weights: Vec<f64> =
                hits.rows.iter().map(|row| factor * weights[*row as usize]).collect();
            let weights = Tensor::from_vec(weights, selected.losses.dims(), read.device())?;
            let weights = weights.to_dtype(selected.losses.dtype())?;
            loss = (loss + (&selected.losses * weights)?.sum_all()?)?;
        }
        Ok(Share { loss: Some(loss), metrics })
    }

    fn quantities(&self, teacher: TeacherKind) -> Quantities {
        let (text, target) = (Quantities::TEXT, Quantities::TARGET.to_owned());
        let label = match self.loss.labels {
            SlotLabels::Text => text.to_owned(),
            SlotLabels::Target => format!("{target}'s most likely token"),
        };
        let (soft, acceptance) = match (teacher, self.loss.soft.map(|soft| soft.distribution)) {
            (_, None) => (label.clone(), label.clone()),
            (TeacherKind::EveryTokenTopK(k), Some(TeacherDistribution::TopK { tail, .. })) => {
                (tail.in_words(k), format!("{target}'s top {k}"))
            }
            _ => (target.clone(), target),
        };
        let form = self.loss.own_form().loss.in_words();
        let learned = match self.loss.soft {
            None => format!("{form}{label}"),
            Some(part) => mixed_in_words(part.weight, &format!("{form}{soft}"))
                .replace(&format!("× {text}"), &format!("× {label}")),
        };
        let slots = format!("slots 1 to {} of drawn blocks", self.draft_len());
        let weights = self.loss.weights.in_words((self.loss.decay, self.loss.alpha));
        let selector = match self.loss.selector {
            Some(part) => format!("; plus {} × the selector's loss", part.weight),
            None => String::new(),
        };
        Quantities {
            loss: format!("{learned}; {slots}{weights}{selector}"),
            hard_loss: format!("{label}; {slots}"),
            agreement: label.clone(),
            // That of a selector is its chance of the label.
            acceptance: if self.loss.selector.is_some() { label } else { acceptance },
        }
    }

    fn measure(&self, batch: &Batch, features: &BatchFeatures) -> Result<DraftMetrics> {
        self.measure_row(batch, features)
    }

    fn draft_len(&self) -> usize {
        self.draft.config().block_size - 1
    }

    fn teacher_tokens(&self, batch: &Batch) -> Vec<u32> {
        match self.loss.reads() {
            None => batch.learned.clone(),
            Some(_) => teacher_tokens(batch, self.draft.config().block_size),
        }
    }
}
