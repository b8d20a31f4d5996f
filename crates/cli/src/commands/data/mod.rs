//! `longdraft data`: what sources become, before a draft is trained on it.

mod inspect;
mod pack;
mod prepare;
mod records;
pub(crate) mod regenerate;
mod stats;

use std::path::{Path, PathBuf};

use longdraft_configuration::read_stage;
use longdraft_data::SourceConfig;
use longdraft_data::template::Learn;
use longdraft_models::TargetConfig;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_train::config::TrainConfig;

use crate::cli::{DataCommand, InputArguments, ReadingArguments};
use crate::failure::{Failure, Result};

pub(crate) use pack::encode_with_bytes;
pub(crate) use records::require_folder;

pub(crate) fn run(command: &DataCommand, json: bool) -> Result<()> {
    match command {
        DataCommand::Inspect(arguments) => inspect::run(arguments, json),
        DataCommand::Stats(arguments) => stats::run(arguments, json),
        DataCommand::Prepare(arguments) => prepare::run(arguments, json),
        DataCommand::Regenerate(arguments) => regenerate::run(arguments, json),
        DataCommand::Tokenizer(arguments) => pack::tokenizer(arguments, json),
        DataCommand::Pack(arguments) => pack::run(arguments, json),
        DataCommand::Records(arguments) => records::run(arguments, json),
    }
}

/// Data sets that go by a name of their own.
const NAMED: [(&str, &str); 4] = [
    ("sharegpt", "hf://Aeala/ShareGPT_Vicuna_unfiltered"),
    ("ultrachat", "hf://HuggingFaceH4/ultrachat_200k/data/train_sft*"),
    ("gsm8k", "hf://openai/gsm8k/main/train*"),
    ("alpaca", "hf://tatsu-lab/alpaca"),
];

/// Sources and the tokenizer that reads them.
struct Inputs {
    /// The configuration that named the sources.
    config: Option<TrainConfig>,
    train: Vec<SourceConfig>,
    held_out: Vec<SourceConfig>,
    target: TargetConfig,
    tokenizer: TextTokenizer,
}

impl Inputs {
    fn of(arguments: &InputArguments) -> Result<Self> {
        let InputArguments { input, reading, overrides } = arguments;
        Self::open(std::slice::from_ref(input), reading, overrides)
    }

    /// Of what the user named: a configuration, or data and a target.
    fn open(named: &[String], reading: &ReadingArguments, overrides: &[String]) -> Result<Self> {
        let is_config = |input: &String| {
            Path::new(input).extension().is_some_and(|e| e == "yaml" || e == "yml")
        };
        let (config, train, held_out) = match named {
            [one] if is_config(one) => {
                let config = read_stage(Path::new(one), overrides)?;
                let (train, held_out) = (config.data.train.clone(), config.data.held_out.clone());
                (Some(config), train, held_out)
            }
            several if several.iter().any(is_config) => {
                return Err(Failure::usage("a configuration stands alone: it names its sources"));
            }
            several => {
                if let Some(text) = overrides.first() {
                    let problem =
                        format!("`{text}` replaces a value, but there is no configuration");
                    return Err(Failure::usage(problem));
                }
                let source = |input: &String| by_name(input, reading.learn);
                (None, several.iter().map(source).collect::<Result<_>>()?, Vec::new())
            }
        };
        let of_config = config.as_ref().map(|config| config.target.as_str());
        let spec = reading.target.as_deref().or(of_config);
        let spec = spec.ok_or_else(|| {
            Failure::usage("whose tokenizer? there is no configuration that names a target")
                .hint("add --target with a Hugging Face folder, a GGUF file or `org/name`")
        })?;
        let tokenizer = Target::open_tokenizer(spec)?;
        let configured = config.as_ref().map(|config| config.data.chat_template_kwargs.clone());
        let tokenizer = tokenizer.with_variables(&configured.unwrap_or_default());
        let tokenizer = reading.template.apply(tokenizer)?;
        let target = Target::open_config(spec)?;
        Ok(Self { config, train, held_out, target, tokenizer })
    }

    /// Tolerated share of malformed rows.
    fn max_bad_rows(&self) -> f64 {
        let configured = self.config.as_ref().map(|config| config.data.max_bad_rows);
        configured.unwrap_or(longdraft_data::quarantine::MAX_BAD_ROWS)
    }
}

/// A path, an address, or a known name; its format is recognised.
fn by_name(input: &str, learn: Option<Learn>) -> Result<SourceConfig> {
    let named = NAMED.iter().find(|(name, _)| *name == input).map(|(_, address)| *address);
    let path = match named {
        _ if Path::new(input).exists() || input.starts_with("hf://") => input,
        Some(address) => address,
        None => {
            let names: Vec<&str> = NAMED.iter().map(|(name, _)| *name).collect();
            return Err(Failure::usage(format!("`{input}`: no such file or folder")).hint(
                format!(
                    "give a path, hf://org/name[/path][@revision], or one of {}",
                    names.join(", ")
                ),
            ));
        }
    };
    Ok(SourceConfig { path: PathBuf::from(path), learn, ..SourceConfig::default() })
}
