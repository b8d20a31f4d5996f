//! From what a user typed to a folder or file on this machine.

use std::path::{Path, PathBuf};

use hf_hub::api::sync::{ApiBuilder, ApiRepo};

use crate::error::{ModelError, Result};

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
    let path = Path::new(spec);
    if path.exists() {
        return Ok(path.to_path_buf());
    }
    if !is_hub_id(spec) {
        return Err(ModelError::unrecognised(
            path,
            "no such file or folder (a hub model is written `org/name`)",
        ));
    }
    let fail = |error: &dyn std::fmt::Display| ModelError::Hub {
        repo: spec.to_owned(),
        reason: error.to_string(),
    };
    // From the environment: HF_HOME for the cache, HF_ENDPOINT for a mirror.
    let api = ApiBuilder::from_env().with_progress(false).build().map_err(|error| fail(&error))?;
    let repo = api.model(spec.to_owned());
    let info = repo.info().map_err(|error| fail(&error))?;
    let names: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
    fetch(&repo, &names).map_err(|error| fail(&error))
}

fn fetch(repo: &ApiRepo, names: &[String]) -> std::result::Result<PathBuf, String> {
    let wanted = |name: &&String| {
        let is_weight =
            Path::new(name).extension().is_some_and(|e| e == "safetensors") && !name.contains('/');
        SMALL_FILES.contains(&name.as_str())
            || is_weight
            || name.as_str() == "model.safetensors.index.json"
    };
    let mut folder = None;
    for name in names.iter().filter(wanted) {
        let path = repo.get(name).map_err(|error| format!("{name}: {error}"))?;
        folder = path.parent().map(Path::to_path_buf);
    }
    folder.ok_or_else(|| "it holds no configuration or safetensors weights".to_owned())
}

/// `org/name` with the characters that the hub allows.
fn is_hub_id(spec: &str) -> bool {
    let part = |text: &str| {
        !text.is_empty()
            && !text.starts_with(['.', '-'])
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
    };
    spec.split_once('/').is_some_and(|(org, name)| part(org) && part(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_org_and_name_is_a_hub_id() {
        assert!(is_hub_id("Qwen/Qwen2.5-0.5B"));
        for spec in ["model", "/abs/path", "../up", "a/b/c", "./a", "a/", "a/.."] {
            assert!(!is_hub_id(spec), "{spec}");
        }
    }

    #[test]
    fn a_missing_path_is_named() {
        let message = locate("no/such/folder").expect_err("missing").to_string();
        assert!(message.contains("no/such/folder"), "{message}");
    }
}
