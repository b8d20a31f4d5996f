//! `longdraft`: trains draft models for speculative decoding and proves decoding with them
//! lossless.
//!
//! The program is [`main()`]. Other crates may call [`check_configuration()`], as the fuzzers do.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[macro_use]
mod terminal;
mod cli;
mod commands;
mod configuration;
mod datastore;
mod decode_record;
mod decoding;
mod doctor;
mod failure;
mod parity;
mod progress;
mod ranks;
mod report;
mod sha256;

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;

/// Runs the command that the process's arguments name.
pub fn main() -> ExitCode {
    let arguments = cli::Cli::parse();
    match commands::run(arguments).and_then(|()| terminal::finish()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.print();
            ExitCode::from(failure.code())
        }
    }
}

/// Composes, checks and shows a configuration file of any kind, changed by `overrides`
/// (`key=value`), as `longdraft config` does.
///
/// # Errors
/// - every problem of the file and the overrides, in words
pub fn check_configuration(path: &Path, overrides: &[String]) -> Result<(), String> {
    use configuration::{Kind, kind_of, read, read_pretrain, show};
    let checked = || match kind_of(path)? {
        Kind::Train => read(path, overrides).map(|composed| drop(show(&composed))),
        Kind::Pretrain => read_pretrain(path, overrides).map(drop),
        Kind::Grid => commands::check_grid(path),
    };
    checked().map_err(|failure: failure::Failure| failure.message().to_owned())
}
