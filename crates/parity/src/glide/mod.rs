//! Kind `glide`: training steps of the GLIDE draft, compat and default mode.

mod batches;
mod case;
mod checks;
mod step;

use std::path::Path;
use std::sync::Arc;

use longdraft_models::TargetConfig;
use longdraft_models::draft::glide::GlideDraft;
use longdraft_models::target_model::Target;
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
const LAST_WEIGHTS: &str = "weights_final.safetensors";

/// Recomputes every step of the case.
pub(super) fn run(folder: &Path, meta: &Value, name: &str, place: &Place) -> Result<CaseReport> {
    let case = Case::open(folder, meta, place)?;
    let mut report = CaseReport::new(name, "glide");
    let config = TargetConfig::from_json(&meta["config"])
        .map_err(|problems| malformed(folder, format!("meta.json: config: {problems}")))?;
    let options = place.target_options();
    let target = Arc::new(Target::from_source(config, &case.weights, &options)?);
    let glide = glide_config(&case, target.config());
    let draft = GlideDraft::from_source(&case.weights, &glide, &target)?;
    let objective = GlideObjective::new(Arc::clone(&target), draft, objective_config(&case));
    let parameters = case.optimized(objective.draft().parameters());
    let mut optimizer = AdamW::new(case.optimizer(), &parameters);
    let mut all_steps = DraftMetrics::default();
    let steps = case.steps()?;
    for (index, step) in steps.iter().enumerate() {
        let name = format!("step {}", index + 1);
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
                report.check(format!("{name} {key}"), error, case.tolerance.loss);
                if key != "grad_norm" {
                    note(&mut report.loss_error, error);
                }
            }
        }
        check_metrics(&case, step, &outcome.metrics, &mut report.part(name));
        all_steps.merge(&outcome.metrics);
        if index == 0 {
            let path = folder.join("grads.safetensors");
            let trained = (&parameters[..], &outcome.gradients);
            check_gradients((&path, PREFIX), trained, &case.tolerance, &mut report)?;
        }
        optimizer.step(&parameters, &outcome.gradients, rate(folder, step)?)?;
        // A case of one step may leave the last weights out.
        let is_last = index + 1 == steps.len();
        let has_last = is_last && (index > 0 || folder.join(LAST_WEIGHTS).is_file());
        let files = [(index == 0, "weights_step1.safetensors"), (has_last, LAST_WEIGHTS)];
        for (_, file) in files.into_iter().filter(|(is_wanted, _)| *is_wanted) {
            let tensors = objective.glide().named_tensors()?;
            check_weights((&folder.join(file), PREFIX), tensors, &case.tolerance, &mut report)?;
        }
    }
    if !meta["all_steps"].is_null() {
        check_metrics(&case, &meta["all_steps"], &all_steps, &mut report.part("all steps"));
    }
    Ok(report)
}
