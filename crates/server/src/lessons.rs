//! What a server hands to whoever learns of its answers, and what it tells of the learning.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use longdraft_decode::Generation;
use longdraft_models::TargetTokenId;
use serde_json::{Value, json};

/// Answers that wait to be kept; more are not learned of.
const WAITING: usize = 256;

/// An answer that was written.
#[derive(Debug, Clone)]
pub struct Served {
    /// Text before it.
    pub prompt: Arc<Vec<TargetTokenId>>,
    /// Its tokens.
    pub answer: Vec<TargetTokenId>,
    /// Which of them nobody had proposed: there rounds began, after a proposal that was refused or the
    /// last one.
    pub own: Vec<usize>,
}

/// What became of a training.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Training {
    /// When it ended, in seconds since 1970.
    pub at: u64,
    /// How long it took.
    pub seconds: f64,
    /// Answers that were set aside, on which the drafts were compared.
    pub held_out: usize,
    /// Whether these were too few to learn at all.
    pub too_few: bool,
    /// Tokens per pass of the target with the draft that was there, as these answers show.
    pub before: f64,
    /// The same with the candidate.
    pub after: f64,
    /// 95 % interval of the difference, answer by answer.
    pub interval: (f64, f64),
    /// Whether the candidate proposes now.
    pub replaced: bool,
}

/// What became of a comparison of the learned draft with the one that the server was given, on the newest answers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Check {
    /// When it ended, in seconds since 1970.
    pub at: u64,
    /// Answers that it is made of; neither draft learned them.
    pub answers: usize,
    /// Tokens per pass of the target with the given draft, as these answers show.
    pub given: f64,
    /// The same with the learned one.
    pub learned: f64,
    /// 95 % interval of what the learned one has more, answer by answer.
    pub interval: (f64, f64),
}

/// State of the learning.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Learning {
    /// What is done: `waiting`, `training`, `checking`, `paused`.
    pub doing: &'static str,
    /// Answers that are kept.
    pub rows: usize,
    /// Answers that were not: refused by the filter, too many at once, no room.
    pub dropped: usize,
    /// Tokens of the datastore that grows.
    pub datastore: usize,
    /// Trainings that ended, and those of them whose candidate was taken.
    pub trainings: usize,
    /// Candidates that were taken.
    pub replaced: usize,
    /// Trainings and checks that failed.
    pub failed: usize,
    /// The last training that ended.
    pub last: Option<Training>,
    /// Whether the given draft proposes although there is a learned one.
    pub rests: bool,
    /// Comparisons of the learned draft with the given one since the server began.
    pub checks: usize,
    /// The last one.
    pub check: Option<Check>,
}

impl Learning {
    /// As `/learning` tells it.
    pub(crate) fn to_json(&self) -> Value {
        let last = self.last.as_ref().map(|last| {
            json!({
                "at": last.at, "seconds": last.seconds, "held_out": last.held_out,
                "too_few_held_out": last.too_few,
                "tau_before": last.before, "tau_after": last.after, "interval": last.interval,
                "replaced": last.replaced,
            })
        });
        let check = self.check.as_ref().map(|check| {
            json!({
                "at": check.at, "answers": check.answers, "tau_given": check.given,
                "tau_learned": check.learned, "interval": check.interval,
            })
        });
        json!({
            "learned_rests": self.rests, "checks": self.checks, "last_check": check,
            "doing": self.doing, "rows": self.rows, "dropped": self.dropped,
            "datastore_tokens": self.datastore, "trainings": self.trainings,
            "replaced": self.replaced, "failed": self.failed, "last": last,
        })
    }
}

/// Where server and learner meet.
#[derive(Debug, Default)]
pub struct Board {
    learning: Mutex<Learning>,
    /// Answers that run or wait, and since when it is so.
    busy: Mutex<Busy>,
    changed: Condvar,
}

#[derive(Debug)]
struct Busy {
    answers: usize,
    since: Instant,
}

impl Default for Busy {
    fn default() -> Self {
        Self { answers: 0, since: Instant::now() }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Board {
    /// What is told of the learning.
    pub fn learning(&self) -> Learning {
        lock(&self.learning).clone()
    }

    /// Changes what is told.
    pub fn tell(&self, change: impl FnOnce(&mut Learning)) {
        change(&mut lock(&self.learning));
    }

    /// For how long nothing has run or waited; none while something does.
    pub fn idle(&self) -> Option<Duration> {
        let busy = lock(&self.busy);
        (busy.answers == 0).then(|| busy.since.elapsed())
    }

    /// Waits at most so long for answers to begin or end.
    pub fn wait(&self, most: Duration) {
        let busy = lock(&self.busy);
        drop(self.changed.wait_timeout(busy, most));
    }

    /// Notes how many answers run or wait.
    pub(crate) fn load(&self, answers: usize) {
        let mut busy = lock(&self.busy);
        let changes = (busy.answers == 0) != (answers == 0);
        busy.answers = answers;
        if changes {
            busy.since = Instant::now();
            self.changed.notify_all();
        }
    }
}

/// The server's end.
#[derive(Debug, Clone)]
pub struct Lessons {
    sender: SyncSender<Served>,
    /// What is told.
    pub board: Arc<Board>,
}

impl Lessons {
    /// A way from the server to a learner.
    pub fn new() -> (Self, Receiver<Served>) {
        let (sender, receiver) = sync_channel(WAITING);
        (Self { sender, board: Arc::default() }, receiver)
    }

    /// Hands an answer over; never waits.
    pub(crate) fn add(
        &self,
        prompt: &Arc<Vec<TargetTokenId>>,
        generation: &Generation,
        own: Vec<usize>,
    ) {
        let answer = generation.tokens.clone();
        if self.sender.try_send(Served { prompt: Arc::clone(prompt), answer, own }).is_err() {
            self.board.tell(|learning| learning.dropped += 1);
        }
    }
}
