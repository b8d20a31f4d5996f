//! Arguments of `config`.

use std::path::PathBuf;

use clap::Subcommand;

/// What to do with configurations.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print the composed configuration, every value with the line it comes from.
    ///
    /// Example: longdraft config show conf/glide/smollm2.yaml train.seed=1
    Show(ConfigArguments),
    /// Compose files, try the targets, sources and drafts that they name, and tell everything that is
    /// wrong.
    ///
    /// Example: longdraft config check conf/glide/*.yaml train.steps=100
    Check {
        /// Configuration files, and changes of them all: dotted.key=value, +new.key=value, ~key.
        #[arg(required = true, value_name = "CONFIG|KEY=VALUE")]
        configs: Vec<String>,
        /// Check keys and values alone: open no data, target or draft, and ask no hub.
        #[arg(long)]
        keys: bool,
    },
    /// Print the JSON Schema of configuration files, for editors.
    ///
    /// Example: longdraft config schema > longdraft.schema.json
    Schema {
        /// Tables of every key instead, as in docs/reference/configuration.md.
        #[arg(long)]
        markdown: bool,
        /// Of `lm train` instead of `train`.
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
