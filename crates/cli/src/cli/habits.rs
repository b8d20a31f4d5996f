//! Arguments of what surrounds the work: runs on disk, completions, manual pages.

use std::path::PathBuf;

use clap::Subcommand;
use clap_complete::Shell;

/// What to do with runs.
#[derive(Debug, Subcommand)]
pub(crate) enum RunsCommand {
    /// Runs below a folder: state, steps, figures, bytes on disk.
    ///
    /// Example: longdraft runs list
    List(RunsListArguments),
    /// Figures of runs side by side, and the keys in which their configurations differ.
    ///
    /// Example: longdraft runs compare runs/a runs/b
    Compare(RunsCompareArguments),
    /// Delete run directories, after a question.
    ///
    /// Example: longdraft runs delete runs/old
    Delete(RunsDeleteArguments),
}

/// Arguments of `runs list`.
#[derive(Debug, clap::Args)]
pub(crate) struct RunsListArguments {
    /// Where they lie.
    #[arg(default_value = "runs")]
    pub(crate) folder: PathBuf,
}

/// Arguments of `runs compare`.
#[derive(Debug, clap::Args)]
pub(crate) struct RunsCompareArguments {
    /// Run directories.
    #[arg(required = true, value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,
}

/// Arguments of `runs delete`.
#[derive(Debug, clap::Args)]
pub(crate) struct RunsDeleteArguments {
    /// Run directories, with all that lies in them.
    #[arg(required = true, value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,
    /// Delete without a question.
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionsArguments {
    /// For which shell.
    pub(crate) shell: Shell,
}

/// Arguments of `man`.
#[derive(Debug, clap::Args)]
pub(crate) struct ManArguments {
    /// Write a page for every command into this folder, in place of the main one to stdout.
    #[arg(long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
}
