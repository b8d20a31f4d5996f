//! Kinds `pretrain` (steps, artifact and scores of a small decoder) and `pretrain-units` (tables of
//! single functions). Tolerances are those of the cases' README.

mod artifact;
mod case;
mod scores;
mod steps;
mod units;

use std::path::Path;

use serde_json::Value;

use super::{CaseReport, Place};
use crate::error::Result;

pub(super) use units::run as run_units;

use case::Case;

/// Recomputes every part that the case has.
pub(super) fn run(folder: &Path, meta: &Value, name: &str, place: &Place) -> Result<CaseReport> {
    let case = Case::open(folder, meta)?;
    let mut report = CaseReport::new(name, "pretrain");
    steps::check(&case, place, &mut report)?;
    if folder.join("weights_trained.safetensors").is_file() {
        let dequantised = if meta["int8"].is_object() {
            Some(artifact::check(&case, &mut report)?)
        } else {
            None
        };
        if meta["eval"].is_object() {
            scores::check(&case, dequantised.as_ref(), place, &mut report)?;
        }
    }
    Ok(report)
}
