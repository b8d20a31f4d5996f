//! Who proposes tokens.

mod combined;
mod eagle3;
mod glide;
pub mod grow;
mod lookup;
mod model;
mod reduced_head;
mod window;

use std::sync::Arc;

use longdraft_models::TargetTokenId;
use longdraft_models::draft::AnyDraft;
use longdraft_models::target::{Features, KvCache, Tap, Target};

use crate::distribution::Sampling;
use crate::draws::Draws;
use crate::error::Result;
use crate::shape::DraftShape;
use crate::tree::Tree;

pub use combined::{Combination, CombinedDrafter};
pub use eagle3::Eagle3Model;
pub use glide::GlideModel;
pub use lookup::{Datastore, LookupChances, LookupDrafter, Match, MatchClass};
pub use model::{DraftModel, ModelDrafter, Reading};
pub use reduced_head::ReducedHead;
pub use window::DraftWindow;

/// A drafter over a draft of any method; `head` limits what GLIDE proposes.
///
/// # Errors
/// - the device has no memory for its state
pub fn drafter_of<'a>(
    draft: &'a AnyDraft,
    target: &Target,
    head: Option<Arc<ReducedHead>>,
) -> Result<Box<dyn Drafter + 'a>> {
    Ok(match draft {
        AnyDraft::Glide(draft) => {
            let model = GlideModel::new(draft, target)?;
            let model = match head {
                Some(head) => model.with_head(head),
                None => model,
            };
            Box::new(ModelDrafter::new(model))
        }
        AnyDraft::Eagle3(draft) => Box::new(ModelDrafter::new(Eagle3Model::new(draft, target)?)),
    })
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
    /// Rounds before this one.
    pub round: u64,
    /// What drawn proposals are drawn with.
    pub draws: &'a mut dyn Draws,
    /// When another node pays; without it the shape is filled. Only for certain proposals.
    pub worth: Option<Worth>,
    /// Whether proposals that take time of their own are wanted.
    pub paid: bool,
    /// Levels that a draft model read, set by it.
    pub levels: usize,
}

/// When a proposal is worth its time, from measured costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Worth {
    /// Smallest chance of acceptance at which a node pays its row of the target's pass.
    pub node: f64,
    /// Smallest expected number of further accepted tokens at which another level of drafting pays.
    pub level: f64,
    /// Measured acceptance by predicted acceptance of the draft's first tokens.
    pub calibration: f64,
    /// Measured acceptance of the draft's first tokens.
    pub first: f64,
    /// Measured acceptance of what lookup finds.
    pub lookup: LookupChances,
}

/// Proposes tokens after the root.
pub trait Drafter {
    /// What it wants of every pass of the target.
    fn taps(&self) -> Vec<Tap> {
        Vec::new()
    }

    /// A request starts; its first `kept` tokens are those of the request before.
    ///
    /// # Errors
    /// - the draft cannot run
    fn begin(&mut self, kept: usize) -> Result<()>;

    /// The target ran the next tokens; `features` hold the rows of those that are committed, in
    /// order. `tokens` are all committed ones that are known.
    ///
    /// # Errors
    /// - the draft cannot run
    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        let _ = (tokens, features);
        Ok(())
    }

    /// Proposes a tree below the root.
    ///
    /// # Errors
    /// - the draft cannot run
    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree>;
}
