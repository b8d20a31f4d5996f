//! Files that readers are given, in a temporary folder a thread.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

thread_local! {
    static FOLDER: TempDir = tempfile::tempdir().expect("a temporary folder");
}

/// Writes a file, in place of the one that was there.
pub(crate) fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = FOLDER.with(|folder| folder.path().join(name));
    std::fs::write(&path, bytes).expect("the temporary folder can be written");
    path
}

/// A folder that `make` fills the first time.
pub(crate) fn folder(name: &str, make: impl FnOnce(&Path)) -> PathBuf {
    let path = FOLDER.with(|folder| folder.path().join(name));
    if !path.is_dir() {
        std::fs::create_dir(&path).expect("the temporary folder can be written");
        make(&path);
    }
    path
}

/// As [`folder`], with `bytes` as its file `changed`.
pub(crate) fn folder_with(
    name: &str,
    make: impl FnOnce(&Path),
    changed: &str,
    bytes: &[u8],
) -> PathBuf {
    let path = folder(name, make);
    std::fs::write(path.join(changed), bytes).expect("the temporary folder can be written");
    path
}

/// What `make` writes to a path whose file name is `name`.
pub(crate) fn written(name: &str, make: impl FnOnce(&Path)) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(name);
    make(&path);
    std::fs::read(path).expect("it was written")
}

/// A file of the folder that `make` fills.
pub(crate) fn made(name: &str, make: impl FnOnce(&Path)) -> Vec<u8> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    make(folder.path());
    std::fs::read(folder.path().join(name)).expect("it was written")
}
