//! Draft models as drafters: what a model computes stands apart from how trees grow.

use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::target::{Features, Tap};

use super::{DraftContext, Drafter, Plan, grow};
use crate::error::Result;
use crate::tree::Tree;

/// A proposed token that the draft reads to propose what follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// The token.
    pub token: TargetTokenId,
    /// What it follows: 0 is the root, i the i-th token that was read since.
    pub parent: usize,
}

/// A model that reads tokens and gives logits of what follows them.
pub trait DraftModel {
    /// What it wants of every pass of the target.
    fn taps(&self) -> Vec<Tap> {
        Vec::new()
    }

    /// What the columns of its logits stand for; every token of the target if `None`.
    fn vocabulary(&self) -> Option<&VocabularyMap>;

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

    /// Logits after the root, `[Vd]`; forgets what was read in the round before. At most `room`
    /// readings follow.
    ///
    /// # Errors
    /// - the draft cannot run
    fn read_root(&mut self, context: DraftContext<'_>, room: usize) -> Result<Vec<f32>>;

    /// Logits after each of `level`, `[Vd]` each; they count as read, in order, after those of
    /// earlier calls.
    ///
    /// # Errors
    /// - the draft cannot run
    fn read(&mut self, context: DraftContext<'_>, level: &[Reading]) -> Result<Vec<Vec<f32>>>;
}

/// Drafts chains and trees with a model.
pub struct ModelDrafter<M> {
    model: M,
}

impl<M: DraftModel> ModelDrafter<M> {
    /// A drafter for one request at a time.
    pub fn new(model: M) -> Self {
        Self { model }
    }
}

impl<M: DraftModel> Drafter for ModelDrafter<M> {
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
        if !plan.paid {
            return Ok(Tree::new(context.tokens[context.tokens.len() - 1]));
        }
        grow::grow(&mut self.model, context, plan)
    }
}

/// Places of readings in a round: who follows whom.
#[derive(Debug, Default)]
pub(super) struct Readings {
    /// Parent of each reading, as in [`Reading::parent`].
    parents: Vec<usize>,
}

impl Readings {
    pub(super) fn clear(&mut self) {
        self.parents.clear();
    }

    pub(super) fn len(&self) -> usize {
        self.parents.len()
    }

    pub(super) fn push(&mut self, reading: Reading) {
        self.parents.push(reading.parent);
    }

    /// Readings from the first below the root to `reading` itself, counted from 0.
    pub(super) fn path(&self, reading: usize) -> Vec<u32> {
        let mut path = vec![reading as u32];
        let mut at = reading;
        while let Some(parent) = self.parents[at].checked_sub(1) {
            path.push(parent as u32);
            at = parent;
        }
        path.reverse();
        path
    }
}
