//! Tokens as text on stdout: whole characters, stop strings left out, accepted proposals in colour.

use std::ops::ControlFlow;

use longdraft_decode::stop::StopStrings;
use longdraft_decode::{Committed, EndReason, Origin};
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::{TextStream, TextTokenizer};

use crate::failure::{Failure, Result};

const GREEN: &str = "\x1b[32m";
const BLUE: &str = "\x1b[36m";
const PLAIN: &str = "\x1b[0m";

/// Prints an answer while it is written.
pub(super) struct Speaker<'a> {
    stream: Option<TextStream<'a>>,
    stop_tokens: &'a [TargetTokenId],
    stops: StopStrings,
    colours: bool,
    text: String,
    problem: Option<String>,
}

impl<'a> Speaker<'a> {
    pub(super) fn new(
        tokenizer: &'a TextTokenizer,
        stop_tokens: &'a [TargetTokenId],
        stops: &[String],
    ) -> Self {
        Self {
            stream: Some(tokenizer.stream()),
            stop_tokens,
            stops: StopStrings::new(stops.iter().cloned()),
            colours: false,
            text: String::new(),
            problem: None,
        }
    }

    /// Accepted tokens of the draft in green, of lookup in blue.
    pub(super) fn with_colours(mut self, colours: bool) -> Self {
        self.colours = colours;
        self
    }

    /// Prints what a token makes certain; ends the text at a stop string, or if nobody can read it.
    pub(super) fn say(&mut self, committed: Committed) -> ControlFlow<EndReason> {
        if self.stop_tokens.contains(&committed.token) {
            return ControlFlow::Continue(());
        }
        let Some(stream) = &mut self.stream else { return ControlFlow::Continue(()) };
        let piece = match stream.push(committed.token.0) {
            Ok(piece) => self.stops.push(&piece),
            Err(error) => {
                self.problem = Some(error.to_string());
                return ControlFlow::Break(EndReason::Interrupted);
            }
        };
        self.print(&piece.text, committed.proposed_by);
        if piece.stopped {
            self.stream = None;
            return ControlFlow::Break(EndReason::StopString);
        }
        match self.problem {
            Some(_) => ControlFlow::Break(EndReason::Interrupted),
            None => ControlFlow::Continue(()),
        }
    }

    fn print(&mut self, text: &str, origin: Option<Origin>) {
        self.text.push_str(text);
        let colour = match origin.filter(|_| self.colours && !text.is_empty()) {
            Some(Origin::Draft) => GREEN,
            Some(Origin::Lookup) => BLUE,
            None => "",
        };
        let end = if colour.is_empty() { "" } else { PLAIN };
        out!("{colour}{text}{end}");
        crate::terminal::flush();
    }

    /// Prints the rest; returns the whole text.
    ///
    /// # Errors
    /// - something could not be decoded or printed
    pub(super) fn finish(mut self) -> Result<String> {
        if let Some(stream) = self.stream.take() {
            let rest = stream.finish()?;
            let streamed = self.stops.push(&rest);
            let held = if streamed.stopped { String::new() } else { self.stops.finish() };
            self.print(&format!("{}{held}", streamed.text), None);
        }
        if self.problem.is_none() {
            outln!();
        }
        match self.problem {
            Some(problem) => Err(Failure::work(problem)),
            None => Ok(self.text),
        }
    }
}
