//! Arguments of what writes, checks and sends drafts.

use std::path::PathBuf;

/// Arguments of `extract`.
#[derive(Debug, clap::Args)]
pub(crate) struct ExtractArguments {
    /// A checkpoint, a run (its newest checkpoint is taken), or a curriculum (its last stage's).
    #[arg(value_name = "CKPT|RUN")]
    pub(crate) checkpoint: PathBuf,
    /// Take the run's checkpoint with the best held-out evaluation in place of the newest one.
    #[arg(long)]
    pub(crate) best: bool,
    /// Where to write (default: `draft` in the run directory).
    #[arg(long)]
    pub(crate) output: Option<PathBuf>,
}

/// Arguments of `export`.
#[derive(Debug, clap::Args)]
pub(crate) struct ExportArguments {
    /// A checkpoint, a run (its newest checkpoint is taken), a curriculum (its last stage's), or a draft
    /// folder or file.
    #[arg(value_name = "CKPT|RUN|DRAFT")]
    pub(crate) draft: PathBuf,
    /// Engine: vllm, sglang, llamacpp (GGUF), llamacpp-hf (for its converter), hf (plain),
    /// speculators, longspec (GLIDE). Several, with commas, go to folders of their names.
    #[arg(long, value_name = "PROFILE", required = true, value_delimiter = ',')]
    pub(crate) to: Vec<String>,
    /// Folder to write: new, empty, or an earlier export.
    #[arg(long, short, value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// How it is written.
    #[command(flatten)]
    pub(crate) options: ExportOptions,
}

/// How a draft is exported.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ExportOptions {
    /// Hugging Face folder, GGUF file or hub model `org/name` (`org/name:Q4_K_M` for its GGUF file; default: the run's own). llamacpp
    /// takes the tokenizer from it: give the GGUF file that you serve.
    #[arg(long)]
    pub target: Option<String>,
    /// The target's name for engines, where it differs from where it lies here.
    #[arg(long, value_name = "ORG/NAME")]
    pub target_name: Option<String>,
    /// Type of the weights (default: bf16; f16 for longspec).
    #[arg(long)]
    pub dtype: Option<ExportDtype>,
    /// Leave the target's embeddings out; engines then take the target's own.
    #[arg(long)]
    pub no_embed: bool,
    /// Tokens per round that engines draft by default (default: the best chain that `eval decode`
    /// measured, else 3).
    #[arg(long)]
    pub draft_len: Option<usize>,
    /// Refuse what only some versions of the engine compute.
    #[arg(long)]
    pub strict: bool,
}

/// Arguments of `verify`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct VerifyArguments {
    /// Exported folder, a folder of exported folders, or GGUF file.
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// What it is for (default: what its manifest or its files say).
    #[arg(long, value_name = "PROFILE")]
    pub(crate) profile: Option<String>,
    /// The target that it drafts for: sizes, vocabulary, embeddings and RoPE are compared.
    #[arg(long)]
    pub(crate) target: Option<String>,
    /// What it was made from: the re-loaded export has to compute the same.
    #[arg(long, value_name = "CKPT|RUN|DRAFT", requires = "target")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Decode so many tokens with the export and with the checkpoint, and compare tau.
    #[arg(long, value_name = "TOKENS", requires = "checkpoint")]
    pub(crate) decode: Option<usize>,
    /// Write inputs and outputs of the network check (safetensors), for another reader to repeat;
    /// features come from the target on a fixed text.
    #[arg(long, value_name = "FILE", requires = "target")]
    pub(crate) record: Option<PathBuf>,
    /// Warnings count as errors.
    #[arg(long)]
    pub(crate) strict: bool,
}

/// Arguments of `push`.
#[derive(Debug, clap::Args)]
pub(crate) struct PushArguments {
    /// Exported folder.
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
    /// Repository; it is made if it is not there.
    #[arg(value_name = "ORG/REPO")]
    pub(crate) repo: String,
    /// Licence of the draft, as the hub spells it (apache-2.0, mit, ...): the target's and the data's
    /// terms bind it.
    #[arg(long)]
    pub(crate) license: Option<String>,
    /// Make the repository private.
    #[arg(long)]
    pub(crate) private: bool,
    /// Print what would be sent, and the model card; nothing is sent.
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Type of exported weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ExportDtype {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// 32 bits.
    F32,
}
