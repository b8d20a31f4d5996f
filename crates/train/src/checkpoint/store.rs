//! Writing, rotating and reading checkpoints.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use longdraft_models::draft::Draft;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::{SafetensorsSource, save};

use super::manifest::{MANIFEST, Manifest};
use super::state::CheckpointState;
use crate::error::{Result, TrainError};
use crate::optim::AdamWState;

/// Newest checkpoint.
pub const LAST: &str = "last";

/// The one before it.
pub const PREVIOUS: &str = "last_2";

/// The one with the best held-out evaluation.
pub const BEST: &str = "best";

const STATE: &str = "state.json";
const DRAFT: &str = "draft.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";

/// Folders that are being written, or are about to go.
const SAVING: &str = ".saving-";
const OUTGOING: &str = ".outgoing-";

/// A newest checkpoint that did not match its manifest.
const DAMAGED: &str = "last.damaged";

/// Where a checkpoint goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// `last`; the one that was there becomes `last_2`.
    Last,
    /// `best`, in place of the one that was there.
    Best,
}

impl Place {
    /// Name of the folder, and of the one that what was there goes to.
    pub(crate) fn names(self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::Last => (LAST, Some(PREVIOUS)),
            Self::Best => (BEST, None),
        }
    }
}

/// Saves into and resumes from one folder.
#[derive(Debug, Clone)]
pub struct Checkpointer {
    folder: PathBuf,
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
    /// First and second moments of every trained tensor, by name.
    pub moments: BTreeMap<String, (Vec<f32>, Vec<f32>)>,
    /// Optimizer steps taken.
    pub steps: u64,
    /// Why a newer checkpoint was passed over.
    pub warning: Option<String>,
}

impl Checkpointer {
    /// A checkpointer over `folder`, which is made when needed.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Writes a checkpoint.
    ///
    /// # Errors
    /// - the folder cannot be written or is full; existing checkpoints stay as they were
    pub fn save(
        &self,
        place: Place,
        state: &CheckpointState,
        draft: &dyn Draft,
        optimizer: &AdamWState,
        tokenizer: &TextTokenizer,
    ) -> Result<PathBuf> {
        let (name, previous) = place.names();
        self.put(name, previous, |folder| write_files(folder, state, draft, optimizer, tokenizer))
    }

    /// Writes a folder aside and puts it at `name`; what was there goes to `previous`, or away.
    pub(crate) fn put(
        &self,
        name: &str,
        previous: Option<&str>,
        write: impl Fn(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let temporary = self.folder.join(format!("{SAVING}{}", std::process::id()));
        let fail = |error: std::io::Error| TrainError::checkpoint(&self.folder, error);
        let _ = std::fs::remove_dir_all(&temporary);
        std::fs::create_dir_all(&temporary).map_err(fail)?;
        let written = write(&temporary).and_then(|()| self.rotate(&temporary, name, previous));
        if written.is_err() {
            let _ = std::fs::remove_dir_all(&temporary);
        }
        written
    }

    fn rotate(&self, temporary: &Path, name: &str, previous: Option<&str>) -> Result<PathBuf> {
        let fail = |error: std::io::Error| TrainError::checkpoint(&self.folder, error);
        let place = self.folder.join(name);
        let outgoing = self.folder.join(format!("{OUTGOING}{}", std::process::id()));
        let leave = |from: &Path| {
            let _ = std::fs::remove_dir_all(&outgoing);
            if from.exists() { std::fs::rename(from, &outgoing).map_err(fail) } else { Ok(()) }
        };
        match previous.map(|name| self.folder.join(name)) {
            Some(previous) if place.exists() => {
                leave(&previous)?;
                std::fs::rename(&place, &previous).map_err(fail)?;
            }
            Some(_) => {}
            None => leave(&place)?,
        }
        std::fs::rename(temporary, &place).map_err(fail)?;
        File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(fail)?;
        let _ = std::fs::remove_dir_all(&outgoing);
        Ok(place)
    }

    /// Takes away what a killed process left half written. Only for who holds the run directory.
    pub fn clean(&self) {
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(SAVING) || name.starts_with(OUTGOING) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }

    /// The newest undamaged checkpoint, if there is any. A damaged newer one is set aside, so that
    /// the next save does not push the good one out.
    ///
    /// # Errors
    /// - checkpoints exist but none is usable; every damage is named
    pub fn load_latest(&self) -> Result<Option<Loaded>> {
        let newest = self.newest(load)?;
        Ok(newest.map(|(mut loaded, warning)| {
            loaded.warning = warning;
            loaded
        }))
    }

    /// What `load` makes of the newest undamaged checkpoint, and why a newer one was passed over.
    ///
    /// # Errors
    /// - as [`Self::load_latest`]
    pub(crate) fn newest<T>(
        &self,
        load: impl Fn(&Path) -> Result<T>,
    ) -> Result<Option<(T, Option<String>)>> {
        let mut damages: Vec<String> = Vec::new();
        for name in [LAST, PREVIOUS] {
            let path = self.folder.join(name);
            if !path.is_dir() {
                continue;
            }
            match Manifest::verify(&path).and_then(|()| load(&path)) {
                Ok(loaded) => {
                    if !damages.is_empty() {
                        let aside = self.folder.join(DAMAGED);
                        let _ = std::fs::remove_dir_all(&aside);
                        let _ = std::fs::rename(self.folder.join(LAST), aside);
                    }
                    return Ok(Some((loaded, (!damages.is_empty()).then(|| damages.join("; ")))));
                }
                Err(error) => damages.push(error.to_string()),
            }
        }
        if damages.is_empty() {
            return Ok(None);
        }
        Err(TrainError::checkpoint(&self.folder, damages.join("; ")))
    }
}

fn write_files(
    folder: &Path,
    state: &CheckpointState,
    draft: &dyn Draft,
    optimizer: &AdamWState,
    tokenizer: &TextTokenizer,
) -> Result<()> {
    let parameters = draft.parameters();
    let mut tensors: Vec<(String, Tensor)> = parameters
        .iter()
        .map(|parameter| (parameter.name.clone(), parameter.var.as_tensor().clone()))
        .collect();
    tensors.extend(draft.fixed_tensors()?);
    save(&folder.join(DRAFT), &tensors, HashMap::new())?;
    let mut moments = Vec::new();
    for (index, parameter) in parameters.iter().enumerate() {
        for (prefix, values) in [("first", &optimizer.first), ("second", &optimizer.second)] {
            let device = candle_core::Device::Cpu;
            let tensor = Tensor::from_slice(&values[index], values[index].len(), &device)?;
            moments.push((format!("{prefix}.{}", parameter.name), tensor));
        }
    }
    let metadata = HashMap::from([("step".to_owned(), optimizer.step.to_string())]);
    save(&folder.join(OPTIMIZER), &moments, metadata)?;
    tokenizer.save(folder)?;
    let fail = |error: &dyn std::fmt::Display| TrainError::checkpoint(folder, error);
    let text = serde_json::to_string_pretty(state).map_err(|error| fail(&error))?;
    std::fs::write(folder.join(STATE), text).map_err(|error| fail(&error))?;
    seal(folder)
}

/// Writes the manifest of a folder's files and hands them all to the disk.
pub(crate) fn seal(folder: &Path) -> Result<()> {
    let fail = |error: &dyn std::fmt::Display| TrainError::checkpoint(folder, error);
    let manifest = Manifest::of(folder)?;
    let text = serde_json::to_string_pretty(&manifest).map_err(|error| fail(&error))?;
    std::fs::write(folder.join(MANIFEST), text).map_err(|error| fail(&error))?;
    for entry in std::fs::read_dir(folder).map_err(|error| fail(&error))? {
        let entry = entry.map_err(|error| fail(&error))?;
        File::open(entry.path()).and_then(|file| file.sync_all()).map_err(|error| fail(&error))?;
    }
    File::open(folder).and_then(|file| file.sync_all()).map_err(|error| fail(&error))
}

fn load(path: &Path) -> Result<Loaded> {
    let state = read_state(path)?;
    let draft = read_draft(path)?;
    let source = SafetensorsSource::open_file(&path.join(OPTIMIZER))?;
    let step = source.metadata().get("step").and_then(|step| step.parse().ok());
    let step = step.ok_or_else(|| TrainError::checkpoint(path, "optimizer without a step"))?;
    let values = |name: &str| -> Result<Vec<f32>> {
        Ok(source.load(name, DType::F32)?.flatten_all()?.to_vec1()?)
    };
    let mut moments = BTreeMap::new();
    for name in source.names() {
        if let Some(plain) = name.strip_prefix("first.") {
            let both = (values(&name)?, values(&format!("second.{plain}"))?);
            moments.insert(plain.to_owned(), both);
        }
    }
    Ok(Loaded { path: path.to_path_buf(), state, draft, moments, steps: step, warning: None })
}

/// The draft's weights in what a user may point to: a weight file, a folder that holds one (an
/// extracted draft, an export), a checkpoint, or a run directory (its newest checkpoint).
pub fn draft_file(path: &Path) -> PathBuf {
    let checkpoints = [path.to_path_buf()]
        .into_iter()
        .chain([LAST, PREVIOUS].map(|name| path.join("checkpoints").join(name)));
    let mut files = checkpoints.map(|folder| folder.join(DRAFT));
    files.find(|file| file.is_file()).unwrap_or_else(|| path.to_path_buf())
}

/// A checkpoint's small state.
///
/// # Errors
/// - it is missing or unusable
pub fn read_state(checkpoint: &Path) -> Result<CheckpointState> {
    let path = checkpoint.join(STATE);
    let text =
        std::fs::read_to_string(&path).map_err(|error| TrainError::checkpoint(&path, error))?;
    serde_json::from_str(&text).map_err(|error| TrainError::checkpoint(&path, error))
}

/// A checkpoint's draft tensors by name.
///
/// # Errors
/// - the file is missing or unusable
pub fn read_draft(checkpoint: &Path) -> Result<Vec<(String, Tensor)>> {
    let source = SafetensorsSource::open_file(&checkpoint.join(DRAFT))?;
    let named = |name: String| {
        let tensor = source.load_as_stored(&name)?;
        Ok((name, tensor))
    };
    source.names().into_iter().map(named).collect()
}
