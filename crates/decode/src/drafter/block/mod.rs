//! Models that propose a whole block in one pass.
//!
//! Trees grow from a block as from any model: the logits of a level are there before its tokens are
//! chosen. A level more costs nothing but its rows of the target's pass, which the pace learns.

mod model;

use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::target::{Features, Tap};

use super::model::Readings;
use super::{DraftContext, DraftModel, Drafted, Drafter, Plan, Reading, grow};
use crate::error::Result;
use crate::tree::Tree;

pub use model::BlockDraftModel;
pub(super) use model::drafter;

/// A model whose one pass gives logits of every token of a block.
pub trait BlockModel {
    /// What it wants of every pass of the target.
    fn taps(&self) -> Vec<Tap> {
        Vec::new()
    }

    /// What the columns of its logits stand for; every token of the target if `None`.
    fn vocabulary(&self) -> Option<&VocabularyMap>;

    /// Tokens after the root that a pass covers at most.
    fn block_len(&self) -> usize;

    /// As [`Drafter::begin`].
    ///
    /// # Errors
    /// - the draft cannot run
    fn begin(&mut self, kept: usize) -> Result<()>;

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

    /// Logits of the token after a path, `[Vd]`: the root, then the tokens that are chosen after it.
    ///
    /// # Errors
    /// - the pass was shorter than the path
    fn logits(&self, path: &[TargetTokenId]) -> Result<Vec<f32>>;
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

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.model.begin(kept)
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        self.model.observe(tokens, features)
    }

    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        let shape = plan.shape.cut(self.model.block_len());
        if !plan.paid || shape.depth() == 0 {
            return Ok(Tree::new(context.tokens[context.tokens.len() - 1]));
        }
        let depth = shape.depth();
        let root = context.tokens[context.tokens.len() - 1];
        let (model, readings) = (&mut self.model, Readings::default());
        let mut levels = Levels { model, depth, root, readings, tokens: Vec::new() };
        let mut cut = Plan {
            shape: &shape,
            drawn: plan.drawn,
            sampling: plan.sampling,
            round: plan.round,
            draws: &mut *plan.draws,
            worth: plan.worth,
            paid: true,
            drafted: Drafted::Nothing,
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
    root: TargetTokenId,
    readings: Readings,
    /// Tokens of the readings.
    tokens: Vec<TargetTokenId>,
}

impl<M: BlockModel> DraftModel for Levels<'_, M> {
    fn vocabulary(&self) -> Option<&VocabularyMap> {
        self.model.vocabulary()
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.model.begin(kept)
    }

    fn read_root(&mut self, context: DraftContext<'_>, _: usize) -> Result<Vec<f32>> {
        self.readings.clear();
        self.tokens.clear();
        self.model.run(context, self.depth)?;
        self.model.logits(&[self.root])
    }

    fn read(&mut self, _: DraftContext<'_>, level: &[Reading]) -> Result<Vec<Vec<f32>>> {
        let first = self.readings.len();
        for reading in level {
            self.readings.push(*reading);
            self.tokens.push(reading.token);
        }
        let logits = (first..first + level.len()).map(|at| {
            let chosen = self.readings.path(at).into_iter().map(|i| self.tokens[i as usize]);
            let path: Vec<_> = std::iter::once(self.root).chain(chosen).collect();
            self.model.logits(&path)
        });
        logits.collect()
    }
}
