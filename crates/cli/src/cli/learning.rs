//! Arguments of `serve --learn` and of `learn`.

use std::path::PathBuf;

use clap::Subcommand;

/// What a server learns of its answers.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Learning")]
pub(crate) struct LearningArguments {
    /// Keep the answers in this folder, closed to other users, and train the draft with them; lookup finds
    /// them at once.
    #[arg(long, value_name = "DIR")]
    pub(crate) learn: Option<PathBuf>,
    /// Without --draft: train a new draft of this method, as `draft.method` names it.
    #[arg(long, value_name = "NAME", value_parser = super::methods())]
    #[arg(requires = "learn", conflicts_with = "draft")]
    pub(crate) learn_method: Option<String>,
    /// Have this program take out of every text what must not be kept: it reads prompt and answer with a line
    /// between them that holds a NUL alone, and writes the same. Where it fails the answer is not kept.
    #[arg(long, value_name = "PROGRAM", requires = "learn")]
    pub(crate) learn_redact: Option<PathBuf>,
    /// Most that is kept of answers; the oldest go.
    #[arg(long, value_name = "MIB", default_value_t = 256, requires = "learn")]
    pub(crate) learn_size: u64,
    /// Days that they are kept.
    #[arg(long, value_name = "DAYS", default_value_t = 30, requires = "learn")]
    pub(crate) learn_days: u64,
    /// Train when so many new answers are kept.
    #[arg(long, value_name = "N", default_value_t = 256, requires = "learn")]
    pub(crate) learn_rows: usize,
    /// Longest that a training steps, in minutes; time in which it rests does not count.
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0, requires = "learn")]
    pub(crate) learn_minutes: f64,
    /// `idle`: training rests while answers are written; `always`: it goes on, at the lowest priority.
    #[arg(long, value_name = "WHEN", default_value = "idle", requires = "learn")]
    pub(crate) learn_when: LearnWhen,
}

/// When a server trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LearnWhen {
    /// While nothing is answered.
    Idle,
    /// All the time.
    Always,
}

/// Commands about what a server learned.
#[derive(Debug, Subcommand)]
pub(crate) enum LearnCommand {
    /// Remove everything that a server kept of its answers, and the drafts that learned from them.
    ///
    /// Example: longdraft learn purge learned
    Purge {
        /// Folder that `serve --learn` was given.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Train with what is kept; `serve --learn` starts it.
    #[command(hide = true)]
    Train {
        /// Folder that `serve --learn` was given.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}
