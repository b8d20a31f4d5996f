//! An answer while it is written, and when it is complete.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use longdraft_decode::Origin;
use serde_json::Value;

use crate::api::error::{Error, Result};

/// Text that a token made certain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Never empty.
    pub text: String,
    /// What proposed the token; the target's own if nothing did.
    pub proposed_by: Option<Origin>,
}

/// An answer that is complete.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Its text, without what ended it.
    pub text: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens per pass of the target, its own included.
    pub tau: f64,
    /// All figures and the tokens, as `generate --json` gives them.
    pub figures: Value,
}

/// What a session's thread tells of an answer.
pub(super) enum Told {
    Piece(Piece),
    End(Result<Answer>),
}

pub(super) fn ended() -> Error {
    Error::fault("the session's thread has ended")
}

/// Longest wait between two looks at an answer.
const LONG: Duration = Duration::from_hours(1);

/// An answer while it is written.
pub struct Stream {
    told: Receiver<Told>,
    cancelled: Arc<AtomicBool>,
    is_over: bool,
    answer: Option<Result<Answer>>,
}

/// What came of waiting for a piece.
#[derive(Debug)]
pub enum Next {
    /// It came.
    Piece(Piece),
    /// Nothing came yet.
    Nothing,
    /// The answer is over.
    End,
}

impl Stream {
    pub(super) fn new(told: Receiver<Told>, cancelled: Arc<AtomicBool>) -> Self {
        Self { told, cancelled, is_over: false, answer: None }
    }

    /// Waits for the next piece, so long at most.
    pub fn next_within(&mut self, time: Duration) -> Next {
        if self.is_over {
            return Next::End;
        }
        let answer = match self.told.recv_timeout(time) {
            Ok(Told::Piece(piece)) => return Next::Piece(piece),
            Err(RecvTimeoutError::Timeout) => return Next::Nothing,
            Ok(Told::End(answer)) => answer,
            Err(RecvTimeoutError::Disconnected) => Err(ended()),
        };
        (self.is_over, self.answer) = (true, Some(answer));
        Next::End
    }

    /// Ends the answer after the round that is under way, also while its prompt is read; what is written stays.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Waits for the rest; the whole answer.
    ///
    /// # Errors
    /// - the answer could not be written
    pub fn answer(mut self) -> Result<Answer> {
        while !matches!(self.next_within(LONG), Next::End) {}
        self.answer.take().unwrap_or_else(|| Err(ended()))
    }
}

impl Iterator for Stream {
    type Item = Result<Piece>;

    /// The next piece. After an error there is none.
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_within(LONG) {
                Next::Piece(piece) => return Some(Ok(piece)),
                Next::Nothing => {}
                Next::End => {
                    let failed = self.answer.take_if(|answer| answer.is_err());
                    return failed.and_then(Result::err).map(Err);
                }
            }
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.cancel();
    }
}
