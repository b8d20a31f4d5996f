//! Arguments of commands that several processes share.

use longdraft_models::DeviceChoice;

/// Processes of a command.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Several processes")]
pub(crate) struct RankArguments {
    /// Processes that work together on this machine; they are started, and share its cores (default: those that a
    /// launcher started).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) ranks: Option<u32>,
    /// The same, one for each of so many NVIDIA GPUs of this machine.
    #[arg(long, value_name = "N", conflicts_with = "ranks")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) gpus: Option<u32>,
}

impl RankArguments {
    /// Processes that are asked for.
    pub(crate) fn wanted(&self) -> Option<usize> {
        self.ranks.or(self.gpus).map(|ranks| ranks as usize)
    }

    /// What a plan is of: NVIDIA GPUs where these are asked for, though none may be here.
    pub(crate) fn planned_on(&self, device: DeviceChoice) -> DeviceChoice {
        let are_meant = device == DeviceChoice::Auto && self.gpus.is_some();
        if are_meant { DeviceChoice::Cuda(0) } else { device }
    }
}
