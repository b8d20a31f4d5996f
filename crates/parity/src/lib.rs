//! Recomputing reference cases: `meta.json` names the kind, the files hold inputs and the values
//! that a correct implementation must get.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod block;
mod eagle3;
mod error;
mod forward;
mod glide;
mod pretrain;
mod quants;
mod training;

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_models::device::Precision;
use longdraft_models::target_model::TargetOptions;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use serde_json::{Value, json};

pub use error::{ParityError, Result};

use training::ROUNDED;

/// Kinds of cases, as `meta.json` names them.
const KINDS: &str =
    "dflash, dflash2, dspark, eagle3, glide, pretrain, pretrain-units, quants and forward";

/// Where and in which precision cases are recomputed.
#[derive(Debug)]
pub struct Place {
    device: Device,
    /// Type of what is frozen.
    frozen: DType,
}

impl Place {
    /// From here on the process multiplies as `precision` says.
    pub fn new(device: Device, precision: Precision) -> Self {
        let frozen = precision.apply(&device);
        Self { device, frozen }
    }

    /// How a target is opened there.
    fn target_options(&self) -> TargetOptions {
        let (device, dtype) = (self.device.clone(), self.frozen);
        TargetOptions { device, dtype, ..TargetOptions::default() }
    }

    /// Whether 16-bit values enter what the cases hold in f32.
    fn rounds(&self) -> bool {
        self.frozen != DType::F32
    }

    /// The tolerance of this precision, of those in f32 and with 16-bit values.
    fn allowed(&self, single: f64, half: f64) -> f64 {
        if self.rounds() { half.max(single) } else { single }
    }
}

/// One compared quantity.
#[derive(Debug, Clone)]
pub struct Check {
    /// What is compared.
    pub name: String,
    /// How far it is off, or how many values are.
    pub error: f64,
    /// How far it may be.
    pub tolerance: f64,
}

impl Check {
    /// NaN never passes.
    pub fn pass(&self) -> bool {
        self.error <= self.tolerance
    }
}

/// What became of one case.
#[derive(Debug)]
pub struct CaseReport {
    /// Its name.
    pub case: String,
    /// Its kind, as `meta.json` names it.
    pub kind: &'static str,
    /// In the order in which they were made.
    pub checks: Vec<Check>,
    /// Largest relative errors, where a kind has them.
    loss_error: Option<f64>,
    grad_error: Option<f64>,
    weight_error: Option<f64>,
}

impl CaseReport {
    fn new(case: &str, kind: &'static str) -> Self {
        let (case, checks) = (case.to_owned(), Vec::new());
        Self { case, kind, checks, loss_error: None, grad_error: None, weight_error: None }
    }

    /// Whether all of it holds; without a check nothing does.
    pub fn pass(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(Check::pass)
    }

    fn check(&mut self, name: impl Into<String>, error: f64, tolerance: f64) {
        self.checks.push(Check { name: name.into(), error, tolerance });
    }

    /// Counts mismatches; only none passes.
    fn check_equal<T: PartialEq>(&mut self, name: impl Into<String>, got: &[T], want: &[T]) {
        self.check(name, mismatches(got, want), 0.0);
    }

    /// A count, where the case has it.
    fn check_count(&mut self, name: impl Into<String>, got: u64, want: &Value) {
        if let Some(want) = want.as_u64() {
            self.check_equal(name, &[got], &[want]);
        }
    }

    /// Whole numbers, where the file holds them.
    fn check_stored(&mut self, file: &SafetensorsSource, name: &str, got: &[i64]) -> Result<()> {
        if file.shape(name).is_some() {
            self.check_equal(name, got, &file.load_i64(name)?);
        }
        Ok(())
    }

    /// Counts values that are not the same bit for bit.
    fn check_bits(&mut self, name: impl Into<String>, got: &[f32], want: &[f32]) {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        self.check_equal(name, &bits(got), &bits(want));
    }

    /// Counts mismatches of what is chosen by computed values: a share of them may differ.
    fn check_choices<T: PartialEq>(
        &mut self,
        name: impl Into<String>,
        got: &[T],
        want: &[T],
        share: f64,
    ) {
        self.check(name, mismatches(got, want), (share * want.len() as f64).ceil());
    }

    /// The part whose checks have names that begin so.
    fn part(&mut self, name: impl Into<String>) -> Part<'_> {
        Part { name: name.into(), report: self }
    }

    /// As a line of JSON.
    pub fn to_json(&self) -> Value {
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

/// Checks of one step or prompt: their names begin with its name.
struct Part<'a> {
    name: String,
    report: &'a mut CaseReport,
}

impl Part<'_> {
    fn check(&mut self, what: &str, error: f64, tolerance: f64) {
        self.report.check(format!("{} {what}", self.name), error, tolerance);
    }

    fn check_equal<T: PartialEq>(&mut self, what: &str, got: &[T], want: &[T]) {
        self.report.check_equal(format!("{} {what}", self.name), got, want);
    }
}

/// Recomputes the case in `folder` at `place`; `target` holds the weights of kinds that do not carry them.
///
/// # Errors
/// - the folder holds no case of a known kind, or one whose files do not fit together
/// - weights are missing, or not those that the case was made from
pub fn run_case(folder: &Path, target: Option<&Path>, place: &Place) -> Result<CaseReport> {
    let path = folder.join("meta.json");
    let meta = read_json(&path)?;
    let name = folder.canonicalize().ok();
    let name = name.as_deref().unwrap_or(folder).file_name().unwrap_or_default();
    let name = meta["case"].as_str().map_or_else(|| name.to_string_lossy().into(), str::to_owned);
    match meta["kind"].as_str() {
        Some("eagle3") => eagle3::run(folder, &meta, &name, place),
        Some("dflash") => block::run(folder, &meta, (&name, "dflash"), place),
        Some("dflash2") => block::run(folder, &meta, (&name, "dflash2"), place),
        Some("dspark") => block::run(folder, &meta, (&name, "dspark"), place),
        Some("glide") => glide::run(folder, &meta, &name, place),
        Some("pretrain") => pretrain::run(folder, &meta, &name, place),
        Some("pretrain-units") => pretrain::run_units(folder, &meta, &name),
        Some("quants") => quants::run(folder, &meta, &name),
        Some("forward") => forward::run(folder, &meta, &name, target, place),
        Some(kind) => Err(ParityError::UnknownKind { path, kind: kind.to_owned() }),
        None => Err(malformed(&path, "`kind` is missing")),
    }
}

/// Values that differ, and by how many one of the lists is longer.
fn mismatches<T: PartialEq>(got: &[T], want: &[T]) -> f64 {
    let differing = got.iter().zip(want).filter(|(a, b)| a != b).count();
    (differing + got.len().abs_diff(want.len())) as f64
}

/// A JSON file of a case.
fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).map_err(|error| malformed(path, error))?;
    serde_json::from_str(&text).map_err(|error| malformed(path, format!("not JSON: {error}")))
}

/// A malformed case, or a file of it.
fn malformed(path: &Path, problem: impl std::fmt::Display) -> ParityError {
    ParityError::Malformed { path: path.to_path_buf(), problem: problem.to_string() }
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

/// A tensor in f32, if the file holds it.
fn stored(file: &SafetensorsSource, name: &str) -> Result<Option<Tensor>> {
    Ok(file.shape(name).map(|_| file.load(name, DType::F32)).transpose()?)
}

/// Values of a stored tensor in f32, row after row.
fn floats(file: &SafetensorsSource, name: &str) -> Result<Vec<f32>> {
    Ok(file.load(name, DType::F32)?.flatten_all()?.to_vec1()?)
}

/// A tensor where values are compared: not every device has f64.
fn on_host(tensor: &Tensor) -> candle_core::Result<Tensor> {
    tensor.to_device(&Device::Cpu)
}

/// Notes an error beside the largest of its kind so far.
fn note(largest: &mut Option<f64>, error: f64) {
    *largest = Some(worst(largest.unwrap_or(0.0), error));
}

/// The larger error; NaN stays.
fn worst(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}

/// `|a − b| / |b|`.
fn relative(a: f64, b: f64) -> f64 {
    if b == 0.0 { (a - b).abs() } else { (a - b).abs() / b.abs() }
}
