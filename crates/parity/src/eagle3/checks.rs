//! Comparison with the values that the case holds.

use candle_core::{DType, Tensor};
use longdraft_models::draft::Parameter;
use longdraft_models::draft::eagle3::Eagle3Draft;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_parallel::Gradients;
use longdraft_train::method::eagle3::{Eagle3Metrics, StepCounts};
use longdraft_train::metrics::Rate;
use serde_json::Value;

use super::case::Case;
use crate::error::Result;
use crate::{CaseReport, malformed, relative, relative_error, worst};

/// Every trained tensor's gradient; returns the largest error.
pub(super) fn check_gradients(
    case: &Case<'_>,
    file_name: &str,
    parameters: &[Parameter],
    gradients: &Gradients,
    report: &mut CaseReport,
) -> Result<f64> {
    let file = SafetensorsSource::open_file(&case.folder.join(file_name))?;
    let label = file_name.trim_end_matches(".safetensors");
    let (mut largest, mut reached) = (0.0, Vec::new());
    for (index, parameter) in parameters.iter().enumerate() {
        let Some(got) = gradients.tensor(index, parameter)? else {
            continue;
        };
        reached.push(parameter.name.clone());
        let error = error_of(&file, &parameter.name, &got)?;
        largest = worst(largest, error);
        report.check(format!("{label} {}", parameter.name), error, case.tolerance.grad);
    }
    reached.sort();
    report.check_equal(format!("{label} tensors"), &reached, &file.names());
    Ok(largest)
}

/// Every trained tensor's value; returns the largest error.
pub(super) fn check_weights(
    case: &Case<'_>,
    file_name: &str,
    draft: &Eagle3Draft,
    report: &mut CaseReport,
) -> Result<f64> {
    let file = SafetensorsSource::open_file(&case.folder.join(file_name))?;
    let label = file_name.trim_end_matches(".safetensors");
    let mut largest = 0.0;
    for (name, got) in draft.named_tensors() {
        let error = error_of(&file, &name, &got)?;
        largest = worst(largest, error);
        report.check(format!("{label} {name}"), error, case.tolerance.weight);
    }
    Ok(largest)
}

fn error_of(file: &SafetensorsSource, name: &str, got: &Tensor) -> Result<f64> {
    match file.shape(name) {
        Some(_) => relative_error(got, &file.load(name, DType::F32)?),
        None => Ok(f64::INFINITY),
    }
}

/// A list with a value a step.
type OfStep = fn(&StepCounts) -> f64;

/// Losses, rates and counters, where `want` has them; returns the largest error of a loss.
pub(super) fn check_metrics(
    case: &Case<'_>,
    label: &dyn Fn(&str) -> String,
    want: &Value,
    got: &Eagle3Metrics,
    report: &mut CaseReport,
) -> Result<f64> {
    let tolerance = &case.tolerance;
    let mut largest = 0.0;
    check_list(case, label, want, "step_losses", got, report, &mut |step, want| {
        let error = relative(step.loss(), want);
        largest = worst(largest, error);
        (error, tolerance.loss)
    })?;
    let rates: [(&str, OfStep); 2] =
        [("acc", StepCounts::accuracy), ("acceptance", StepCounts::acceptance)];
    for (key, of) in rates {
        check_list(case, label, want, key, got, report, &mut |step, want| {
            ((of(step) - want).abs(), tolerance.rate)
        })?;
    }
    let sums: [(&str, OfStep); 2] =
        [("acceptance_sum", |step| step.acceptance_sum), ("step_loss_sum", |step| step.loss_sum)];
    for (key, of) in sums {
        check_list(case, label, want, key, got, report, &mut |step, want| {
            ((of(step) - want).abs(), tolerance.rate * rows(step))
        })?;
    }
    check_list(case, label, want, "acc_count", got, report, &mut |step, want| {
        ((step.top1_count as f64 - want).abs(), (tolerance.count * rows(step)).ceil())
    })?;
    for key in ["rows_R_and_M", "rows_m_and_M"] {
        let Some(pairs) = want[key].as_array() else { continue };
        let pair = |step: &StepCounts| vec![step.supervised as u64, step.learned as u64];
        let got: Vec<Vec<u64>> = got.steps.iter().map(pair).collect();
        let numbers = |pair: &Value| {
            pair.as_array().map(|pair| pair.iter().filter_map(Value::as_u64).collect::<Vec<_>>())
        };
        let want: Vec<Vec<u64>> = pairs.iter().filter_map(numbers).collect();
        report.check_equal(label(key), &got, &want);
    }
    for (key, rate, bonus) in [
        ("simulated_acceptance_length", Rate::Top1, 0.0),
        ("simulated_acceptance_length_sampling", Rate::Acceptance, 0.0),
        ("simulated_acceptance_length_without_bonus", Rate::Top1, 1.0),
        ("simulated_acceptance_length_sampling_without_bonus", Rate::Acceptance, 1.0),
    ] {
        if let Some(want) = want[key].as_f64() {
            let value = got.simulated_acceptance_length(rate) - bonus;
            report.check(label(key), (value - want).abs(), tolerance.rate);
        }
    }
    Ok(largest)
}

fn rows(step: &StepCounts) -> f64 {
    step.supervised.max(1) as f64
}

/// Compares a list with a value a step; `error` gives error and tolerance of one.
fn check_list(
    case: &Case<'_>,
    label: &dyn Fn(&str) -> String,
    want: &Value,
    key: &str,
    got: &Eagle3Metrics,
    report: &mut CaseReport,
    error: &mut dyn FnMut(&StepCounts, f64) -> (f64, f64),
) -> Result<()> {
    let Some(values) = want[key].as_array() else {
        return Ok(());
    };
    if values.len() != got.steps.len() {
        let problem = format!("meta.json: `{key}` has {} values", values.len());
        return Err(malformed(case.folder, problem));
    }
    for (i, (step, want)) in got.steps.iter().zip(values).enumerate() {
        let (error, tolerance) = error(step, want.as_f64().unwrap_or(f64::NAN));
        report.check(label(&format!("{key} {i}")), error, tolerance);
    }
    Ok(())
}
