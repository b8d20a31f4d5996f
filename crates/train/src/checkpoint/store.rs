//! Writing, rotating and reading checkpoints.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use longdraft_models::draft::{Draft, Parameter, TOKEN_COUNTS_FILE, TokenCounts};
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

/// Folders that are being written, or are about to go: these with the name of the place that they leave.
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
        let outgoing = self.folder.join(format!("{OUTGOING}{name}-{}", std::process::id()));
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

    /// Takes away what a killed process left half written, and puts `best` back where that process had not yet put
    /// another one in its place. Only for who holds the run directory.
    pub fn clean(&self) {
        if !self.world.is_first() {
            return;
        }
        let Ok(entries) = std::fs::read_dir(&self.folder) else { return };
        let of_best = format!("{OUTGOING}{BEST}-");
        for entry in entries.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(&of_best) && self.puts_best_back(&entry.path()) {
                continue;
            }
            if name.starts_with(SAVING) || name.starts_with(OUTGOING) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }

    /// Whether a folder was `best`, is whole, and stands at its place again.
    fn puts_best_back(&self, outgoing: &Path) -> bool {
        let best = self.folder.join(BEST);
        let is_missing = matches!(best.try_exists(), Ok(false));
        is_missing && Manifest::verify(outgoing).is_ok() && std::fs::rename(outgoing, &best).is_ok()
    }

    /// Whether `best` is there and undamaged. The first rank looks; all ranks call it.
    pub fn holds_best(&self) -> bool {
        let holds = self.world.is_first() && Manifest::verify(&self.folder.join(BEST)).is_ok();
        self.world.of_first(u64::from(holds)) > 0
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
        let problem = format!("no checkpoint can be used: {}", damages.join("; "));
        Err(TrainError::CannotGoOn { path: self.folder.clone(), problem })
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

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};
    use longdraft_models::weights::TensorRole;
    use serde_json::json;

    use super::*;
    use crate::optim::AdamWConfig;

    fn put(checkpointer: &Checkpointer, place: Place, text: &str) {
        let write = |folder: &Path| {
            std::fs::write(folder.join(STATE), text).expect("state");
            Ok(())
        };
        checkpointer.put(place, write).expect("saved");
    }

    #[test]
    fn a_best_checkpoint_that_a_kill_left_without_its_place_comes_back() {
        let folder = tempfile::tempdir().expect("folder");
        let checkpointer = Checkpointer::new(folder.path(), &World::single());
        let best = folder.path().join(BEST);
        let text = || std::fs::read_to_string(best.join(STATE)).expect("state");
        // What a kill between the two renames leaves, or one before the old folder was taken away.
        let outgoing = folder.path().join(".outgoing-best-7");
        let leave = |place: &Path| std::fs::rename(&best, place).expect("moved");
        put(&checkpointer, Place::Best, "one");
        leave(&outgoing);
        assert!(!checkpointer.holds_best());
        checkpointer.clean();
        assert!(checkpointer.holds_best() && !outgoing.exists());
        assert_eq!(text(), "one");
        leave(&outgoing);
        put(&checkpointer, Place::Best, "two");
        checkpointer.clean();
        assert!(!outgoing.exists());
        assert_eq!(text(), "two");
        // A damaged one does not come back, nor one from another place.
        for (name, is_damaged) in
            [(".outgoing-best-7", true), (".outgoing-last-7", false), (".outgoing-7", false)]
        {
            put(&checkpointer, Place::Best, "three");
            let outgoing = folder.path().join(name);
            leave(&outgoing);
            if is_damaged {
                std::fs::write(outgoing.join(STATE), "half").expect("state");
            }
            checkpointer.clean();
            assert!(!best.exists() && !outgoing.exists(), "{name}");
        }
    }

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
            "metrics_bytes": 10, "identity": { "values": [] }, "draft": {}, "target_fingerprint": "t",
        });
        let loaded = Loaded {
            path: folder.path().to_path_buf(),
            state: serde_json::from_value(state).expect("a state"),
            draft: Vec::new(),
            moments: Moments::read(folder.path()).expect("moments"),
            warning: None,
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

    #[test]
    fn checkpoints_of_which_none_can_be_used_are_no_beginning() {
        let folder = tempfile::tempdir().expect("folder");
        let checkpointer = Checkpointer::new(folder.path(), &World::single());
        assert!(checkpointer.load_latest().expect("none").is_none());
        for text in ["one", "two"] {
            put(&checkpointer, Place::Last, text);
        }
        for name in [LAST, PREVIOUS] {
            std::fs::write(folder.path().join(name).join(STATE), "half").expect("state");
        }
        let error = checkpointer.load_latest().expect_err("damaged");
        assert!(matches!(error, TrainError::CannotGoOn { .. }), "{error}");
        let told = error.to_string();
        assert!(told.contains("last_2") && told.contains("no checkpoint can be used"), "{told}");
    }
}
