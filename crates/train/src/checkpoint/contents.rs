//! What a checkpoint holds, written and read back.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use longdraft_models::draft::{Draft, Parameter, TOKEN_COUNTS_FILE, TokenCounts};
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::{SafetensorsSource, save};
use longdraft_models::weights::streamed::Streamed;
use longdraft_parallel::DataParallel;
use serde::de::DeserializeOwned;

use super::locate::draft_file;
use super::manifest::Manifest;
use super::optimizer_shards::{self, Moment, Moments};
use super::state::CheckpointState;
use crate::error::{Result, TrainError};
use crate::optim::{AdamW, MomentKind};

pub(super) const STATE: &str = "state.json";
pub(super) const DRAFT: &str = "draft.safetensors";

/// What is saved.
pub struct Contents<'a> {
    /// Small state.
    pub state: &'a CheckpointState,
    /// The draft, which every rank holds.
    pub draft: &'a dyn Draft,
    /// With this rank's moments.
    pub optimizer: &'a AdamW,
    /// Which moments those are.
    pub parallel: &'a DataParallel,
    /// The target's tokenizer.
    pub tokenizer: &'a TextTokenizer,
    /// How often each token was supervised, in this stage and in those before it.
    pub token_counts: &'a TokenCounts,
}

/// A checkpoint that was read back.
#[derive(Debug)]
pub struct Loaded {
    /// Which folder it came from.
    pub path: PathBuf,
    /// Small state.
    pub state: CheckpointState,
    /// Draft tensors by name, those that never change included.
    pub draft: Vec<(String, Tensor)>,
    moments: Moments,
}

impl Loaded {
    /// Gives a rank's optimizer the moments of what it updates, whatever number of ranks saved them.
    ///
    /// # Errors
    /// - they are damaged or of another draft
    pub fn restore(
        &self,
        optimizer: &mut AdamW,
        parallel: &DataParallel,
        parameters: &[Parameter],
    ) -> Result<()> {
        optimizer.restore(self.moments.step, (parallel, parameters), |kind, run| {
            let name = format!("{}.{}", kind.name(), parameters[run.parameter].name);
            let values = self.moments.part(&name, run)?;
            if values.len() == run.len {
                return Ok(values);
            }
            let problem = format!(
                "the optimizer's `{name}` does not fit the draft: {} values where {} are needed",
                values.len(),
                run.len
            );
            Err(TrainError::CannotGoOn { path: self.path.clone(), problem })
        })
    }
}

impl Contents<'_> {
    /// Writes a rank's files into a folder; the first rank also writes what all of them hold.
    ///
    /// # Errors
    /// - a value cannot be read, or a file cannot be written
    pub fn write(&self, folder: &Path) -> Result<()> {
        let parameters = self.draft.parameters();
        let mut moments = Vec::new();
        for (index, run) in self.parallel.runs().iter().enumerate() {
            moments.extend(MomentKind::ALL.map(|kind| Moment {
                start: run.start,
                part: Streamed {
                    name: format!("{}.{}", kind.name(), parameters[run.parameter].name),
                    length: run.len,
                    values: Box::new(move || self.optimizer.moment(kind, index)),
                },
            }));
        }
        optimizer_shards::write(folder, self.parallel, moments, self.optimizer.steps())?;
        if self.parallel.world().is_first() { self.write_common(folder) } else { Ok(()) }
    }

    /// What every rank holds.
    fn write_common(&self, folder: &Path) -> Result<()> {
        let parameters = self.draft.parameters().iter();
        let mut tensors: Vec<(String, Tensor)> = parameters
            .map(|parameter| (parameter.name.clone(), parameter.var.as_tensor().clone()))
            .collect();
        tensors.extend(self.draft.fixed_tensors()?);
        save(&folder.join(DRAFT), &tensors, HashMap::new())?;
        self.tokenizer.save(folder)?;
        let fail = |error: &dyn std::fmt::Display| TrainError::checkpoint(folder, error);
        std::fs::write(folder.join(TOKEN_COUNTS_FILE), self.token_counts.to_text())
            .map_err(|error| fail(&error))?;
        let text = serde_json::to_string_pretty(self.state).map_err(|error| fail(&error))?;
        std::fs::write(folder.join(STATE), text).map_err(|error| fail(&error))
    }
}

/// Reads a checkpoint whose manifest holds.
///
/// # Errors
/// - a file is missing or unusable
pub fn load(path: &Path) -> Result<Loaded> {
    let (state, draft) = (read_state(path)?, draft_tensors(path)?);
    let moments = Moments::read(path)?;
    Ok(Loaded { path: path.to_path_buf(), state, draft, moments })
}

/// Adds the counts that stand beside a draft's weights, if there are any.
///
/// # Errors
/// - the file is damaged or of another vocabulary
pub fn add_token_counts(counts: &mut TokenCounts, draft: &Path) -> Result<()> {
    let file = draft_file(draft);
    let folder = if file.is_dir() { &file } else { file.parent().unwrap_or(Path::new("")) };
    let path = folder.join(TOKEN_COUNTS_FILE);
    match std::fs::read_to_string(&path) {
        Ok(text) => counts.add_text(&text).map_err(|error| TrainError::checkpoint(&path, error)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(TrainError::checkpoint(&path, error)),
    }
}

/// A checkpoint's small state.
///
/// # Errors
/// - it is missing or unusable
pub fn read_state(checkpoint: &Path) -> Result<CheckpointState> {
    read_json(&checkpoint.join(STATE))
}

/// What a JSON file of a checkpoint holds.
///
/// # Errors
/// - it is missing or unusable
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text =
        std::fs::read_to_string(path).map_err(|error| TrainError::checkpoint(path, error))?;
    serde_json::from_str(&text).map_err(|error| TrainError::checkpoint(path, error))
}

/// A checkpoint's draft tensors by name.
///
/// # Errors
/// - the file is missing or unusable, or not the one that the manifest describes
pub fn read_draft(checkpoint: &Path) -> Result<Vec<(String, Tensor)>> {
    verify_draft(checkpoint)?;
    draft_tensors(checkpoint)
}

/// A checkpoint's draft tensors, to be read one at a time.
///
/// # Errors
/// - as [`read_draft`]
pub fn open_draft_file(checkpoint: &Path) -> Result<SafetensorsSource> {
    verify_draft(checkpoint)?;
    Ok(SafetensorsSource::open_file(&checkpoint.join(DRAFT))?)
}

/// Checks a checkpoint's draft against the manifest, if there is one.
pub(super) fn verify_draft(checkpoint: &Path) -> Result<()> {
    // A run that goes on may put a newer checkpoint here while it is read: the second look finds that one whole.
    let verify = || Manifest::verify_file(checkpoint, DRAFT);
    verify().or_else(|_| verify())
}

fn draft_tensors(checkpoint: &Path) -> Result<Vec<(String, Tensor)>> {
    let source = SafetensorsSource::open_file(&checkpoint.join(DRAFT))?;
    let named = |name: String| {
        let tensor = source.load_as_stored(&name)?;
        Ok((name, tensor))
    };
    source.names().into_iter().map(named).collect()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};
    use longdraft_models::weights::TensorRole;
    use serde_json::json;

    use super::*;
    use crate::optim::AdamWConfig;

    #[test]
    fn moments_of_another_draft_are_refused_with_the_checkpoints_name() {
        let folder = tempfile::tempdir().expect("folder");
        let of_size = |elements: usize| {
            let tensor = Tensor::zeros(elements, DType::F32, &Device::Cpu).expect("tensor");
            let var = Var::from_tensor(&tensor).expect("variable");
            let (name, role) = ("w".to_owned(), TensorRole::Layer);
            [Parameter { name, var, role, decay: true, dead: false }]
        };
        let (saved, other, values) = (of_size(6), of_size(8), [1.0_f32; 6]);
        let moments =
            MomentKind::ALL.map(|kind| Moment::held(format!("{}.w", kind.name()), 0, &values));
        let parallel = DataParallel::single(&saved);
        optimizer_shards::write(folder.path(), &parallel, moments.into(), 7).expect("written");
        let state = json!({
            "step": 7, "cursor": { "epoch": 0, "position": 3 }, "learned_rows": 100, "tokens": 5000,
            "seconds": 0.0, "evaluations_since_best": 0, "ended": false, "metrics_bytes": 10,
            "identity": { "values": [] }, "method": "any", "draft": {}, "target_fingerprint": "t",
        });
        let loaded = Loaded {
            path: folder.path().to_path_buf(),
            state: serde_json::from_value(state).expect("a state"),
            draft: Vec::new(),
            moments: Moments::read(folder.path()).expect("moments"),
        };
        let restored = |parameters: &[Parameter]| {
            let mut optimizer = AdamW::new(AdamWConfig::default(), parameters);
            loaded.restore(&mut optimizer, &DataParallel::single(parameters), parameters)
        };
        restored(&saved).expect("its own");
        let error = restored(&other).expect_err("another draft");
        assert!(matches!(error, TrainError::CannotGoOn { .. }), "{error}");
        let told = error.to_string();
        assert!(told.starts_with(&folder.path().display().to_string()), "{told}");
        assert!(told.contains("`first.w` does not fit the draft: 6 values where 8"), "{told}");
    }
}
