//! GGUF files: headers read within the file's bounds, and files of our own. What a target's file
//! holds is known by [`crate::target_model::gguf`].

mod element;
pub mod header;
pub(crate) mod split;
pub mod write;

use std::path::{Path, PathBuf};

/// Stored row of each half-split row, and back: inside a head, stored row `2i + s` is half-split row
/// `s·D/2 + i`.
pub fn half_split_row(stored: usize, head_dim: usize) -> usize {
    let (head, within) = (stored / head_dim, stored % head_dim);
    head * head_dim + within % 2 * (head_dim / 2) + within / 2
}

/// Files of a folder that end in `.gguf`; of a model in parts the first one.
pub fn gguf_files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "gguf"))
        .filter(|path| !split::follows(path))
        .collect();
    files.sort();
    files
}
