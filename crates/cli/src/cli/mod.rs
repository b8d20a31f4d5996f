//! Command-line arguments.

mod beginning;
#[cfg(any(test, feature = "bench"))]
pub(crate) mod benchmarking;
mod checking;
mod configuration;
mod data;
mod decoding;
mod drafting;
mod evaluation;
mod fitting;
mod habits;
mod learning;
#[cfg(test)]
mod manual;
mod planning;
mod pretraining;
mod ranks;
mod serving;
mod templates;
mod training;

use std::error::Error;
use std::ffi::OsString;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ColorChoice, CommandFactory, FromArgMatches, Parser, Subcommand};
use longdraft_kernels::dispatch::{Ops, Simd};
use longdraft_train::method::Method;

pub(crate) use beginning::{
    DoctorArguments, FetchArguments, InitArguments, ModelSize, Purpose, QuickstartArguments,
};
#[cfg(any(test, feature = "bench"))]
pub(crate) use benchmarking::{
    BenchArguments, BenchCommand, CaptureBenchArguments, DecodeBenchArguments,
    PretrainBenchArguments, ShapeArguments,
};
pub(crate) use checking::{KernelCheckArguments, ParityArguments};
pub(crate) use configuration::ConfigCommand;
pub(crate) use data::{
    DataCommand, DataInspectArguments, DataPackArguments, DataPrepareArguments,
    DataRecordsArguments, DataRegenerateArguments, DataStatsArguments, DataTokenizerArguments,
    InputArguments, ReadingArguments, TextArguments,
};
pub use decoding::{CacheChoice, WeightDtype};
pub(crate) use decoding::{GenerateArguments, ServeArguments};
pub(crate) use drafting::{DecodingArguments, parse_tree};
pub use drafting::{LookupChoice, OpenOptions, PaceChoice, VerifyChoice};
pub(crate) use evaluation::{
    BpbArguments, EvalBpbArguments, EvalCommand, EvalDecodeArguments, EvalHeldOutArguments,
    ServerArguments,
};
pub(crate) use fitting::{FitArguments, WatchArguments, parse_time};
pub(crate) use habits::{
    CompletionsArguments, ManArguments, RunsCommand, RunsCompareArguments, RunsDeleteArguments,
    RunsListArguments,
};
pub(crate) use learning::{LearnCommand, LearnWhen, LearningArguments};
pub(crate) use planning::PlanArguments;
pub(crate) use pretraining::{ExperimentArguments, LmCommand, QuantizeArguments};
pub(crate) use ranks::RankArguments;
pub(crate) use serving::{ExportArguments, ExtractArguments, PushArguments, VerifyArguments};
pub use serving::{ExportDtype, ExportOptions};
pub(crate) use templates::{TemplateArguments, parse_variables};
pub(crate) use training::{CaptureArguments, ReportArguments, TrainArguments, with_device};

/// Train draft models for speculative decoding, and decode losslessly with them.
///
/// Begin with `longdraft quickstart`, which shows all of it, or with `longdraft fit MODEL`, which makes your own model
/// faster.
#[derive(Debug, Parser)]
#[command(name = "longdraft", version, arg_required_else_help = true)]
#[command(after_help = crate::failure::EXIT_CODES)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Threads to use; 0 stands for every core, as without it.
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) threads: Option<usize>,
    /// Print only results, warnings and errors.
    #[arg(short, long, global = true, help_heading = "Global options", conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Print also what runs on what, and how long it took.
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub(crate) verbose: bool,
    /// When to use colours (NO_COLOR and a terminal that calls itself dumb ask for none).
    #[arg(long, global = true, help_heading = "Global options", value_name = "WHEN")]
    #[arg(default_value = "auto")]
    pub(crate) color: ColorChoice,
    /// Also add what is printed to stderr to this file, every line with its time; the file has what --quiet leaves
    /// out and --verbose would add, too.
    #[arg(long, global = true, help_heading = "Global options", value_name = "FILE")]
    pub(crate) log_file: Option<PathBuf>,
    /// Print a last line of JSON for programs, also for an error.
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,
    /// Implementation of the ops: `composed` leaves out fused ones on every device.
    #[arg(long, global = true, hide = true, default_value = "fused", value_parser = ops())]
    pub(crate) ops: Ops,
    /// Widest vector instructions of the CPU's kernels, to compare machines; results have the same bits.
    #[arg(long, global = true, hide = true, default_value = "widest", value_parser = simd())]
    pub(crate) simd: Simd,
}

impl Cli {
    /// Reads the command line.
    pub(crate) fn try_read(words: &[OsString]) -> Result<Self, clap::Error> {
        let command_line = command().color(asked_colour(words));
        let mut matches =
            command_line.try_get_matches_from(words).map_err(|error| with_tip(error, words))?;
        Self::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command()))
    }
}

/// Says what to do about arguments that cannot be read, where more is known of it than their parser says.
fn with_tip(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    let tip = match error.kind() {
        ErrorKind::UnknownArgument => way_to_target(&error, words),
        ErrorKind::ValueValidation => error.source().and_then(number_wanted),
        _ => None,
    };
    if let Some(tip) = tip {
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// What number an option takes whose value is none.
fn number_wanted(reason: &(dyn Error + 'static)) -> Option<&'static str> {
    if reason.is::<ParseFloatError>() {
        return Some("give a number, such as 0.8");
    }
    Some(match reason.downcast_ref::<ParseIntError>()?.kind() {
        IntErrorKind::PosOverflow => "give a smaller whole number",
        IntErrorKind::Zero => "give a whole number from 1 on, such as 8",
        _ => "give a whole number that is not negative, such as 8",
    })
}

/// How a command takes its target where a word was meant as one: some take it as their first word, others by
/// --target.
fn way_to_target(error: &clap::Error, words: &[OsString]) -> Option<&'static str> {
    let text = |kind| error.get(kind).map(ToString::to_string).unwrap_or_default();
    let (word, usage) = (text(ContextKind::InvalidArg), text(ContextKind::Usage));
    let is_given =
        words.iter().any(|word| word.to_string_lossy().split('=').next() == Some("--target"));
    let is_open = usage.contains("--target <TARGET>") && !is_given;
    if word == "--target" && usage.contains("<TARGET>") {
        return Some("the target stands here without an option, as a word of its own");
    }
    (!word.starts_with('-') && is_open)
        .then_some("the target is named by an option: --target MODEL")
}

/// What `--color` asks for, before the arguments are read: what is wrong with them has colours, too.
fn asked_colour(words: &[OsString]) -> ColorChoice {
    let read = |name: &str| <ColorChoice as clap::ValueEnum>::from_str(name, false).ok();
    let words: Vec<&str> = words.iter().filter_map(|word| word.to_str()).collect();
    let of = |(at, word): (usize, &&str)| match word.strip_prefix("--color") {
        Some("") => read(words.get(at + 1)?),
        Some(rest) => read(rest.strip_prefix('=')?),
        None => None,
    };
    words.iter().enumerate().find_map(of).unwrap_or(ColorChoice::Auto)
}

/// Names of a choice's values, with commas.
pub(crate) fn names_of<T: clap::ValueEnum>() -> String {
    let values = T::value_variants().iter().filter_map(clap::ValueEnum::to_possible_value);
    values.map(|value| value.get_name().to_owned()).collect::<Vec<_>>().join(", ")
}

/// The names of draft methods, as the values of an option.
fn methods() -> PossibleValuesParser {
    PossibleValuesParser::new(Method::all().map(Method::name))
}

/// Values of an option, each with its name and help, where their type is a library's.
fn one_of<T: Clone + Send + Sync + 'static, const N: usize>(
    values: [(&'static str, &'static str, T); N],
) -> impl TypedValueParser<Value = T> {
    let named = values.each_ref().map(|(name, help, _)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(named).map(move |given| {
        let found = values.iter().find(|(name, _, _)| *name == given);
        found.expect("no other name is accepted").2.clone()
    })
}

fn ops() -> impl TypedValueParser<Value = Ops> {
    one_of([
        ("fused", "Fused where there is one", Ops::Fused),
        ("composed", "Composed of tensor ops", Ops::Composed),
        #[cfg(feature = "emulate-cuda")]
        ("emulated", "Kernels for NVIDIA GPUs, run by the CPU: slow, to check them", Ops::Emulated),
    ])
}

fn simd() -> impl TypedValueParser<Value = Simd> {
    one_of([
        ("none", "None but what the compiler finds", Simd::None),
        ("avx2", "AVX2 with FMA, and AVX-VNNI where the machine has it", Simd::Avx2),
        ("widest", "All that the machine has", Simd::Widest),
    ])
}

/// The commands; negative numbers are values of their options, and refused as such.
pub(crate) fn command() -> clap::Command {
    fn with_negative_numbers(command: clap::Command) -> clap::Command {
        command
            .mut_args(|argument| {
                let takes = !argument.is_positional() && argument.get_action().takes_values();
                argument.allow_negative_numbers(takes)
            })
            .mut_subcommands(with_negative_numbers)
    }
    with_negative_numbers(Cli::command())
}

/// Commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the whole pipeline without a network: train a draft for a small target in three stages, extract
    /// it, decode with and without it, plot.
    ///
    /// Example: longdraft quickstart
    Quickstart(QuickstartArguments),
    /// Make a model faster with one command: train a draft for it, measure the draft, and export it.
    ///
    /// It measures this machine and says what to expect. The target answers prompts, a draft learns from the answers
    /// within the time, and is measured on prompts that were set aside. The same command goes on where it was
    /// stopped; with more --time it adds.
    ///
    /// Example: longdraft fit qwen2.5-coder-0.5b-q4_k_m.gguf --prompts mine.jsonl --time 2h
    Fit(FitArguments),
    /// Train a draft by a configuration: one stage, or the stages of a curriculum one after the other.
    ///
    /// It goes on by itself when the output directory holds a checkpoint.
    ///
    /// Example: longdraft train conf/glide/smollm2.yaml train.seed=1
    Train(TrainArguments),
    /// Write the target's features to `train.features`, so that `train` runs without the target's layers.
    ///
    /// It says first how much that is. Several processes share the work; a killed one goes on.
    ///
    /// Example: longdraft capture conf/eagle3/smollm2-offline.yaml train.features=features
    Capture(CaptureArguments),
    /// Write a first configuration from a few answers: on a terminal it asks, --yes takes the defaults.
    ///
    /// Example: longdraft init mine.yaml --for train --target org/name:Q4_K_M --time 1h --yes
    Init(InitArguments),
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
    /// Check an exported folder without any engine.
    ///
    /// It lists every problem at once, with what each engine would do, and what to do about it.
    ///
    /// Example: longdraft verify exports/smollm2-vllm --target model.gguf --checkpoint runs/smollm2
    Verify(VerifyArguments),
    /// Send an export to the Hugging Face hub, with a model card made from its run.
    ///
    /// Example: longdraft push exports/smollm2-vllm my-org/smollm2-eagle3 --dry-run
    Push(PushArguments),
    /// Write text with the target, with a draft or without.
    ///
    /// Example: longdraft generate --target model.gguf --draft runs/smollm2/draft --prompt "Once"
    Generate(GenerateArguments),
    /// Answer requests over HTTP as OpenAI's interface asks them, several at a time, with a draft or
    /// without.
    ///
    /// Example: longdraft serve model.gguf --draft runs/smollm2/draft --port 8080
    Serve(ServeArguments),
    /// Remove what `serve --learn` kept and learned.
    #[command(subcommand)]
    Learn(LearnCommand),
    /// Pretrain a small language model, pack it, and score it.
    #[command(subcommand)]
    Lm(LmCommand),
    /// The old name of `lm train`.
    #[command(hide = true)]
    Pretrain(TrainArguments),
    /// The old name of `lm quantize`.
    #[command(hide = true)]
    Quantize(QuantizeArguments),
    /// The old name of `lm grid`.
    #[command(hide = true)]
    Experiment(ExperimentArguments),
    /// Measure a draft on prompts or on held-out text.
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Look at training data, measure it, prepare it, or have the target answer it anew.
    #[command(subcommand)]
    Data(DataCommand),
    /// Fetch a model of the Hugging Face hub, or a small real target, and print where it lies.
    ///
    /// A download that was cut off goes on.
    ///
    /// Example: longdraft fetch Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M
    Fetch(FetchArguments),
    /// Recompute reference cases and print the largest relative error.
    ///
    /// Example: longdraft parity cases/qwen2_short --json
    Parity(ParityArguments),
    /// Check every op of training and decoding against f64 on a device, or time it.
    ///
    /// Example: longdraft kernel-check --device cuda:0 --real --json
    KernelCheck(KernelCheckArguments),
    /// Write results and plots of runs, side by side, as one HTML page that needs no network.
    ///
    /// Example: longdraft report runs/a runs/b --output comparison.html
    Report(ReportArguments),
    /// Serve a page of runs on this machine that updates while they go; in the end it is their report.
    ///
    /// Example: longdraft watch runs/fit/smollm2 --open
    Watch(WatchArguments),
    /// List, compare or delete runs.
    #[command(subcommand)]
    Runs(RunsCommand),
    /// Print a script that completes commands and options in a shell.
    ///
    /// Example: longdraft completions bash > ~/.local/share/bash-completion/completions/longdraft
    Completions(CompletionsArguments),
    /// Print the manual page, or write one for every command.
    ///
    /// Example: longdraft man --output ~/.local/share/man/man1
    Man(ManArguments),
    /// Time steps at the shapes of published models, with random weights; a JSON line a case.
    ///
    /// Example: longdraft bench glide --shape smollm2-135m --tokens 1024
    #[cfg(any(test, feature = "bench"))]
    #[command(subcommand, hide = true)]
    Bench(BenchCommand),
    /// Check this machine and say what to do; with a target, what its weights cost here.
    ///
    /// Example: longdraft doctor --target model.Q4_K_M.gguf
    Doctor(DoctorArguments),
}

impl Command {
    /// What the command is called now, if it was called by an old name.
    pub(crate) fn new_name(&self) -> Option<&'static str> {
        match self {
            Self::Pretrain(_) => Some("lm train"),
            Self::Quantize(_) => Some("lm quantize"),
            Self::Experiment(_) => Some("lm grid"),
            Self::Eval(EvalCommand::Bpb(_)) => Some("lm score"),
            _ => None,
        }
    }

    /// Whether the command leaves nothing but its output, so that it may end where nobody reads on.
    pub(crate) fn only_prints(&self) -> bool {
        match self {
            Self::Config(_)
            | Self::Eval(EvalCommand::HeldOut(_) | EvalCommand::Bpb(_))
            | Self::Lm(LmCommand::Score(_))
            | Self::Generate(_)
            | Self::Verify(_)
            | Self::Parity(_)
            | Self::KernelCheck(_)
            | Self::Completions(_)
            | Self::Doctor(_) => true,
            Self::Man(man) => man.output.is_none(),
            Self::Runs(runs) => !matches!(runs, RunsCommand::Delete(_)),
            Self::Data(data) => {
                matches!(data, DataCommand::Inspect(_) | DataCommand::Stats(_))
            }
            Self::Train(train) | Self::Pretrain(train) | Self::Lm(LmCommand::Train(train)) => {
                train.planning.plan
            }
            Self::Capture(capture) => capture.dry_run,
            Self::Push(push) => push.dry_run,
            Self::Eval(EvalCommand::Decode(decode)) => decode.output.is_none(),
            _ => false,
        }
    }

    /// Processes that it is to start, if it is one that several share.
    pub(crate) fn ranks_to_start(&self) -> Option<RankArguments> {
        match self {
            Self::Train(train) | Self::Pretrain(train) | Self::Lm(LmCommand::Train(train)) => {
                Some(train.ranks_to_start())
            }
            Self::Capture(capture) => Some(capture.ranks.clone()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
