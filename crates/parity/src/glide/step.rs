//! One optimizer step recomputed: features, loss and gradients of every micro-batch.

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures, sequence_of};
use longdraft_kernels::factors::with_factors;
use longdraft_kernels::linear_cross_entropy::{Inputs, linear_cross_entropy};
use longdraft_kernels::top_k::TopK;
use longdraft_models::target_model::{Tap, Taps, Target};
use longdraft_models::weights::WeightSource;
use longdraft_parallel::Gradients;
use longdraft_train::method::glide::GlideObjective;
use longdraft_train::metrics::DraftMetrics;
use longdraft_train::objective::{Objective, SoftTargetKind};

use super::batches::MicroBatch;
use super::case::{Case, objective_config};
use super::checks::check_activations;
use crate::error::Result;
use crate::{CaseReport, malformed};

/// What one optimizer step came to.
pub(super) struct Outcome {
    pub(super) loss: f64,
    pub(super) target_loss: f64,
    pub(super) grad_norm: f64,
    pub(super) gradients: Gradients,
    pub(super) metrics: DraftMetrics,
}

/// Runs target and objective on every micro-batch and sums.
pub(super) fn run_step(
    case: &Case<'_>,
    target: &Target,
    objective: &GlideObjective,
    batches: &[MicroBatch],
    index: usize,
    report: &mut CaseReport,
) -> Result<Outcome> {
    let parameters = objective.draft().parameters();
    let total: usize = batches.iter().map(|micro| micro.batch.learned.len()).sum();
    let mut gradients = Gradients::new(parameters);
    let mut metrics = DraftMetrics::default();
    let (mut loss, mut target_loss) = (0.0, 0.0);
    for (micro, MicroBatch { batch, delays }) in batches.iter().enumerate() {
        let (features, micro_target_loss) = features(case, target, batch, index, micro)?;
        target_loss += micro_target_loss;
        if index == 0 {
            check_activations(case, objective, (batch, delays), &features, (micro, report))?;
        }
        // As a step of training does it.
        let own = with_factors(|| -> Result<_> {
            let result = objective.loss((batch, delays), &features, true)?;
            if let Some(numerator) = result.numerator {
                gradients.add_of(parameters, &(numerator / total as f64)?)?;
            }
            Ok(result.metrics)
        })?;
        let weight = objective_config(case).soft_weight;
        loss += (1.0 - weight) * own.hard_sum + weight * own.soft_sum;
        metrics.merge(&own);
    }
    Ok(Outcome {
        loss: loss / total as f64,
        target_loss: target_loss / total as f64,
        grad_norm: gradients.norm()?,
        gradients,
        metrics,
    })
}

/// The target's features, with the teacher that the case pins, and its own `Σ ℓ_hard`.
fn features(
    case: &Case<'_>,
    target: &Target,
    batch: &Batch,
    index: usize,
    micro: usize,
) -> Result<(BatchFeatures, f64)> {
    let sequence = sequence_of(batch);
    let taps = Taps::of(&[Tap::LastKv, Tap::FinalHidden]);
    let features = target.forward(&sequence, &taps)?;
    let learned = Tensor::from_slice(&batch.learned, batch.learned.len(), target.device())?;
    let hidden = features.final_hidden()?.index_select(&learned, 0)?;
    let labels = batch.labels();
    let own = linear_cross_entropy(
        &Inputs::of_labels(&hidden, &target.hold_ends()?.head()?, &labels).bent(target.bend()),
    )?;
    let config = objective_config(case);
    let has_entries = case.inputs.shape("topk_ids").is_some();
    let teacher = match config.soft_targets {
        _ if case.compat => TeacherFeatures::None,
        SoftTargetKind::TopK if config.soft_weight > 0.0 || has_entries => {
            let entries = top_k_entries(case, batch, index, micro)?;
            TeacherFeatures::TopK { entries, k: config.top_k, hidden: Some(hidden) }
        }
        // Without a weight in the loss, too: rates are measured against it.
        _ => TeacherFeatures::Full { hidden },
    };
    let last_kv = Some(features.last_kv()?.clone());
    let features = BatchFeatures { last_kv, aux_hidden: None, teacher, part: None };
    Ok((features, own.rows.hard.iter().sum()))
}

fn top_k_entries(case: &Case<'_>, batch: &Batch, index: usize, micro: usize) -> Result<TopK> {
    let k = objective_config(case).top_k;
    let count = case.steps()?.len() * case.rows * case.seq_len * k;
    let ids = case.integers("topk_ids", count)?;
    let log_probs: Vec<f32> =
        case.inputs.load("topk_logprobs", DType::F32)?.flatten_all()?.to_vec1()?;
    if log_probs.len() != count {
        return Err(malformed(case.folder, "`topk_logprobs` and `topk_ids` differ in size"));
    }
    let start = (index * case.rows + micro) * case.seq_len;
    let mut entries = TopK::default();
    for &t in &batch.learned {
        let at = (start + t as usize) * k;
        entries.ids.extend(ids[at..at + k].iter().map(|id| *id as u32));
        entries.log_probs.extend(&log_probs[at..at + k]);
    }
    Ok(entries)
}
