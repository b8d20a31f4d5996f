//! Sizes and hashes of a checkpoint's files.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};

pub(super) const MANIFEST: &str = "manifest.json";

/// After which a file that another rank wrote is not on this file system.
const LATEST: Duration = Duration::from_secs(10);

/// Size and hash of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileEntry {
    bytes: u64,
    blake3: String,
}

/// What a complete checkpoint consists of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    version: String,
    files: BTreeMap<String, FileEntry>,
}

/// Some files of a checkpoint by name.
pub(super) type Files = BTreeMap<String, FileEntry>;

/// Hands a rank's files to the disk and describes them.
pub(super) fn describe_own(folder: &Path, is_own: impl Fn(&str) -> bool) -> Result<Files> {
    let fail = |error: std::io::Error| TrainError::checkpoint(folder, error);
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name != MANIFEST && is_own(&name) {
            File::open(entry.path()).and_then(|file| file.sync_all()).map_err(fail)?;
            files.insert(name, describe(&entry.path()).map_err(fail)?);
        }
    }
    Ok(files)
}

impl Manifest {
    /// Of all ranks' files.
    pub(super) fn of(parts: Vec<Files>) -> Self {
        let files = parts.into_iter().flatten().collect();
        Self { version: env!("CARGO_PKG_VERSION").to_owned(), files }
    }

    /// Writes the manifest, after which the folder is complete.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let fail = |error: &dyn std::fmt::Display| TrainError::checkpoint(folder, error);
        if let Some(name) = self.files.keys().find(|name| !appears(&folder.join(name))) {
            let problem = format!(
                "`{name}` of another rank is not to be seen: the run directory \
                                   must lie on a file system that all ranks share"
            );
            return Err(TrainError::checkpoint(folder, problem));
        }
        let text = serde_json::to_string_pretty(self).map_err(|error| fail(&error))?;
        let path = folder.join(MANIFEST);
        std::fs::write(&path, text).map_err(|error| fail(&error))?;
        for path in [path.as_path(), folder] {
            File::open(path).and_then(|file| file.sync_all()).map_err(|error| fail(&error))?;
        }
        Ok(())
    }

    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(MANIFEST);
        let text =
            std::fs::read_to_string(&path).map_err(|error| TrainError::checkpoint(&path, error))?;
        serde_json::from_str(&text).map_err(|error| TrainError::checkpoint(&path, error))
    }

    /// Reads a folder's manifest and checks every file against it.
    pub(super) fn verify(folder: &Path) -> Result<()> {
        let manifest = Self::read(folder)?;
        manifest.files.iter().try_for_each(|(name, entry)| entry.check(&folder.join(name)))
    }

    /// As [`Self::verify`] for one file; nothing is checked in a folder without a manifest.
    pub(super) fn verify_file(folder: &Path, name: &str) -> Result<()> {
        if !folder.join(MANIFEST).exists() {
            return Ok(());
        }
        let path = folder.join(name);
        match Self::read(folder)?.files.get(name) {
            Some(entry) => entry.check(&path),
            None => Err(TrainError::checkpoint(path, "the manifest does not list it")),
        }
    }
}

impl FileEntry {
    /// Checks a file against what was written down of it.
    fn check(&self, path: &Path) -> Result<()> {
        let found = describe(path).map_err(|error| TrainError::checkpoint(path, error))?;
        if found == *self {
            return Ok(());
        }
        let problem = format!(
            "damaged: {} bytes with blake3 {}, the manifest says {} bytes with {}",
            found.bytes, found.blake3, self.bytes, self.blake3
        );
        Err(TrainError::checkpoint(path, problem))
    }
}

/// Whether a file is to be seen; network file systems may show it late.
fn appears(path: &Path) -> bool {
    let started = Instant::now();
    loop {
        if path.is_file() {
            return true;
        }
        if started.elapsed() > LATEST {
            return false;
        }
        std::thread::sleep(LATEST / 100);
    }
}

fn describe(path: &Path) -> std::io::Result<FileEntry> {
    let mut hasher = blake3::Hasher::new();
    let mut file = std::fs::File::open(path)?;
    let bytes = std::io::copy(&mut file, &mut hasher)?;
    Ok(FileEntry { bytes, blake3: hasher.finalize().to_hex().to_string() })
}
