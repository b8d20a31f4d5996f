//! Arguments of `bench`.

use clap::{Args, Subcommand};
use longdraft_kernels::matrix::BlockFormat;
use longdraft_models::{DeviceChoice, Precision, StepProducts};
use longdraft_train::method::Method;

/// What is timed. Every case prints one JSON line.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Training steps of a GLIDE draft: one hard label a token, `compat: longspec`, one delay.
    Glide(GlideBenchArguments),
    /// Training steps of an EAGLE-3 draft: seven test-time steps, every row learned.
    Eagle3(Eagle3BenchArguments),
    /// Training steps of a DFlash draft: hard labels at the slots of drawn blocks.
    Dflash(DflashBenchArguments),
    /// Steps of pretraining the default language model, sequence by sequence.
    Pretrain(PretrainBenchArguments),
    /// Rows of features through the target into a store of one shard a row.
    Capture(CaptureBenchArguments),
    /// The target's passes over a few rows after a cached context.
    Decode(DecodeBenchArguments),
    /// f32 products at training shapes on the CPU.
    Products,
}

/// Where steps run, and how many.
#[derive(Debug, Clone, Args)]
pub(crate) struct BenchArguments {
    /// Where it is computed: auto, cpu, cuda:0, metal:0.
    #[arg(long, default_value = "cpu")]
    pub(crate) device: DeviceChoice,
    /// Type of frozen weights and products: auto, f32, bf16.
    #[arg(long, default_value = "auto", value_parser = precision)]
    pub(crate) precision: Precision,
    /// Factors of large products of training steps on a CPU: rounded, f32.
    #[arg(long, default_value = "rounded", value_parser = products)]
    pub(crate) products: StepProducts,
    /// Steps before the clock is read.
    #[arg(long, default_value_t = 3)]
    pub(crate) warm_ups: usize,
    /// Timed steps.
    #[arg(long, default_value = "10", value_parser = positive)]
    pub(crate) steps: usize,
    /// Time every kernel and product of the timed steps by itself, which slows them (NVIDIA GPUs).
    #[arg(long)]
    pub(crate) trace: bool,
    /// Begin every kernel after the end of the one before it, where they may overlap (NVIDIA GPUs).
    #[arg(long)]
    pub(crate) in_turn: bool,
    /// Form attention's scores once for all gradients of a step (NVIDIA GPUs of compute capability 9.0).
    #[arg(long)]
    pub(crate) one_pass: bool,
}

/// Sizes of a target with random weights.
#[derive(Debug, Clone, Args)]
pub(crate) struct ShapeArguments {
    /// Sizes of the target: tiny, smollm2-135m, llama3.1-8b, or a published `org/name`.
    #[arg(long, default_value = "smollm2-135m")]
    pub(crate) shape: String,
    /// Layers of the target in place of the shape's.
    #[arg(long, value_parser = positive)]
    pub(crate) layers: Option<usize>,
}

/// Rows of tokens through a target.
#[derive(Debug, Clone, Args)]
pub(crate) struct RowsArguments {
    #[command(flatten)]
    pub(crate) shape: ShapeArguments,
    #[command(flatten)]
    pub(crate) bench: BenchArguments,
    /// Tokens of a row; several are cases of their own.
    #[arg(long, value_delimiter = ',', default_value = "1024", value_parser = positive)]
    pub(crate) tokens: Vec<usize>,
}

/// Arguments of `bench glide`.
#[derive(Debug, Clone, Args)]
pub(crate) struct GlideBenchArguments {
    #[command(flatten)]
    pub(crate) rows: RowsArguments,
    /// Documents of a row, of equal length; several are cases of their own.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = positive)]
    pub(crate) documents: Vec<usize>,
    /// Learn the target's distribution beside the labels.
    #[arg(long)]
    pub(crate) soft: bool,
    /// The target runs once; its features are kept for every step.
    #[arg(long, conflicts_with = "llm_loss")]
    pub(crate) cached: bool,
    /// Compute the target's own loss too, as LongSpec's program does.
    #[arg(long, conflicts_with = "soft")]
    pub(crate) llm_loss: bool,
}

/// Arguments of `bench eagle3`.
#[derive(Debug, Clone, Args)]
pub(crate) struct Eagle3BenchArguments {
    #[command(flatten)]
    pub(crate) rows: RowsArguments,
    /// Run the target in every step; else features are drawn.
    #[arg(long)]
    pub(crate) online: bool,
    /// Tokens that the draft proposes (default: the shape's).
    #[arg(long, value_parser = positive)]
    pub(crate) draft_vocab_size: Option<usize>,
}

/// Arguments of `bench dflash`.
#[derive(Debug, Clone, Args)]
pub(crate) struct DflashBenchArguments {
    #[command(flatten)]
    pub(crate) rows: RowsArguments,
    /// Run the target in every step; else features are drawn.
    #[arg(long)]
    pub(crate) online: bool,
    /// Layers of the draft.
    #[arg(long, default_value = "2", value_parser = positive)]
    pub(crate) draft_layers: usize,
    /// Layers of the target that are read.
    #[arg(long, default_value = "5", value_parser = positive)]
    pub(crate) taps: usize,
    /// Slots of a block.
    #[arg(long, default_value = "8", value_parser = positive)]
    pub(crate) block_size: usize,
    /// Blocks of a row (default: one for every 8 tokens).
    #[arg(long, value_parser = positive)]
    pub(crate) blocks: Option<usize>,
    /// Slots after which a slot's weight has fallen to 1/e.
    #[arg(long, default_value_t = 4.0)]
    pub(crate) slot_decay: f64,
}

/// Arguments of `bench pretrain`.
#[derive(Debug, Clone, Args)]
pub(crate) struct PretrainBenchArguments {
    #[command(flatten)]
    pub(crate) bench: BenchArguments,
    /// Tokens of a sequence; several are cases of their own.
    #[arg(long, value_delimiter = ',', default_value = "1024", value_parser = positive)]
    pub(crate) tokens: Vec<usize>,
    /// Sequences of a step.
    #[arg(long, default_value = "4", value_parser = positive)]
    pub(crate) sequences: usize,
}

/// Arguments of `bench capture`.
#[derive(Debug, Clone, Args)]
pub(crate) struct CaptureBenchArguments {
    #[command(flatten)]
    pub(crate) rows: RowsArguments,
    /// Whose features.
    #[arg(long, default_value = "eagle3", value_parser = method)]
    pub(crate) method: Method,
}

/// Arguments of `bench decode`.
#[derive(Debug, Clone, Args)]
pub(crate) struct DecodeBenchArguments {
    #[command(flatten)]
    pub(crate) shape: ShapeArguments,
    #[command(flatten)]
    pub(crate) bench: BenchArguments,
    /// Rows of a pass; several are cases of their own.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = positive)]
    pub(crate) rows: Vec<usize>,
    /// Tokens that are cached before.
    #[arg(long, default_value_t = 0)]
    pub(crate) context: usize,
    /// Hold the matrices as quantised blocks of this type: Q4_K, Q4_1, ...
    #[arg(long, value_parser = blocks)]
    pub(crate) stored: Option<BlockFormat>,
    /// Also measure how fast the host's memory is read, over one GiB.
    #[arg(long)]
    pub(crate) read_bandwidth: bool,
    /// Start every kernel of every pass by itself, where passes repeat (NVIDIA GPUs).
    #[arg(long)]
    pub(crate) no_graphs: bool,
}

fn blocks(text: &str) -> Result<BlockFormat, String> {
    BlockFormat::named(text).ok_or_else(|| {
        let names = BlockFormat::ALL.map(BlockFormat::name);
        format!("a type of blocks: {}", names.join(", "))
    })
}

fn products(text: &str) -> Result<StepProducts, String> {
    match text {
        "rounded" => Ok(StepProducts::Rounded),
        "f32" => Ok(StepProducts::F32),
        _ => Err("rounded or f32".to_owned()),
    }
}

fn precision(text: &str) -> Result<Precision, String> {
    match text {
        "auto" => Ok(Precision::Auto),
        "f32" => Ok(Precision::F32),
        "bf16" => Ok(Precision::Bf16),
        _ => Err("auto, f32 or bf16".to_owned()),
    }
}

fn method(text: &str) -> Result<Method, String> {
    Method::named(text).copied().ok_or_else(|| {
        let names: Vec<&str> = Method::all().map(Method::name).collect();
        format!("a draft method: {}", names.join(", "))
    })
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(value) if value > 0 => Ok(value),
        _ => Err("a whole number above 0".to_owned()),
    }
}
