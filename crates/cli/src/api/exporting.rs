//! Drafts for serving engines, and what is wrong with them.

use std::path::{Path, PathBuf};

use longdraft_serving::verify::Severity;
use serde::Serialize;

use super::error::Result;
use super::models::Draft;
use crate::cli::{ExportArguments, ExportOptions, VerifyArguments};
use crate::commands::{export as writing, verify as checking};

/// A folder that was written.
#[derive(Debug, Clone, Serialize)]
pub struct ExportedFolder {
    /// Engine it is for: `vllm`, `sglang`, ...
    pub profile: String,
    /// The folder.
    pub output: PathBuf,
    /// Tensors of the weight file.
    pub tensors: usize,
    /// Names.
    pub files: Vec<String>,
    /// What the engines of some version do not compute.
    pub warnings: Vec<String>,
    /// Engines with the command that serves it; `DIR` stands for the folder.
    pub serve: Vec<(String, String)>,
}

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
    writing::each(&arguments, &mut |written| {
        let serve = written.exported.manifest.serve.iter();
        folders.push(ExportedFolder {
            profile: written.profile.name().to_owned(),
            output: written.folder,
            tensors: written.exported.tensors,
            serve: serve.map(|(engine, command)| (engine.clone(), command.clone())).collect(),
            files: written.exported.files,
            warnings: written.exported.warnings,
        });
    })?;
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

/// What was found out about an exported folder.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// The folder.
    pub folder: PathBuf,
    /// Whether it may be served.
    pub clean: bool,
    /// Errors and warnings.
    pub counts: (usize, usize),
    /// Every finding with its remedy, and each engine's verdict.
    pub report: longdraft_serving::verify::Report,
    /// tau with the checkpoint and with the export, where both decoded.
    pub tau: Option<(f64, f64)>,
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
    checking::each(&arguments, &mut |folder, _, checked| {
        let report = checked.report.clone();
        findings.push(Finding {
            folder: folder.to_path_buf(),
            clean: checked.judge(options.strict).is_ok(),
            counts: (report.count(Severity::Error), report.count(Severity::Warning)),
            report,
            tau: checked.decoded,
        });
    })?;
    Ok(findings)
}
