//! Putting checkpoints at their places, and finding the newest one that is whole.

use std::fs::File;
use std::path::{Path, PathBuf};

use longdraft_parallel::World;

use super::manifest::{Manifest, describe_own};
use super::optimizer_shards;
use crate::error::{Result, TrainError};

/// Newest checkpoint.
pub const LAST: &str = "last";

/// The one before it.
pub const PREVIOUS: &str = "last_2";

/// The one with the best held-out evaluation.
pub const BEST: &str = "best";

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

impl Checkpointer {
    /// A rank's checkpointer over `folder`, which is made when needed.
    pub fn new(folder: impl Into<PathBuf>, world: &World) -> Self {
        Self { folder: folder.into(), world: world.clone() }
    }

    /// Writes a checkpoint aside and puts it at its place; all ranks call it.
    /// Every rank writes its files with `write`; the first one completes the folder.
    ///
    /// # Errors
    /// - the folder cannot be written or is full; existing checkpoints stay as they were
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

    /// What `load` makes of the newest undamaged checkpoint, if there is any, and why a newer one was passed over. A
    /// damaged newer one is set aside, so that the next save does not push the good one out. The first rank looks, the
    /// others read what it found.
    ///
    /// # Errors
    /// - checkpoints exist but none is usable; every damage is named
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

/// Checks every file of a checkpoint against its manifest.
///
/// # Errors
/// - one is missing, damaged or cannot be read
pub fn verify(checkpoint: &Path) -> Result<()> {
    Manifest::verify(checkpoint)
}

#[cfg(test)]
mod tests {
    use super::super::contents::{STATE, load};
    use super::*;

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
    fn checkpoints_of_which_none_can_be_used_are_no_beginning() {
        let folder = tempfile::tempdir().expect("folder");
        let checkpointer = Checkpointer::new(folder.path(), &World::single());
        assert!(checkpointer.newest(load).expect("none").is_none());
        for text in ["one", "two"] {
            put(&checkpointer, Place::Last, text);
        }
        for name in [LAST, PREVIOUS] {
            std::fs::write(folder.path().join(name).join(STATE), "half").expect("state");
        }
        let error = checkpointer.newest(load).expect_err("damaged");
        assert!(matches!(error, TrainError::CannotGoOn { .. }), "{error}");
        let told = error.to_string();
        assert!(told.contains("last_2") && told.contains("no checkpoint can be used"), "{told}");
    }
}
