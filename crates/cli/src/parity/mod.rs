//! Recomputing reference cases: `meta.json` names the kind, the files hold inputs and the values
//! that a correct implementation must get.

mod eagle3;
mod forward;
mod glide;
mod pretrain;

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};

use crate::failure::{Failure, Result};

/// One compared quantity.
#[derive(Debug, Clone)]
pub(crate) struct Check {
    pub(crate) name: String,
    pub(crate) error: f64,
    pub(crate) tolerance: f64,
}

impl Check {
    /// NaN never passes.
    pub(crate) fn pass(&self) -> bool {
        self.error <= self.tolerance
    }
}

/// What became of one case.
#[derive(Debug)]
pub(crate) struct CaseReport {
    pub(crate) case: String,
    pub(crate) kind: &'static str,
    pub(crate) checks: Vec<Check>,
    /// Largest relative errors, where a kind has them.
    pub(crate) loss_error: Option<f64>,
    pub(crate) grad_error: Option<f64>,
    pub(crate) weight_error: Option<f64>,
}

impl CaseReport {
    fn new(case: &str, kind: &'static str) -> Self {
        let case = case.to_owned();
        Self {
            case,
            kind,
            checks: Vec::new(),
            loss_error: None,
            grad_error: None,
            weight_error: None,
        }
    }

    pub(crate) fn pass(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(Check::pass)
    }

    fn check(&mut self, name: impl Into<String>, error: f64, tolerance: f64) {
        self.checks.push(Check { name: name.into(), error, tolerance });
    }

    /// Counts mismatches; only none passes.
    fn check_equal<T: PartialEq>(&mut self, name: impl Into<String>, got: &[T], want: &[T]) {
        let differing = got.iter().zip(want).filter(|(a, b)| a != b).count();
        let error = differing + got.len().abs_diff(want.len());
        self.check(name, error as f64, 0.0);
    }

    pub(crate) fn to_json(&self) -> Value {
        // JSON has no infinity or NaN: they become null, and the check fails all the same.
        let checks: Vec<Value> = self
            .checks
            .iter()
            .map(|check| {
                json!({
                    "name": check.name, "error": check.error, "tolerance": check.tolerance,
                    "pass": check.pass()
                })
            })
            .collect();
        json!({
            "case": self.case, "kind": self.kind, "pass": self.pass(),
            "loss_error": self.loss_error, "grad_error": self.grad_error,
            "weight_error": self.weight_error, "checks": checks
        })
    }
}

/// Runs the case in `folder` on `device`; `target` holds the weights of kinds that do not carry them.
pub(crate) fn run_case(
    folder: &Path,
    target: Option<&Path>,
    device: &Device,
) -> Result<CaseReport> {
    let path = folder.join("meta.json");
    let text = std::fs::read_to_string(&path)
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    let meta: Value = serde_json::from_str(&text)
        .map_err(|error| Failure::usage(format!("{}: not JSON: {error}", path.display())))?;
    let name = folder.canonicalize().ok();
    let name = name.as_deref().unwrap_or(folder).file_name().unwrap_or_default();
    let name = meta["case"].as_str().map_or_else(|| name.to_string_lossy().into(), str::to_owned);
    match meta["kind"].as_str() {
        Some("eagle3") => eagle3::run(folder, &meta, &name, device),
        Some("glide") => glide::run(folder, &meta, &name, device),
        Some("pretrain") => pretrain::run(folder, &meta, &name, device),
        Some("pretrain-units") => pretrain::run_units(folder, &meta, &name),
        Some("forward") => forward::run(folder, &meta, &name, target, device),
        Some(kind) => Err(Failure::usage(format!("{}: unknown kind `{kind}`", path.display()))
            .hint(
                "this build knows the kinds eagle3, glide, pretrain, pretrain-units and forward",
            )),
        None => Err(Failure::usage(format!("{}: `kind` is missing", path.display()))),
    }
}

/// A malformed case.
fn malformed(folder: &Path, problem: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("{}: {problem}", folder.display()))
}

/// `max |a − b| / max |b|`; infinite if shapes differ, NaN if a value is.
fn relative_error(a: &Tensor, b: &Tensor) -> Result<f64> {
    let (absolute, largest) = absolute_error(a, b)?;
    Ok(if largest > 0.0 { absolute / largest } else { absolute })
}

/// `max |a − b|` and `max |b|`.
fn absolute_error(a: &Tensor, b: &Tensor) -> Result<(f64, f64)> {
    if a.dims() != b.dims() {
        return Ok((f64::INFINITY, 1.0));
    }
    let flat = |t: &Tensor| on_host(t)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
    let (a, b) = (flat(a)?, flat(b)?);
    let mut worst = 0.0_f64;
    let mut largest = 0.0_f64;
    for (x, y) in a.iter().zip(&b) {
        let difference = (x - y).abs();
        if difference.is_nan() {
            return Ok((f64::NAN, 1.0));
        }
        worst = worst.max(difference);
        largest = largest.max(y.abs());
    }
    Ok((worst, largest))
}

/// A tensor where values are compared: not every device has f64.
fn on_host(tensor: &Tensor) -> candle_core::Result<Tensor> {
    tensor.to_device(&Device::Cpu)
}

/// The larger error; NaN stays.
fn worst(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// `|a − b| / |b|`.
fn relative(a: f64, b: f64) -> f64 {
    if b == 0.0 { (a - b).abs() } else { (a - b).abs() / b.abs() }
}
