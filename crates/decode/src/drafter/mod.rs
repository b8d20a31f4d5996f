//! Who proposes tokens.

mod glide;
mod window;

use longdraft_models::TargetTokenId;
use longdraft_models::target::{KvCache, Target};

use crate::error::Result;

pub use glide::GlideDrafter;
pub use window::DraftWindow;

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

/// Proposes a chain of tokens after the root.
pub trait Drafter {
    /// Starts a request: the prompt is in the target's cache, the root is its first new token.
    ///
    /// # Errors
    /// - the draft cannot run
    fn begin(&mut self, context: DraftContext<'_>) -> Result<()>;

    /// Proposes at most `draft_len` tokens.
    ///
    /// # Errors
    /// - the draft cannot run
    fn propose(
        &mut self,
        context: DraftContext<'_>,
        draft_len: usize,
    ) -> Result<Vec<TargetTokenId>>;

    /// The first `accepted` proposals were committed, followed by a token of the target's.
    ///
    /// # Errors
    /// - the draft cannot run
    fn accept(&mut self, context: DraftContext<'_>, accepted: &[TargetTokenId]) -> Result<()>;
}
