//! `longdraft`: trains draft models for speculative decoding and proves decoding with them
//! lossless.
//!
//! The program is [`main()`]. Other crates may call [`check_configuration()`], as the fuzzers do.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[macro_use]
mod terminal;
mod cache;
mod cli;
mod commands;
mod configuration;
mod datastore;
mod decode_record;
mod decoding;
mod doctor;
mod draft_source;
mod events;
#[cfg(test)]
mod hints;
mod interrupts;
mod parity;
mod progress;
mod ranks;
mod report;
mod screen;
mod sha256;
mod statistics;

pub(crate) use terminal::{failure, status};

use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;

use failure::{Failure, PIPE_CLOSED};

/// Runs the command that the process's arguments name.
pub fn main() -> ExitCode {
    let arguments = match cli::Cli::try_read() {
        Ok(arguments) => arguments,
        Err(error) => return tell_usage(&error),
    };
    match commands::run(arguments).and_then(|()| terminal::finish()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.print();
            terminal::flush();
            ExitCode::from(failure.code())
        }
    }
}

/// Help and version as they were asked for; otherwise what is wrong with the arguments.
fn tell_usage(error: &clap::Error) -> ExitCode {
    let printed = error.print();
    if !error.use_stderr() {
        return match printed {
            Ok(()) => ExitCode::SUCCESS,
            Err(lost) if lost.kind() == ErrorKind::BrokenPipe => ExitCode::from(PIPE_CLOSED),
            Err(_) => ExitCode::FAILURE,
        };
    }
    // Arguments that cannot be read may still ask for JSON.
    if std::env::args_os().any(|argument| argument == "--json") {
        let message = error.render().to_string();
        let message = message.trim_start_matches("error: ").split("\n\n").next();
        let failure = Failure::usage(message.unwrap_or_default().trim_end());
        outln!("{}", failure.hint("longdraft --help lists commands and arguments").to_json());
    }
    ExitCode::from(2)
}

/// Composes and checks a configuration file of any kind, changed by `overrides` (`key=value`), as
/// `longdraft config check --keys` does.
///
/// # Errors
/// - every problem of the file and the overrides, in words
pub fn check_configuration(path: &Path, overrides: &[String]) -> Result<(), String> {
    let problems = commands::key_problems(path, overrides);
    let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
    if lines.is_empty() { Ok(()) } else { Err(lines.join("\n")) }
}
