//! Arguments of training and its report.

use std::path::PathBuf;

use longdraft_models::DeviceChoice;
use longdraft_train::stage::ResumePolicy;

use super::{PlanArguments, RankArguments};

/// Arguments of `report`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReportArguments {
    /// Run directories of `fit`, of `train` or of `eval decode --output`, or directories with a
    /// `curriculum.json`.
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
    /// Where it computes, as `device=` does: auto, cpu, cuda:0, metal:0.
    #[arg(long)]
    pub(crate) device: Option<DeviceChoice>,
    /// Go on from a checkpoint although objective, data, target or batch changed.
    #[arg(long)]
    pub(crate) force_resume: bool,
    /// Go on with a run, finished or not, to a later end than it had: larger train.steps, train.max_minutes or,
    /// of drafts, train.epochs or train.tokens. The warm-up stays as it was; what becomes of the learning
    /// rate is told. Of a curriculum of drafts, the last stage that has begun (stages.2.train.steps=300).
    #[arg(long, conflicts_with = "force_resume")]
    pub(crate) extend: bool,
    /// Processes that train together.
    #[command(flatten)]
    pub(crate) ranks: RankArguments,
    /// Planning in place of training.
    #[command(flatten)]
    pub(crate) planning: PlanArguments,
}

/// Arguments of `capture`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct CaptureArguments {
    /// Configuration file (YAML) with the store's place in `train.features`.
    #[arg(value_name = "CONFIG")]
    pub(crate) config: PathBuf,
    /// Change values: dotted.key=value, +new.key=value, ~key; stage=NAME picks a curriculum's.
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
    /// A further configuration that the store serves: one pass of the target for all. It trains on the same rows, and the
    /// changes count for it, too. May be given several times.
    #[arg(long, value_name = "CONFIG")]
    pub(crate) also: Vec<PathBuf>,
    /// Where it computes, as `device=` does: auto, cpu, cuda:0, metal:0.
    #[arg(long)]
    pub(crate) device: Option<DeviceChoice>,
    /// Only say how much would be written.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Check the hash of every shard in an object store too; in a folder that is always done.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Take the features from records that another trainer or engine wrote (SpecForge, speculators and vLLM,
    /// DeepSpec), in place of the target's passes; `data records` writes their text.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) records: Option<PathBuf>,
    /// Processes that fill one store.
    #[command(flatten)]
    pub(crate) ranks: RankArguments,
}

impl TrainArguments {
    /// What is done about a run directory of other settings.
    pub(crate) fn policy(&self) -> ResumePolicy {
        match (self.force_resume, self.extend) {
            (true, _) => ResumePolicy::Force,
            (_, true) => ResumePolicy::Extend,
            _ => ResumePolicy::Strict,
        }
    }

    /// Processes to start: a plan needs none.
    pub(crate) fn ranks_to_start(&self) -> RankArguments {
        if self.planning.plan { RankArguments::default() } else { self.ranks.clone() }
    }

    /// All changes to the configuration, the last one wins.
    pub(crate) fn changes(&self) -> Vec<String> {
        with_device(&self.overrides, self.device)
    }
}

/// Changes to a configuration and, after them, the device.
pub(crate) fn with_device(overrides: &[String], device: Option<DeviceChoice>) -> Vec<String> {
    let device = device.map(|device| format!("device={device}"));
    overrides.iter().cloned().chain(device).collect()
}
