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
    /// Text from the target, with a draft or without.
    ///
    /// Example: longdraft generate --target model.gguf --draft runs/smollm2/draft --prompt "Once"
    Generate(GenerateArguments),
    /// Measure a draft on prompts.
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
