//! Held-out rows: drawn blocks, and decoding rounds replayed over the text.

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_features::BatchFeatures;
use longdraft_kernels::linear_cross_entropy::RowStatistics;
use longdraft_models::draft::block::BlockConfig;
use longdraft_models::target_model::RowPart;

use super::blocks::{Slots, candidates, context};
use super::objective::{BlockObjective, Plan};
use super::selected::Hits;
use super::slot_loss::Factors;
use super::teacher::SoftLoss;
use crate::error::Result;
use crate::metrics::DraftMetrics;
use crate::objective::TeacherDistribution;
use crate::replay::{Rounds, is_replayed};

/// Blocks that run at the same time at most, so that memory does not grow with the row.
const BLOCKS: usize = 256;

/// Greedy decoding of a row's text: a block stands at every token that a round may begin with, and
/// `right` tells at which of some blocks' learned slots the draft proposes the text's token. So many
/// blocks run at the same time as are drawn of the row: memory is that of training.
pub(in crate::method) fn replay(
    batch: &Batch,
    config: &BlockConfig,
    drawn: usize,
    right: impl Fn(&Slots) -> Result<Vec<bool>>,
) -> Result<Rounds> {
    let (size, proposals) = (config.block_size, config.proposals());
    let slots_of = if config.chain.is_some() { Slots::from_anchors } else { Slots::new };
    // Proposals of the block at a token up to the first wrong one, `[T]`.
    let mut held = vec![0; batch.ids.len()];
    for starts in candidates(batch).chunks(drawn.clamp(1, BLOCKS)) {
        let slots = slots_of(batch, starts, config);
        let mut of_slots = vec![false; slots.ids.len()];
        for (slot, right) in slots.learned.iter().zip(right(&slots)?) {
            of_slots[*slot as usize] = right;
        }
        for (start, block) in starts.iter().zip(of_slots.chunks(size)) {
            held[*start] = block[size - proposals..].iter().take_while(|right| **right).count();
        }
    }
    Ok(Rounds::replay(batch, proposals, |root, level| level <= held[root]))
}

/// A row's denominators, of what each rank that shares it adds; all of them call it.
pub(in crate::method) fn of_whole_row(own: &[f64], part: Option<&RowPart>) -> Vec<f64> {
    part.map_or_else(|| own.to_vec(), |part| part.sum(own))
}

impl BlockObjective {
    /// Counters of a held-out row: of drawn blocks, and of its rounds.
    pub(super) fn measure_row(
        &self,
        batch: &Batch,
        features: &BatchFeatures,
    ) -> Result<DraftMetrics> {
        let slots = self.labelled(batch, features)?;
        let context = context(&self.draft, batch, features)?;
        let states = |slots: &Slots| -> Result<Tensor> {
            Ok(self.states(slots, &context, batch.ids.len())?.detach())
        };
        let replayed = if is_replayed(batch, features) {
            replay(batch, self.draft.config(), slots.anchors.len(), |slots| {
                self.right(&states(slots)?, (batch, slots), features)
            })?
        } else {
            Rounds::default()
        };
        let (states, selected) = if slots.learned.is_empty() {
            (None, self.loss.selector.map(|_| (Hits::default(), None)))
        } else {
            let states = states(&slots)?;
            let selected = self.select(&states, &slots)?;
            (Some(states), selected)
        };
        let of = |distribution| -> Result<DraftMetrics> {
            let soft = self.loss.soft.map(|soft| SoftLoss { distribution, ..soft });
            let rows = match &states {
                Some(states) => self.statistics(soft, states, (batch, &slots), features)?,
                None => RowStatistics::default(),
            };
            let hits = selected.as_ref().map(|(hits, _)| hits);
            let plan = self.planned(batch, slots.clone(), Some(&rows), hits);
            let factors = self.factors_of(&plan, &rows, features.part.as_ref());
            self.metrics(&plan, (&rows, &factors), selected.as_ref())
        };
        let mut metrics = of(TeacherDistribution::Whole)?;
        metrics.replayed = replayed;
        if let Some(SoftLoss { distribution: top @ TeacherDistribution::TopK { .. }, .. }) =
            self.loss.soft
        {
            metrics.as_trained = Some(Box::new(of(top)?));
        }
        Ok(metrics)
    }

    /// The factors of held-out slots, whose step is their row. All ranks that share it ask.
    fn factors_of(
        &self,
        plan: &Plan,
        rows: &RowStatistics,
        part: Option<&RowPart>,
    ) -> Vec<Factors> {
        let form = self.loss.own_form();
        let mean = form.mean_of_step(&of_whole_row(&plan.denominators, part));
        form.factors(rows.hard.len(), &rows.acceptance, mean)
    }

    /// At which learned slots with states `[S, H]` the text's token is proposed.
    fn right(
        &self,
        states: &Tensor,
        of: (&Batch, &Slots),
        features: &BatchFeatures,
    ) -> Result<Vec<bool>> {
        let Some((hits, selected)) = self.select(states, of.1)? else {
            return Ok(self.statistics(None, states, of, features)?.agrees);
        };
        let mut right = vec![false; of.1.learned.len()];
        for (row, chosen) in hits.rows.iter().zip(selected.iter().flat_map(|chosen| &chosen.right))
        {
            right[*row as usize] = *chosen;
        }
        Ok(right)
    }

    /// Counters of a row without a learned slot.
    pub(super) fn metrics_of_nothing(&self, plan: &Plan) -> Result<DraftMetrics> {
        let selected = self.loss.selector.map(|_| (Hits::default(), None));
        self.metrics(plan, (&RowStatistics::default(), &[]), selected.as_ref())
    }
}
