//! From what a user typed to a folder or file on this machine.

use std::path::{Path, PathBuf};

use crate::error::{ModelError, Result};
use crate::hub::{Kind, Repository, is_repository};

/// Files that a target folder may hold beside its weights.
const SMALL_FILES: [&str; 5] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
];

/// An existing path as it is; otherwise `org/name` is fetched from the Hugging Face hub (into the
/// hub's own cache folder) and the path of its snapshot is returned.
///
/// # Errors
/// - neither a path nor a hub id, or the hub cannot deliver
pub fn locate(spec: &str) -> Result<PathBuf> {
    located(spec, true)
}

/// As [`locate`], but of a hub model only configuration and tokenizer are fetched.
///
/// # Errors
/// - as [`locate`]
pub(super) fn locate_description(spec: &str) -> Result<PathBuf> {
    located(spec, false)
}

fn located(spec: &str, with_weights: bool) -> Result<PathBuf> {
    let path = Path::new(spec);
    if path.exists() {
        return Ok(path.to_path_buf());
    }
    if !is_repository(spec) {
        return Err(ModelError::unrecognised(
            path,
            "no such file or folder (a hub model is written `org/name`)",
        ));
    }
    let repo = Repository::open(Kind::Model, spec, "main")?;
    let listing = repo.listing()?;
    let wanted = |name: &&String| is_wanted(name, with_weights);
    let wanted: Vec<String> = listing.names.iter().filter(wanted).cloned().collect();
    let paths = repo.files(&listing, &wanted)?;
    let folder = paths.first().and_then(|path| path.parent());
    folder
        .map(Path::to_path_buf)
        .ok_or_else(|| repo.error("it holds no configuration or safetensors weights"))
}

fn is_wanted(name: &str, with_weights: bool) -> bool {
    let is_weight =
        Path::new(name).extension().is_some_and(|e| e == "safetensors") && !name.contains('/');
    SMALL_FILES.contains(&name)
        || (with_weights && (is_weight || name == "model.safetensors.index.json"))
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
