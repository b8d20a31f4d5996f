//! Exports and their checks, as JSON.

use std::path::PathBuf;

use longdraft::{ExportOptions, Stop, VerifyOptions, choice};
use pyo3::prelude::*;
use serde_json::json;

use crate::keywords::{given, read};
use crate::models::Draft;
use crate::running::run;

/// Writes a draft for engines; returns the folders.
#[pyfunction]
pub(crate) fn export(
    py: Python<'_>,
    draft: &Draft,
    to: Vec<String>,
    output: PathBuf,
    exporting: Bound<'_, PyAny>,
) -> PyResult<String> {
    let options = ExportOptions {
        target: given(&exporting, "target")?,
        target_name: given(&exporting, "target_name")?,
        dtype: read(&exporting, "dtype", choice)?,
        no_embed: given(&exporting, "no_embed")?,
        draft_len: given(&exporting, "draft_len")?,
        strict: given(&exporting, "strict")?,
    };
    let draft = draft.0.clone();
    run(py, &Stop::new(), move || {
        let engines: Vec<&str> = to.iter().map(String::as_str).collect();
        Ok(json!(longdraft::export(&draft, &engines, output, &options)?).to_string())
    })
}

/// Checks exported folders; returns what was found out.
#[pyfunction]
pub(crate) fn verify(
    py: Python<'_>,
    folder: PathBuf,
    verifying: Bound<'_, PyAny>,
) -> PyResult<String> {
    let options = VerifyOptions {
        profile: given(&verifying, "profile")?,
        target: given(&verifying, "target")?,
        checkpoint: given(&verifying, "checkpoint")?,
        decode: given(&verifying, "decode")?,
        strict: given(&verifying, "strict")?,
    };
    run(py, &Stop::new(), move || Ok(json!(longdraft::verify(folder, &options)?).to_string()))
}
