//! Keeps answers: through the user's filter into the rows, and into the datastore at once.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use longdraft_decode::drafter::GrownDatastore;
use longdraft_models::TargetTokenId;
use longdraft_server::Served;

use super::Shared;
use super::redact::{Text, redact};
use super::store::{Row, Store};
use crate::decoding::Models;

/// How often it is looked whether the server ends.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How often it is looked for what is too old.
const SWEEP_EVERY: Duration = Duration::from_mins(1);

/// Keeps what the server hands over.
pub(super) struct Keeper {
    pub(super) store: Store,
    pub(super) redact: Option<PathBuf>,
    pub(super) grown: Option<Arc<GrownDatastore>>,
    pub(super) models: Arc<Models>,
    pub(super) shared: Arc<Shared>,
    /// Whether a problem was told: one line is enough, whatever the number of answers.
    pub(super) told_of_trouble: bool,
    /// When it was looked for what is too old.
    pub(super) swept: Instant,
}

impl Keeper {
    /// Until the server ends.
    pub(super) fn work(mut self, served: &Receiver<Served>) {
        loop {
            let served = match served.recv_timeout(LOOK_EVERY) {
                Ok(served) => served,
                Err(RecvTimeoutError::Timeout) if !self.shared.stops() => {
                    self.sweep();
                    continue;
                }
                Err(_) => return,
            };
            // What waits when the server ends is kept where that takes no time.
            if self.shared.stops() && self.redact.is_some() {
                continue;
            }
            let kept = self.keep(&served);
            let (rows, datastore) =
                (self.store.rows(), self.grown.as_ref().map_or(0, |grown| grown.len()));
            self.shared.board.tell(|learning| {
                (learning.rows, learning.datastore) = (rows, datastore);
                learning.dropped += usize::from(kept.is_none());
            });
        }
    }

    /// Lets go of old rows where nothing is answered, too.
    fn sweep(&mut self) {
        if self.swept.elapsed() < SWEEP_EVERY {
            return;
        }
        self.swept = Instant::now();
        self.store.sweep();
        let rows = self.store.rows();
        self.shared.board.tell(|learning| learning.rows = rows);
    }

    fn keep(&mut self, served: &Served) -> Option<()> {
        let (prompt, answer) = self.filtered(served)?;
        match self.store.add(&Row::new(&prompt, &answer, served.own.len())) {
            Ok(()) => {}
            Err(error) => {
                self.tell(&format!("an answer cannot be kept: {error}"));
                return None;
            }
        }
        for counter in [&self.shared.fresh, &self.shared.unchecked] {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(grown) = &self.grown {
            grown.add([&answer[..]]);
        }
        Some(())
    }

    /// Tokens of prompt and answer, without what must not be kept.
    fn filtered(&mut self, served: &Served) -> Option<(Vec<u32>, Vec<u32>)> {
        let ids = |tokens: &[TargetTokenId]| tokens.iter().map(|token| token.0).collect::<Vec<_>>();
        let (prompt, answer) = (ids(&served.prompt), ids(&served.answer));
        let Some(program) = &self.redact else { return Some((prompt, answer)) };
        let tokenizer = &self.models.tokenizer;
        let text = Text {
            prompt: tokenizer.decode(&prompt, false).ok()?,
            answer: tokenizer.decode(&answer, false).ok()?,
        };
        let Some(found) = redact(program, &text) else {
            let program = program.display().to_string();
            self.tell(&format!("{program} failed on an answer, which is not kept"));
            return None;
        };
        if found == text {
            return Some((prompt, answer));
        }
        // What was put in may be a token that the target does not know.
        let vocabulary = self.models.target.config().vocab_size;
        let known = |ids: &Vec<u32>| ids.iter().all(|id| (*id as usize) < vocabulary);
        let encoded = |text: &str| Some(tokenizer.encode(text).ok()?.ids).filter(known);
        let answer = encoded(&found.answer)?;
        Some((encoded(&found.prompt)?, answer)).filter(|(_, answer)| !answer.is_empty())
    }

    fn tell(&mut self, problem: &str) {
        if !std::mem::replace(&mut self.told_of_trouble, true) {
            errln!("warning: learning: {problem}; further ones are counted at /learning");
        }
    }
}
