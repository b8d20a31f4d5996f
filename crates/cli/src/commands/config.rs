//! `longdraft config`: what a configuration comes to, and what can be configured.

use std::path::Path;

use longdraft_train::pretrain::PretrainConfig;
use serde_json::json;

use crate::cli::ConfigCommand;
use crate::commands::pretrain::check_grid;
use crate::configuration::{
    Kind, json_schema, kind_of, markdown, markdown_of, read, read_pretrain, schema_of, show,
};
use crate::failure::{Failure, Result};

fn check(path: &Path) -> Result<()> {
    match kind_of(path)? {
        Kind::Train => read(path, &[]).map(|_| ()),
        Kind::Pretrain => read_pretrain(path, &[]).map(|_| ()),
        Kind::Grid => check_grid(path),
    }
}

/// Shows, checks or describes.
pub(crate) fn run(command: &ConfigCommand, json: bool) -> Result<()> {
    match command {
        ConfigCommand::Show(arguments) => {
            out!("{}", show(&read(&arguments.config, &arguments.overrides)?));
            Ok(())
        }
        ConfigCommand::Check { configs } => {
            let mut problems = Vec::new();
            for path in configs {
                if let Err(failure) = check(path) {
                    problems.push(failure.message().to_owned());
                }
            }
            if json {
                outln!("{}", json!({ "files": configs.len(), "problems": problems }));
            } else if problems.is_empty() {
                outln!("{} configurations are fine", configs.len());
            }
            if problems.is_empty() {
                return Ok(());
            }
            Err(Failure::usage(problems.join("\n")).in_result())
        }
        ConfigCommand::Schema { markdown, pretrain: true } => {
            let schema = schema_of::<PretrainConfig>();
            if *markdown {
                out!("{}", markdown_of(&schema));
            } else {
                outln!("{schema:#}");
            }
            Ok(())
        }
        ConfigCommand::Schema { markdown: true, .. } => {
            out!("{}", markdown());
            Ok(())
        }
        ConfigCommand::Schema { markdown: false, .. } => {
            outln!("{:#}", json_schema());
            Ok(())
        }
    }
}
