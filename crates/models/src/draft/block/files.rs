//! Block drafts by their files.

use std::collections::HashMap;
use std::path::Path;

use candle_core::Tensor;
use serde_json::Value;

use super::config::BlockConfig;
use super::model::BlockDraft;
use super::weights::tensor_specs;
use crate::draft::DraftKind;
use crate::draft::files::{SavedDraft, config_beside, open_weights, save_draft};
use crate::error::{ModelError, Problems, Result};
use crate::target::Target;
use crate::weights::WeightSource;

/// A block draft through the target's head alone.
pub(in crate::draft) const KIND: DraftKind = DraftKind {
    name: "dflash",
    title: "DFlash",
    is_at: |path| config_beside(path).is_some_and(|value| names(&value, ARCHITECTURE)),
    open: |path, target| Ok(Box::new(BlockDraft::open(path, target)?)),
    restore: |config, source, target| {
        let config = read_saved(config, Some(target.config().num_hidden_layers))?;
        config.problems_with(target.config()).into_result(source.path())?;
        Ok(Box::new(BlockDraft::from_source(source, &config, &target.embedding()?)?))
    },
    save,
    open_gguf: None,
    reading: |_| None,
};

/// The architecture under which engines know the draft.
pub(super) const ARCHITECTURE: &str = "DFlashDraftModel";

/// The target's frozen tensors, which some files repeat.
const FROZEN: [&str; 2] = ["embed_tokens.weight", "lm_head.weight"];

impl BlockConfig {
    /// What is said of a saved block draft; `None` if nothing is.
    ///
    /// # Errors
    /// - it is unusable
    pub fn of_saved(saved: &SavedDraft) -> Result<Option<Self>> {
        let said = saved.config.as_ref().filter(|value| names(value, ARCHITECTURE));
        let read = |value| Self::from_json(value, None).map_err(in_file(&saved.path));
        said.map(read).transpose()
    }

    /// Where the network of a draft computes something else with tensors of the same shapes.
    fn differences(&self, found: &Self) -> Problems {
        let mut problems = Problems::default();
        let mut same = |key: &str, found: String, wanted: String| {
            if found != wanted {
                problems.push(format!("the draft has `{key}` = {found}, {wanted} is configured"));
            }
        };
        let ids = |config: &BlockConfig| {
            format!("{:?}", config.target_layers.iter().map(|layer| layer.0).collect::<Vec<_>>())
        };
        same("target_layers", ids(found), ids(self));
        same("mask_token_id", found.mask_token_id.to_string(), self.mask_token_id.to_string());
        let kinds = |config: &BlockConfig| {
            let of = |kind: &_| (*kind, config.is_causal_in(*kind));
            config.layers.iter().map(of).collect::<Vec<_>>()
        };
        let describe = |config: &BlockConfig| {
            format!("{:?}, window {:?}", kinds(config), config.sliding_window.unwrap_or_default())
        };
        same("layers (and whether they are causal)", describe(found), describe(self));
        problems
    }
}

impl BlockDraft {
    /// Opens a draft folder, or a weight file with its `config.json` beside it.
    ///
    /// # Errors
    /// - as [`Self::from_source`]; the configuration is missing, unusable, another model's, or does
    ///   not fit the target
    pub fn open(path: &Path, target: &Target) -> Result<Self> {
        let file = folder_of(path).join("config.json");
        let config = read_config(&file, Some(target.config().num_hidden_layers))?;
        config.problems_with(target.config()).into_result(&file)?;
        Self::from_source(open_weights(path)?.as_ref(), &config, &target.embedding()?)
    }

    /// Reads the weights of a network whose sizes are known.
    ///
    /// # Errors
    /// - as [`Self::from_source`]; the draft is said to be another network
    pub fn load(saved: &SavedDraft, config: &BlockConfig, embedding: &Tensor) -> Result<Self> {
        check_same_network(saved, config)?;
        Self::from_source(open_weights(&saved.path)?.as_ref(), config, embedding)
    }

    /// Checks that [`Self::load`] finds this network; no tensor is read.
    ///
    /// # Errors
    /// - as [`Self::load`]
    pub fn check_file(saved: &SavedDraft, config: &BlockConfig) -> Result<()> {
        check_same_network(saved, config)?;
        check_tensors(open_weights(&saved.path)?.as_ref(), config)
    }

    /// Writes the tensors as safetensors and `.pth`, with `config.json`, into a folder.
    ///
    /// # Errors
    /// - the folder cannot be written
    pub fn save(&self, folder: &Path, target_fingerprint: &str) -> Result<()> {
        let config = self.config.to_json(ARCHITECTURE);
        save(folder, &config, &self.weights.named(), target_fingerprint)
    }
}

/// Checks that a source holds every tensor of the network in its shape, and no other.
pub(super) fn check_tensors(source: &dyn WeightSource, config: &BlockConfig) -> Result<()> {
    let specs = tensor_specs(config);
    let mut problems = crate::weights::check_specs(source, &specs);
    let known = |name: &String| {
        FROZEN.contains(&name.as_str()) || specs.iter().any(|spec| spec.name == *name)
    };
    for name in source.names().iter().filter(|name| !known(name)) {
        problems.push(format!("unexpected tensor `{name}`"));
    }
    problems.into_result(source.path())
}

fn save(folder: &Path, config: &Value, tensors: &[(String, Tensor)], target: &str) -> Result<()> {
    let metadata = HashMap::from([("draft".to_owned(), KIND.name.to_owned())]);
    save_draft(folder, config.clone(), metadata, tensors, target)
}

fn folder_of(path: &Path) -> &Path {
    if path.is_dir() { path } else { path.parent().unwrap_or(path) }
}

fn names(value: &Value, architecture: &str) -> bool {
    let listed = value["architectures"].as_array();
    listed.is_some_and(|names| names.iter().any(|name| name == architecture))
}

/// The configuration as a checkpoint holds it.
fn read_saved(config: &Value, target_layers: Option<usize>) -> Result<BlockConfig> {
    let in_checkpoint = in_file(Path::new("draft configuration"));
    BlockConfig::from_json(config, target_layers).map_err(in_checkpoint)
}

fn read_config(file: &Path, target_layers: Option<usize>) -> Result<BlockConfig> {
    let text = std::fs::read_to_string(file).map_err(ModelError::io(file))?;
    let value: Value =
        serde_json::from_str(&text).map_err(|error| ModelError::invalid(file, error))?;
    if !names(&value, ARCHITECTURE) {
        let problem = format!("`architectures` does not name {ARCHITECTURE}");
        return Err(ModelError::invalid(file, problem));
    }
    BlockConfig::from_json(&value, target_layers).map_err(in_file(file))
}

fn in_file(file: &Path) -> impl FnOnce(Problems) -> ModelError {
    let path = file.to_path_buf();
    |problems| ModelError::Invalid { path, problems }
}

/// Weights fit networks that compute something else: what is said of them must hold.
fn check_same_network(saved: &SavedDraft, wanted: &BlockConfig) -> Result<()> {
    let found = BlockConfig::of_saved(saved)?;
    found.map_or(Ok(()), |found| wanted.differences(&found).into_result(&saved.path))
}
