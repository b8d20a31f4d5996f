//! Arguments of training and its report.

use std::path::PathBuf;

use super::PlanArguments;

/// Arguments of `report`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReportArguments {
    /// Run directories of `train`, or directories with a `curriculum.json`.
    #[arg(required = true, value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,
    /// Where to write (default: `report.html` in the first run's directory).
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// Arguments of `train`.
#[derive(Debug, clap::Args)]
pub(crate) struct TrainArguments {
    /// Configuration file (YAML).
    #[arg(value_name = "CONFIG")]
    pub(crate) config: PathBuf,
    /// Change values: dotted.key=value (as in YAML), +new.key=value, ~key.
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
    /// Go on from a checkpoint although objective, data, target or batch changed.
    #[arg(long)]
    pub(crate) force_resume: bool,
    /// Planning in place of training.
    #[command(flatten)]
    pub(crate) planning: PlanArguments,
}

/// Arguments of `capture`.
#[derive(Debug, clap::Args)]
pub(crate) struct CaptureArguments {
    /// Configuration file (YAML) with the store's place in `train.features`.
    #[arg(value_name = "CONFIG")]
    pub(crate) config: PathBuf,
    /// Change values: dotted.key=value, +new.key=value, ~key; stage=NAME picks a curriculum's.
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
    /// Only say how much would be written.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Check the hash of every shard in an object store too; in a folder that is always done.
    #[arg(long)]
    pub(crate) verify: bool,
}
