//! What the user says in a conversation: lines with editing and history on a terminal, lines of a
//! file or pipe elsewhere; lines that begin with `/` are commands.

use std::io::{BufRead, IsTerminal};

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::failure::{Failure, Result};

const PROMPT: &str = "> ";

/// What the commands are.
pub(super) const HELP: &str = "\
/clear          forget the conversation; the system prompt stays
/system TEXT    another system prompt; without TEXT none
/help           this list
/quit           end (as Ctrl-D)
//TEXT          say /TEXT
Ctrl-C ends an answer; the arrow keys bring back earlier lines.";

/// Exit code where Ctrl-C ends the program.
const INTERRUPTED: i32 = 130;

/// Where turns come from.
pub(super) enum Turns {
    /// Somebody writes them.
    Edited(Box<DefaultEditor>),
    /// They are read; on a terminal whose output goes elsewhere they are asked for.
    Lines { asks: bool },
}

impl Turns {
    pub(super) fn open() -> Result<Self> {
        let asks = std::io::stdin().is_terminal();
        if !asks || !std::io::stdout().is_terminal() {
            return Ok(Self::Lines { asks });
        }
        let editor = DefaultEditor::new().map_err(|error| unreadable(&error))?;
        errln!("/help lists what can be done besides talking");
        Ok(Self::Edited(Box::new(editor)))
    }

    /// The next line; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<String>> {
        match self {
            Self::Lines { asks } => {
                if *asks {
                    err!("{PROMPT}");
                }
                let mut line = String::new();
                let read = std::io::stdin().lock().read_line(&mut line);
                let read = read.map_err(|error| unreadable(&error))?;
                Ok((read > 0).then_some(line))
            }
            Self::Edited(editor) => match editor.readline(PROMPT) {
                Ok(line) => {
                    // Only an earlier line that cannot be brought back is lost.
                    let _ = editor.add_history_entry(&line);
                    Ok(Some(line))
                }
                Err(ReadlineError::Eof) => Ok(None),
                Err(ReadlineError::Interrupted) => {
                    crate::terminal::flush();
                    std::process::exit(INTERRUPTED)
                }
                Err(error) => Err(unreadable(&error)),
            },
        }
    }
}

fn unreadable(error: &dyn std::fmt::Display) -> Failure {
    Failure::usage(format!("stdin: {error}"))
}

/// What a line means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Line<'a> {
    /// It is empty.
    Nothing,
    /// To the target.
    Say(&'a str),
    /// List the commands.
    Help,
    /// End.
    Quit,
    /// Forget what was said.
    Clear,
    /// Another system prompt, or none.
    System(&'a str),
    /// A command that does not exist, by its name.
    Unknown(&'a str),
}

impl<'a> Line<'a> {
    pub(super) fn read(line: &'a str) -> Self {
        let line = line.trim();
        let Some(command) = line.strip_prefix('/') else {
            return if line.is_empty() { Self::Nothing } else { Self::Say(line) };
        };
        if command.starts_with('/') {
            return Self::Say(command);
        }
        let (name, argument) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (name, argument.trim()) {
            ("help" | "?", _) => Self::Help,
            ("quit" | "exit" | "bye", "") => Self::Quit,
            ("clear" | "reset", "") => Self::Clear,
            ("system", text) => Self::System(text),
            _ => Self::Unknown(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_from_what_is_said() {
        for (line, means) in [
            ("  \n", Line::Nothing),
            (" what is 1/2? \n", Line::Say("what is 1/2?")),
            ("/help\n", Line::Help),
            ("/exit", Line::Quit),
            ("/clear", Line::Clear),
            ("/system be  brief ", Line::System("be  brief")),
            ("/system", Line::System("")),
            ("//help is a command", Line::Say("/help is a command")),
            ("/save it", Line::Unknown("save")),
            ("/quit now", Line::Unknown("quit")),
            ("/", Line::Unknown("")),
        ] {
            assert_eq!(Line::read(line), means, "{line:?}");
        }
    }
}
