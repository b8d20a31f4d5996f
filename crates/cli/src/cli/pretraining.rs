//! Arguments of `lm`.

use std::path::PathBuf;

use clap::Subcommand;
use clap::builder::TypedValueParser;
use longdraft_models::weights::artifact::{Compression, Embedding, QuantiseFormat};

use super::{BpbArguments, EvalBpbArguments, TrainArguments, one_of};

/// What to do with a small language model.
#[derive(Debug, Subcommand)]
pub(crate) enum LmCommand {
    /// Train a small language model from token shards; goes on by itself when the output directory
    /// holds a checkpoint.
    ///
    /// Example: longdraft lm train conf/pretrain/books.yaml train.seed=1
    Train(TrainArguments),
    /// Write a language model as int8 codes in one compressed file, read it back and score it.
    ///
    /// Example: longdraft lm quantize runs/books --output books.ldq --data runs/books-data/val_000000.bin
    /// --tokenizer runs/books-data
    Quantize(QuantizeArguments),
    /// Bits per byte of a language model, or of any target, over sliding windows.
    ///
    /// Example: longdraft lm score runs/books --data val.bin --tokenizer sp.model --window 2048
    Score(EvalBpbArguments),
    /// Run a grid of pretraining runs, several seeds each, and print a table with intervals; goes
    /// on where it stopped.
    ///
    /// Example: longdraft lm grid conf/pretrain/findings.yaml
    Grid(ExperimentArguments),
}

fn format() -> impl TypedValueParser<Value = QuantiseFormat> {
    let modern = "Scales rounded before use, no floor, any number of levels";
    one_of([
        ("compat", "As published", QuantiseFormat::Compat),
        ("modern", modern, QuantiseFormat::Modern),
    ])
}

fn embedding() -> impl TypedValueParser<Value = Embedding> {
    one_of([("codes", "As any other matrix", Embedding::Codes), ("f16", "As f16", Embedding::F16)])
}

fn compression() -> impl TypedValueParser<Value = Compression> {
    one_of([
        ("zlib", "zlib, level 9", Compression::Zlib),
        ("zstd", "zstd, level 22", Compression::Zstd),
    ])
}

/// Arguments of `lm quantize`.
#[derive(Debug, clap::Args)]
pub(crate) struct QuantizeArguments {
    /// Run of `lm train`, checkpoint, model folder or `.ldq` file.
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,
    /// The artifact, `.ldq`; or a `.gguf` file of Q8_0 blocks, which targets, drafts and llama.cpp
    /// read (models of `architecture: llama`; needs --tokenizer).
    #[arg(long)]
    pub(crate) output: PathBuf,
    /// Rules.
    #[arg(long, default_value = "compat", value_parser = format())]
    pub(crate) format: QuantiseFormat,
    /// Largest code: 127 for int8, 31 for int6 (modern).
    #[arg(long, default_value_t = 127)]
    pub(crate) levels: u8,
    /// How the embedding is stored.
    #[arg(long, default_value = "codes", value_parser = embedding())]
    pub(crate) embedding: Embedding,
    /// Tensors of at most so many values are kept.
    #[arg(long, default_value_t = 65_536)]
    pub(crate) keep_max_elements: usize,
    /// Compression.
    #[arg(long, default_value = "zlib", value_parser = compression())]
    pub(crate) compression: Compression,
    /// Bytes of code that are counted with the file.
    #[arg(long, default_value_t = 0)]
    pub(crate) code_bytes: u64,
    /// Clip rows so that file and code hold at most so many bytes (modern).
    #[arg(long)]
    pub(crate) budget_bytes: Option<u64>,
    /// Score live weights and artifact on these `.bin` files.
    #[arg(long, num_args = 1..)]
    pub(crate) data: Vec<PathBuf>,
    /// How it is scored.
    #[command(flatten)]
    pub(crate) scoring: BpbArguments,
}

/// Arguments of `lm grid`.
#[derive(Debug, clap::Args)]
pub(crate) struct ExperimentArguments {
    /// Grid (YAML).
    #[arg(value_name = "GRID")]
    pub(crate) grid: PathBuf,
    /// Change values of every run: dotted.key=value.
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
    /// Run only runs of these names.
    #[arg(long, num_args = 1..)]
    pub(crate) only: Vec<String>,
}
