//! Writing, rotating and reading checkpoints.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use longdraft_models::draft::TokenCounts;
use longdraft_models::draft::{Draft, TOKEN_COUNTS_FILE};
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::{SafetensorsSource, save};
use longdraft_models::weights::streamed::Streamed;
use longdraft_parallel::{DataParallel, World};

use super::locate::draft_file;
use super::manifest::{Manifest, describe_own};
use super::optimizer_shards::{self, Moment, Moments};
use super::state::CheckpointState;
use crate::error::{Result, TrainError};
use crate::optim::{AdamW, MomentKind};

/// Newest checkpoint.
pub const LAST: &str = "last";

/// The one before it.
pub const PREVIOUS: &str = "last_2";

/// The one with the best held-out evaluation.
pub const BEST: &str = "best";

pub(super) const STATE: &str = "state.json";
pub(super) const DRAFT: &str = "draft.safetensors";

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
    fn names(self) -> (&'static str, Option<&'static str>) {
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
    world: World,
}

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
    /// Why a newer checkpoint was passed over.
    pub warning: Option<String>,
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
        draft: &dyn Draft,
    ) -> Result<()> {
        let parameters = draft.parameters();
        optimizer.restore(self.moments.step, (parallel, parameters), |kind, run| {
            let name = format!("{}.{}", kind.name(), parameters[run.parameter].name);
            self.moments.part(&name, run)
        })
    }
}

impl Checkpointer {
    /// A rank's checkpointer over `folder`, which is made when needed.
    pub fn new(folder: impl Into<PathBuf>, world: &World) -> Self {
        Self { folder: folder.into(), world: world.clone() }
    }

    /// Writes a checkpoint; all ranks call it.
    ///
    /// # Errors
    /// - the folder cannot be written or is full; existing checkpoints stay as they were
    pub fn save(&self, place: Place, contents: &Contents<'_>) -> Result<PathBuf> {
        self.put(place, |folder| contents.write(folder))
    }

    /// Writes a folder aside and puts it at its place.
    /// Every rank writes its files with `write`; the first one completes the folder.
    ///
    /// # Errors
    /// - as [`Self::save`]
    pub fn put(&self, place: Place, write: impl Fn(&Path) -> Result<()>) -> Result<PathBuf> {
        let (name, previous) = place.names();
        let world = &self.world;
        let job = world.of_first(std::process::id());
        let temporary = self.folder.join(format!("{SAVING}{job}"));
        let fail = |error: std::io::Error| TrainError::checkpoint(&self.folder, error);
        if world.is_first() {
            let _ = std::fs::remove_dir_all(&temporary);
            std::fs::create_dir_all(&temporary).map_err(fail)?;
        }
        world.barrier();
        let written = write(&temporary).and_then(|()| {
            let is_own = |name: &str| {
                let part = optimizer_shards::is_part(name);
                if part { optimizer_shards::is_part_of(name, world) } else { world.is_first() }
            };
            let parts = world.gather_json(&describe_own(&temporary, is_own)?)?;
            if world.is_first() {
                Manifest::of(parts).write(&temporary)?;
                self.rotate(&temporary, name, previous)?;
            }
            Ok(self.folder.join(name))
        });
        if written.is_err() {
            let _ = std::fs::remove_dir_all(&temporary);
        }
        let path = written?;
        world.barrier();
        Ok(path)
    }

    fn rotate(&self, temporary: &Path, name: &str, previous: Option<&str>) -> Result<()> {
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
        Ok(())
    }

    /// Takes away what a killed process left half written. Only for who holds the run directory.
    pub fn clean(&self) {
        if !self.world.is_first() {
            return;
        }
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
    /// The first rank looks, the others read what it found.
    ///
    /// # Errors
    /// - as [`Self::load_latest`]
    pub fn newest<T>(
        &self,
        load: impl Fn(&Path) -> Result<T>,
    ) -> Result<Option<(T, Option<String>)>> {
        const PLACES: [&str; 2] = [LAST, PREVIOUS];
        let found = if self.world.is_first() { self.look(PLACES, &load)? } else { None };
        let place = found.as_ref().map_or(PLACES.len(), |(place, ..)| *place);
        match PLACES.get(self.world.of_first(place as u64) as usize) {
            Some(place) if !self.world.is_first() => {
                Ok(Some((load(&self.folder.join(place))?, None)))
            }
            _ => Ok(found.map(|(_, loaded, warning)| (loaded, warning))),
        }
    }

    /// The first of some places that holds an undamaged checkpoint, and what is wrong with those
    /// before it.
    fn look<T>(
        &self,
        places: [&str; 2],
        load: impl Fn(&Path) -> Result<T>,
    ) -> Result<Option<(usize, T, Option<String>)>> {
        let mut damages: Vec<String> = Vec::new();
        for (place, name) in places.into_iter().enumerate() {
            let path = self.folder.join(name);
            match path.try_exists() {
                Ok(true) => {}
                Ok(false) => continue,
                // A folder that cannot be looked into is not one without checkpoints.
                Err(error) => return Err(TrainError::checkpoint(&path, error)),
            }
            match Manifest::verify(&path).and_then(|()| load(&path)) {
                Ok(loaded) => {
                    if !damages.is_empty() {
                        let aside = self.folder.join(DAMAGED);
                        let _ = std::fs::remove_dir_all(&aside);
                        let _ = std::fs::rename(self.folder.join(LAST), aside);
                    }
                    let warning = (!damages.is_empty()).then(|| damages.join("; "));
                    return Ok(Some((place, loaded, warning)));
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

impl Contents<'_> {
    fn write(&self, folder: &Path) -> Result<()> {
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

fn load(path: &Path) -> Result<Loaded> {
    let (state, draft) = (read_state(path)?, read_draft(path)?);
    let moments = Moments::read(path)?;
    Ok(Loaded { path: path.to_path_buf(), state, draft, moments, warning: None })
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

/// Checks every file of a checkpoint against its manifest.
///
/// # Errors
/// - one is missing, damaged or cannot be read
pub fn verify(checkpoint: &Path) -> Result<()> {
    Manifest::verify(checkpoint)
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
