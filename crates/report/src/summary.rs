//! The figures of a stage that fit a table.

use longdraft_records::median;
use serde::Serialize;

use super::metrics_log::{Agreement, MetricsLog};
use super::run::{Run, Stage};
use super::series::mean_of_last;

/// One row of the summary.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageSummary {
    /// Run, and stage if it is one of several.
    pub name: String,
    /// Optimizer steps.
    pub steps: u64,
    /// Trained on.
    pub tokens: u64,
    /// Mean of the last twentieth of the logged steps, nats per learned row.
    pub final_loss: Option<f64>,
    /// Of the last evaluation, the same quantity as `final_loss`; none where it was not measured.
    pub held_out_loss: Option<f64>,
    /// Of the last evaluation, nats per learned row.
    pub held_out_hard_loss: Option<f64>,
    /// Of the last evaluation, index 0 is delay 1.
    pub held_out_top1_by_delay: Vec<Option<f64>>,
    /// Of the last evaluation, index 0 is delay 1.
    pub held_out_acceptance_by_delay: Vec<Option<f64>>,
    /// Of the last evaluation, greedy.
    pub simulated_acceptance_length: Option<f64>,
    /// Of the last evaluation, greedy decoding of the text replayed.
    pub replayed_acceptance_length: Option<f64>,
    /// Of the last evaluation, sampling.
    pub simulated_acceptance_length_sampling: Option<f64>,
    /// Over the logged steps.
    pub median_tokens_per_second: Option<f64>,
    /// Time in steps, without evaluations and saving.
    pub seconds: f64,
    /// Largest resident set.
    pub peak_memory_mib: Option<f64>,
}

impl StageSummary {
    /// A row for each stage.
    pub fn of_run(run: &Run) -> Vec<Self> {
        run.stages.iter().map(|stage| Self::of_stage(run.stage_name(stage), stage)).collect()
    }

    fn of_stage(name: String, stage: &Stage) -> Self {
        let log = &stage.log;
        let none = Agreement::default();
        let held_out = log.held_out.last().map_or(&none, |record| &record.held_out);
        let losses: Vec<f64> =
            log.steps.iter().filter_map(|record| record.agreement.loss).collect();
        let speeds: Vec<f64> =
            log.steps.iter().filter_map(|record| record.tokens_per_second).collect();
        Self {
            name,
            steps: log.steps.last().map_or(0, |record| record.step),
            tokens: stage.tokens(),
            final_loss: mean_of_last(&losses),
            held_out_loss: loss_as_trained(log),
            held_out_hard_loss: held_out.hard_loss,
            held_out_top1_by_delay: held_out.top1_by_delay.clone(),
            held_out_acceptance_by_delay: held_out.acceptance_by_delay.clone(),
            simulated_acceptance_length: held_out.simulated_acceptance_length,
            replayed_acceptance_length: held_out.replayed_acceptance_length,
            simulated_acceptance_length_sampling: held_out.simulated_acceptance_length_sampling,
            median_tokens_per_second: (!speeds.is_empty()).then(|| median(&speeds)),
            seconds: log.seconds(),
            peak_memory_mib: log
                .steps
                .iter()
                .filter_map(|record| record.memory_mib)
                .max_by(f64::total_cmp),
        }
    }
}

/// The last held-out loss that is measured against what the last step's loss is.
fn loss_as_trained(log: &MetricsLog) -> Option<f64> {
    let against = |agreement: &Agreement| {
        agreement.measured_against.as_ref().map(|quantities| quantities.loss.clone())
    };
    let trained = against(&log.steps.last()?.agreement)?;
    let held_out = &log.held_out.last()?.held_out;
    let all = [Some(held_out), held_out.as_trained.as_deref()];
    let same =
        all.into_iter().flatten().find(|figures| against(figures).as_ref() == Some(&trained));
    same?.loss
}
