//! Tokens as text on stdout: whole characters, stop strings left out, accepted proposals
//! in colours or marks.

use std::ops::ControlFlow;

use longdraft_decode::stop::AnswerText;
use longdraft_decode::{Committed, EndReason, Origin};
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;

use crate::failure::{Failure, Result};

const GREEN: &str = "\x1b[32m";
const BLUE: &str = "\x1b[36m";
const PLAIN: &str = "\x1b[0m";

/// How accepted proposals are told from the target's own tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Show {
    /// Not at all.
    Nothing,
    /// Those of the draft in green, those of lookup in blue.
    Colours,
    /// Those of the draft in `[[ ]]`, those of lookup in `{{ }}`.
    Marks,
}

/// Prints an answer while it is written.
pub(super) struct Speaker<'a> {
    answer: AnswerText<'a>,
    stop_tokens: &'a [TargetTokenId],
    show: Show,
    /// Whose mark is open.
    marked: Option<Origin>,
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
            answer: AnswerText::new(tokenizer, stops),
            stop_tokens,
            show: Show::Nothing,
            marked: None,
            text: String::new(),
            problem: None,
        }
    }

    /// Shows who proposed what.
    pub(super) fn showing(mut self, show: Show) -> Self {
        self.show = show;
        self
    }

    /// Prints what a token makes certain; ends the text at a stop string, or if nobody can read it.
    pub(super) fn say(&mut self, committed: Committed) -> ControlFlow<EndReason> {
        if self.stop_tokens.contains(&committed.token) {
            return ControlFlow::Continue(());
        }
        let piece = match self.answer.push(committed.token.0) {
            Ok(piece) => piece,
            Err(error) => {
                self.problem = Some(error.to_string());
                return ControlFlow::Break(EndReason::Interrupted);
            }
        };
        self.print(&piece.text, committed.proposed_by);
        if piece.stopped {
            return ControlFlow::Break(EndReason::StopString);
        }
        match self.problem {
            Some(_) => ControlFlow::Break(EndReason::Interrupted),
            None => ControlFlow::Continue(()),
        }
    }

    fn print(&mut self, text: &str, origin: Option<Origin>) {
        if text.is_empty() {
            return;
        }
        self.text.push_str(text);
        match self.show {
            Show::Nothing => out!("{text}"),
            Show::Marks => {
                self.mark(origin);
                out!("{text}");
            }
            Show::Colours => match origin {
                Some(Origin::Draft) => out!("{GREEN}{text}{PLAIN}"),
                Some(Origin::Lookup) => out!("{BLUE}{text}{PLAIN}"),
                Some(Origin::Grammar) | None => out!("{text}"),
            },
        }
        crate::terminal::flush();
    }

    /// Ends the mark of who proposed what was printed last, and begins that of what comes.
    fn mark(&mut self, origin: Option<Origin>) {
        if self.marked == origin {
            return;
        }
        match std::mem::replace(&mut self.marked, origin) {
            Some(Origin::Draft) => out!("]]"),
            Some(Origin::Lookup) => out!("}}}}"),
            Some(Origin::Grammar) | None => {}
        }
        match origin {
            Some(Origin::Draft) => out!("[["),
            Some(Origin::Lookup) => out!("{{{{"),
            Some(Origin::Grammar) | None => {}
        }
    }

    /// Prints the rest; returns the whole text.
    ///
    /// # Errors
    /// - something could not be decoded or printed
    pub(super) fn finish(mut self) -> Result<String> {
        let rest = self.answer.finish()?;
        self.print(&rest.text, None);
        self.mark(None);
        if self.problem.is_none() {
            outln!();
        }
        match self.problem {
            Some(problem) => Err(Failure::work(problem)),
            None => Ok(self.text),
        }
    }
}
