//! What cases of training steps have in common: tolerances, steps, the optimizer, gradients and weights.

use std::path::Path;

use candle_core::Tensor;
use longdraft_models::draft::Parameter;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_parallel::Gradients;
use longdraft_train::metrics::Rate;
use longdraft_train::optim::AdamWConfig;
use serde_json::Value;

use crate::error::Result;
use crate::{CaseReport, Part, Place, malformed, note, relative_error, stored};

/// Allowed errors: relative, those of rates absolute, that of counts a share.
pub(crate) struct Tolerance {
    pub(crate) loss: f64,
    /// Of gradients, and of activations.
    pub(crate) grad: f64,
    pub(crate) weight: f64,
    /// Of rates and simulated lengths; times rows for sums.
    pub(crate) rate: f64,
    pub(crate) count: f64,
}

/// In f32.
pub(crate) const SINGLE: Tolerance =
    Tolerance { loss: 1e-5, grad: 1e-4, weight: 1e-4, rate: 1e-5, count: 0.0 };

/// About twice what the cases show with frozen weights in bf16 and products in f32.
pub(crate) const ROUNDED: Tolerance =
    Tolerance { loss: 1e-2, grad: 0.25, weight: 2e-2, rate: 5e-2, count: 0.1 };

impl Tolerance {
    /// What `meta` gives, or `own`; more where the place rounds.
    pub(crate) fn of(meta: &Value, place: &Place, own: &Self) -> Self {
        let given = |key: &str, own: f64, rounded: f64| {
            place.allowed(meta["tolerance"][key].as_f64().unwrap_or(own), rounded)
        };
        Self {
            loss: given("loss_rel", own.loss, ROUNDED.loss),
            grad: given("grad_rel_max", own.grad, ROUNDED.grad),
            weight: given("weight_rel_max", own.weight, ROUNDED.weight),
            rate: place.allowed(own.rate, ROUNDED.rate),
            count: place.allowed(own.count, ROUNDED.count),
        }
    }
}

/// Optimizer steps of a case; there is one at least.
pub(crate) fn steps<'a>(folder: &Path, meta: &'a Value) -> Result<&'a Vec<Value>> {
    let steps = meta["steps"].as_array().filter(|steps| !steps.is_empty());
    steps.ok_or_else(|| malformed(folder, "meta.json: `steps` is missing"))
}

pub(crate) fn rate(folder: &Path, step: &Value) -> Result<f64> {
    step["lr"].as_f64().ok_or_else(|| malformed(folder, "meta.json: a step has no `lr`"))
}

/// The optimizer that `meta` describes, and for the rest `defaults`.
pub(crate) fn optimizer(meta: &Value, defaults: &AdamWConfig) -> AdamWConfig {
    let given = &meta["optimizer"];
    let number = |key: &str, default: f64| given[key].as_f64().unwrap_or(default);
    let beta = |i: usize, default: f64| given["betas"][i].as_f64().unwrap_or(default);
    AdamWConfig {
        betas: (beta(0, defaults.betas.0), beta(1, defaults.betas.1)),
        eps: number("eps", defaults.eps),
        weight_decay: number("weight_decay", defaults.weight_decay),
        clip_norm: number("clip_norm", defaults.clip_norm),
        ..defaults.clone()
    }
}

/// Every trained tensor's gradient, against a file that names them after `prefix`.
pub(crate) fn check_gradients(
    (path, prefix): (&Path, &str),
    (parameters, gradients): (&[Parameter], &Gradients),
    tolerance: &Tolerance,
    report: &mut CaseReport,
) -> Result<()> {
    let file = SafetensorsSource::open_file(path)?;
    let (label, mut reached) = (label_of(path), Vec::new());
    for (index, parameter) in parameters.iter().enumerate() {
        let Some(got) = gradients.tensor(index, parameter)? else { continue };
        let stored = format!("{prefix}{}", parameter.name);
        let error = error_of(&file, &stored, &got)?;
        note(&mut report.grad_error, error);
        report.check(format!("{label} {}", parameter.name), error, tolerance.grad);
        reached.push(stored);
    }
    for name in file.names().iter().filter(|name| !reached.contains(name)) {
        report.check(format!("{label} {name} (no gradient here)"), f64::INFINITY, 0.0);
    }
    reached.sort();
    report.check_equal(format!("{label} tensors"), &reached, &file.names());
    Ok(())
}

/// Every trained tensor's value, against a file that names them after `prefix`.
pub(crate) fn check_weights(
    (path, prefix): (&Path, &str),
    tensors: Vec<(String, Tensor)>,
    tolerance: &Tolerance,
    report: &mut CaseReport,
) -> Result<()> {
    let file = SafetensorsSource::open_file(path)?;
    let label = label_of(path);
    for (name, got) in tensors {
        let error = error_of(&file, &format!("{prefix}{name}"), &got)?;
        note(&mut report.weight_error, error);
        report.check(format!("{label} {name}"), error, tolerance.weight);
    }
    Ok(())
}

fn label_of(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn error_of(file: &SafetensorsSource, name: &str, got: &Tensor) -> Result<f64> {
    stored(file, name)?.map_or(Ok(f64::INFINITY), |want| relative_error(got, &want))
}

/// Simulated acceptance lengths, where the case has them; `length` counts the target's own token.
pub(crate) fn check_lengths(
    want: &Value,
    length: impl Fn(Rate) -> f64,
    tolerance: f64,
    part: &mut Part<'_>,
) {
    for (key, rate, bonus) in [
        ("simulated_acceptance_length", Rate::Top1, 0.0),
        ("simulated_acceptance_length_sampling", Rate::Acceptance, 0.0),
        ("simulated_acceptance_length_without_bonus", Rate::Top1, 1.0),
        ("simulated_acceptance_length_sampling_without_bonus", Rate::Acceptance, 1.0),
    ] {
        if let Some(want) = want[key].as_f64() {
            part.check(key, (length(rate) - bonus - want).abs(), tolerance);
        }
    }
}
