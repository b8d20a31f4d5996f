//! Sizes and hashes of a checkpoint's files.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};

pub(super) const MANIFEST: &str = "manifest.json";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FileEntry {
    bytes: u64,
    blake3: String,
}

/// What a complete checkpoint consists of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    version: String,
    files: BTreeMap<String, FileEntry>,
}

impl Manifest {
    /// Describes every file of a folder.
    pub(super) fn of(folder: &Path) -> Result<Self> {
        let fail = |error: std::io::Error| TrainError::checkpoint(folder, error);
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir(folder).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name != MANIFEST {
                files.insert(name, describe(&entry.path()).map_err(fail)?);
            }
        }
        Ok(Self { version: env!("CARGO_PKG_VERSION").to_owned(), files })
    }

    /// Reads a folder's manifest and checks every file against it.
    pub(super) fn verify(folder: &Path) -> Result<()> {
        let path = folder.join(MANIFEST);
        let text =
            std::fs::read_to_string(&path).map_err(|error| TrainError::checkpoint(&path, error))?;
        let manifest: Self =
            serde_json::from_str(&text).map_err(|error| TrainError::checkpoint(&path, error))?;
        for (name, entry) in &manifest.files {
            let path = folder.join(name);
            let found = describe(&path).map_err(|error| TrainError::checkpoint(&path, error))?;
            if found != *entry {
                let problem = format!(
                    "damaged: {} bytes with blake3 {}, the manifest says {} bytes with {}",
                    found.bytes, found.blake3, entry.bytes, entry.blake3
                );
                return Err(TrainError::checkpoint(path, problem));
            }
        }
        Ok(())
    }
}

fn describe(path: &Path) -> std::io::Result<FileEntry> {
    let mut hasher = blake3::Hasher::new();
    let mut file = std::fs::File::open(path)?;
    let bytes = std::io::copy(&mut file, &mut hasher)?;
    Ok(FileEntry { bytes, blake3: hasher.finalize().to_hex().to_string() })
}
