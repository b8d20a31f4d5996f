//! Kind `glide`: training steps of the GLIDE draft, compat and default mode.

mod batches;
mod case;
mod checks;
mod step;

use std::path::Path;
use std::sync::Arc;

use longdraft_models::TargetConfig;
use longdraft_models::draft::glide::GlideDraft;
use longdraft_models::target_model::{Target, TargetOptions};
use longdraft_train::method::glide::GlideObjective;
use longdraft_train::metrics::DraftMetrics;
use longdraft_train::objective::Objective;
use longdraft_train::optim::AdamW;
use serde_json::Value;

use super::{CaseReport, Place, malformed, note, relative};
use crate::error::Result;
use crate::training::{check_gradients, check_weights, rate};

use batches::batches;
use case::{Case, glide_config, objective_config};
use checks::check_metrics;
use step::run_step;

/// Of the draft's tensors in a case's files.
const PREFIX: &str = "draft_model.";

/// Recomputes every step of the case.
pub(super) fn run(folder: &Path, meta: &Value, name: &str, place: &Place) -> Result<CaseReport> {
    let case = Case::open(folder, meta, place)?;
    let mut report = CaseReport::new(name, "glide");
    let config = TargetConfig::from_json(&meta["config"])
        .map_err(|problems| malformed(folder, format!("meta.json: config: {problems}")))?;
    let options = TargetOptions {
        device: place.device.clone(),
        dtype: place.frozen,
        ..TargetOptions::default()
    };
    let target = Arc::new(Target::from_source(config, &case.weights, &options)?);
    let glide = glide_config(&case, target.config());
    let draft = GlideDraft::from_source(&case.weights, &glide, &target)?;
    let objective = GlideObjective::new(Arc::clone(&target), draft, objective_config(&case));
    let parameters = case.optimized(objective.draft().parameters());
    let mut optimizer = AdamW::new(case.optimizer(), &parameters);
    let mut all_steps = DraftMetrics::default();
    let steps = case.steps()?;
    for (index, step) in steps.iter().enumerate() {
        let label = |what: &str| format!("step {} {what}", index + 1);
        let batches = batches(&case, index, step, &mut report)?;
        // As a stage does it: with what the last update wrote.
        let step_of = || run_step(&case, &target, &objective, &batches, index, &mut report);
        let outcome = optimizer.written().with(step_of)?;
        for (key, got) in [
            ("loss", outcome.loss),
            ("llm_loss", outcome.target_loss),
            ("grad_norm", outcome.grad_norm),
        ] {
            if let Some(want) = step[key].as_f64() {
                let error = relative(got, want);
                report.check(label(key), error, case.tolerance.loss);
                if key != "grad_norm" {
                    note(&mut report.loss_error, error);
                }
            }
        }
        check_metrics(&case, &label, step, &outcome.metrics, &mut report);
        all_steps.merge(&outcome.metrics);
        if index == 0 {
            let path = folder.join("grads.safetensors");
            let trained = (&parameters[..], &outcome.gradients);
            check_gradients((&path, PREFIX), trained, &case.tolerance, &mut report)?;
        }
        optimizer.step(&parameters, &outcome.gradients, rate(folder, step)?)?;
        let file = match index {
            0 => Some("weights_step1.safetensors"),
            i if i + 1 == steps.len() => Some("weights_final.safetensors"),
            _ => None,
        };
        for file in file.into_iter().chain(
            (steps.len() == 1 && folder.join("weights_final.safetensors").is_file())
                .then_some("weights_final.safetensors"),
        ) {
            let tensors = objective.glide().named_tensors();
            check_weights((&folder.join(file), PREFIX), tensors, &case.tolerance, &mut report)?;
        }
    }
    if !meta["all_steps"].is_null() {
        let label = |what: &str| format!("all steps {what}");
        check_metrics(&case, &label, &meta["all_steps"], &all_steps, &mut report);
    }
    Ok(report)
}
