//! One job at a time in a run directory.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::Path;

use longdraft_parallel::World;

use crate::error::{Result, TrainError};

const LOCK_FILE: &str = ".lock";

/// Held as long as the process works in a run directory; the system lets go of it when the process
/// dies, however it dies.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

impl RunLock {
    /// The first rank takes the directory for all, and the others go on when it has it.
    ///
    /// # Errors
    /// - as [`Self::acquire`]
    pub fn of_world(directory: &Path, world: &World) -> Result<Option<Self>> {
        let lock = world.is_first().then(|| Self::acquire(directory)).transpose()?;
        world.barrier();
        Ok(lock)
    }

    /// Whether a process works in the directory; nothing is made there.
    pub fn is_held(directory: &Path) -> bool {
        let file = File::open(directory.join(LOCK_FILE));
        file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Takes the directory, which is made when needed.
    ///
    /// # Errors
    /// - another process holds it, or it cannot be written
    pub fn acquire(directory: &Path) -> Result<Self> {
        let path = directory.join(LOCK_FILE);
        let fail = |error: std::io::Error| TrainError::checkpoint(&path, error);
        std::fs::create_dir_all(directory).map_err(fail)?;
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(fail)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => {
                Err(TrainError::Locked { path: directory.to_path_buf() })
            }
            // A file system without locks is no reason not to train.
            Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {
                Ok(Self { _file: file })
            }
            Err(TryLockError::Error(error)) => Err(fail(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_held_once_until_it_is_let_go() {
        let folder = tempfile::tempdir().expect("folder");
        let run = folder.path().join("run");
        assert!(!RunLock::is_held(&run));
        let held = RunLock::acquire(&run).expect("free");
        assert!(RunLock::is_held(&run));
        assert!(matches!(RunLock::acquire(&run), Err(TrainError::Locked { .. })));
        drop(held);
        assert!(!RunLock::is_held(&run));
        RunLock::acquire(&run).expect("free again");
    }
}
