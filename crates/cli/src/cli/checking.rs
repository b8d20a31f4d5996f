//! Arguments of `parity` and `kernel-check`.

use std::path::PathBuf;

use clap::builder::TypedValueParser;
use longdraft_kernels::check::Size;
use longdraft_models::DeviceChoice;
use longdraft_models::device::Precision;

use super::one_of;

fn precision() -> impl TypedValueParser<Value = Precision> {
    let bf16 = "Frozen weights in bf16, on a GPU the products' factors too";
    one_of([("f32", "Everything in f32", Precision::F32), ("bf16", bf16, Precision::Bf16)])
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
    /// Where it is computed: auto, cpu, cuda:0, metal:0.
    #[arg(long, default_value = "cpu")]
    pub(crate) device: DeviceChoice,
    /// Type of what is frozen, and on a GPU of products' factors; bf16 has tolerances of its own.
    #[arg(long, default_value = "f32", value_parser = precision())]
    pub(crate) precision: Precision,
}

/// Arguments of `kernel-check`.
#[derive(Debug, clap::Args)]
pub(crate) struct KernelCheckArguments {
    /// Ops to check, by the beginnings of their names (default: all).
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Where it computes: auto, cpu, cuda:0, metal:0.
    #[arg(long, default_value = "cpu")]
    pub(crate) device: DeviceChoice,
    /// How large the cases are.
    #[command(flatten)]
    pub(crate) size: SizeArguments,
    /// Runs of every case, which must have the same bits.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Time the ops instead: TFLOP/s, GB/s, microseconds of the host (default size: small on a CPU,
    /// else real).
    #[arg(long, conflicts_with = "repeat")]
    pub(crate) bench: bool,
}

/// Sizes of cases, one of them.
#[derive(Debug, clap::Args)]
#[group(multiple = false)]
pub(crate) struct SizeArguments {
    /// A few seconds on a CPU.
    #[arg(long, alias = "tiny")]
    smoke: bool,
    /// Every head dim, odd counts, losses over 128,256 tokens (default).
    #[arg(long)]
    small: bool,
    /// Lengths up to 131,072 and widths of 8B models, for a GPU.
    #[arg(long)]
    real: bool,
}

impl SizeArguments {
    /// The size that was asked for.
    pub(crate) fn chosen(&self) -> Option<Size> {
        match self {
            Self { smoke: true, .. } => Some(Size::Smoke),
            Self { small: true, .. } => Some(Size::Small),
            Self { real: true, .. } => Some(Size::Real),
            Self { smoke: false, small: false, real: false } => None,
        }
    }
}
