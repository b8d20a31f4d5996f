//! The folder of a learner: taking it, closing what lies in it, and removing all of that.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::ErrorKind;
use std::path::Path;

use longdraft_train::checkpoint::RunLock;

use super::state::{self, STATE_FILE, State};
use super::{process, store};
use crate::failure::{Failure, Result};

/// What a folder holds beside the rows; the last one says that it is a learner's.
const PARTS: [&str; 4] = [state::TRAINING, state::DRAFTS, process::LOG_FILE, STATE_FILE];
/// What an earlier start may have left before it wrote anything.
const LOCK: &str = ".lock";

/// Takes a folder, which is made if it is not there. One with other things in it is refused, and so is one where another
/// server learns.
pub(super) fn take(folder: &Path) -> Result<RunLock> {
    let fail = |error: std::io::Error| failed(folder, &error);
    match std::fs::read_dir(folder) {
        Ok(entries) => {
            let names = entries.map(|entry| Ok(entry.map_err(fail)?.file_name()));
            let names = names.collect::<Result<Vec<_>>>()?;
            let is_ours = names.iter().any(|name| name == STATE_FILE);
            let is_other = |name: &&OsString| *name != LOCK && !is_left(name);
            if let Some(other) = names.iter().find(is_other).filter(|_| !is_ours) {
                let (folder, other) = (folder.display(), other.to_string_lossy());
                return Err(Failure::usage(format!(
                    "{folder}: `{other}` lies there, and nothing was learned there"
                ))
                .hint("give --learn DIR a folder of its own, empty or not there yet"));
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            builder().recursive(true).create(folder).map_err(fail)?;
        }
        Err(error) => return Err(fail(error)),
    }
    lock(folder)
}

/// Whether a file is a state that a kill cut short.
fn is_left(name: &OsStr) -> bool {
    let rest = name.to_str().and_then(|name| name.strip_prefix(STATE_FILE));
    rest.and_then(|rest| rest.strip_suffix(".tmp")).is_some_and(|owner| owner.starts_with('.'))
}

fn lock(folder: &Path) -> Result<RunLock> {
    RunLock::acquire(folder).map_err(|error| {
        Failure::from(error).hint("a server that learns there is running: end it first")
    })
}

/// Removes everything that was kept; the number of rows.
/// It fails where no learner made the folder, one is at work there, or something cannot be removed.
pub(super) fn purge(folder: &Path) -> Result<usize> {
    let place = folder.join(STATE_FILE);
    if !place.is_file() {
        return Err(Failure::usage(format!("{}: nothing was learned there", folder.display()))
            .hint("give the folder of `longdraft serve --learn DIR`"));
    }
    if State::read(folder).is_none() {
        return Err(Failure::usage(format!("{}: this is not a learner's file", place.display()))
            .hint(
                "nothing was removed: if server and learner wrote it, remove the folder yourself",
            ));
    }
    let _lock = lock(folder)?;
    let rows = store::remove(folder)?;
    let entries = std::fs::read_dir(folder).map_err(|error| failed(folder, &error))?;
    let names = entries.flatten().map(|entry| entry.file_name());
    let left: Vec<OsString> = names.filter(|name| is_left(name)).collect();
    for part in left.into_iter().chain(PARTS.map(OsString::from)) {
        let path = folder.join(part);
        let removed = match path.symlink_metadata() {
            Ok(about) if about.is_dir() => std::fs::remove_dir_all(&path),
            Ok(_) => std::fs::remove_file(&path),
            Err(_) => Ok(()),
        };
        removed.map_err(Failure::at(&path))?;
    }
    Ok(rows)
}

fn failed(path: &Path, error: &std::io::Error) -> Failure {
    Failure::file(format!("{}: {error}", path.display()), error)
        .hint("--learn needs a folder that it may write")
}

/// Of folders that only their owner may look into.
fn builder() -> DirBuilder {
    #[cfg_attr(not(unix), expect(unused_mut, reason = "modes are Unix's"))]
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
}

/// Makes a part of a learner's folder that only its owner may look into; one that is there is closed to
/// others. It fails where it cannot be made or closed.
pub(super) fn private_folder(path: &Path) -> Result<()> {
    let fail = |error: std::io::Error| failed(path, &error);
    builder().recursive(true).create(path).map_err(fail)?;
    #[cfg(unix)]
    {
        let closed = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(path, closed).map_err(fail)?;
    }
    Ok(())
}

/// Makes a file that only its owner may read, to be written at its end.
/// It fails where it is there.
pub(super) fn private_file(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_folder_with_other_things_is_left_as_it_is() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("folder");
        let mode =
            |path: &Path| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).expect("mode");
        let other = folder.path().join("drafts/7");
        std::fs::create_dir_all(&other).expect("folder");
        assert!(take(folder.path()).is_err());
        assert!(purge(folder.path()).is_err());
        // A file of this name is not enough.
        std::fs::write(folder.path().join(STATE_FILE), "{}").expect("file");
        assert!(purge(folder.path()).is_err());
        assert!(other.is_dir() && mode(folder.path()) == 0o755);
        // An empty one is taken, also where an earlier start ended at once, and a new one is closed.
        let empty = tempfile::tempdir().expect("folder");
        drop(take(empty.path()).expect("empty"));
        drop(take(empty.path()).expect("with a lock"));
        let new = empty.path().join("new");
        drop(take(&new).expect("new"));
        assert_eq!(mode(&new), 0o700);
        assert!(take(empty.path()).is_err(), "there is another folder in it");
        // A first state that a kill cut short is nobody else's.
        let left = new.join(format!("{STATE_FILE}.0123abcd.7.tmp"));
        std::fs::write(&left, "{").expect("file");
        drop(take(&new).expect("with a state that was cut short"));
        State::open(&new, "target", "draft").and_then(|state| state.write(&new)).expect("written");
        assert!(take(&new).is_ok());
        std::fs::write(&left, "{").expect("file");
        assert_eq!(purge(&new).expect("purged"), 0);
        assert!(!new.join(STATE_FILE).exists() && !left.exists());
    }
}
