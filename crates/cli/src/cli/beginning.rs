//! Arguments of `init`.

use std::path::PathBuf;

use super::fitting::parse_time;

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
