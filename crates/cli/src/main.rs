//! `longdraft`: trains draft models for speculative decoding and proves decoding with them
//! lossless.

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
mod status;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let arguments = cli::Cli::parse();
    match commands::run(arguments).and_then(|()| terminal::finish()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure.print();
            ExitCode::from(failure.code())
        }
    }
}
