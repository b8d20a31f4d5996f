//! Command-line arguments.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::decoding::DecodingArguments;

/// Train draft models for speculative decoding, and decode losslessly with them.
#[derive(Debug, Parser)]
#[command(name = "longdraft", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Threads to use (default: every core).
    #[arg(long, global = true)]
    pub(crate) threads: Option<usize>,
    /// Print a machine-readable last line.
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// Commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// The whole pipeline: fetch a target, train a draft, extract it, decode with and without it.
    ///
    /// Example: longdraft quickstart --target smollm2
    Quickstart(QuickstartArguments),
    /// Train a draft: one stage, or the stages of a curriculum one after the other; goes on by
    /// itself when the output directory holds a checkpoint.
    ///
    /// Example: longdraft train conf/glide/smollm2.yaml train.seed=1
    Train(TrainArguments),
    /// Write the target's features to `train.features`, so that `train` runs without the target;
    /// says first how much that is. Several processes share the work; a killed one goes on.
    ///
    /// Example: longdraft capture conf/eagle3/smollm2-offline.yaml train.features=features
    Capture(CaptureArguments),
    /// Show, check or describe configurations.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Write a checkpoint's draft weights, configuration and tokenizer.
    ///
    /// Example: longdraft extract runs/smollm2
    Extract(ExtractArguments),
    /// Write a draft as a serving engine reads it; `verify` checks the folder.
    ///
    /// Example: longdraft export runs/smollm2 --to vllm --output exports/smollm2-vllm
    Export(ExportArguments),
    /// Check an exported folder without any engine: every problem at once, with what each engine would
    /// do and the way out.
    ///
    /// Example: longdraft verify exports/smollm2-vllm --target model.gguf --checkpoint runs/smollm2
    Verify(VerifyArguments),
    /// Send an export to the Hugging Face hub, with a model card made from its run.
    ///
    /// Example: longdraft push exports/smollm2-vllm my-org/smollm2-eagle3 --dry-run
    Push(PushArguments),
    /// Text from the target, with a draft or without.
    ///
    /// Example: longdraft generate --target model.gguf --draft runs/smollm2/draft --prompt "Once"
    Generate(GenerateArguments),
    /// Train a small language model from token shards; goes on by itself when the output directory
    /// holds a checkpoint.
    ///
    /// Example: longdraft pretrain conf/pretrain/books.yaml train.seed=1
    Pretrain(TrainArguments),
    /// Write a language model as int8 codes in one compressed file, read it back and score it.
    ///
    /// Example: longdraft quantize runs/books --output books.ldq --data runs/books-data/val.bin
    /// --tokenizer runs/books-data
    Quantize(QuantizeArguments),
    /// Run a grid of pretraining runs, several seeds each, and print a table with intervals; goes
    /// on where it stopped.
    ///
    /// Example: longdraft experiment conf/pretrain/findings.yaml
    Experiment(ExperimentArguments),
    /// Measure a draft on prompts, or a language model in bits per byte.
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Look at training data, measure it, prepare it, or have the target answer it anew.
    #[command(subcommand)]
    Data(DataCommand),
    /// Fetch a small real target.
    ///
    /// Example: longdraft fetch smollm2
    Fetch(FetchArguments),
    /// Recompute reference cases and print the largest relative error.
    ///
    /// Example: longdraft parity cases/qwen2_short --json
    Parity(ParityArguments),
    /// Plots of training runs, side by side, as one HTML page that needs no network.
    ///
    /// Example: longdraft report runs/a runs/b --output comparison.html
    Report(ReportArguments),
    /// Check this machine and say what to do.
    ///
    /// Example: longdraft doctor
    Doctor,
}

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

/// Arguments of `parity`.
#[derive(Debug, clap::Args)]
pub(crate) struct ParityArguments {
    /// Case folders, or folders that hold case folders.
    #[arg(required = true, value_name = "CASE_DIR")]
    pub(crate) cases: Vec<PathBuf>,
    /// Weights of `forward` cases: a Hugging Face folder or a GGUF file.
    #[arg(long)]
    pub(crate) target: Option<PathBuf>,
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

/// What to do with configurations.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print the composed configuration, every value with the line it comes from.
    ///
    /// Example: longdraft config show conf/glide/smollm2.yaml train.seed=1
    Show(ConfigArguments),
    /// Compose files and name everything that is wrong with them.
    ///
    /// Example: longdraft config check conf/glide/*.yaml
    Check {
        /// Configuration files.
        #[arg(required = true, value_name = "CONFIG")]
        configs: Vec<PathBuf>,
    },
    /// Print the JSON Schema of configuration files, for editors.
    ///
    /// Example: longdraft config schema > longdraft.schema.json
    Schema {
        /// Tables of every key instead, as in docs/configuration.md.
        #[arg(long)]
        markdown: bool,
        /// Of `pretrain` instead of `train`.
        #[arg(long)]
        pretrain: bool,
    },
}

/// A configuration file with changes.
#[derive(Debug, clap::Args)]
pub(crate) struct ConfigArguments {
    /// Configuration file (YAML).
    #[arg(value_name = "CONFIG")]
    pub(crate) config: PathBuf,
    /// Change values: dotted.key=value, +new.key=value, ~key.
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

/// Arguments of `extract`.
#[derive(Debug, clap::Args)]
pub(crate) struct ExtractArguments {
    /// A checkpoint, or a run directory (its newest checkpoint is taken).
    #[arg(value_name = "CKPT")]
    pub(crate) checkpoint: PathBuf,
    /// Where to write (default: `draft` in the run directory).
    #[arg(long)]
    pub(crate) output: Option<PathBuf>,
}

/// Arguments of `export`.
#[derive(Debug, clap::Args)]
pub(crate) struct ExportArguments {
    /// A checkpoint, a run directory (its newest checkpoint is taken), or a draft folder or file.
    #[arg(value_name = "CKPT|RUN|DRAFT")]
    pub(crate) draft: PathBuf,
    /// Engine: vllm, sglang, llamacpp (GGUF), llamacpp-hf (for its converter), hf (plain),
    /// speculators, longspec (GLIDE). Several, with commas, go to folders of their names.
    #[arg(long, value_name = "PROFILE", required = true, value_delimiter = ',')]
    pub(crate) to: Vec<String>,
    /// Folder to write: new, empty, or an earlier export.
    #[arg(long, short, value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// Hugging Face folder, GGUF file or hub model `org/name` (default: the run's own). llamacpp
    /// takes the tokenizer from it: give the GGUF file that you serve.
    #[arg(long)]
    pub(crate) target: Option<String>,
    /// The target's name for engines, where it differs from where it lies here.
    #[arg(long, value_name = "ORG/NAME")]
    pub(crate) target_name: Option<String>,
    /// Type of the weights (default: bf16; f16 for longspec).
    #[arg(long)]
    pub(crate) dtype: Option<ExportDtype>,
    /// Leave the target's embeddings out; engines then take the target's own.
    #[arg(long)]
    pub(crate) no_embed: bool,
    /// Tokens per round that engines draft by default (default: the best chain that `eval decode`
    /// measured, else 3).
    #[arg(long)]
    pub(crate) draft_len: Option<usize>,
    /// Refuse what only some versions of the engine compute.
    #[arg(long)]
    pub(crate) strict: bool,
}

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArguments {
    /// Exported folder, or GGUF file.
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
pub(crate) enum ExportDtype {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// 32 bits.
    F32,
}

/// Arguments of `generate`.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "a flag each")]
pub(crate) struct GenerateArguments {
    /// Hugging Face folder, GGUF file or hub model `org/name`.
    #[arg(long)]
    pub(crate) target: String,
    /// Drafting and verification.
    #[command(flatten)]
    pub(crate) decoding: DecodingArguments,
    /// Decode plainly.
    #[arg(long)]
    pub(crate) no_draft: bool,
    /// Text to continue, or with --chat the user's turn.
    #[arg(long)]
    pub(crate) prompt: Option<String>,
    /// A file with it, `-` for stdin.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// Speak through the target's chat template; without a prompt, a conversation: a turn a line.
    #[arg(long)]
    pub(crate) chat: bool,
    /// System prompt of the conversation.
    #[arg(long, requires = "chat")]
    pub(crate) system: Option<String>,
    /// Most tokens to generate.
    #[arg(long, default_value_t = 256)]
    pub(crate) max_tokens: usize,
    /// 0: the most likely token always.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// Text that ends the answer, left out of it; may be given again.
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Token that ends the answer, written out or its id; may be given again.
    #[arg(long, value_name = "TOKEN")]
    pub(crate) stop_token: Vec<String>,
    /// Go on after tokens that end a text.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Colour accepted tokens: green those of the draft, blue those of lookup.
    #[arg(long)]
    pub(crate) show_acceptance: bool,
}

/// Storage of frozen weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum WeightDtype {
    /// 32 bits.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// As the file holds them: quantised blocks (Q4_0, Q4_1, Q8_0) where it has such, else 32 bits.
    /// The output is that of f32.
    Stored,
}

/// Arguments of `quickstart`.
#[derive(Debug, clap::Args)]
pub(crate) struct QuickstartArguments {
    /// Which target: `smollm2` is fetched (98 MB, Apache-2.0); a path or hub model also works.
    #[arg(long, default_value = "smollm2")]
    pub(crate) target: String,
    /// Run directory.
    #[arg(long, default_value = "runs/quickstart")]
    pub(crate) output: PathBuf,
    /// Replace values of the training configuration: dotted.key=value.
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum EvalCommand {
    /// tau, acceptance by position, speed with intervals, and whether output equals plain decoding.
    ///
    /// Example: longdraft eval decode --target model.gguf --draft runs/x/draft --prompts mt-bench
    Decode(EvalDecodeArguments),
    /// Acceptance that drafts would have on a configuration's held-out rows, without decoding.
    ///
    /// Example: longdraft eval held-out conf/glide/smollm2.yaml --draft runs/a --draft runs/b
    HeldOut(EvalHeldOutArguments),
    /// Bits per byte of a language model over sliding windows.
    ///
    /// Example: longdraft eval bpb runs/books --data val.bin --tokenizer sp.model --window 2048
    Bpb(EvalBpbArguments),
}

/// Arguments of `eval held-out`.
#[derive(Debug, clap::Args)]
pub(crate) struct EvalHeldOutArguments {
    /// Configuration (YAML) with target and held-out text; of a curriculum, `stage=NAME` picks one.
    #[arg(value_name = "CONFIG")]
    pub(crate) config: PathBuf,
    /// Run directory, checkpoint, draft folder or file; again for each draft that is compared with
    /// the first.
    #[arg(long = "draft", value_name = "PATH", required = true)]
    pub(crate) drafts: Vec<PathBuf>,
    /// Replace values of the configuration: dotted.key=value.
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

/// A scored stream and its windows.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct BpbArguments {
    /// SentencePiece `.model`, or folder with a `tokenizer.json` (a target brings its own).
    #[arg(long)]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Tokens of a window (default: 1024).
    #[arg(long, default_value_t = 1024)]
    pub(crate) window: usize,
    /// Targets that a window moves on by (default: a quarter of the window).
    #[arg(long)]
    pub(crate) stride: Option<usize>,
    /// Length of the sequences in training, for the report and for windows without overlap.
    #[arg(long)]
    pub(crate) training_length: Option<usize>,
    /// Use only the first tokens.
    #[arg(long)]
    pub(crate) max_tokens: Option<usize>,
    /// Tokens that go through the model at once.
    #[arg(long, default_value_t = 8192)]
    pub(crate) batch_tokens: usize,
}

/// What becomes of targets behind the last complete window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TailChoice {
    /// A shorter window scores them.
    Score,
    /// They are left out, as published.
    Drop,
}

/// Arguments of `eval bpb`.
#[derive(Debug, clap::Args)]
pub(crate) struct EvalBpbArguments {
    /// Run of `pretrain`, checkpoint, `.ldq` file; or a target: Hugging Face folder, GGUF file, hub
    /// model.
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// `.bin` files or folders of them, or text (JSONL, text files).
    #[arg(long, required = true, num_args = 1..)]
    pub(crate) data: Vec<PathBuf>,
    /// Field of the text.
    #[arg(long, default_value = "text")]
    pub(crate) field: String,
    /// How it is scored.
    #[command(flatten)]
    pub(crate) scoring: BpbArguments,
    /// Windows without overlap, at the window's length.
    #[arg(long)]
    pub(crate) plain: bool,
    /// What becomes of the last targets.
    #[arg(long, default_value = "score")]
    pub(crate) tail: TailChoice,
    /// Start anew at every start of a document.
    #[arg(long)]
    pub(crate) doc_isolated: bool,
    /// Stretch RoPE for windows beyond so many tokens (targets; own models know theirs).
    #[arg(long, value_name = "TOKENS")]
    pub(crate) ntk_reference: Option<usize>,
}

/// Rules of an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum FormatChoice {
    /// As published.
    Compat,
    /// Scales rounded before use, no floor, any number of levels.
    Modern,
}

/// How the embedding is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum EmbeddingChoice {
    /// As any other matrix.
    Codes,
    /// As f16.
    F16,
}

/// Compression of an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CompressionChoice {
    /// zlib, level 9.
    Zlib,
    /// zstd, level 22.
    Zstd,
}

/// Arguments of `quantize`.
#[derive(Debug, clap::Args)]
pub(crate) struct QuantizeArguments {
    /// Run of `pretrain`, checkpoint, model folder or `.ldq` file.
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,
    /// The artifact, `.ldq`.
    #[arg(long)]
    pub(crate) output: PathBuf,
    /// Rules.
    #[arg(long, default_value = "compat")]
    pub(crate) format: FormatChoice,
    /// Largest code: 127 for int8, 31 for int6 (modern).
    #[arg(long, default_value_t = 127)]
    pub(crate) levels: u8,
    /// How the embedding is stored.
    #[arg(long, default_value = "codes")]
    pub(crate) embedding: EmbeddingChoice,
    /// Tensors of at most so many values are kept.
    #[arg(long, default_value_t = 65_536)]
    pub(crate) keep_max_elements: usize,
    /// Compression.
    #[arg(long, default_value = "zlib")]
    pub(crate) compression: CompressionChoice,
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

/// Arguments of `experiment`.
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

/// Arguments of `eval decode`.
#[derive(Debug, clap::Args)]
pub(crate) struct EvalDecodeArguments {
    /// Hugging Face folder, GGUF file or hub model `org/name`.
    #[arg(long)]
    pub(crate) target: String,
    /// Drafting and verification.
    #[command(flatten)]
    pub(crate) decoding: DecodingArguments,
    /// spec-bench, mt-bench, gsm8k, humaneval or longdoc (looked for in $LONGDRAFT_DATA, else
    /// `data`), or a JSONL file.
    #[arg(long, value_name = "NAME|FILE")]
    pub(crate) prompts: String,
    /// Field that holds the prompt of a file's rows.
    #[arg(long, default_value = "prompt")]
    pub(crate) field: String,
    /// Send a file's prompts as a user's turn through the target's chat template (named sets do so
    /// if there is one).
    #[arg(long)]
    pub(crate) chat: bool,
    /// Use only the first prompts; of spec-bench and mt-bench, the first of each category.
    #[arg(long)]
    pub(crate) limit: Option<usize>,
    /// Cut long documents so that prompts have these lengths: a curve over the context.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    pub(crate) contexts: Vec<usize>,
    /// Most tokens to generate for each.
    #[arg(long, default_value_t = 128)]
    pub(crate) max_tokens: usize,
    /// Temperatures to measure at.
    #[arg(long, value_delimiter = ',', default_value = "0")]
    pub(crate) temperature: Vec<f64>,
    /// Timing runs over all prompts, with and without drafting in turns.
    #[arg(long, default_value_t = 3)]
    pub(crate) runs: usize,
    /// Directory for `decode.json`; `longdraft report` shows it beside the run that is there.
    #[arg(long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
}

/// What to do with data.
#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Show rows as the target reads them, learned tokens in colour (or in `[[ ]]`).
    ///
    /// Example: longdraft data inspect rows.jsonl --target model.gguf --learn assistant
    Inspect(DataInspectArguments),
    /// Rows, tokens, learned share, lengths and the fill of packed rows.
    ///
    /// Example: longdraft data stats conf/glide/smollm2.yaml
    Stats(DataStatsArguments),
    /// Write token shards that train again and again without tokenising; goes on where a killed
    /// run stopped.
    ///
    /// Example: longdraft data prepare ultrachat gsm8k --target model.gguf --output shards
    Prepare(DataPrepareArguments),
    /// Have the target answer prompts itself: its own answers train the best drafts.
    ///
    /// Example: longdraft data regenerate prompts.jsonl --target model.gguf --output answers.jsonl
    Regenerate(DataRegenerateArguments),
    /// Train a small byte-level BPE tokenizer on text.
    ///
    /// Example: longdraft data tokenizer books.jsonl --vocabulary 1024 --output runs/books-data
    Tokenizer(DataTokenizerArguments),
    /// Write text as the packed token shards that `pretrain` reads.
    ///
    /// Example: longdraft data pack books.jsonl --tokenizer runs/books-data --output runs/books-data
    Pack(DataPackArguments),
}

/// Arguments of `data tokenizer`.
#[derive(Debug, clap::Args)]
pub(crate) struct DataTokenizerArguments {
    /// Text: JSONL, Parquet, text files, folders of them.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) inputs: Vec<PathBuf>,
    /// Field of the text.
    #[arg(long, default_value = "text")]
    pub(crate) field: String,
    /// Tokens, special ones and bytes included.
    #[arg(long, default_value_t = 1024)]
    pub(crate) vocabulary: usize,
    /// Use only about so many bytes of text.
    #[arg(long)]
    pub(crate) max_bytes: Option<usize>,
    /// Folder for `tokenizer.json`.
    #[arg(long)]
    pub(crate) output: PathBuf,
}

/// Arguments of `data pack`.
#[derive(Debug, clap::Args)]
pub(crate) struct DataPackArguments {
    /// Text: JSONL, Parquet, text files, folders of them.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) inputs: Vec<PathBuf>,
    /// Field of the text.
    #[arg(long, default_value = "text")]
    pub(crate) field: String,
    /// SentencePiece `.model`, or folder with a `tokenizer.json`.
    #[arg(long)]
    pub(crate) tokenizer: PathBuf,
    /// Folder for `train_000000.bin`, ... and `val_000000.bin`.
    #[arg(long)]
    pub(crate) output: PathBuf,
    /// Every so many documents one goes to the validation shard (0: none).
    #[arg(long, default_value_t = 20)]
    pub(crate) validation_every: usize,
    /// Tokens of a shard.
    #[arg(long, default_value_t = 100_000_000)]
    pub(crate) shard_tokens: usize,
    /// Write the true byte count of every token beside each shard.
    #[arg(long)]
    pub(crate) byte_counts: bool,
}

/// Which mask a source gets that is named without a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LearnChoice {
    /// Every token.
    All,
    /// All but the system turn.
    NoSystem,
    /// Every assistant turn.
    Assistant,
    /// The last assistant turn.
    Last,
    /// What follows the prompt.
    Answer,
}

/// Arguments of `data inspect`.
#[derive(Debug, clap::Args)]
pub(crate) struct DataInspectArguments {
    /// Configuration (.yaml), data file or folder, `hf://org/name`, or sharegpt, ultrachat, gsm8k,
    /// alpaca.
    #[arg(value_name = "CONFIG|FILE")]
    pub(crate) input: String,
    /// Whose tokenizer and chat template (a configuration names its own).
    #[arg(long)]
    pub(crate) target: Option<String>,
    /// Rows to show of every source.
    #[arg(long, default_value_t = 5)]
    pub(crate) rows: usize,
    /// Mask, where no configuration names one.
    #[arg(long, default_value = "all")]
    pub(crate) learn: LearnChoice,
    /// Replace values of the configuration: dotted.key=value.
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

/// Arguments of `data stats`.
#[derive(Debug, clap::Args)]
pub(crate) struct DataStatsArguments {
    /// Configuration (.yaml), data file or folder, or hub data set.
    #[arg(value_name = "CONFIG|FILE")]
    pub(crate) input: String,
    /// Whose tokenizer and chat template (a configuration names its own).
    #[arg(long)]
    pub(crate) target: Option<String>,
    /// Mask, where no configuration names one.
    #[arg(long, default_value = "all")]
    pub(crate) learn: LearnChoice,
    /// Tokens of a packed row, where no configuration names them.
    #[arg(long, default_value_t = 1024)]
    pub(crate) row_tokens: usize,
    /// Replace values of the configuration: dotted.key=value.
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

/// Arguments of `data prepare`.
#[derive(Debug, clap::Args)]
pub(crate) struct DataPrepareArguments {
    /// One configuration (.yaml), or data files, folders, hub data sets, sharegpt, ultrachat,
    /// gsm8k, alpaca.
    #[arg(required = true, value_name = "CONFIG|NAME")]
    pub(crate) inputs: Vec<String>,
    /// Folder for the shards.
    #[arg(long)]
    pub(crate) output: PathBuf,
    /// Whose tokenizer and chat template (a configuration names its own).
    #[arg(long)]
    pub(crate) target: Option<String>,
    /// Mask, where no configuration names one.
    #[arg(long, default_value = "all")]
    pub(crate) learn: LearnChoice,
    /// KiB of text that make a shard.
    #[arg(long, default_value_t = longdraft_data::shards::SHARD_BYTES >> 10)]
    pub(crate) shard_kib: usize,
}

/// Arguments of `data regenerate`.
#[derive(Debug, clap::Args)]
pub(crate) struct DataRegenerateArguments {
    /// Rows with prompts: conversations (every assistant turn is answered anew), or a text field.
    #[arg(value_name = "PROMPTS")]
    pub(crate) prompts: PathBuf,
    /// Hugging Face folder, GGUF file or hub model `org/name`.
    #[arg(long)]
    pub(crate) target: String,
    /// Draft folder or file: faster, same law.
    #[arg(long)]
    pub(crate) draft: Option<PathBuf>,
    /// JSONL file for the answers; rows that failed go to FILE.failed.jsonl. Goes on if they exist.
    #[arg(long)]
    pub(crate) output: PathBuf,
    /// Field of the prompt (default: recognised).
    #[arg(long)]
    pub(crate) field: Option<String>,
    /// Most tokens of an answer.
    #[arg(long, default_value_t = 512)]
    pub(crate) max_tokens: usize,
    /// 0: the most likely token always.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// Key of the random draws.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Tokens proposed per round.
    #[arg(long, default_value_t = 4)]
    pub(crate) draft_len: usize,
    /// Rows that are answered at a time; the answers do not depend on it.
    #[arg(long, default_value_t = 8)]
    pub(crate) batch: usize,
    /// Use only the first rows.
    #[arg(long)]
    pub(crate) limit: Option<usize>,
}

/// Arguments of `fetch`.
#[derive(Debug, clap::Args)]
pub(crate) struct FetchArguments {
    /// `smollm2`: SmolLM2-135M-Instruct, Q4_1 GGUF.
    #[arg(value_parser = ["smollm2"])]
    pub(crate) model: String,
    /// Where to put it (default: the user's cache folder).
    pub(crate) folder: Option<PathBuf>,
}
