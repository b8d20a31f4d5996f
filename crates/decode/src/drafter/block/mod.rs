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

use super::{
    DraftContext, DraftModel, DraftRows, DraftState, Drafted, Drafter, Forecast, Plan, Reading,
    grow,
};
use crate::error::{DecodeError, Result};
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
}

/// Drafts chains and trees with a block model.
pub struct BlockDrafter<M> {
    model: M,
}

impl<M: BlockModel> BlockDrafter<M> {
    /// A drafter for one request at a time.
    pub fn new(model: M) -> Self {
        Self { model }
    }
}

impl<M: BlockModel> Drafter for BlockDrafter<M> {
    fn taps(&self) -> Vec<Tap> {
        self.model.taps()
    }

    fn tells_confidence(&self) -> bool {
        self.model.tells_confidence()
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.model.begin(kept)
    }

    fn state(&self) -> DraftState<'_> {
        self.model.state()
    }

    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        self.model.take_over(rows, tokens)
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        self.model.observe(tokens, features)
    }

    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        let shape = plan.shape.cut(self.model.block_len());
        if !plan.paid || shape.depth() == 0 {
            return Ok(Tree::new(context.tokens[context.tokens.len() - 1]));
        }
        let (model, depth) = (&mut self.model, shape.depth());
        let mut levels = Levels { model, depth, slot: 0, first: 0, count: 0 };
        let mut cut = Plan {
            shape: &shape,
            drawn: plan.drawn,
            sampling: plan.sampling,
            round: plan.round,
            draws: &mut *plan.draws,
            worth: plan.worth,
            confidence_threshold: plan.confidence_threshold,
            paid: true,
            drafted: Drafted::Nothing,
            looked_up: Vec::new(),
        };
        let tree = grow::grow(&mut levels, context, &mut cut)?;
        plan.drafted = Drafted::Block;
        Ok(tree)
    }
}

/// A block handed out level by level.
struct Levels<'m, M> {
    model: &'m mut M,
    depth: usize,
    /// The slot of the newest level.
    slot: usize,
    /// Number of the first token of that level among all that were read, the root being 0.
    first: usize,
    /// Tokens of that level.
    count: usize,
}

impl<M: BlockModel> DraftModel for Levels<'_, M> {
    fn vocabulary(&self) -> Option<&VocabularyMap> {
        self.model.vocabulary()
    }

    fn reads_are_free(&self) -> bool {
        true
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.model.begin(kept)
    }

    fn read_root(&mut self, context: DraftContext<'_>, _: usize) -> Result<Forecast> {
        self.model.run(context, self.depth)?;
        (self.slot, self.first, self.count) = (0, 0, 1);
        let root = Chosen { token: context.tokens[context.tokens.len() - 1], after: 0 };
        let none = || DecodeError::Shape("a pass says nothing of its first slot".to_owned());
        self.model.forecasts(0, &[root])?.pop().ok_or_else(none)
    }

    fn read(&mut self, _: DraftContext<'_>, level: &[Reading]) -> Result<Vec<Forecast>> {
        let first = self.first;
        let before = level.iter().map(|Reading { token, parent }| {
            let after = parent.checked_sub(first).filter(|after| *after < self.count);
            let problem =
                || DecodeError::Shape("a token follows none of the slot before".to_owned());
            Ok(Chosen { token: *token, after: after.ok_or_else(problem)? })
        });
        let before = before.collect::<Result<Vec<_>>>()?;
        self.slot += 1;
        (self.first, self.count) = (first + self.count, before.len());
        self.model.forecasts(self.slot, &before)
    }
}
