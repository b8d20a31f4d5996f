//! Arguments of `data`.

use std::path::PathBuf;

use clap::Subcommand;
use clap::builder::TypedValueParser;
use longdraft_data::template::Learn;
use longdraft_models::DeviceChoice;

use super::{TemplateArguments, WeightDtype, one_of};

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
    /// Write text as the packed token shards that `lm train` reads.
    ///
    /// Example: longdraft data pack books.jsonl --tokenizer runs/books-data --output runs/books-data
    Pack(DataPackArguments),
    /// Write tokens and masks of what another trainer or engine captured (SpecForge, speculators and vLLM,
    /// DeepSpec) as rows, and with `--capture` its features as a store.
    ///
    /// Example: longdraft data records cache/hidden_states --output records.jsonl
    Records(DataRecordsArguments),
}

/// Arguments of `data records`.
#[derive(Debug, clap::Args)]
pub(crate) struct DataRecordsArguments {
    /// Folder of the records and folders of them.
    #[arg(value_name = "FOLDER")]
    pub(crate) folder: PathBuf,
    /// Changes to the configuration of --capture: dotted.key=value.
    #[arg(value_name = "KEY=VALUE", requires = "capture")]
    pub(crate) overrides: Vec<String>,
    /// JSONL file.
    #[arg(long)]
    pub(crate) output: PathBuf,
    /// Data set with the loss masks of records that have none: a folder of .arrow files, or rows with input_ids
    /// and loss_mask. Without it, the .arrow files in FOLDER or the folder above.
    #[arg(long, value_name = "PATH")]
    pub(crate) masks: Option<PathBuf>,
    /// Every token is learned.
    #[arg(long, conflicts_with = "masks")]
    pub(crate) learn_all: bool,
    /// Then capture the records into the store that this configuration names in `train.features`.
    #[arg(long, value_name = "CONFIG")]
    pub(crate) capture: Option<PathBuf>,
}

/// What text is taken.
#[derive(Debug, clap::Args)]
pub(crate) struct TextArguments {
    /// Text: JSONL, Parquet, text files, folders of them.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) inputs: Vec<PathBuf>,
    /// Field of the text; of several, those that a row has are put together line by line.
    #[arg(long, default_value = "text", value_delimiter = ',')]
    pub(crate) field: Vec<String>,
}

/// Arguments of `data tokenizer`.
#[derive(Debug, clap::Args)]
pub(crate) struct DataTokenizerArguments {
    #[command(flatten)]
    pub(crate) text: TextArguments,
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
    #[command(flatten)]
    pub(crate) text: TextArguments,
    /// SentencePiece `.model`, or folder with a `tokenizer.json`.
    #[arg(long)]
    pub(crate) tokenizer: PathBuf,
    /// Folder for `train_000000.bin`, ... and `val_000000.bin`.
    #[arg(long)]
    pub(crate) output: PathBuf,
    /// Every so many documents one goes to the validation shard (0: none). Of fewer documents the end
    /// of them does.
    #[arg(long, default_value_t = 20)]
    pub(crate) validation_every: usize,
    /// Tokens of a shard.
    #[arg(long, default_value_t = 100_000_000)]
    pub(crate) shard_tokens: usize,
    /// Write the true byte count of every token beside each shard.
    #[arg(long)]
    pub(crate) byte_counts: bool,
}

fn learn() -> impl TypedValueParser<Value = Learn> {
    one_of([
        ("all", "Every token", Learn::All),
        ("no-system", "All but the system turn", Learn::NoSystem),
        ("assistant", "Every assistant turn", Learn::Assistant),
        ("last", "The last assistant turn", Learn::Last),
        ("answer", "What follows the prompt", Learn::Answer),
    ])
}

/// Who reads rows, and how.
#[derive(Debug, clap::Args)]
pub(crate) struct ReadingArguments {
    /// Whose tokenizer and chat template (a configuration names its own).
    #[arg(long)]
    pub(crate) target: Option<String>,
    /// What is learned, where no configuration says it (default: by the format of the rows).
    #[arg(long, value_parser = learn())]
    pub(crate) learn: Option<Learn>,
    /// What the chat template is given; a configuration's own variables stay where these say nothing.
    #[command(flatten)]
    pub(crate) template: TemplateArguments,
}

/// Sources, and who reads them.
#[derive(Debug, clap::Args)]
pub(crate) struct InputArguments {
    /// Configuration (.yaml), data file or folder, `hf://org/name`, or sharegpt, ultrachat, gsm8k,
    /// alpaca.
    #[arg(value_name = "CONFIG|FILE")]
    pub(crate) input: String,
    #[command(flatten)]
    pub(crate) reading: ReadingArguments,
    /// Replace values of the configuration: dotted.key=value.
    #[arg(value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<String>,
}

/// Arguments of `data inspect`.
#[derive(Debug, clap::Args)]
pub(crate) struct DataInspectArguments {
    #[command(flatten)]
    pub(crate) inputs: InputArguments,
    /// Rows to show of every source.
    #[arg(long, default_value_t = 5)]
    pub(crate) rows: usize,
}

/// Arguments of `data stats`.
#[derive(Debug, clap::Args)]
pub(crate) struct DataStatsArguments {
    #[command(flatten)]
    pub(crate) inputs: InputArguments,
    /// Tokens of a packed row, where no configuration names them.
    #[arg(long, default_value_t = 1024)]
    pub(crate) row_tokens: usize,
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
    #[command(flatten)]
    pub(crate) reading: ReadingArguments,
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
    /// Hugging Face folder, GGUF file or hub model `org/name` (`org/name:Q4_K_M` for its GGUF file).
    #[arg(long)]
    pub(crate) target: String,
    /// Draft, as `generate` takes it: faster, the same answers.
    #[arg(long)]
    pub(crate) draft: Option<PathBuf>,
    /// Also propose what followed the last tokens where they stood earlier in the text: faster where answers
    /// repeat themselves, the same answers.
    #[arg(long)]
    pub(crate) lookup: bool,
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
    /// Type that the target's weights are held in.
    #[arg(long, default_value = "stored")]
    pub(crate) dtype: WeightDtype,
    /// Where to compute: auto (a GPU if there is one), cpu, cuda:0, metal:0.
    #[arg(long, default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// What the target's chat template is given.
    #[command(flatten)]
    pub(crate) template: TemplateArguments,
}
