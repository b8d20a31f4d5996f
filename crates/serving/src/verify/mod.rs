//! The offline validator: what is wrong with an exported folder, and what each engine would do.
//!
//! Everything is read, nothing is run, and every finding is listed: with its place, what was
//! expected, the engines' behaviour and the way out. Files come first, then keys, tensors,
//! vocabulary, layers, the target's side, and last the network itself on a fixed input.

mod files;
mod round_trip;
mod target;

use std::collections::BTreeMap;
use std::path::Path;

use longdraft_models::paths::folder_of;

pub use crate::checks::{Effect, Problem, Report, Severity, Verdict};

use crate::checks::{Checks, gguf};
use crate::error::{Result, ServingError};
use crate::formats;
use crate::manifest::{MANIFEST_FILE, Manifest};
use crate::parity::ParityVector;
use crate::profile::Profile;
use crate::target::TargetFacts;

/// What to check a folder against.
#[derive(Default)]
pub struct VerifyOptions<'a> {
    /// What it is for; by default what its manifest or its files say.
    pub profile: Option<Profile>,
    /// The target that it drafts for.
    pub target: Option<&'a TargetFacts>,
    /// What the checkpoint that it was made from computes, weights rounded likewise.
    pub checkpoint: Option<ParityVector>,
}

/// Checks a folder, or a GGUF file.
///
/// # Errors
/// - there is nothing to read, or something in it is neither file nor folder; whatever else is wrong with what is there
///   stands in the report
pub fn verify(path: &Path, options: &VerifyOptions<'_>) -> Result<Report> {
    require_files(path)?;
    let folder = folder_of(path);
    std::fs::read_dir(folder).map_err(ServingError::io(folder))?;
    let manifest = std::fs::read_to_string(folder.join(MANIFEST_FILE)).ok();
    let parsed = manifest.as_ref().map(|text| serde_json::from_str::<Manifest>(text));
    let (manifest, unusable) = match parsed.transpose() {
        Ok(manifest) => (manifest, None),
        Err(error) => (None, Some(error.to_string())),
    };
    let config = files::peek(folder);
    let profile = options
        .profile
        .or(manifest.as_ref().map(|manifest| manifest.profile))
        .unwrap_or_else(|| files::guess(path, &config));
    let mut checks = Checks {
        folder: folder.to_path_buf(),
        profile,
        target: options.target,
        manifest,
        config,
        sizes: None,
        tensors: BTreeMap::new(),
        problems: Vec::new(),
    };
    if let Some(reason) = unusable {
        let problem =
            Problem::new(Severity::Warning, "manifest", MANIFEST_FILE, reason, "a manifest");
        checks
            .push(problem.remedy("export again: layers and outputs cannot be compared without it"));
    }
    if profile != Profile::Llamacpp {
        files::check(&mut checks);
    }
    let format = if profile == Profile::Llamacpp {
        let method = checks.manifest.as_ref().map(|manifest| manifest.method.as_str());
        formats::recognised_gguf(gguf::architecture(path).as_deref(), method)
    } else {
        formats::recognised(profile, &checks.config)
    };
    let runs = format.check(&mut checks, path);
    target::check(&mut checks, path);
    let parity = if runs { round_trip::check(&mut checks, format, options) } else { None };
    Ok(Report::of(profile, checks.problems, parity))
}

/// Refuses a folder that holds pipes or devices: to read one might never end.
fn require_files(path: &Path) -> Result<()> {
    let within = if path.is_dir() {
        let entries = std::fs::read_dir(path).map_err(ServingError::io(path))?;
        entries.flatten().map(|entry| entry.path()).collect()
    } else {
        vec![path.to_path_buf()]
    };
    let is_other = |at: &Path| at.metadata().is_ok_and(|found| !found.is_file() && !found.is_dir());
    match within.into_iter().find(|at| is_other(at)) {
        Some(other) => {
            let problem = std::io::Error::other("neither a file nor a folder: remove it");
            Err(ServingError::io(other)(problem))
        }
        None => Ok(()),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_is_named_and_not_waited_for() {
        let folder = tempfile::tempdir().expect("folder");
        let socket = folder.path().join(MANIFEST_FILE);
        let _socket = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
        for path in [folder.path(), &socket] {
            let error = verify(path, &VerifyOptions::default()).expect_err("refused");
            let text = error.to_string();
            assert!(text.contains(MANIFEST_FILE) && text.contains("neither a file"), "{text}");
        }
    }
}
