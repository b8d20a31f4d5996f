//! Arguments of `--plan`.

use clap::builder::{PossibleValuesParser, TypedValueParser};
use longdraft_plan::{GPUS, Gpu};

/// What a plan assumes of the machine; `train` and `lm train` themselves take it from where they run.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Planning")]
pub(crate) struct PlanArguments {
    /// Only say what the run needs with so many --ranks: memory of a rank, bytes between ranks, time of a step.
    /// Nothing is loaded or written, and no rank is started.
    #[arg(long)]
    pub(crate) plan: bool,
    /// Memory of one rank in GiB, on a GPU its own (default: what is free on this machine, on a CPU its share of that).
    #[arg(long, requires = "plan", value_name = "GIB", value_parser = positive)]
    pub(crate) memory: Option<f64>,
    /// Of `train` only: plan for GPUs of this kind, whatever `device` says: memory, links and the time of each part of a
    /// step, by a roofline of published limits. --memory, --bandwidth, --network-bandwidth and --gflops override it.
    #[arg(long, requires = "plan", value_parser = gpus())]
    pub(crate) gpu: Option<&'static Gpu>,
    /// Of `train` only: tokens of a document, of which a row holds several (default: the row).
    #[arg(long, requires = "plan", value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) document_tokens: Option<u64>,
    /// 10⁹ operations a second of one rank (default: measured here, if it is a CPU, for its share of the cores).
    #[arg(long, requires = "plan", value_parser = positive)]
    pub(crate) gflops: Option<f64>,
    /// 10⁹ bytes a second that a rank sends (default: 1.25, a 10 Gbit/s network; of GPUs by NCCL 370.8, NVLink within a
    /// machine).
    #[arg(long, requires = "plan", value_name = "GB_PER_SECOND", value_parser = positive)]
    pub(crate) bandwidth: Option<f64>,
    /// The same to ranks of other machines (default: as --bandwidth; of GPUs by NCCL 48.5, InfiniBand of 400 Gbit/s).
    #[arg(long, requires = "plan", value_name = "GB_PER_SECOND", value_parser = positive)]
    pub(crate) network_bandwidth: Option<f64>,
    /// Ranks on each machine (default: of GPUs 1, by NCCL 8; of a CPU all of them, so that each rank of --ranks N has an
    /// N-th of its free memory, its cores and their speed).
    #[arg(long, requires = "plan", value_name = "RANKS", value_parser = clap::value_parser!(u64).range(1..=65536))]
    pub(crate) machine_ranks: Option<u64>,
    /// Bytes of a value of the target's matrices (default: as `device` and `precision` hold them, 4 or 2; with `stored`
    /// what its file holds).
    #[arg(long, requires = "plan", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub(crate) target_bytes: Option<u8>,
    /// Of `train` only: a Markdown table of GPUs over ZeRO 1 and 3, 1, 4 and 8 ranks a row or a layer,
    /// online and offline.
    #[arg(long, requires = "plan")]
    pub(crate) table: bool,
    /// Of `train` only: a Markdown table of the collectives of a step, with the seconds that they take by estimate.
    #[arg(long, requires = "plan", conflicts_with = "table")]
    pub(crate) collectives: bool,
}

/// Reads a GPU by its name, and lists the names of all.
fn gpus() -> impl TypedValueParser<Value = &'static Gpu> {
    PossibleValuesParser::new(GPUS.iter().map(|gpu| gpu.name))
        .try_map(|name| Gpu::named(&name).ok_or("no GPU that is known"))
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("a number above 0".to_owned()),
    }
}
