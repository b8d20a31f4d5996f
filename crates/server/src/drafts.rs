//! Another draft while the server runs: it is opened aside, and every place takes it with its next request.

use std::sync::Arc;

use longdraft_decode::drafter::Drafter;
use longdraft_models::draft::Draft;
use tokio::sync::mpsc::{
    UnboundedReceiver, UnboundedSender, WeakUnboundedSender, unbounded_channel,
};
use tokio::sync::oneshot;

use crate::events::Task;

/// Opens the draft that is to propose from now on, on any thread; or says why it cannot.
pub type OpenDraft = dyn Fn() -> Result<Arc<dyn Draft>, String> + Send + Sync;

/// The drafter of a place with a draft, or why there is none.
pub type MakeDrafter<'a> =
    dyn Fn(&Arc<dyn Draft>) -> Result<Option<Box<dyn Drafter + 'a>>, String> + 'a;

/// How a server comes by another draft.
pub struct Drafts<'a> {
    /// Opens it when `/reload` asks; none of a server that has no draft.
    pub open: Option<Arc<OpenDraft>>,
    /// Makes it a place's drafter, on the decoder's thread.
    pub make: Box<MakeDrafter<'a>>,
}

/// What the decoder is asked for.
pub(crate) enum Work {
    /// An answer.
    Answer(Box<Task>),
    /// To propose with another draft.
    Swap(Swap),
}

/// Another draft, and who waits for what becomes of it.
pub(crate) struct Swap {
    pub(crate) draft: Arc<dyn Draft>,
    pub(crate) done: oneshot::Sender<Result<(), String>>,
}

/// The decoder's end of [`channel`].
pub struct Inbox {
    pub(crate) sender: UnboundedSender<Work>,
    pub(crate) receiver: UnboundedReceiver<Work>,
}

/// Reaches a server from other threads of its program.
#[derive(Clone)]
pub struct Control {
    /// Weak: the server ends when nobody can ask any more, and this asks nothing.
    sender: WeakUnboundedSender<Work>,
}

/// A way into a server that does not run yet.
pub fn channel() -> (Control, Inbox) {
    let (sender, receiver) = unbounded_channel();
    (Control { sender: sender.downgrade() }, Inbox { sender, receiver })
}

impl Control {
    /// Has a draft propose from every place's next request on. Blocks until the decoder took it.
    ///
    /// # Errors
    /// - it cannot draft here, or the server ended: what proposed before goes on
    pub fn swap(&self, draft: Arc<dyn Draft>) -> Result<(), String> {
        let ended = || "the server has ended".to_owned();
        let (done, told) = oneshot::channel();
        let sender = self.sender.upgrade().ok_or_else(ended)?;
        sender.send(Work::Swap(Swap { draft, done })).map_err(|_| ended())?;
        drop(sender);
        told.blocking_recv().map_err(|_| ended())?
    }
}
