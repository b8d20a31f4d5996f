//! GGUF files: headers read within the file's bounds, and files of our own. What a target's file
//! holds is known by [`crate::target::gguf`].

pub mod header;
pub mod write;

use std::path::{Path, PathBuf};

/// Files of a folder that end in `.gguf`.
pub(crate) fn gguf_files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "gguf"))
        .collect();
    files.sort();
    files
}
