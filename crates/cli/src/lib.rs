//! `longdraft`: trains draft models for speculative decoding and proves decoding with them
//! lossless.
//!
//! Programs open a [`Target`] and a [`Draft`], decode with them in a [`Session`], and [`train`], [`capture`],
//! [`evaluate`], [`export`] and [`verify`] as the commands of these names do:
//!
//! ```no_run
//! use longdraft::{AnswerOptions, Draft, Session, Target};
//!
//! # fn main() -> longdraft::Result<()> {
//! let target = Target::open("model.gguf")?;
//! let draft = Draft::open("runs/mine")?;
//! let session = Session::new(&target, Some(&draft))?;
//! let answer = session.generate("Once upon a time", &AnswerOptions::default())?;
//! println!("{} ({:.2} tokens per target pass)", answer.text, answer.tau);
//! # Ok(())
//! # }
//! ```
//!
//! The program itself is [`main()`]. The fuzzers call [`check_configuration()`].

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

#[macro_use]
mod terminal;
mod answer;
mod api;
mod cache;
mod cli;
mod commands;
mod datastore;
mod decoding;
mod doctor;
mod draft_source;
#[cfg(test)]
mod hints;
mod interrupts;
mod model_source;
mod progress;
mod ranks;
mod recording;
mod screen;
mod threads;

pub(crate) use terminal::{failure, status};

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;

use failure::{Failure, PIPE_CLOSED};

pub use api::*;
pub use cli::{
    CacheChoice, ExportDtype, ExportOptions, LookupChoice, OpenOptions, PaceChoice, VerifyChoice,
    WeightDtype,
};
pub use longdraft_decode::{DraftShape, Origin};
pub use longdraft_models::DeviceChoice;
pub use longdraft_models::tokenizer::Message;
pub use longdraft_serving::verify::{Problem, Report, Severity};
pub use longdraft_train::metrics::DraftMetrics;
pub use longdraft_train::stage::{Event, Observer, ResumePolicy, StepReport};

/// Runs the command that the process's arguments name.
pub fn main() -> ExitCode {
    ExitCode::from(main_of(std::env::args_os()))
}

/// Runs the command that some words name, the program's own name first; returns the exit code. It
/// listens for signals and starts the process's threads, so a process calls it once.
pub fn main_of(words: impl IntoIterator<Item = OsString>) -> u8 {
    let words: Vec<OsString> = words.into_iter().collect();
    recording::set_command(&words);
    let arguments = match cli::Cli::try_read(&words) {
        Ok(arguments) => arguments,
        Err(error) => return tell_usage(&error, &words),
    };
    match commands::run(arguments).and_then(|()| terminal::finish()) {
        Ok(()) => 0,
        Err(failure) => {
            failure.print();
            terminal::flush();
            failure.code()
        }
    }
}

/// Names what starts this program, by which further ranks are started: a module of Python's is started by its
/// interpreter. Without it, it is the process's own file.
pub fn set_program(words: Vec<OsString>) {
    recording::set_program(words);
}

/// Whether warnings alone are told on stderr, and no progress; commands decide it by their options.
pub fn set_quiet(quiet: bool) {
    let verbosity = if quiet { terminal::Verbosity::Quiet } else { terminal::Verbosity::Normal };
    terminal::set_manners(verbosity, clap::ColorChoice::Auto);
}

/// Threads that everything computes on; 0 stands for one for every core, as without it.
///
/// # Errors
/// - there are too many, they have been started already, or cannot be
pub fn set_threads(threads: usize) -> Result<()> {
    Ok(threads::start_threads(threads)?)
}

/// Help and version as they were asked for; otherwise what is wrong with the arguments.
fn tell_usage(error: &clap::Error, words: &[OsString]) -> u8 {
    let printed = error.print();
    if !error.use_stderr() {
        return match printed {
            Ok(()) => 0,
            Err(lost) if lost.kind() == ErrorKind::BrokenPipe => PIPE_CLOSED,
            Err(_) => 1,
        };
    }
    // Arguments that cannot be read may still ask for JSON.
    if words.iter().any(|word| word == "--json") {
        let message = error.render().to_string();
        let message = message.trim_start_matches("error: ").split("\n\n").next();
        let failure = Failure::usage(message.unwrap_or_default().trim_end());
        let hint = error.get(clap::error::ContextKind::Suggested).map_or_else(
            || "longdraft --help lists commands and arguments".to_owned(),
            ToString::to_string,
        );
        outln!("{}", failure.hint(hint).to_json());
    }
    2
}

/// Composes and checks a configuration file of any kind, changed by `overrides` (`key=value`), as
/// `longdraft config check --keys` does.
///
/// # Errors
/// - every problem of the file and the overrides, in words
pub fn check_configuration(path: &Path, overrides: &[String]) -> std::result::Result<(), String> {
    let problems = commands::check_configuration(path, overrides, true);
    let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
    if lines.is_empty() { Ok(()) } else { Err(lines.join("\n")) }
}
