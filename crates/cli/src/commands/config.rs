//! `longdraft config`: what a configuration comes to, and what can be configured.

use std::path::{Path, PathBuf};

use longdraft_configuration::{
    Composed, ConfigurationError, Kind, Problem, compose, compose_pretrain, input_problems,
    json_schema, kind_of, markdown_of, read, schema_of, show,
};
use longdraft_pretrain::PretrainConfig;
use longdraft_train::config::TrainConfig;
use longdraft_train::inputs::{Purpose, Reach};
use serde_json::{Value, json};

use crate::cli::ConfigCommand;
use crate::commands::habits::page;
use crate::commands::pretrain::grid_problems;
use crate::failure::{Failure, Result};

/// Shows, checks or describes.
pub(crate) fn run(command: &ConfigCommand, json: bool) -> Result<()> {
    match command {
        ConfigCommand::Show(arguments) => {
            let composed = read(&arguments.config, &arguments.overrides)?;
            if json {
                outjson!({ "stages": to_json(&composed) });
            } else {
                out!("{}", show(&composed));
            }
            Ok(())
        }
        ConfigCommand::Check { configs, keys } => check_all(configs, *keys, json),
        ConfigCommand::Schema { markdown, pretrain } => {
            let schema = match (markdown, pretrain) {
                (_, true) => schema_of::<PretrainConfig>(),
                (true, false) => schema_of::<TrainConfig>(),
                (false, false) => json_schema(),
            };
            match (*markdown, json) {
                (true, _) => page(&markdown_of(&schema), json),
                (false, true) => outln!("{schema}"),
                (false, false) => outln!("{schema:#}"),
            }
            Ok(())
        }
    }
}

/// Every stage with its configuration; that of a file without stages has no name.
fn to_json(composed: &Composed) -> Vec<Value> {
    let stage = |name: Option<&str>, config: &TrainConfig| {
        let config = config.record();
        json!({ "stage": name, "configuration": config })
    };
    match composed {
        Composed::Stage(located) => vec![stage(None, &located.config)],
        Composed::Curriculum { stages, .. } => {
            stages.iter().map(|one| stage(Some(&one.name), &one.located.config)).collect()
        }
    }
}

/// Checks every file with the same overrides, and tells all problems of all of them.
fn check_all(arguments: &[String], keys_alone: bool, json: bool) -> Result<()> {
    let (overrides, configs): (Vec<&String>, Vec<&String>) =
        arguments.iter().partition(|argument| is_override(argument));
    let overrides: Vec<String> = overrides.into_iter().cloned().collect();
    let configs: Vec<PathBuf> = configs.into_iter().map(PathBuf::from).collect();
    if configs.is_empty() {
        return Err(Failure::usage("no configuration file is given"));
    }
    let problems: Vec<Problem> =
        configs.iter().flat_map(|path| check(path, &overrides, keys_alone)).collect();
    if json {
        let listed: Vec<Value> = problems.iter().map(Problem::to_json).collect();
        outjson!({ "files": configs.len(), "problems": listed });
    } else if problems.is_empty() {
        match configs.len() {
            1 => outln!("1 configuration is fine"),
            count => outln!("{count} configurations are fine"),
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(Failure::from(ConfigurationError::from(problems)).in_result())
}

impl From<ConfigurationError> for Failure {
    fn from(error: ConfigurationError) -> Self {
        let hint = error.hint();
        let failure = match error {
            ConfigurationError::Problems(problems) => {
                Self::problems(problems.iter().map(ToString::to_string).collect())
            }
            other => Self::usage(other),
        };
        failure.hinted(hint)
    }
}

/// Whether an argument changes a value. An argument that names a file is that file.
fn is_override(argument: &str) -> bool {
    (argument.starts_with('~') || argument.contains('=')) && !Path::new(argument).exists()
}

/// What is wrong with a file's keys and values; with `keys_alone` nothing that it names is opened.
pub(crate) fn check(path: &Path, overrides: &[String], keys_alone: bool) -> Vec<Problem> {
    let problems = kind_of(path).and_then(|kind| match kind {
        Kind::Train => {
            let composed = compose(path, overrides)?;
            let inputs = || input_problems(&composed, Reach::Small, Purpose::Training);
            Ok(if keys_alone { Vec::new() } else { inputs() })
        }
        Kind::Pretrain => {
            let located = compose_pretrain(path, overrides)?;
            Ok(if keys_alone { Vec::new() } else { located.input_problems() })
        }
        Kind::Grid => grid_problems(path, overrides, keys_alone),
    });
    problems.unwrap_or_else(|problems| problems)
}
