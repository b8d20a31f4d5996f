//! Models that propose a whole block in one pass.
//!
//! Trees grow from a block as from any model: what is said of a slot's token is there before the token
//! is chosen. A level more costs nothing but its rows of the target's pass, which the pace learns.

mod chained;
mod model;
mod selected;

use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::target_model::{Features, Tap};

use super::grow::Growth;
use super::together::propose_alone;
use super::{
    Asked, Beside, DraftContext, DraftModel, DraftRows, DraftState, Drafter, Forecast, Plan,
    Shared, Turn,
};
use crate::error::Result;
use crate::tree::Tree;

pub use model::BlockDraftModel;
pub(super) use model::drafter;

/// A token that a slot of a block follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chosen {
    /// The token.
    pub token: TargetTokenId,
    /// The token before it: its place among those that the slot before followed; 0 for the root.
    pub after: usize,
}

/// A model whose one pass covers every token of a block.
pub trait BlockModel {
    /// What it wants of every pass of the target.
    fn taps(&self) -> Vec<Tap> {
        Vec::new()
    }

    /// What the columns of its logits stand for; every token of the target if `None`.
    fn vocabulary(&self) -> Option<&VocabularyMap>;

    /// Tokens after the root that a pass covers at most.
    fn block_len(&self) -> usize;

    /// As [`Drafter::tells_confidence`].
    fn tells_confidence(&self) -> bool {
        false
    }

    /// As [`Drafter::begin`].
    ///
    /// # Errors
    /// - the draft cannot run
    fn begin(&mut self, kept: usize) -> Result<()>;

    /// As [`Drafter::state`].
    fn state(&self) -> DraftState<'_> {
        DraftState::Private
    }

    /// As [`Drafter::take_over`].
    ///
    /// # Errors
    /// - the device has no memory for them
    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        let _ = (rows, tokens);
        Ok(())
    }

    /// As [`Drafter::observe`].
    ///
    /// # Errors
    /// - the draft cannot run
    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        let _ = (tokens, features);
        Ok(())
    }

    /// Runs the pass over the `depth` tokens after the root; forgets the round before.
    ///
    /// # Errors
    /// - the draft cannot run
    fn run(&mut self, context: DraftContext<'_>, depth: usize) -> Result<()>;

    /// What a slot says after each of the tokens chosen for the slot before it: slot 0 after the root,
    /// then slot by slot.
    ///
    /// # Errors
    /// - the pass has no such slot
    fn forecasts(&mut self, slot: usize, before: &[Chosen]) -> Result<Vec<Forecast>>;

    /// As [`DraftModel::shared`].
    fn shared(&mut self) -> Option<Shared<'_>> {
        None
    }

    /// As [`DraftModel::read`]: what the slot of a level says, after the pass where that is the first one. By default
    /// no other request is beside.
    ///
    /// # Errors
    /// - as [`Self::run`] and [`Self::forecasts`]
    fn read(&mut self, turn: Turn<'_>, beside: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        let _ = beside;
        if let Asked::Root { depth, .. } = turn.asked {
            self.run(turn.context, depth)?;
        }
        Ok(vec![self.forecasts(turn.asked.level(), &turn.chosen())?])
    }
}

impl Turn<'_> {
    /// The tokens that the slot which is asked for follows.
    pub(super) fn chosen(&self) -> Vec<Chosen> {
        let tokens = self.context.tokens;
        match self.asked {
            Asked::Root { .. } => vec![Chosen { token: tokens[tokens.len() - 1], after: 0 }],
            Asked::After { readings, .. } => {
                readings.iter().map(|r| Chosen { token: r.token, after: r.after }).collect()
            }
        }
    }
}

/// Drafts chains and trees with a block model.
pub struct BlockDrafter<M> {
    levels: Levels<M>,
}

impl<M: BlockModel> BlockDrafter<M> {
    /// A drafter for one request at a time.
    pub fn new(model: M) -> Self {
        Self { levels: Levels(model) }
    }
}

impl<M: BlockModel> Drafter for BlockDrafter<M> {
    fn taps(&self) -> Vec<Tap> {
        self.levels.0.taps()
    }

    fn tells_confidence(&self) -> bool {
        self.levels.0.tells_confidence()
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.levels.0.begin(kept)
    }

    fn state(&self) -> DraftState<'_> {
        self.levels.0.state()
    }

    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        self.levels.0.take_over(rows, tokens)
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        self.levels.0.observe(tokens, features)
    }

    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        propose_alone(self, context, plan)
    }

    fn start(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Growth> {
        Ok(Growth::planned(context, plan, plan.shape.cut(self.levels.0.block_len())))
    }

    fn model(&mut self) -> Option<&mut dyn DraftModel> {
        Some(&mut self.levels)
    }
}

/// A block handed out level by level.
struct Levels<M>(M);

impl<M: BlockModel> DraftModel for Levels<M> {
    fn vocabulary(&self) -> Option<&VocabularyMap> {
        self.0.vocabulary()
    }

    fn reads_are_free(&self) -> bool {
        true
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.0.begin(kept)
    }

    fn shared(&mut self) -> Option<Shared<'_>> {
        self.0.shared()
    }

    fn read(&mut self, turn: Turn<'_>, beside: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        self.0.read(turn, beside)
    }
}
