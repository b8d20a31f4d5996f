//! Which file of a folder holds a draft's weights.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use serde_json::Value;

use super::kinds;
use crate::error::{ModelError, Result};
use crate::side_files;
use crate::weights::atomic::write_atomically;
use crate::weights::gguf::gguf_files;
use crate::weights::pth::PthSource;
use crate::weights::safetensors::{INDEX, SafetensorsSource};
use crate::weights::{WeightSource, pth, safetensors};

/// Name of the draft file.
pub const DRAFT_FILE: &str = "draft_model_weights.safetensors";

/// How often each token was supervised in training (`TokenCounts::to_text`), beside a draft's
/// weights and in checkpoints.
pub const TOKEN_COUNTS_FILE: &str = "token_counts.txt";

/// Name of the same tensors in PyTorch's format.
pub const PTH_FILE: &str = "draft_model_weights.pth";

/// Files that hold a draft in a folder, the first that is there.
const NAMES: [&str; 4] = [DRAFT_FILE, "model.safetensors", PTH_FILE, "pytorch_model.bin"];

/// The GGUF file that a path is, or that a folder holds as its only model.
pub(super) fn gguf_of(path: &Path) -> Option<PathBuf> {
    if path.is_file() {
        return path.extension().is_some_and(|e| e == "gguf").then(|| path.to_path_buf());
    }
    let plain = holds_plain(path);
    match gguf_files(path).as_slice() {
        [one] if !plain => Some(one.clone()),
        _ => None,
    }
}

/// Whether a folder holds weights in a file of a name that [`open_weights`] takes.
pub fn holds_draft(folder: &Path) -> bool {
    holds_plain(folder) || (folder.is_dir() && gguf_of(folder).is_some())
}

/// Whether a folder holds weights in another format than GGUF.
fn holds_plain(folder: &Path) -> bool {
    NAMES.iter().chain(&[INDEX]).any(|name| folder.join(name).is_file())
}

/// Opens a draft's weight file, or the one that a folder holds: whole, in shards, PyTorch's, GGUF.
///
/// # Errors
/// - none is there, or it is unusable
pub fn open_weights(path: &Path) -> Result<Box<dyn WeightSource>> {
    if let Some(file) = gguf_of(path) {
        return kinds::open_gguf(&file);
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

/// A trained draft to go on from: its weights, with what is said of its network.
#[derive(Debug, Clone)]
pub struct SavedDraft {
    /// Weight file, or a folder that holds one.
    pub path: PathBuf,
    /// What the draft's `config.json` says, where it is known.
    pub config: Option<Value>,
}

impl SavedDraft {
    /// The draft of a folder or a weight file, with the `config.json` there.
    pub fn at(path: &Path) -> Self {
        Self { path: path.to_path_buf(), config: config_beside(path) }
    }
}

/// The `config.json` beside a draft's weights; `None` if it is missing or no JSON.
pub(super) fn config_beside(path: &Path) -> Option<Value> {
    read_json(&folder_beside(path).join("config.json")).ok()
}

/// The folder that a draft is, or in which its file lies or would lie.
pub(super) fn folder_beside(path: &Path) -> &Path {
    if path.is_dir() { path } else { path.parent().unwrap_or(path) }
}

/// What stands before the plain name `known` in a file's names: one of `prefixes`, or nothing.
pub(super) fn prefix_before(
    known: &str,
    names: &[String],
    prefixes: &[&'static str],
) -> &'static str {
    let is_known = |name: &String, prefix: &str| name.strip_prefix(prefix) == Some(known);
    let holds = |prefix: &&&str| names.iter().any(|name| is_known(name, prefix));
    prefixes.iter().find(holds).copied().unwrap_or("")
}

/// Reads a file of JSON.
pub(crate) fn read_json(file: &Path) -> Result<Value> {
    let text = side_files::read_text(file)?;
    serde_json::from_str(&text).map_err(|error| ModelError::invalid(file, error))
}

/// Fingerprint of the target that a draft folder or file says it was trained for.
pub fn trained_for(path: &Path) -> Option<String> {
    config_beside(path)?["target_fingerprint"].as_str().map(str::to_owned)
}

/// Writes a draft's tensors as [`DRAFT_FILE`] and [`PTH_FILE`], with its `config.json`.
///
/// # Errors
/// - the folder cannot be written
pub fn save_draft(
    folder: &Path,
    mut config: Value,
    mut metadata: HashMap<String, String>,
    tensors: &[(String, Tensor)],
    target_fingerprint: &str,
) -> Result<()> {
    metadata.insert("format".to_owned(), "pt".to_owned());
    metadata.insert("target_fingerprint".to_owned(), target_fingerprint.to_owned());
    safetensors::save(&folder.join(DRAFT_FILE), tensors, metadata)?;
    pth::save(&folder.join(PTH_FILE), tensors)?;
    config["target_fingerprint"] = target_fingerprint.into();
    write_atomically(&folder.join("config.json"), format!("{config:#}\n").as_bytes())
}

fn open_file(file: &Path) -> Result<Box<dyn WeightSource>> {
    Ok(match file.extension().and_then(|extension| extension.to_str()) {
        Some("pth" | "pt" | "bin") => Box::new(PthSource::open(file)?),
        // Caches have names of their own.
        Some("safetensors") | None => Box::new(SafetensorsSource::open_file(file)?),
        Some(_) if !file.exists() => Box::new(SafetensorsSource::open_file(file)?),
        Some(_) => {
            let problem = "not a draft: these are .safetensors, .pth, .pt, .bin or .gguf files";
            return Err(ModelError::unrecognised(file, problem));
        }
    })
}
