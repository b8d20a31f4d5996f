//! Stages one after the other, each from the draft of the one before.

use std::path::{Path, PathBuf};

use longdraft_models::weights::atomic::write_atomically;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::store::{BEST, LAST, PREVIOUS};
use crate::error::{Result, TrainError};

/// Names a curriculum's stages in its output folder.
pub const CURRICULUM_FILE: &str = "curriculum.json";

/// What a stage starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StartFrom {
    /// The draft at the end of the stage before (of a first stage: `draft.from`, or initial values).
    #[default]
    Last,
    /// Its best draft by held-out simulated length.
    Best,
    /// Whatever its own `draft` section says.
    Scratch,
}

impl StartFrom {
    /// The checkpoint of a finished stage that the next one starts from.
    ///
    /// # Errors
    /// - there is none
    pub fn checkpoint(self, stage_output: &Path) -> Result<Option<PathBuf>> {
        let names: &[&str] = match self {
            Self::Last => &[LAST, PREVIOUS],
            Self::Best => &[BEST],
            Self::Scratch => return Ok(None),
        };
        let checkpoints = stage_output.join("checkpoints");
        let found = names.iter().map(|name| checkpoints.join(name)).find(|path| path.is_dir());
        found.map(Some).ok_or_else(|| {
            let hint = match self {
                Self::Best => " (the stage before needs held-out rows and `train.keep_best: true`)",
                _ => "",
            };
            TrainError::checkpoint(&checkpoints, format!("no `{}`{hint}", names[0]))
        })
    }
}

/// What `curriculum.json` holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CurriculumFile {
    /// In order.
    pub stages: Vec<StageEntry>,
}

/// One stage of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageEntry {
    /// Its name.
    pub name: String,
    /// Its run directory, relative to the curriculum's where it lies inside.
    pub output: PathBuf,
}

impl CurriculumFile {
    /// Writes the file into the curriculum's folder, which is made when needed: whole or not at all.
    ///
    /// # Errors
    /// - the folder cannot be written
    pub fn write(&self, output: &Path) -> Result<()> {
        let fail = |error: &dyn std::fmt::Display| TrainError::checkpoint(output, error);
        std::fs::create_dir_all(output).map_err(|error| fail(&error))?;
        let text = serde_json::to_string_pretty(self).map_err(|error| fail(&error))?;
        write_atomically(&output.join(CURRICULUM_FILE), text.as_bytes())
            .map_err(|error| fail(&error))
    }
}
