//! Arguments of `generate` and `serve`.

use std::path::PathBuf;

use super::DecodingArguments;
use super::LearningArguments;

/// Arguments of `generate`.
#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "a flag each")]
pub(crate) struct GenerateArguments {
    /// Hugging Face folder, GGUF file or hub model `org/name` (`org/name:Q4_K_M` for its GGUF file).
    #[arg(long)]
    pub(crate) target: String,
    /// Decode plainly, whatever drafts are given.
    #[arg(long, help_heading = "Drafting")]
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
    #[arg(long, default_value_t = 0.0, help_heading = "Sampling")]
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
    /// Colour accepted tokens: green those of the draft, blue those of lookup. Without colours (a pipe,
    /// NO_COLOR) they stand in `[[ ]]` and `{{ }}`.
    #[arg(long)]
    pub(crate) show_acceptance: bool,
    /// Drafting and verification; last, for its headings in the help.
    #[command(flatten)]
    pub(crate) decoding: DecodingArguments,
}

/// Arguments of `serve`.
#[derive(Debug, clap::Args)]
pub(crate) struct ServeArguments {
    /// Hugging Face folder, GGUF file or hub model `org/name` (`org/name:Q4_K_M` for its GGUF file).
    pub(crate) target: String,
    /// Address or name of this machine to answer at; 0.0.0.0 and :: are every one of its addresses.
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port to answer at; 0 takes a free one.
    #[arg(long, default_value_t = 8080)]
    pub(crate) port: u16,
    /// What requests call the model. [default: the name of TARGET]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Answers that are written at a time.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) parallel: usize,
    /// Answers that wait for a place; more are refused with 429.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) queue: usize,
    /// Most tokens of an answer, whatever is asked for. [default: what the context has room for]
    #[arg(long)]
    pub(crate) max_tokens: Option<usize>,
    /// Most tokens of a request: those of its prompts and those that its answers may have.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_request_tokens: Option<usize>,
    /// The same of all requests that are answered or wait; more are refused with 429.
    #[arg(long, value_name = "TOKENS")]
    pub(crate) max_total_tokens: Option<usize>,
    /// Largest request, in KiB.
    #[arg(long, value_name = "KIB", default_value_t = 4096)]
    pub(crate) max_body: usize,
    /// Key that requests have to carry (`Authorization: Bearer KEY`). [default: the variable
    /// LONGDRAFT_API_KEY, if it is set]
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    /// Pages of this origin may ask, too; `*` for all. May be given again.
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) allow_origin: Vec<String>,
    /// Time that running answers have to finish after Ctrl-C or SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) grace: u64,
    /// Temperature where a request names none; 0: the most likely token always.
    #[arg(long, default_value_t = 1.0, help_heading = "Sampling")]
    pub(crate) temperature: f64,
    /// What is learned of the answers.
    #[command(flatten)]
    pub(crate) learning: LearningArguments,
    /// Drafting and verification; last, for its headings in the help.
    #[command(flatten)]
    pub(crate) decoding: DecodingArguments,
}

/// Storage of cached keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum CacheChoice {
    /// f16 beside quantised blocks, bf16 there on an NVIDIA GPU and where it multiplies in bf16, else f32.
    #[default]
    Auto,
    /// 32 bits.
    F32,
    /// IEEE half.
    F16,
    /// Blocks of 8 bits.
    Q8,
}

/// Storage of frozen weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum WeightDtype {
    /// 32 bits.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// As the file holds them: 16 or 32 bits, or the quantised blocks of a GGUF file. Beside blocks, activations are in 8-bit fixed point, keys and values in f16, and a draft
    /// proposes from blocks of 8 bits.
    #[default]
    Stored,
}
