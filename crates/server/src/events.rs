//! What the two halves of the server say to each other.

use longdraft_decode::acceptance::AcceptanceMetrics;
use longdraft_decode::{DecodeOptions, EndReason, LogProbs, Origin};
use longdraft_models::TargetTokenId;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::UnboundedSender;

use crate::error::ApiError;
use crate::grammar::FormState;

/// One answer that is asked for.
pub(crate) struct Task {
    /// Which of the answers of its request.
    pub(crate) choice: usize,
    pub(crate) prompt: Arc<Vec<TargetTokenId>>,
    pub(crate) options: DecodeOptions,
    /// Texts that end it.
    pub(crate) stops: Vec<String>,
    /// Whether tokens end it as the model has it.
    pub(crate) own_ends: bool,
    /// Whether its text goes on where that of the prompt ends.
    pub(crate) goes_on: bool,
    pub(crate) form: Option<FormState>,
    /// Closed when the client is gone.
    pub(crate) events: UnboundedSender<(usize, Event)>,
    pub(crate) asked: Instant,
    /// Its share of queue, places and tokens; given back when it ended and who asked has heard of it.
    pub(crate) share: Arc<Share>,
}

/// A place in the queue or the batch, and tokens, if these are limited.
#[derive(Debug)]
pub(crate) struct Share {
    pub(crate) _place: OwnedSemaphorePermit,
    pub(crate) _tokens: Option<OwnedSemaphorePermit>,
}

/// What comes of an answer.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// More of it.
    Piece(Piece),
    /// It ended.
    End(Ending),
    /// It cannot go on.
    Failed(ApiError),
}

/// What a token adds to an answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Piece {
    /// Text that is certain: whole characters, perhaps none.
    pub(crate) text: String,
    /// The token; none where the end of an answer sets its last characters free.
    pub(crate) token: Option<TargetTokenId>,
    /// Where in the text of the answer the token begins, in characters.
    pub(crate) offset: usize,
    /// The drafter that proposed it; none where it is the target's own.
    pub(crate) proposed_by: Option<Origin>,
    /// Its log-probability, if that is asked for.
    pub(crate) log_probs: Option<LogProbs>,
}

/// What an answer came to.
#[derive(Debug, Clone)]
pub(crate) struct Ending {
    pub(crate) reason: EndReason,
    /// Generated tokens, a stop token included.
    pub(crate) tokens: usize,
    /// Tokens of the prompt that were kept from an earlier request, or copied from another one.
    pub(crate) reused: usize,
    pub(crate) metrics: AcceptanceMetrics,
    /// Its pieces are held until they are heard, and so is its share.
    pub(crate) _share: Option<Arc<Share>>,
}
