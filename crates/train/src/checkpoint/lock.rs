//! One job at a time in a run directory.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::Path;

use longdraft_parallel::World;

use crate::error::{Result, TrainError};

const LOCK_FILE: &str = ".lock";

/// Held as long as the process works in a run directory; the system lets go of it when the process
/// dies, however it dies.
#[derive(Debug)]
pub struct RunLock {
    file: File,
}

impl Drop for RunLock {
    /// Nobody is named who no longer works there.
    fn drop(&mut self) {
        let _ = self.file.set_len(0);
    }
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
        is_locked(&directory.join(LOCK_FILE))
    }

    /// Takes the directory, which is made when needed.
    ///
    /// # Errors
    /// - another process holds it, or it cannot be written
    pub fn acquire(directory: &Path) -> Result<Self> {
        let path = directory.join(LOCK_FILE);
        let fail = TrainError::unwritable(directory);
        std::fs::create_dir_all(directory).map_err(fail)?;
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(fail)?;
        lock_file(&file, directory).map_err(|error| match error {
            TrainError::Locked { path: directory, .. } => {
                TrainError::Locked { path: directory, process: holder(&path) }
            }
            other => other,
        })?;
        note_holder(&file);
        Ok(Self { file })
    }
}

/// Leaves this process's number and host in its lock file, for others to name. The lock holds without it.
fn note_holder(mut file: &File) {
    let host = gethostname::gethostname();
    let text = format!("{} on {}", std::process::id(), host.to_string_lossy());
    let _ = file.set_len(0).and_then(|()| file.write_all(text.as_bytes()));
}

/// The number and host that the process that holds a lock file left there.
fn holder(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let (number, host) = text.split_once(" on ")?;
    let is_name = |host: &str| host.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c));
    let number: u32 = number.parse().ok().filter(|_| is_name(host))?;
    Some(format!("{number} on {host}"))
}

/// Whether a process holds the lock of a file; nothing is made there.
pub fn is_locked(path: &Path) -> bool {
    let file = File::open(path);
    file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Takes the lock of an open file until it is closed; `path` is what an error names.
///
/// # Errors
/// - another process holds it
pub fn lock_file(file: &File, path: &Path) -> Result<()> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            Err(TrainError::Locked { path: path.to_path_buf(), process: None })
        }
        // A file system without locks, or a network one without their service, is no reason not to work.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
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
        let refused = RunLock::acquire(&run).expect_err("held");
        let number = format!("in this folder (process {} on ", std::process::id());
        assert!(refused.to_string().contains(&number), "{refused}");
        drop(held);
        assert_eq!(holder(&run.join(LOCK_FILE)), None, "nobody works there any more");
        assert!(!RunLock::is_held(&run));
        RunLock::acquire(&run).expect("free again");
    }

    #[test]
    fn a_place_that_cannot_be_a_directory_is_named() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("a file");
        let error = RunLock::acquire(&file.join("run")).expect_err("below a file");
        assert!(matches!(error, TrainError::Unwritable { .. }), "{error}");
        assert!(error.to_string().contains("run: nothing can be written there"), "{error}");
    }

    #[test]
    fn an_open_file_is_held_until_it_is_closed() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("rows.jsonl");
        assert!(!is_locked(&path));
        let open = || OpenOptions::new().create(true).append(true).open(&path).expect("opened");
        let held = open();
        lock_file(&held, &path).expect("free");
        assert!(is_locked(&path));
        assert!(matches!(lock_file(&open(), &path), Err(TrainError::Locked { .. })));
        drop(held);
        assert!(!is_locked(&path));
    }
}
