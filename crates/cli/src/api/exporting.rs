//! Drafts for serving engines, and what is wrong with them.

use std::path::{Path, PathBuf};

use super::error::Result;
use super::models::Draft;
use crate::cli::{ExportArguments, ExportOptions, VerifyArguments};
use crate::commands::{export as writing, verify as checking};

pub use crate::commands::export::ExportedFolder;
pub use crate::commands::verify::Finding;

/// Writes a draft as serving engines read it; several go to folders of their names below `output`.
///
/// # Errors
/// - an engine is not known, does not compute this draft, or the target is not known
/// - `output` holds something else
pub fn export(
    draft: &Draft,
    to: &[&str],
    output: impl AsRef<Path>,
    options: &ExportOptions,
) -> Result<Vec<ExportedFolder>> {
    let arguments = ExportArguments {
        draft: draft.path.clone(),
        to: to.iter().map(|name| (*name).to_owned()).collect(),
        output: output.as_ref().to_path_buf(),
        options: options.clone(),
    };
    let mut folders = Vec::new();
    writing::each(&arguments, &mut |folder| folders.push(folder))?;
    Ok(folders)
}

/// What an export is checked against.
#[derive(Debug, Clone, Default)]
pub struct VerifyOptions {
    /// What it is for; by default what its manifest or its files say.
    pub profile: Option<String>,
    /// The target that it drafts for.
    pub target: Option<String>,
    /// What it was made from; needs the target.
    pub checkpoint: Option<PathBuf>,
    /// Decode so many tokens with both and compare tau; needs the checkpoint.
    pub decode: Option<usize>,
    /// Warnings count as errors.
    pub strict: bool,
}

/// Checks an exported folder, or those in a folder, without any engine.
///
/// # Errors
/// - there is nothing to read; what is wrong with what is there stands in the findings
pub fn verify(folder: impl AsRef<Path>, options: &VerifyOptions) -> Result<Vec<Finding>> {
    let arguments = VerifyArguments {
        folder: folder.as_ref().to_path_buf(),
        profile: options.profile.clone(),
        target: options.target.clone(),
        checkpoint: options.checkpoint.clone(),
        decode: options.decode,
        strict: options.strict,
        ..VerifyArguments::default()
    };
    let mut findings = Vec::new();
    checking::each(&arguments, &mut |finding, _| findings.push(finding))?;
    Ok(findings)
}
