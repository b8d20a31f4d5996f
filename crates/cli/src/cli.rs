//! Command-line arguments.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Train draft models for speculative decoding, and decode losslessly with them.
#[derive(Debug, Parser)]
#[command(name = "longdraft", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Threads to use (default: every core).
    #[arg(long, global = true)]
    pub(crate) threads: Option<usize>,
    /// Print a machine-readable last line.
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// Commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Recompute reference cases and print the largest relative error.
    ///
    /// Example: longdraft parity cases/qwen2_short --json
    Parity(ParityArguments),
}

/// Arguments of `parity`.
#[derive(Debug, clap::Args)]
pub(crate) struct ParityArguments {
    /// Case folders, or folders that hold case folders.
    #[arg(required = true, value_name = "CASE_DIR")]
    pub(crate) cases: Vec<PathBuf>,
    /// Weights of `forward` cases: a Hugging Face folder or a GGUF file.
    #[arg(long)]
    pub(crate) target: Option<PathBuf>,
}
