//! Exports and their checks, as JSON.

use std::path::PathBuf;

use longdraft::{ExportOptions, Stop, VerifyOptions, choice};
use pyo3::prelude::*;
use serde_json::json;

use crate::errors::raised;
use crate::models::Draft;
use crate::running::run;

/// Keyword arguments about an export.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Exporting {
    target: Option<String>,
    target_name: Option<String>,
    dtype: Option<String>,
    no_embed: bool,
    draft_len: Option<usize>,
    strict: bool,
}

/// Writes a draft for engines; returns the folders.
#[pyfunction]
pub(crate) fn export(
    py: Python<'_>,
    draft: &Draft,
    to: Vec<String>,
    output: PathBuf,
    exporting: Exporting,
) -> PyResult<String> {
    let dtype = exporting.dtype.as_deref().map(|dtype| choice("dtype", dtype)).transpose();
    let options = ExportOptions {
        target: exporting.target,
        target_name: exporting.target_name,
        dtype: dtype.map_err(raised)?,
        no_embed: exporting.no_embed,
        draft_len: exporting.draft_len,
        strict: exporting.strict,
    };
    let draft = draft.0.clone();
    run(py, &Stop::new(), move || {
        let engines: Vec<&str> = to.iter().map(String::as_str).collect();
        Ok(json!(longdraft::export(&draft, &engines, output, &options)?).to_string())
    })
}

/// Keyword arguments about a check.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Verifying {
    profile: Option<String>,
    target: Option<String>,
    checkpoint: Option<PathBuf>,
    decode: Option<usize>,
    strict: bool,
}

/// Checks exported folders; returns what was found out.
#[pyfunction]
pub(crate) fn verify(py: Python<'_>, folder: PathBuf, verifying: Verifying) -> PyResult<String> {
    let Verifying { profile, target, checkpoint, decode, strict } = verifying;
    let options = VerifyOptions { profile, target, checkpoint, decode, strict };
    run(py, &Stop::new(), move || Ok(json!(longdraft::verify(folder, &options)?).to_string()))
}
