//! Which file of a folder holds a draft's weights.

use std::path::{Path, PathBuf};

use super::eagle3::gguf_file::GgufDraftSource;
use crate::error::{ModelError, Result};
use crate::weights::WeightSource;
use crate::weights::gguf::gguf_files;
use crate::weights::pth::PthSource;
use crate::weights::safetensors::SafetensorsSource;

/// Name of the draft file.
pub const DRAFT_FILE: &str = "draft_model_weights.safetensors";

/// How often each token was supervised in training (`TokenCounts::to_text`), beside a draft's
/// weights and in checkpoints.
pub const TOKEN_COUNTS_FILE: &str = "token_counts.txt";

/// Name of the same tensors in PyTorch's format.
pub const PTH_FILE: &str = "draft_model_weights.pth";

/// Files that hold a draft in a folder, the first that is there.
const NAMES: [&str; 4] = [DRAFT_FILE, "model.safetensors", PTH_FILE, "pytorch_model.bin"];

/// Names the shards of a folder.
const INDEX: &str = "model.safetensors.index.json";

/// The GGUF file that a path is, or that a folder holds as its only model.
pub(super) fn gguf_of(path: &Path) -> Option<PathBuf> {
    if path.is_file() {
        return path.extension().is_some_and(|e| e == "gguf").then(|| path.to_path_buf());
    }
    let plain = NAMES.iter().chain(&[INDEX]).any(|name| path.join(name).is_file());
    match gguf_files(path).as_slice() {
        [one] if !plain => Some(one.clone()),
        _ => None,
    }
}

/// Whether a folder holds weights in a file of a name that [`open_weights`] takes.
pub fn holds_draft(folder: &Path) -> bool {
    let plain = NAMES.iter().chain(&[INDEX]).any(|name| folder.join(name).is_file());
    plain || (folder.is_dir() && gguf_of(folder).is_some())
}

/// Opens a draft's weight file, or the one that a folder holds: whole, in shards, PyTorch's, GGUF.
///
/// # Errors
/// - none is there, or it is unusable
pub fn open_weights(path: &Path) -> Result<Box<dyn WeightSource>> {
    if let Some(file) = gguf_of(path) {
        return Ok(Box::new(GgufDraftSource::open(&file)?));
    }
    if !path.is_dir() {
        return open_file(path);
    }
    let found = NAMES.iter().map(|name| path.join(name)).find(|file| file.is_file());
    match found {
        Some(file) => open_file(&file),
        None if path.join(INDEX).is_file() => Ok(Box::new(SafetensorsSource::open_folder(path)?)),
        None => {
            let problem = format!("no draft is there ({}, {INDEX}, *.gguf)", NAMES.join(", "));
            Err(ModelError::unrecognised(path, problem))
        }
    }
}

fn open_file(file: &Path) -> Result<Box<dyn WeightSource>> {
    Ok(match file.extension().and_then(|extension| extension.to_str()) {
        Some("pth" | "pt" | "bin") => Box::new(PthSource::open(file)?),
        // Caches have names of their own.
        Some("safetensors") | None => Box::new(SafetensorsSource::open_file(file)?),
        Some(_) if !file.exists() => Box::new(SafetensorsSource::open_file(file)?),
        Some(_) => {
            let problem = "no draft: these are .safetensors, .pth, .pt, .bin or .gguf files";
            return Err(ModelError::unrecognised(file, problem));
        }
    })
}
