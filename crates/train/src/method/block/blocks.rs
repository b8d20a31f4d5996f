//! Blocks of a row: where they begin, drawn anew in every epoch, and which of their slots are learned.

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_features::BatchFeatures;
use longdraft_kernels::graph::{cat, narrow};
use longdraft_kernels::random::CounterRng;
use longdraft_models::draft::block::{Anchor, BlockConfig, BlockDraft, Visible};
use longdraft_models::target_model::KeyValues;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// How many blocks are drawn of a row, where there are so many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockBudget {
    /// The same number of every row.
    PerRow(usize),
    /// One for every so many supervised tokens, and at least one.
    PerTokens(usize),
}

impl BlockBudget {
    /// Blocks of a row with so many supervised tokens.
    pub fn of(self, supervised: usize) -> usize {
        match self {
            Self::PerRow(blocks) => blocks,
            Self::PerTokens(tokens) => (supervised / tokens.max(1)).max(1),
        }
    }
}

/// Which supervised tokens of a row may begin a block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BlockStarts {
    /// Those that a supervised one of their document follows (SpecForge, DeepSpec).
    #[default]
    Followed,
    /// Those whose whole block lies in their document, all but one of them at most (SpecForge at first).
    WholeBlocks,
    /// All but those among the last tokens of the row, as many as a block has slots (speculators).
    BeforeEnd,
}

impl BlockStarts {
    /// These tokens, ascending, for blocks of `slots` slots.
    fn of(self, batch: &Batch, slots: usize) -> Vec<usize> {
        let tokens = batch.ids.len();
        let supervised = |t: &usize| is_supervised(batch, *t);
        match self {
            Self::Followed => candidates(batch),
            Self::WholeBlocks => {
                let is_whole = |t: &usize| same_document(batch, *t, *t + slots.saturating_sub(1));
                (0..tokens).filter(supervised).filter(is_whole).collect()
            }
            Self::BeforeEnd => (0..tokens.saturating_sub(slots)).filter(supervised).collect(),
        }
    }

    /// How many blocks of `asked` are drawn among so many tokens.
    fn most(self, asked: usize, candidates: usize) -> usize {
        let spare = usize::from(self == Self::WholeBlocks);
        asked.min(candidates.saturating_sub(spare))
    }
}

/// How blocks are drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockDraws {
    /// Run key.
    pub seed: u64,
    /// How many of a row.
    pub budget: BlockBudget,
}

impl BlockDraws {
    /// Where the blocks of a row begin, ascending: different tokens, all equally likely, that are
    /// supervised and followed by a supervised one of the same document.
    pub fn of(&self, batch: &Batch) -> Vec<usize> {
        self.among(batch, (BlockStarts::Followed, 0))
    }

    /// The same among the tokens of a rule, for blocks of so many slots.
    pub fn among(&self, batch: &Batch, (rule, slots): (BlockStarts, usize)) -> Vec<usize> {
        let mut candidates = rule.of(batch, slots);
        let supervised = (0..batch.ids.len()).filter(|t| is_supervised(batch, *t)).count();
        let asked = self.budget.of(supervised);
        let blocks = rule.most(asked, candidates.len());
        if candidates.len() > blocks {
            let key = [batch.epoch, batch.row as u64];
            let mut rng = CounterRng::new(self.seed, "blocks", &key);
            for i in 0..blocks {
                let other = i + rng.below((candidates.len() - i) as u64) as usize;
                candidates.swap(i, other);
            }
            candidates.truncate(blocks);
            candidates.sort_unstable();
        }
        candidates
    }
}

/// The slots of a row's blocks.
#[derive(Debug, Clone)]
pub(in crate::method) struct Slots {
    /// Blocks in their row.
    pub(in crate::method) anchors: Vec<Anchor>,
    /// Tokens in the slots, `[R]`.
    pub(in crate::method) ids: Vec<u32>,
    /// Positions of the slots, `[R]`: those after the first token's, as in drafting, also where `data.anchor` moves the
    /// tokens that follow it.
    pub(in crate::method) positions: Vec<u32>,
    /// Learned slots among them, ascending.
    pub(in crate::method) learned: Vec<u32>,
    /// Their labels.
    pub(in crate::method) labels: Vec<u32>,
    /// Where these labels stand in the row.
    pub(in crate::method) places: Vec<u32>,
    /// The tokens before these labels.
    pub(in crate::method) before: Vec<u32>,
}

impl Slots {
    /// Those of blocks that begin at `starts`. Slot `k` stands at the place of the
    /// `k`-th token after the first and learns that very token, if it is supervised and of the same
    /// document. The first slot holds its token and learns nothing.
    pub(in crate::method) fn new(batch: &Batch, starts: &[usize], config: &BlockConfig) -> Self {
        let size = config.block_size;
        let mut slots = Self::unlearned(batch, starts, config);
        for (block, &start) in starts.iter().enumerate() {
            let learned = |k: &usize| is_learned(batch, start, start + k);
            for k in (1..size).filter(learned) {
                slots.learn(batch, block * size + k, start + k);
            }
        }
        slots
    }

    /// The same where slot `k` learns the token after its place, and nothing is learned after the first
    /// token of a block that is not.
    pub(in crate::method) fn from_anchors(
        batch: &Batch,
        starts: &[usize],
        config: &BlockConfig,
    ) -> Self {
        let size = config.block_size;
        let mut slots = Self::unlearned(batch, starts, config);
        for (block, &start) in starts.iter().enumerate() {
            let learned = |k: &usize| is_learned(batch, start, start + 1 + k);
            for k in (0..size).take_while(learned) {
                slots.learn(batch, block * size + k, start + 1 + k);
            }
        }
        slots
    }

    fn unlearned(batch: &Batch, starts: &[usize], config: &BlockConfig) -> Self {
        let first_of_document = first_tokens(batch);
        let anchor = |&index: &usize| Anchor { index, document_start: first_of_document[index] };
        let known = starts.iter().map(|start| (batch.ids[*start], batch.position_ids[*start]));
        let (ids, positions) = config.inputs(known);
        Self {
            anchors: starts.iter().map(anchor).collect(),
            ids,
            positions,
            learned: Vec::new(),
            labels: Vec::new(),
            places: Vec::new(),
            before: Vec::new(),
        }
    }

    fn learn(&mut self, batch: &Batch, slot: usize, place: usize) {
        self.learned.push(slot as u32);
        self.labels.push(batch.ids[place]);
        self.places.push(place as u32);
        self.before.push(batch.ids[place - 1]);
    }

    /// Slots of one of the blocks.
    pub(super) fn of_a_block(&self) -> usize {
        self.ids.len() / self.anchors.len().max(1)
    }

    /// What `of_block` makes of every block, at the learned slots: it gets the chances of the block's learned
    /// slots, 1 where none are given.
    pub(in crate::method) fn by_block(
        &self,
        chances: Option<&[f64]>,
        of_block: impl Fn(&[Option<f64>]) -> Vec<f64>,
    ) -> Vec<f64> {
        let mut of_slots = vec![None; self.ids.len()];
        for (row, slot) in self.learned.iter().enumerate() {
            of_slots[*slot as usize] = Some(chances.map_or(1.0, |chances| chances[row]));
        }
        let blocks = of_slots.chunks(self.of_a_block().max(1));
        let all: Vec<f64> = blocks.flat_map(of_block).collect();
        self.learned.iter().map(|slot| all[*slot as usize]).collect()
    }

    /// Tokens at which the learned slots have their teachers: those before their labels.
    pub(in crate::method) fn teachers(&self) -> Vec<u32> {
        self.places.iter().map(|place| place - 1).collect()
    }

    /// All slots' states after a draft's final norm, over the [`context`] of a row of `tokens`: `[R, H]`.
    pub(in crate::method) fn states(
        &self,
        draft: &BlockDraft,
        context: &[KeyValues],
        tokens: usize,
    ) -> Result<Tensor> {
        self.states_at(None, draft, (context, tokens))
    }

    /// The same of the learned slots, `[S, H]`.
    pub(in crate::method) fn learned_states(
        &self,
        draft: &BlockDraft,
        context: &[KeyValues],
        tokens: usize,
    ) -> Result<Tensor> {
        self.states_at(Some(&self.learned), draft, (context, tokens))
    }

    fn states_at(
        &self,
        wanted: Option<&[u32]>,
        draft: &BlockDraft,
        (context, tokens): (&[KeyValues], usize),
    ) -> Result<Tensor> {
        let config = draft.config();
        let visible = Visible::new(config, &self.anchors, config.block_size, tokens);
        Ok(draft.blocks_at(&self.ids, &self.positions, (context, &visible), wanted)?)
    }
}

/// Keys and values of a row's tokens in every layer, `[T, K, D]` each. Where ranks share the row, each
/// computes those of its part; all layers are gathered at once, so that every rank gathers as often.
pub(in crate::method) fn context(
    draft: &BlockDraft,
    batch: &Batch,
    features: &BatchFeatures,
) -> Result<Vec<KeyValues>> {
    let aux = features.aux_hidden()?;
    let Some(part) = &features.part else {
        return Ok(draft.attended_context(aux, &batch.position_ids)?);
    };
    let layers = draft.context(aux, &part.rows().select(&batch.position_ids))?;
    let sides: Vec<&Tensor> = layers.iter().flat_map(|layer| [&layer.k, &layer.v]).collect();
    let all = part.gather(&cat(&sides, 1)?)?;
    let heads = draft.config().num_key_value_heads;
    let side = |side: usize| narrow(&all, 1, side * heads, heads);
    let layer = |i| Ok(KeyValues { k: side(2 * i)?, v: side(2 * i + 1)? });
    (0..layers.len()).map(layer).collect()
}

/// What a rank does that runs a part of a row without a learned slot: it gives the others its keys. The
/// result is a number without worth, through which their gradients reach these; `None` of a whole row.
pub(in crate::method) fn give_keys(
    draft: &BlockDraft,
    batch: &Batch,
    features: &BatchFeatures,
) -> Result<Option<Tensor>> {
    if features.part.is_none() {
        return Ok(None);
    }
    let context = context(draft, batch, features)?;
    let Some(layer) = context.first() else { return Ok(None) };
    let sum = layer.k.sum_all()?;
    // A number as factor would end the way back here.
    Ok(Some((&sum * sum.zeros_like()?)?))
}

/// Where blocks may begin, ascending.
pub(super) fn candidates(batch: &Batch) -> Vec<usize> {
    let may = |t: &usize| batch.loss_mask[*t] && is_learned(batch, *t, t + 1);
    (0..batch.ids.len()).filter(may).collect()
}

/// Tokens in their order, each once: blocks that cross have teachers in common.
pub(super) fn distinct(mut tokens: Vec<u32>) -> Vec<u32> {
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

/// Whether the loss counts the token at `t`, which is not padding.
fn is_supervised(batch: &Batch, t: usize) -> bool {
    batch.loss_mask[t] && batch.document_ids[t] >= 0
}

/// Whether a block that begins at `start` learns the token at `place`.
pub(super) fn is_learned(batch: &Batch, start: usize, place: usize) -> bool {
    same_document(batch, start, place) && batch.loss_mask[place]
}

/// Whether two tokens are there and belong to one document.
fn same_document(batch: &Batch, a: usize, b: usize) -> bool {
    let document = |t: usize| batch.document_ids.get(t).filter(|id| **id >= 0);
    document(a).is_some() && document(a) == document(b)
}

/// The first token of every token's document, `[T]`.
fn first_tokens(batch: &Batch) -> Vec<usize> {
    let mut first = 0;
    let of_token = |t: usize| {
        if t > 0 && batch.document_ids[t] != batch.document_ids[t - 1] {
            first = t;
        }
        first
    };
    (0..batch.ids.len()).map(of_token).collect()
}

#[cfg(test)]
mod tests {
    use longdraft_models::published::published_config;

    use super::*;

    /// Two documents and padding.
    fn batch() -> Batch {
        Batch {
            ids: (10..22).collect(),
            position_ids: vec![0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 0],
            document_ids: vec![0, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1, -1],
            loss_mask: [0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1].map(|bit| bit == 1).to_vec(),
            ..Batch::default()
        }
    }

    #[test]
    fn blocks_begin_where_a_supervised_token_follows_in_the_document() {
        let all = BlockDraws { seed: 1, budget: BlockBudget::PerRow(9) };
        assert_eq!(all.of(&batch()), [1, 4, 6, 7, 8]);
    }

    #[test]
    fn other_rules_begin_blocks_where_their_trainers_do() {
        let all = BlockDraws { seed: 1, budget: BlockBudget::PerRow(9) };
        assert_eq!(all.among(&batch(), (BlockStarts::Followed, 4)), all.of(&batch()));
        // The row's last four tokens are 8 to 11.
        assert_eq!(all.among(&batch(), (BlockStarts::BeforeEnd, 4)), [1, 2, 4, 5, 6, 7]);
        assert_eq!(all.among(&batch(), (BlockStarts::BeforeEnd, 12)), [0; 0]);
        // Blocks at 1, 2 and 6 lie in their document, and one of them is left out.
        let mut left_out = std::collections::BTreeSet::new();
        for epoch in 0..40 {
            let drawn = all.among(&Batch { epoch, ..batch() }, (BlockStarts::WholeBlocks, 4));
            assert!(drawn.len() == 2 && drawn.is_sorted(), "{drawn:?}");
            left_out.extend([1, 2, 6].into_iter().filter(|start| !drawn.contains(start)));
        }
        assert_eq!(left_out.into_iter().collect::<Vec<_>>(), [1, 2, 6]);
        // With five slots only that at 1 does.
        assert_eq!(all.among(&batch(), (BlockStarts::WholeBlocks, 5)), [0; 0]);
    }

    #[test]
    fn draws_repeat_within_an_epoch_and_reach_every_place() {
        let draws = BlockDraws { seed: 1, budget: BlockBudget::PerRow(2) };
        let mut seen = std::collections::BTreeSet::new();
        for epoch in 0..40 {
            let batch = Batch { epoch, ..batch() };
            let blocks = draws.of(&batch);
            assert_eq!(blocks, draws.of(&batch));
            assert!(blocks.len() == 2 && blocks[0] < blocks[1], "{blocks:?}");
            seen.extend(blocks);
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [1, 4, 6, 7, 8]);
    }

    #[test]
    fn a_budget_of_tokens_counts_the_supervised_ones() {
        // 4 of either document, none of the padding.
        for (tokens, blocks) in [(1, 5), (2, 4), (3, 2), (4, 2), (5, 1), (100, 1)] {
            let draws = BlockDraws { seed: 1, budget: BlockBudget::PerTokens(tokens) };
            assert_eq!(draws.of(&batch()).len(), blocks, "{tokens}");
        }
        let budget = BlockBudget::PerTokens(3);
        let draws = |epoch| BlockDraws { seed: 1, budget }.of(&Batch { epoch, ..batch() });
        assert_eq!(draws(1), draws(1));
        assert!((0..20).any(|epoch| draws(epoch) != draws(1)), "always the same blocks");
    }

    #[test]
    fn a_slot_learns_the_token_of_its_own_place() {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let config = BlockConfig::for_target(&target, 1, 4, 99);
        let slots = Slots::new(&batch(), &[1, 4, 8], &config);
        assert_eq!(slots.ids[..5], [11, 99, 99, 99, 14]);
        assert_eq!(slots.positions, [1, 2, 3, 4, 4, 5, 6, 7, 2, 3, 4, 5]);
        // Not across a hole, the end of a document, or into padding.
        assert_eq!(slots.learned, [1, 3, 5, 9]);
        assert_eq!(slots.labels, [12, 14, 15, 19]);
        let starts: Vec<_> = slots.anchors.iter().map(|a| (a.index, a.document_start)).collect();
        assert_eq!(starts, [(1, 0), (4, 0), (8, 6)]);
    }

    #[test]
    fn a_block_goes_on_from_its_first_token_where_the_rows_positions_jump() {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let config = BlockConfig::for_target(&target, 1, 4, 99);
        let position_ids = vec![0, 1, 102, 103, 104, 105, 0, 1, 2, 3, 0, 0];
        let slots = Slots::new(&Batch { position_ids, ..batch() }, &[1, 4], &config);
        assert_eq!(slots.positions, [1, 2, 3, 4, 104, 105, 106, 107]);
    }

    #[test]
    fn a_block_that_proposes_from_slot_0_ends_at_the_first_token_that_is_not_learned() {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let config = BlockConfig::for_target(&target, 1, 4, 99);
        // Supervised after the first token of the block: yes, yes, no, yes.
        let loss_mask = [1, 1, 1, 0, 1].map(|bit| bit == 1).to_vec();
        let batch = Batch { loss_mask, ..Batch::of_document(10..15) };
        let chain = Slots::from_anchors(&batch, &[0], &config);
        assert_eq!((chain.learned, chain.labels), (vec![0, 1], vec![11, 12]));
        let plain = Slots::new(&batch, &[0], &config);
        assert_eq!((plain.learned, plain.labels), (vec![1, 2], vec![11, 12]));
        // Where a hole lies inside, a plain block goes on after it.
        let batch = Batch { loss_mask: vec![true, true, false, true, true], ..batch };
        assert_eq!(Slots::from_anchors(&batch, &[0], &config).learned, [0]);
        assert_eq!(Slots::new(&batch, &[0], &config).learned, [1, 3]);
    }
}
