//! `longdraft extract`: draft weights out of a checkpoint.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use longdraft_models::draft::TOKEN_COUNTS_FILE;
use longdraft_models::draft::glide::DRAFT_FILE;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_train::checkpoint::{LAST, PREVIOUS, read_draft, read_state};
use serde_json::json;

use crate::cli::ExtractArguments;
use crate::failure::{Failure, Result};

/// Writes the draft's folder.
pub(crate) fn run(arguments: &ExtractArguments, json: bool) -> Result<()> {
    let (checkpoint, run) = find(&arguments.checkpoint)?;
    let output = arguments.output.clone().unwrap_or_else(|| run.join("draft"));
    let tensors = extract(&checkpoint, &output)?;
    if json {
        outln!("{}", json!({"output": output, "tensors": tensors}));
    } else {
        outln!("wrote {tensors} tensors to {}", output.join(DRAFT_FILE).display());
    }
    Ok(())
}

/// Writes weights, configuration and tokenizer of a checkpoint; returns the number of tensors.
pub(crate) fn extract(checkpoint: &Path, output: &Path) -> Result<usize> {
    let state = read_state(checkpoint)?;
    let tensors = read_draft(checkpoint)?;
    std::fs::create_dir_all(output)
        .map_err(|error| Failure::work(format!("{}: {error}", output.display())))?;
    state.method.write(output, &state.draft, &tensors, &state.target_fingerprint)?;
    TextTokenizer::from_folder(checkpoint)?.save(output)?;
    let counts = checkpoint.join(TOKEN_COUNTS_FILE);
    if counts.is_file() {
        std::fs::copy(&counts, output.join(TOKEN_COUNTS_FILE))
            .map_err(|error| Failure::work(format!("{}: {error}", output.display())))?;
    }
    Ok(tensors.len())
}

/// The checkpoint itself and the run directory it belongs to.
pub(crate) fn find(path: &Path) -> Result<(PathBuf, PathBuf)> {
    // A folder that cannot be looked into is not one without checkpoints.
    let holds = |folder: &Path| {
        let state = folder.join("state.json");
        let found = match state.try_exists() {
            Err(error) if error.kind() == ErrorKind::NotADirectory => Ok(false),
            found => found,
        };
        found.map_err(|error| Failure::work(format!("{}: {error}", state.display())))
    };
    if holds(path)? {
        let run = path.parent().and_then(Path::parent).unwrap_or(path);
        return Ok((path.to_path_buf(), run.to_path_buf()));
    }
    for name in [LAST, PREVIOUS] {
        let checkpoint = path.join("checkpoints").join(name);
        if holds(&checkpoint)? {
            return Ok((checkpoint, path.to_path_buf()));
        }
    }
    Err(Failure::usage(format!("{}: no checkpoint is there", path.display()))
        .hint("give a run directory of `longdraft train`, or one of its checkpoints/*"))
}
