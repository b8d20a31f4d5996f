//! From what a user typed to a folder or file on this machine.

use std::path::{Path, PathBuf};

use super::files;
use crate::config::TargetConfig;
use crate::error::{ModelError, Result};
use crate::hub::ModelId;
use crate::tokenizer::TextTokenizer;
use crate::weights::gguf::split::header_of_beginnings;

/// An existing path as it is; otherwise `org/name` or `org/name:QUANTISATION` is fetched from the Hugging
/// Face hub (into the hub's own cache folder), and the path of its snapshot or of its first GGUF file is
/// returned.
///
/// # Errors
/// - neither a path nor a hub id, or the hub cannot deliver
pub fn locate(spec: &str) -> Result<PathBuf> {
    match found(spec)? {
        Found::Here(path) => Ok(path),
        Found::Hub(id) => Ok(id.fetch(&mut |_| {})?.path),
    }
}

/// Configuration and tokenizer; of a hub model only these are fetched. Of GGUF files the headers' factors
/// of rotary frequencies are left out, which stand among the weights.
/// It fails as [`locate`] does, or where they are unusable.
pub(super) fn describe(spec: &str) -> Result<(TargetConfig, TextTokenizer)> {
    let of_folder = |path: &Path| Ok((files::open_config(path)?, files::open_tokenizer(path)?));
    let id = match found(spec)? {
        Found::Here(path) => return of_folder(&path),
        Found::Hub(id) => id,
    };
    id.describe(of_folder, |beginnings, last| {
        let header = match header_of_beginnings(beginnings) {
            Ok(header) => header,
            // It may be longer than what has arrived of it.
            Err(_) if !last && !is_whole(beginnings) => return Ok(None),
            Err(error) => return Err(error),
        };
        let path = beginnings.first().map_or(Path::new(""), |(path, _)| path);
        let config = TargetConfig::from_gguf(&header).map_err(ModelError::all_in(path))?;
        Ok(Some((config, TextTokenizer::from_gguf(&header, path)?)))
    })
}

fn is_whole(beginnings: &[(PathBuf, u64)]) -> bool {
    beginnings.iter().all(|(path, length)| path.metadata().is_ok_and(|file| file.len() == *length))
}

/// What a text names.
enum Found {
    Here(PathBuf),
    Hub(ModelId),
}

fn found(spec: &str) -> Result<Found> {
    let path = Path::new(spec);
    if path.exists() {
        return Ok(Found::Here(path.to_path_buf()));
    }
    ModelId::parse(spec).map(Found::Hub).ok_or_else(|| {
        ModelError::unrecognised(
            path,
            "no such file or folder (a hub model is written `org/name`, a GGUF file of one \
             `org/name:Q4_K_M`)",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_path_is_named() {
        let message = locate("no/such/folder").expect_err("missing").to_string();
        assert!(message.contains("no/such/folder"), "{message}");
    }
}
