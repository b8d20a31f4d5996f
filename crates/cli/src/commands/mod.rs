//! One file per command.

mod parity;

use crate::cli::{Cli, Command};
use crate::failure::{Failure, Result};

/// Runs what the arguments ask for.
pub(crate) fn run(arguments: Cli) -> Result<()> {
    let threads = arguments.threads.unwrap_or(0);
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()
        .map_err(|error| Failure::work(format!("cannot start {threads} threads: {error}")))?;
    match arguments.command {
        Command::Parity(parity) => parity::run(&parity, arguments.json),
    }
}
