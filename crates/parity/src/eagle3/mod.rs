//! Kind `eagle3`: training steps of the EAGLE-3 draft, compat and default mode.

mod case;
mod checks;
mod inputs;

use std::path::Path;

use longdraft_data::Batch;
use longdraft_features::BatchFeatures;
use longdraft_kernels::factors::with_factors;
use longdraft_models::draft::Draft;
use longdraft_parallel::Gradients;
use longdraft_train::method::eagle3::{Eagle3Objective, RowPlan};
use longdraft_train::metrics::DraftMetrics;
use longdraft_train::optim::AdamW;
use serde_json::Value;

use super::{CaseReport, Part, Place, malformed, note, relative};
use crate::error::Result;
use crate::training::{check_gradients, check_weights, rate};

use case::Case;
use checks::check_metrics;
use inputs::{check_activations, check_capture, check_teacher, check_vocabulary};

/// Recomputes the default modes and then every step of the case.
pub(super) fn run(folder: &Path, meta: &Value, name: &str, place: &Place) -> Result<CaseReport> {
    let case = Case::open(folder, meta, place)?;
    let mut report = CaseReport::new(name, "eagle3");
    let (batch, features) = (case.batch()?, case.features()?);
    let objective = case.objective(None)?;
    check_vocabulary(&case, &objective, &mut report)?;
    check_teacher(&case, &objective, (&batch, &features), &mut report)?;
    check_capture(&case, &objective, &batch, &mut report)?;
    check_activations(&case, &objective, (&batch, &features), &mut report)?;
    let modes = meta["default_mode"].as_array().map_or(&[][..], Vec::as_slice);
    for (index, mode) in modes.iter().enumerate() {
        run_mode(&case, index, mode, (&batch, &features), &mut report)?;
    }
    run_steps(&case, &objective, (&batch, &features), &mut report)?;
    Ok(report)
}

/// Loss, metrics and gradients of a default mode at the initial weights.
fn run_mode(
    case: &Case<'_>,
    index: usize,
    mode: &Value,
    inputs: (&Batch, &BatchFeatures),
    report: &mut CaseReport,
) -> Result<()> {
    let objective = case.objective(Some(mode))?;
    let part = &mut report.part(format!("default mode {}", index + 1));
    let (plan, metrics, gradients) = step(&objective, inputs)?;
    check_step(case, mode, (&plan, &metrics, &gradients), part)?;
    if let Some(file) = mode["grads_file"].as_str() {
        if file.contains(['/', '\\']) {
            let problem = format!("`grads_file` = {file} is not a file name");
            return Err(malformed(case.folder, problem));
        }
        let trained = (objective.eagle3().parameters(), &gradients);
        check_gradients((&case.folder.join(file), ""), trained, &case.tolerance, report)?;
    }
    Ok(())
}

/// The case's optimizer steps, all on the same batch.
fn run_steps(
    case: &Case<'_>,
    objective: &Eagle3Objective,
    inputs: (&Batch, &BatchFeatures),
    report: &mut CaseReport,
) -> Result<()> {
    let parameters = objective.eagle3().parameters();
    let mut optimizer = AdamW::new(case.optimizer(), parameters);
    let steps = case.steps()?;
    for (index, want) in steps.iter().enumerate() {
        let part = &mut report.part(format!("step {}", index + 1));
        // As a stage does it: with what the last update wrote.
        let (plan, metrics, gradients) = optimizer.written().with(|| step(objective, inputs))?;
        check_step(case, want, (&plan, &metrics, &gradients), part)?;
        if index == 0 {
            let (path, trained) = (case.folder.join("grads.safetensors"), (parameters, &gradients));
            check_gradients((&path, ""), trained, &case.tolerance, report)?;
        }
        optimizer.step(parameters, &gradients, rate(case.folder, want)?)?;
        let mut files = Vec::new();
        if index == 0 {
            files.push("weights_step1.safetensors");
        }
        if index + 1 == steps.len() && case.folder.join("weights_final.safetensors").is_file() {
            files.push("weights_final.safetensors");
        }
        for file in files {
            let tensors = objective.eagle3().named_tensors()?;
            check_weights((&case.folder.join(file), ""), tensors, &case.tolerance, report)?;
        }
    }
    Ok(())
}

/// Rows, counters and gradients of one step over all records.
fn step(
    objective: &Eagle3Objective,
    (batch, features): (&Batch, &BatchFeatures),
) -> Result<(RowPlan, DraftMetrics, Gradients)> {
    let plan = objective.plan(batch, features)?;
    let denominators = objective.denominators(&plan);
    let parameters = objective.eagle3().parameters();
    let mut gradients = Gradients::new(parameters);
    // As a step of training does it.
    let metrics = with_factors(|| -> Result<_> {
        let outcome = objective.evaluate(batch, features, &plan, &denominators, true)?;
        if let Some(loss) = outcome.loss {
            gradients.add_of(parameters, &loss)?;
        }
        Ok(outcome.metrics)
    })?;
    Ok((plan, metrics, gradients))
}

/// Loss, gradient norm and metrics of one step.
fn check_step(
    case: &Case<'_>,
    want: &Value,
    (plan, metrics, gradients): (&RowPlan, &DraftMetrics, &Gradients),
    part: &mut Part<'_>,
) -> Result<()> {
    for (key, got) in [("loss", metrics.loss()), ("grad_norm", gradients.norm()?)] {
        if let Some(want) = want[key].as_f64() {
            let error = relative(got, want);
            part.check(key, error, case.tolerance.loss);
            if key == "loss" {
                note(&mut part.report.loss_error, error);
            }
        }
    }
    check_metrics(case, want, (plan, metrics), part)
}
