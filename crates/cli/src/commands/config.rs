//! `longdraft config`: what a configuration comes to, and what can be configured.

use serde_json::json;

use crate::cli::ConfigCommand;
use crate::configuration::{json_schema, markdown, read, show};
use crate::failure::{Failure, Result};

/// Shows, checks or describes.
pub(crate) fn run(command: &ConfigCommand, json: bool) -> Result<()> {
    match command {
        ConfigCommand::Show(arguments) => {
            print!("{}", show(&read(&arguments.config, &arguments.overrides)?));
            Ok(())
        }
        ConfigCommand::Check { configs } => {
            let mut problems = Vec::new();
            for path in configs {
                if let Err(failure) = read(path, &[]) {
                    problems.push(failure.message().to_owned());
                }
            }
            if json {
                println!("{}", json!({ "files": configs.len(), "problems": problems }));
            } else if problems.is_empty() {
                println!("{} configurations are fine", configs.len());
            }
            if problems.is_empty() {
                return Ok(());
            }
            Err(Failure::usage(problems.join("\n")))
        }
        ConfigCommand::Schema { markdown: true } => {
            print!("{}", markdown());
            Ok(())
        }
        ConfigCommand::Schema { markdown: false } => {
            println!("{:#}", json_schema());
            Ok(())
        }
    }
}
