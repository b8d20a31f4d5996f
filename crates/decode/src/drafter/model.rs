//! Draft models as drafters: what a model computes stands apart from how trees grow.

use std::any::Any;
use std::sync::Arc;

use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::target_model::{Features, Tap};

use super::grow::Growth;
use super::together::propose_alone;
use super::{DraftContext, DraftRows, DraftState, Drafter, Plan, ReducedHead};
use crate::error::{DecodeError, Result};
use crate::tree::Tree;

/// A proposed token that the draft reads to propose what follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// The token.
    pub token: TargetTokenId,
    /// What it follows: 0 is the root, i the i-th token that was read since.
    pub parent: usize,
    /// Its place among those that were asked for before it together, counted from 0.
    pub after: usize,
}

/// What a draft is asked for.
#[derive(Debug, Clone, Copy)]
pub enum Asked<'t> {
    /// What follows the root. What was read in the round before is forgotten.
    Root {
        /// Levels of tokens that are proposed at most.
        depth: usize,
        /// Readings that follow at most, unless they are free.
        room: usize,
    },
    /// What follows each of the tokens of a level; they count as read, in order, after those of earlier levels.
    After {
        /// Which level, 1 being that of the tokens after the root.
        level: usize,
        /// Its tokens.
        readings: &'t [Reading],
    },
}

impl Asked<'_> {
    /// The level of the tokens after which is asked, 0 being the root.
    pub fn level(&self) -> usize {
        match self {
            Self::Root { .. } => 0,
            Self::After { level, .. } => *level,
        }
    }
}

/// A request's turn in a pass over a draft.
#[derive(Clone, Copy)]
pub struct Turn<'t> {
    /// Its text.
    pub context: DraftContext<'t>,
    /// What it asks for.
    pub asked: Asked<'t>,
}

impl<'t> Turn<'t> {
    /// The tokens after which is asked; none of them is the root.
    pub(super) fn readings(&self) -> &'t [Reading] {
        match self.asked {
            Asked::Root { .. } => &[],
            Asked::After { readings, .. } => readings,
        }
    }
}

/// A request's part of a model whose draft other requests read, too.
pub struct Shared<'m> {
    /// Where lies what all of them read, which tells it from other drafts and heads.
    network: [usize; 2],
    own: &'m mut dyn Any,
}

impl<'m> Shared<'m> {
    /// What is the request's `own`, of a model that reads `draft` and, where it has one, a reduced head.
    pub fn new<D, O: Any>(draft: &D, head: Option<&Arc<ReducedHead>>, own: &'m mut O) -> Self {
        let head = head.map_or(0, |head| Arc::as_ptr(head).addr());
        Self { network: [std::ptr::from_ref(draft).addr(), head], own }
    }

    pub(super) fn network(&self) -> [usize; 2] {
        self.network
    }

    /// The same request with its turn in another one's pass.
    pub(super) fn beside(self, turn: Turn<'m>) -> Beside<'m> {
        Beside { own: self.own, turn }
    }
}

/// A request beside the one that reads: its part of a model of the same kind and draft, and its turn.
pub struct Beside<'t> {
    own: &'t mut dyn Any,
    turn: Turn<'t>,
}

/// The turns of all requests of a pass with what each has of its own: that which reads, then those beside it.
///
/// # Errors
/// - one of them is of another kind of model
pub fn turns_of<'t, O: Any>(
    own: &'t mut O,
    turn: Turn<'t>,
    beside: &'t mut [Beside<'_>],
) -> Result<Vec<(&'t mut O, Turn<'t>)>> {
    let mut turns = vec![(own, turn)];
    for other in beside {
        let own = other.own.downcast_mut().ok_or_else(|| {
            DecodeError::Shape("a pass is shared with a draft of another kind".to_owned())
        })?;
        turns.push((own, other.turn));
    }
    Ok(turns)
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

    /// What the columns of its logits stand for; every token of the target if `None`, the default.
    fn vocabulary(&self) -> Option<&VocabularyMap> {
        None
    }

    /// As [`Drafter::tells_confidence`].
    fn tells_confidence(&self) -> bool {
        false
    }

    /// Tokens after the root that one pass covers at most, of a model that proposes a block. Its pass runs when the
    /// root is asked for. Reading takes next to no time then, so that a tree may read every token that can be among
    /// its best.
    fn block_len(&self) -> Option<usize> {
        None
    }

    /// As [`Drafter::begin`].
    ///
    /// # Errors
    /// - the draft cannot run
    fn begin(&mut self, kept: usize) -> Result<()> {
        let _ = kept;
        Ok(())
    }

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

    /// What of it is the request's own, if other requests can be beside it in [`Self::read`].
    fn shared(&mut self) -> Option<Shared<'_>> {
        None
    }

    /// What follows the tokens that are asked for, in their order: those of this request, then those of each
    /// request `beside` it, which asks for the same level. All of them are read in passes over the draft that they
    /// share, and each hears what it would hear alone, on a CPU to the bit.
    ///
    /// # Errors
    /// - the draft cannot run
    fn read(&mut self, turn: Turn<'_>, beside: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>>;
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
    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        propose_alone(self, context, plan)
    }

    fn start(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Growth> {
        let most = self.model.block_len().unwrap_or(usize::MAX);
        Ok(Growth::planned(context, plan, plan.shape.cut(most)))
    }

    fn model(&mut self) -> Option<&mut dyn DraftModel> {
        Some(&mut self.model)
    }

    fn reader(&self) -> Option<&dyn DraftModel> {
        Some(&self.model)
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

    /// Adds the readings of a level: the number of the first of them, and the paths of all.
    pub(super) fn add(&mut self, level: &[Reading]) -> (usize, Vec<Vec<u32>>) {
        let first = self.parents.len();
        self.parents.extend(level.iter().map(|reading| reading.parent));
        (first, (first..self.parents.len()).map(|reading| self.path(reading)).collect())
    }

    /// Readings from the first below the root to `reading` itself, counted from 0.
    fn path(&self, reading: usize) -> Vec<u32> {
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
