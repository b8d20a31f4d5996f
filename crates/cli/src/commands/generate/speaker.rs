//! Tokens as text on stdout: whole characters, stop strings left out, accepted proposals
//! in colours or marks.

use std::ops::ControlFlow;

use longdraft_decode::stop::Streamed;
use longdraft_decode::{Committed, EndReason, Origin};

use crate::answer::Written;
use crate::failure::Result;

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
    written: Written<'a>,
    out: Printer,
}

impl<'a> Speaker<'a> {
    /// Prints what is written, and shows who proposed what.
    pub(super) fn new(written: Written<'a>, show: Show) -> Self {
        Self { written, out: Printer { show, marked: None } }
    }

    /// Prints what a token makes certain; ends the text at a stop string, or if nobody can read it.
    pub(super) fn say(&mut self, committed: Committed) -> ControlFlow<EndReason> {
        self.written.hear(committed, &mut |text| self.out.print(text, committed.proposed_by))
    }

    /// Prints the rest; returns the whole text, and the rest.
    /// It fails where something could not be decoded or printed.
    pub(super) fn finish(mut self) -> Result<(String, Streamed)> {
        let told = self.written.finish(&mut |rest| self.out.print(rest, None));
        self.out.mark(None);
        let told = told?;
        outln!();
        Ok(told)
    }
}

struct Printer {
    show: Show,
    /// Whose mark is open.
    marked: Option<Origin>,
}

impl Printer {
    fn print(&mut self, text: &str, origin: Option<Origin>) {
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
}
