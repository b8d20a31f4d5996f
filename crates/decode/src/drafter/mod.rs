//! Drafters: what proposes tokens.

mod block;
mod combined;
mod eagle3;
mod glide;
pub mod grow;
mod held;
mod lookup;
mod model;
mod mtp;
mod pairs;
mod reduced_head;
mod state;
mod together;
mod waiting;
mod window;

use std::sync::Arc;

use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{Features, KvCache, Tap, Target};

use crate::distribution::Sampling;
use crate::draws::Draws;
use crate::error::{DecodeError, Result};
use crate::layout::DraftShape;
use crate::tree::Tree;

use grow::Growth;

pub use block::{BlockDraftModel, Chosen};
pub use combined::{Combination, CombinedDrafter};
pub use eagle3::Eagle3Model;
pub use glide::GlideModel;
pub use held::{AnyDraft, Held, Proposer};
pub use lookup::{
    Datastore, GrownDatastore, LookedUp, LookupChances, LookupDrafter, Match, MatchClass,
};
pub use model::{
    Asked, Beside, DraftModel, Forecast, Logits, ModelDrafter, Reading, Shared, Turn, turns_of,
};
pub use mtp::MtpModel;
pub use reduced_head::ReducedHead;
pub use state::{DraftRows, DraftState};
pub use together::{Proposal, propose_each};

/// Opens a method's drafts for decoding; `None` of a draft of another method. A reduced head limits
/// drafts that propose through the target's head.
type OpenDrafter = for<'a> fn(
    &AnyDraft<'a>,
    &Target,
    Option<&Arc<ReducedHead>>,
) -> Result<Option<Box<dyn Drafter + 'a>>>;

/// The methods that can draft.
const DRAFTERS: [OpenDrafter; 3] = [eagle3::drafter, block::drafter, glide::drafter];

/// A drafter over a draft of any method; `head` limits what drafts without a vocabulary of their own
/// propose.
///
/// # Errors
/// - the device has no memory for its state, or no method here drafts with it
pub fn drafter_of<'a>(
    draft: impl Into<AnyDraft<'a>>,
    target: &Target,
    head: Option<&Arc<ReducedHead>>,
) -> Result<Box<dyn Drafter + 'a>> {
    let draft = draft.into();
    for open in DRAFTERS {
        if let Some(drafter) = open(&draft, target, head)? {
            return Ok(drafter);
        }
    }
    Err(DecodeError::NoDrafter(draft.method()))
}

/// What a drafter may look at.
#[derive(Clone, Copy)]
pub struct DraftContext<'a> {
    /// The frozen target.
    pub target: &'a Target,
    /// Its keys and values for all committed tokens but the last.
    pub cache: &'a KvCache,
    /// Committed tokens, prompt included; the last one is the root, not yet run by the target.
    pub tokens: &'a [TargetTokenId],
}

/// How to propose this round.
pub struct Plan<'a> {
    /// Layout, already cut to the room that is left.
    pub shape: &'a DraftShape,
    /// Draw proposals from the draft's distribution instead of taking the most likely ones.
    pub drawn: bool,
    /// The distribution that draft logits are turned into.
    pub sampling: &'a Sampling,
    /// Index of the next token, which keys the draws.
    pub position: u64,
    /// What drawn proposals are drawn with.
    pub draws: &'a mut dyn Draws,
    /// When another node pays; without it the shape is filled. Of drawn proposals only those of
    /// drafts that tell their confidence follow it: that is known before a token is drawn.
    pub worth: Option<Worth>,
    /// Nothing is proposed where the draft's confidence is below this; 0 proposes everywhere.
    pub confidence_threshold: f64,
    /// Whether proposals that take time of their own are wanted.
    pub paid: bool,
    /// What a draft model ran, set by it.
    pub drafted: Drafted,
    /// What has come of earlier finds of lookup, set by it.
    pub looked_up: Vec<LookedUp>,
}

impl<'a> Plan<'a> {
    /// A round that fills a shape with the most likely tokens. The first of them has index 1.
    pub fn filling(
        shape: &'a DraftShape,
        sampling: &'a Sampling,
        draws: &'a mut dyn Draws,
    ) -> Self {
        let (worth, drafted, looked_up) = (None, Drafted::Nothing, Vec::new());
        let (drawn, position, confidence_threshold, paid) = (false, 1, 0.0, true);
        Self {
            shape,
            drawn,
            sampling,
            position,
            draws,
            worth,
            confidence_threshold,
            paid,
            drafted,
            looked_up,
        }
    }
}

/// What a draft model ran in a round: what its time was spent on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Drafted {
    /// Nothing.
    #[default]
    Nothing,
    /// A pass for each of so many levels.
    Levels(usize),
    /// One pass for all levels.
    Block,
}

/// When a proposal is worth its time, from measured costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Worth {
    /// Smallest chance of acceptance at which a node pays its row of the target's pass, for all that decode in it.
    pub node: f64,
    /// Tokens that a pass with proposals costs more than a plain step, whatever their number.
    pub jump: f64,
    /// Smallest expected number of further accepted tokens at which another level of drafting pays.
    pub level: f64,
    /// Measured acceptance by predicted acceptance of the draft's first tokens. A draft predicts it by
    /// its confidence, or else by the probability of the token.
    pub calibration: f64,
    /// Measured tokens that a round of the draft brings beyond those of plain decoding in its time.
    pub gain: f64,
    /// Measured acceptance of what lookup finds.
    pub lookup: LookupChances,
}

/// Proposes tokens after the root. What it does not say itself its model says for it, if it has one.
pub trait Drafter {
    /// What it wants of every pass of the target.
    fn taps(&self) -> Vec<Tap> {
        self.reader().map(DraftModel::taps).unwrap_or_default()
    }

    /// Whether it reads the keys and values of the target's last layer ([`KvCache::last_layer`]), which then holds
    /// all of them although it may have a window.
    fn reads_last_layer(&self) -> bool {
        self.reader().is_some_and(DraftModel::reads_last_layer)
    }

    /// Whether it tells how likely the target is to keep what it proposes.
    fn tells_confidence(&self) -> bool {
        self.reader().is_some_and(DraftModel::tells_confidence)
    }

    /// A request starts; its first `kept` tokens are those of the request before, or of the text that was taken
    /// over. It may start again before its first token is observed. By default nothing is kept from text to text.
    ///
    /// # Errors
    /// - the draft cannot run
    fn begin(&mut self, kept: usize) -> Result<()> {
        self.model().map_or(Ok(()), |model| model.begin(kept))
    }

    /// What it holds of its text, from which another place may go on. By default that place reads its prompt itself.
    fn state(&self) -> DraftState<'_> {
        self.reader().map_or(DraftState::Private, DraftModel::state)
    }

    /// Holds the first `tokens` tokens of another text as if it had observed them; [`Self::begin`] comes after it.
    /// Only a drafter that holds rows is asked, with rows of the same draft.
    ///
    /// # Errors
    /// - the device has no memory for them
    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        self.model().map_or(Ok(()), |model| model.take_over(rows, tokens))
    }

    /// The target ran the next tokens; `features` hold the rows of those that are committed, in
    /// order. `tokens` are all committed ones that are known.
    ///
    /// # Errors
    /// - the draft cannot run
    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        self.model().map_or(Ok(()), |model| model.observe(tokens, features))
    }

    /// Proposes a tree below the root.
    ///
    /// # Errors
    /// - the draft cannot run
    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree>;

    /// Begins a proposal beside those of other requests ([`propose_each`]): a tree that grows by what
    /// [`Self::model`] says. By default it is proposed at once.
    ///
    /// # Errors
    /// - the draft cannot run
    fn start(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Growth> {
        Ok(Growth::whole(self.propose(context, plan)?))
    }

    /// What reads for trees that [`Self::start`] began.
    fn model(&mut self) -> Option<&mut dyn DraftModel> {
        None
    }

    /// The same model, to ask what it wants and holds. A drafter with a model gives both, or answers itself what its
    /// model would be asked.
    fn reader(&self) -> Option<&dyn DraftModel> {
        None
    }

    /// The proposals of a tree that has grown.
    fn finish(&mut self, growth: Growth) -> Tree {
        growth.into_tree()
    }
}
