//! Another draft while the server runs: it is opened aside, and every place takes it with its next request.

use std::sync::Arc;

use longdraft_decode::drafter::{Drafter, Proposer};
use tokio::sync::mpsc::{
    UnboundedReceiver, UnboundedSender, WeakUnboundedSender, unbounded_channel,
};
use tokio::sync::{Mutex, oneshot};

use crate::events::Task;

/// Opens the draft that is to propose from now on, on any thread; or says why it cannot.
pub type OpenDraft = dyn Fn() -> Result<Proposer, String> + Send + Sync;

/// The drafter of a place with a draft, or why there is none.
pub type MakeDrafter<'a> = dyn Fn(&Proposer) -> Result<Option<Box<dyn Drafter + 'a>>, String> + 'a;

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
    pub(crate) proposer: Proposer,
    pub(crate) done: oneshot::Sender<Result<(), String>>,
}

/// The way to the decoder.
pub(crate) struct Line {
    pub(crate) sender: UnboundedSender<Work>,
    /// Held by who opens another draft and has it taken.
    pub(crate) changes: Arc<Mutex<()>>,
}

/// The decoder's end of [`channel`].
pub struct Inbox {
    pub(crate) line: Line,
    pub(crate) receiver: UnboundedReceiver<Work>,
}

/// Reaches a server from other threads of its program.
#[derive(Clone)]
pub struct Control {
    /// Weak: the server ends when nobody can ask any more, and this asks nothing.
    sender: WeakUnboundedSender<Work>,
    changes: Arc<Mutex<()>>,
}

/// A way into a server that does not run yet.
pub fn channel() -> (Control, Inbox) {
    let (sender, receiver) = unbounded_channel();
    let changes = Arc::default();
    let control = Control { sender: sender.downgrade(), changes: Arc::clone(&changes) };
    (control, Inbox { line: Line { sender, changes }, receiver })
}

/// Why a draft does not propose.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SwapError {
    /// The server ended before it took the draft, which says nothing of the draft.
    #[error("the server has ended")]
    Ended,
    /// It cannot draft here: what proposed before goes on.
    #[error("{0}")]
    Refused(String),
}

impl Control {
    /// Works while nobody else opens another draft or has one taken; waits until that is so. What is written
    /// down of a swap belongs into it: who opens a draft afterwards finds it.
    ///
    /// # Panics
    /// - on a thread of an asynchronous runtime
    pub fn alone<T>(&self, work: impl FnOnce() -> T) -> T {
        let _alone = self.changes.blocking_lock();
        work()
    }

    /// Has a draft propose from every place's next request on. Blocks until the decoder took it.
    ///
    /// # Errors
    /// - it cannot draft here, or the server ended
    pub fn swap(&self, proposer: Proposer) -> Result<(), SwapError> {
        let (done, told) = oneshot::channel();
        let sender = self.sender.upgrade().ok_or(SwapError::Ended)?;
        sender.send(Work::Swap(Swap { proposer, done })).map_err(|_| SwapError::Ended)?;
        drop(sender);
        told.blocking_recv().map_err(|_| SwapError::Ended)?.map_err(SwapError::Refused)
    }
}

#[cfg(test)]
mod tests {
    use longdraft_models::draft::vocabulary::VocabularyMap;
    use longdraft_models::draft::{Draft, DraftWeights};
    use longdraft_models::target_model::Tap;

    use super::*;
    use crate::answer::tests::{app_of, settings};
    use crate::app::App;

    struct None(DraftWeights);

    impl Draft for None {
        fn method(&self) -> &'static str {
            "none"
        }

        fn taps(&self) -> Vec<Tap> {
            Vec::new()
        }

        fn vocabulary(&self) -> Option<&VocabularyMap> {
            Option::None
        }

        fn weights(&self) -> &DraftWeights {
            &self.0
        }

        fn weights_mut(&mut self) -> &mut DraftWeights {
            &mut self.0
        }

        fn config_json(&self) -> serde_json::Value {
            serde_json::Value::Null
        }
    }

    fn proposer() -> Proposer {
        let draft = None(DraftWeights::new(Vec::new(), 0.0));
        Proposer { draft: Arc::new(draft), head: Option::None }
    }

    #[test]
    fn a_draft_that_is_refused_is_told_from_a_server_that_ended() {
        let (control, inbox) = channel();
        let Inbox { line, mut receiver } = inbox;
        let swap = || {
            let control = control.clone();
            std::thread::spawn(move || control.swap(proposer()))
        };
        let answer = |receiver: &mut UnboundedReceiver<Work>| match receiver.blocking_recv() {
            Some(Work::Swap(swap)) => swap.done,
            _ => panic!("a swap"),
        };
        let asked = swap();
        answer(&mut receiver).send(Err("too wide".to_owned())).expect("heard");
        assert_eq!(asked.join().expect("told"), Err(SwapError::Refused("too wide".to_owned())));
        // The decoder takes it and ends without a word, or never takes it.
        let asked = swap();
        drop(answer(&mut receiver));
        assert_eq!(asked.join().expect("told"), Err(SwapError::Ended));
        let asked = swap();
        while receiver.is_empty() {
            std::thread::yield_now();
        }
        drop(receiver);
        assert_eq!(asked.join().expect("told"), Err(SwapError::Ended));
        drop(line);
        assert_eq!(control.swap(proposer()), Err(SwapError::Ended));
    }

    /// Else the one that was opened first could be taken last.
    #[test]
    fn drafts_are_opened_and_taken_one_at_a_time() {
        let (began, opening) = std::sync::mpsc::channel();
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let gate = std::sync::Mutex::new(gate);
        let open: Arc<OpenDraft> = Arc::new(move || {
            began.send(()).expect("somebody hears");
            gate.lock().expect("not poisoned").recv().expect("it may go on");
            Ok(proposer())
        });
        let (control, Inbox { line, mut receiver }) = channel();
        let app = app_of(settings(), Some(open), line);
        let reload = |app: Arc<App>| async move { app.reload(app.enter()?).await };
        let runtime = tokio::runtime::Runtime::new().expect("runtime");
        let first = runtime.spawn(reload(Arc::clone(&app)));
        opening.recv().expect("it is opened");
        let second = runtime.block_on(reload(app)).expect_err("one is opened");
        assert_eq!(second.to_json()["error"]["code"], "reload_under_way");
        let learner = std::thread::spawn(move || control.alone(|| ()));
        go.send(()).expect("it waits");
        let Some(Work::Swap(swap)) = receiver.blocking_recv() else { panic!("a swap") };
        assert!(!learner.is_finished(), "the decoder has not taken it");
        swap.done.send(Ok(())).expect("heard");
        assert_eq!(runtime.block_on(first).expect("no panic"), Ok("none"));
        learner.join().expect("its turn");
    }
}
