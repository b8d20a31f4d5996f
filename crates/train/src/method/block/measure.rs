//! Held-out rows: drawn blocks, and decoding rounds replayed over the text.

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_features::BatchFeatures;
use longdraft_kernels::linear_cross_entropy::RowStatistics;
use longdraft_kernels::rows::select_rows;
use longdraft_models::draft::block::BlockConfig;

use super::blocks::{Slots, candidates, context};
use super::objective::{BlockObjective, Plan};
use super::selected::Hits;
use super::teacher::SoftLoss;
use crate::error::Result;
use crate::metrics::DraftMetrics;
use crate::objective::TeacherDistribution;
use crate::replay::Rounds;

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
            let states = slots.states_over(&self.draft, &context, batch.ids.len())?;
            Ok(select_rows(&states.detach(), &slots.learned)?)
        };
        // Ranks that share a row know a part of it each.
        let rounds = match features.part {
            Some(_) => Rounds::default(),
            None => replay(batch, self.draft.config(), slots.anchors.len(), |slots| {
                self.right(&states(slots)?, slots)
            })?,
        };
        if slots.learned.is_empty() {
            let plan = self.planned(batch, slots, None, None);
            return Ok(DraftMetrics { replayed: rounds, ..self.metrics_of_nothing(&plan)? });
        }
        let states = states(&slots)?;
        let selected = self.select(&states, &slots)?;
        let observed = |distribution| {
            let Some(soft) = self.loss.soft else { return self.observe(&states, &slots) };
            let soft = SoftLoss { distribution, ..soft };
            self.beside(soft, &states, (batch, &slots), features)
        };
        let whole = observed(TeacherDistribution::Whole)?;
        let learned = self.loss.soft.map_or(TeacherDistribution::Whole, |soft| soft.distribution);
        let as_trained = match learned {
            TeacherDistribution::Whole => None,
            top @ TeacherDistribution::TopK { .. } => Some(observed(top)?),
        };
        let hits = selected.as_ref().map(|(hits, _)| hits);
        let plan = self.planned(batch, slots.clone(), Some(&whole), hits);
        let of = |rows: &RowStatistics| {
            self.metrics(&plan, (rows, &self.factors_of(&plan, rows)), selected.as_ref())
        };
        let mut metrics = of(&whole)?;
        metrics.replayed = rounds;
        if let Some(rows) = as_trained {
            metrics.as_trained = Some(Box::new(of(&rows)?));
        }
        Ok(metrics)
    }

    /// At which learned slots with states `[S, H]` the text's token is proposed.
    fn right(&self, states: &Tensor, slots: &Slots) -> Result<Vec<bool>> {
        let Some((hits, selected)) = self.select(states, slots)? else {
            return Ok(self.observe(states, slots)?.agrees);
        };
        let mut right = vec![false; slots.learned.len()];
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
