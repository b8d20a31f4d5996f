//! Arguments of `eval`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Subcommand;
use clap::builder::TypedValueParser;
use longdraft_models::DeviceChoice;
use longdraft_models::bits_per_byte::Tail;

use super::{DecodingArguments, one_of};

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum EvalCommand {
    /// tau, acceptance by position, speed with intervals, and whether output equals plain decoding.
    ///
    /// With --server, the same of a server that runs.
    ///
    /// Example: longdraft eval decode --target model.gguf --draft runs/x/draft --prompts mt-bench
    Decode(Box<EvalDecodeArguments>),
    /// Acceptance that drafts would have on a configuration's held-out rows, without decoding.
    ///
    /// Example: longdraft eval held-out conf/glide/smollm2.yaml --draft runs/a --draft runs/b
    HeldOut(EvalHeldOutArguments),
    /// The old name of `lm score`.
    #[command(hide = true)]
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
    /// Also measure tokens with less than so much text before them, then those from there to the next of these numbers, and so
    /// on: a curve over the context. Rows have to be that long (`data.row_tokens`).
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    pub(crate) contexts: Vec<NonZeroUsize>,
    /// Where it computes, as `device=` does: auto, cpu, cuda:0, metal:0.
    #[arg(long)]
    pub(crate) device: Option<DeviceChoice>,
}

/// A scored stream and its windows.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct BpbArguments {
    /// SentencePiece `.model`, or folder with a `tokenizer.json` (a target brings its own).
    #[arg(long)]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Tokens of a window.
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

fn tail() -> impl TypedValueParser<Value = Tail> {
    one_of([
        ("score", "A shorter window scores them", Tail::Score),
        ("drop", "They are left out, as published", Tail::Drop),
    ])
}

/// Arguments of `lm score`.
#[derive(Debug, clap::Args)]
pub(crate) struct EvalBpbArguments {
    /// Run of `lm train`, checkpoint, `.ldq` file; or a target: Hugging Face folder, GGUF file, hub
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
    #[arg(long, default_value = "score", value_parser = tail())]
    pub(crate) tail: Tail,
    /// Start anew at every start of a document.
    #[arg(long)]
    pub(crate) doc_isolated: bool,
    /// Where it computes: auto, cpu, cuda:0, metal:0.
    #[arg(long, default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Stretch RoPE for windows beyond so many tokens (targets; own models know theirs).
    #[arg(long, value_name = "TOKENS")]
    pub(crate) ntk_reference: Option<usize>,
}

/// What `eval decode` measures a server with.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Server")]
pub(crate) struct ServerArguments {
    /// Measure a server that runs: vLLM, SGLang, llama-server, `serve`, or another one of OpenAI's interface. Tells
    /// tokens per second, times to the first token and between tokens, and tau where the server reveals it.
    #[arg(long, value_name = "URL", conflicts_with_all = DECODES_HERE)]
    pub(crate) server: Option<String>,
    /// A second server, without a draft: the speed-up over it, and whether greedy answers are equal.
    #[arg(long, value_name = "URL", requires = "server")]
    pub(crate) compare_server: Option<String>,
    /// The model to ask for, where a server has several (default: the first one that it lists).
    #[arg(long, value_name = "NAME", requires = "server")]
    pub(crate) server_model: Option<String>,
    /// Variable that holds the servers' key.
    #[arg(long, value_name = "VARIABLE", default_value = "LONGDRAFT_API_KEY")]
    pub(crate) api_key_env: String,
    /// Seconds for which a server may be silent.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub(crate) timeout: u64,
}

/// Options about decoding in this process.
const DECODES_HERE: [&str; 14] = [
    "draft",
    "mtp",
    "lookup",
    "datastore",
    "draft_len",
    "tree",
    "confidence_threshold",
    "verify",
    "draft_vocab",
    "draft_vocab_size",
    "dtype",
    "cache",
    "device",
    "pace",
];

impl EvalDecodeArguments {
    /// The target's name; empty where a server is measured.
    pub(crate) fn target_name(&self) -> &str {
        self.target.as_deref().unwrap_or_default()
    }
}

/// Arguments of `eval decode`.
#[derive(Debug, clap::Args)]
pub(crate) struct EvalDecodeArguments {
    /// Hugging Face folder, GGUF file or hub model `org/name` (`org/name:Q4_K_M` for its GGUF file). With --server,
    /// its tokenizer cuts documents, and nothing else of it is read.
    #[arg(long, required_unless_present = "server")]
    pub(crate) target: Option<String>,
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
    /// Use only the first prompts; of spec-bench, mt-bench and longdoc, the first of each category.
    #[arg(long)]
    pub(crate) limit: Option<usize>,
    /// Cut long documents so that prompts have these lengths: a curve over the context.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    pub(crate) contexts: Vec<usize>,
    /// Most tokens to generate for each.
    #[arg(long, default_value_t = 128)]
    pub(crate) max_tokens: usize,
    /// Temperatures to measure at.
    #[arg(long, value_delimiter = ',', default_value = "0", help_heading = "Sampling")]
    pub(crate) temperature: Vec<f64>,
    /// Timing runs over all prompts, with and without drafting in turns.
    #[arg(long, default_value_t = 3)]
    pub(crate) runs: usize,
    /// Directory for `decode.json`; `longdraft report` shows it beside the run that is there.
    #[arg(long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,
    /// A server in place of the target.
    #[command(flatten)]
    pub(crate) server: ServerArguments,
    /// Drafting and verification; last, for its headings in the help.
    #[command(flatten)]
    pub(crate) decoding: DecodingArguments,
}
