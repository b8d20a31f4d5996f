//! Draft models as drafters: what a model computes stands apart from how trees grow.

use std::sync::Arc;

use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::target_model::{Features, Tap};

use super::{DraftContext, DraftRows, DraftState, Drafter, Plan, grow};
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

/// Logits of the token after a node.
#[derive(Debug, Clone)]
pub enum Logits {
    /// Of every column of the draft's vocabulary, `[Vd]`. Nodes may share them: what is looked up in
    /// them is looked up once.
    All(Arc<Vec<f32>>),
    /// Of some columns; the others are −∞.
    Some {
        /// Places in the draft's vocabulary, each at most once, `[K]`.
        columns: Vec<u32>,
        /// Their logits, `[K]`.
        values: Vec<f32>,
    },
}

/// What a draft says of the token after a node.
#[derive(Debug, Clone)]
pub struct Forecast {
    /// Which token it is.
    pub logits: Logits,
    /// The chance, in 0..=1, that the target keeps the token that is proposed there, if the draft
    /// tells it. It must not depend on that token, only on what comes before it: otherwise drawn
    /// proposals would change the distribution of the output.
    pub confidence: Option<f64>,
}

impl From<Vec<f32>> for Forecast {
    /// Logits of every column, `[Vd]`.
    fn from(logits: Vec<f32>) -> Self {
        Self { logits: Logits::All(Arc::new(logits)), confidence: None }
    }
}

/// A model that reads tokens and gives logits of what follows them.
pub trait DraftModel {
    /// What it wants of every pass of the target.
    fn taps(&self) -> Vec<Tap> {
        Vec::new()
    }

    /// As [`Drafter::reads_last_layer`].
    fn reads_last_layer(&self) -> bool {
        false
    }

    /// What the columns of its logits stand for; every token of the target if `None`.
    fn vocabulary(&self) -> Option<&VocabularyMap>;

    /// Whether reading a token takes next to no time, so that a tree may read every token that can
    /// be among its best.
    fn reads_are_free(&self) -> bool {
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

    /// What follows the root; forgets what was read in the round before. At most `room` readings
    /// follow, unless they are free.
    ///
    /// # Errors
    /// - the draft cannot run
    fn read_root(&mut self, context: DraftContext<'_>, room: usize) -> Result<Forecast>;

    /// What follows each of `level`; they count as read, in order, after those of earlier calls.
    ///
    /// # Errors
    /// - the draft cannot run
    fn read(&mut self, context: DraftContext<'_>, level: &[Reading]) -> Result<Vec<Forecast>>;
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

    fn reads_last_layer(&self) -> bool {
        self.model.reads_last_layer()
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
