//! Hard labels at the slots of drawn blocks: `Σ w CE / Σ w`.

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_kernels::linear_cross_entropy::{
    Inputs, Output, Rejection, RowStatistics, SoftTargets, SparseDistributions, Weighted,
    linear_cross_entropy,
};
use longdraft_kernels::rows::select_rows;
use longdraft_models::draft::Draft;
use longdraft_models::draft::block::{BlockDraft, Visible};

use super::blocks::{BlockDraws, Slots};
use super::weights::SlotWeights;
use crate::error::Result;
use crate::features::{BatchFeatures, FeatureNeeds, TeacherKind, untapped};
use crate::loss::Share;
use crate::metrics::{DraftMetrics, LossPart, Quantities};
use crate::objective::{Normalisation, Objective, Prepared};
use crate::rounds::Rounds;

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
}

/// Where blocks begin.
type Starts = Box<dyn Fn(&Batch) -> Vec<usize>>;

/// A block draft with its loss.
pub struct BlockObjective {
    draft: BlockDraft,
    /// The target's frozen head, `[V, H]`.
    head: Tensor,
    loss: BlockLoss,
    starts: Starts,
}

/// What is learned of a row.
struct Plan {
    slots: Slots,
    /// Weights of the learned slots.
    weights: Vec<f32>,
}

impl Plan {
    fn total(&self) -> f64 {
        self.weights.iter().map(|weight| f64::from(*weight)).sum()
    }
}

impl BlockObjective {
    /// An objective over blocks as they are drawn; `head` is the target's, `[V, H]`.
    pub fn new(draft: BlockDraft, head: &Tensor, loss: BlockLoss, draws: BlockDraws) -> Self {
        let starts: Starts = Box::new(move |batch| draws.of(batch));
        Self { draft, head: head.clone(), loss, starts }
    }

    /// Begins blocks where `starts` says: ascending tokens of the row, for comparisons with others.
    #[must_use]
    pub fn with_starts(mut self, starts: impl Fn(&Batch) -> Vec<usize> + 'static) -> Self {
        self.starts = Box::new(starts);
        self
    }

    fn slots(&self, batch: &Batch) -> Slots {
        let config = self.draft.config();
        Slots::new(batch, &(self.starts)(batch), config.block_size, config.mask_token_id)
    }

    /// The learned slots' states, `[S, H]`.
    fn states(&self, batch: &Batch, features: &BatchFeatures, slots: &Slots) -> Result<Tensor> {
        if features.part.is_some() {
            return Err(untapped("the whole row"));
        }
        let config = self.draft.config();
        let context = self.draft.context(features.aux_hidden()?, &batch.position_ids)?;
        let visible = Visible::new(config, &slots.anchors, config.block_size, batch.ids.len());
        let states = self.draft.blocks(&slots.ids, &slots.positions, &context, &visible)?;
        Ok(select_rows(&states, &slots.learned)?)
    }

    /// Cross-entropies under weights.
    fn cross_entropy(&self, states: &Tensor, labels: &[u32], weights: &[f32]) -> Result<Output> {
        let rows = labels.len();
        let (starts, nothing): (Vec<usize>, _) = ((0..=rows).collect(), vec![0.0; rows]);
        let of_rows: Vec<u32> = (0..rows as u32).collect();
        // A label is a distribution with all of its mass at one token.
        let labelled = SparseDistributions {
            starts: &starts,
            ids: labels,
            log_probs: &nothing,
            tails: &vec![0.0; rows],
            rows: &of_rows,
        };
        let weighted = Weighted {
            cross_entropy: weights,
            rejection: &nothing,
            form: Rejection::Linear,
            log_sum_exp: None,
        };
        Ok(linear_cross_entropy(&Inputs {
            hidden: states,
            head: &self.head,
            labels,
            soft: SoftTargets::Sparse(labelled, weighted),
            soft_weight: 1.0,
            teacher: None,
        })?)
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

    /// Weights of a row's slots from the draft's own losses there.
    fn weights_of_losses(&self, slots: &Slots, losses: &[f64]) -> Vec<f32> {
        let chances: Vec<f64> = losses.iter().map(|loss| (-loss).exp()).collect();
        self.weights(slots, Some(&chances))
    }

    /// What the draft makes of the learned slots, without a gradient.
    fn observe(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
        slots: &Slots,
    ) -> Result<RowStatistics> {
        let states = self.states(batch, features, slots)?.detach();
        let output = linear_cross_entropy(&Inputs {
            hidden: &states,
            head: &self.head,
            labels: &slots.labels,
            soft: SoftTargets::None,
            soft_weight: 0.0,
            teacher: None,
        })?;
        Ok(output.rows)
    }

    fn plan(&self, batch: &Batch, features: &BatchFeatures) -> Result<Plan> {
        let slots = self.slots(batch);
        let weights = if slots.learned.is_empty() || !self.loss.weights.look_at_the_draft() {
            self.weights(&slots, None)
        } else {
            let losses = self.observe(batch, features, &slots)?.hard;
            self.weights_of_losses(&slots, &losses)
        };
        Ok(Plan { slots, weights })
    }

    /// What a row is divided by.
    fn denominator(&self, plan: &Plan) -> f64 {
        if self.loss.divide_by_rows && self.loss.weights.look_at_the_draft() {
            1.0
        } else {
            plan.total()
        }
    }

    /// Counters of a row; a delay is a slot here.
    fn metrics(
        &self,
        Plan { slots, weights }: &Plan,
        rows: &RowStatistics,
        denominator: f64,
    ) -> DraftMetrics {
        let mut metrics = DraftMetrics::default();
        let size = self.draft.config().block_size;
        let mut agrees = vec![false; slots.ids.len()];
        let mut sum = 0.0;
        for (row, slot) in slots.learned.iter().enumerate() {
            let delay = *slot % size as u32;
            let (hard, right) = (rows.hard[row], rows.agrees[row]);
            metrics.add_row(delay, hard, 0.0, right, rows.acceptance[row]);
            agrees[*slot as usize] = right;
            sum += f64::from(weights[row]) * hard;
        }
        metrics.parts = vec![LossPart { weight: 1.0, sum, denominator }];
        let right = |block: &[bool]| 1 + block[1..].iter().take_while(|right| **right).count();
        metrics.replayed =
            Rounds { rounds: slots.anchors.len(), tokens: agrees.chunks(size).map(right).sum() };
        metrics
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
        FeatureNeeds { taps: self.draft.taps(), teacher: TeacherKind::None, ahead: 0 }
    }

    fn normalisation(&self) -> Normalisation {
        Normalisation::WholeStep
    }

    fn denominators_of_masks(&self, batch: &Batch) -> Option<Vec<f64>> {
        if self.loss.weights.look_at_the_draft() {
            return self.loss.divide_by_rows.then(|| vec![1.0]);
        }
        let slots = self.slots(batch);
        let weights = self.weights(&slots, None);
        Some(vec![Plan { slots, weights }.total()])
    }

    /// The draft runs here only where weights depend on it.
    fn prepare(&self, batch: &Batch, features: &BatchFeatures) -> Result<Prepared> {
        let plan = self.plan(batch, features)?;
        Ok(Prepared::new(vec![self.denominator(&plan)], plan))
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
        let Plan { slots, weights } = plan;
        if slots.learned.is_empty() {
            return Ok(Share { loss: None, metrics: DraftMetrics::default() });
        }
        let states = self.states(batch, features, slots)?;
        let states = if train { states } else { states.detach() };
        let output = self.cross_entropy(&states, &slots.labels, weights)?;
        let metrics = self.metrics(plan, &output.rows, self.denominator(plan));
        let denominator = denominators.first().copied().filter(|d| *d > 0.0).unwrap_or(1.0);
        Ok(Share { loss: Some((output.loss_sum / denominator)?), metrics })
    }

    fn quantities(&self, _: TeacherKind) -> Quantities {
        let text = Quantities::TEXT;
        let slots = format!("slots 1 to {} of drawn blocks", self.draft_len());
        let weights = match self.loss.weights {
            SlotWeights::Decay => format!("; weights fall by 1/e every {} slots", self.loss.decay),
            SlotWeights::Uniform => String::new(),
            _ => format!("; D-PACE weights, α = {}", self.loss.alpha),
        };
        Quantities {
            loss: format!("{text}; {slots}{weights}"),
            hard_loss: format!("{text}; {slots}"),
            agreement: text.to_owned(),
            acceptance: text.to_owned(),
        }
    }

    fn measure(&self, batch: &Batch, features: &BatchFeatures) -> Result<DraftMetrics> {
        let slots = self.slots(batch);
        if slots.learned.is_empty() {
            return Ok(DraftMetrics::default());
        }
        let rows = self.observe(batch, features, &slots)?;
        let weights = self.weights_of_losses(&slots, &rows.hard);
        let plan = Plan { slots, weights };
        Ok(self.metrics(&plan, &rows, self.denominator(&plan)))
    }

    fn draft_len(&self) -> usize {
        self.draft.config().block_size - 1
    }

    fn teacher_rows(&self, batch: &Batch) -> Vec<u32> {
        batch.learned.clone()
    }
}
