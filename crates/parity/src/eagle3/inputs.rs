//! What is formed before the draft runs: the collated batch, the teacher, the target's features.

use candle_core::{D, DType, Device, Tensor};
use longdraft_data::Batch;
use longdraft_features::BatchFeatures;
use longdraft_kernels::linear::linear;
use longdraft_kernels::log_sum_exp::linear_log_sum_exp;
use longdraft_models::TargetConfig;
use longdraft_models::draft::Draft;
use longdraft_models::target_model::{PackedSequence, Tap, Taps, Target};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_train::method::eagle3::Eagle3Objective;

use super::case::Case;
use crate::error::Result;
use crate::{CaseReport, malformed, mismatches, on_host, relative_error, stored};

/// The vocabulary map as it stands in the weights file.
pub(super) fn check_vocabulary(
    case: &Case<'_>,
    objective: &Eagle3Objective,
    report: &mut CaseReport,
) -> Result<()> {
    let map = objective.eagle3().vocabulary();
    let flags: Vec<i64> = map.membership().into_iter().map(i64::from).collect();
    report.check_stored(&case.weights, "d2t", &map.offsets())?;
    report.check_stored(&case.weights, "t2d", &flags)
}

/// Rows of a `[B, T, ...]` tensor that documents fill, one document after the other; `shift` leaves
/// out as many at each end.
fn filled(case: &Case<'_>, padded: &Tensor, shift: usize) -> Result<Tensor> {
    let rows: Vec<Tensor> = case
        .lengths
        .iter()
        .enumerate()
        .filter(|(_, length)| **length > shift)
        .map(|(record, length)| padded.get(record)?.narrow(0, 0, length - shift))
        .collect::<candle_core::Result<_>>()?;
    Ok(Tensor::cat(&rows, 0)?)
}

/// The collated batch, and the teacher of the public trainer: its row `t` is ours at `t + 1`.
pub(super) fn check_teacher(
    case: &Case<'_>,
    objective: &Eagle3Objective,
    (batch, features): (&Batch, &BatchFeatures),
    report: &mut CaseReport,
) -> Result<()> {
    let path = case.folder.join("batch.safetensors");
    if !path.is_file() || case.meta["compat"].is_null() {
        return Ok(());
    }
    let file = SafetensorsSource::open_file(&path)?;
    let columns = case.lengths.iter().copied().max().unwrap_or(0);
    let padded = |values: &dyn Fn(usize, usize) -> i64| -> Vec<i64> {
        let mut first = 0;
        let mut all = vec![0; case.lengths.len() * columns];
        for (record, &length) in case.lengths.iter().enumerate() {
            for t in 0..length {
                all[record * columns + t] = values(first + t, length - 1 - t);
            }
            first += length;
        }
        all
    };
    let plan = objective.plan(batch, features)?;
    let learned = plan.learned_rows(0);
    // Arguments: token, tokens after it in its document.
    let ids = |t: usize, _: usize| i64::from(batch.ids[t]);
    let mask = |t: usize, later: usize| i64::from(later > 0 && batch.loss_mask[t]);
    let position = |t: usize, _: usize| i64::from(learned.binary_search(&(t as u32)).is_ok());
    for (name, got) in [
        ("batch.input_ids", padded(&ids)),
        ("batch.attention_mask", padded(&|_, _| 1)),
        ("batch.loss_mask", padded(&mask)),
        ("teacher.loss_mask", padded(&mask)),
        ("teacher.position_mask", padded(&position)),
    ] {
        if file.shape(name).is_some() {
            check_integers(case, name, &got, &file.load_i64(name)?, report);
        }
    }
    let tokens = plan.teacher_tokens();
    if let Some(shape) = file.shape("teacher.target_token_ids") {
        let stored = file.load_i64("teacher.target_token_ids")?;
        let (mut got, mut want) = (Vec::new(), Vec::new());
        let width = shape.get(1).copied().unwrap_or(0);
        let mut first = 0;
        for (record, &length) in case.lengths.iter().enumerate() {
            for t in 1..length {
                if let Some(token) = tokens[first + t] {
                    got.push(i64::from(token.0));
                    want.extend(stored.get(record * width + t - 1));
                }
            }
            first += length;
        }
        check_integers(case, "teacher.target_token_ids", &got, &want, report);
    }
    check_distributions(case, objective, &file, report)
}

/// Counts mismatches; a few are near-ties where the case is stored in 16 bits.
fn check_integers(case: &Case<'_>, name: &str, got: &[i64], want: &[i64], report: &mut CaseReport) {
    let tolerance = (case.tolerance.count * want.len() as f64).floor();
    report.check(name, mismatches(got, want), tolerance);
}

/// The teacher's distribution over the draft's vocabulary and its true probabilities.
fn check_distributions(
    case: &Case<'_>,
    objective: &Eagle3Objective,
    file: &SafetensorsSource,
    report: &mut CaseReport,
) -> Result<()> {
    let vocabulary = objective.eagle3().vocabulary();
    let kept: Vec<u32> = vocabulary.kept().iter().map(|id| id.0).collect();
    let head = case.target_head()?;
    let kept_head =
        head.index_select(&Tensor::from_slice(&kept, kept.len(), &case.place.device)?, 0)?;
    let rows: Vec<Tensor> = (0..case.lengths.len())
        .filter(|record| case.lengths[*record] > 1)
        .map(|record| {
            let hidden = case.record_tensor(record, "hidden_state")?;
            Ok(hidden.narrow(0, 1, case.lengths[record] - 1)?)
        })
        .collect::<Result<_>>()?;
    if rows.is_empty() {
        return Ok(());
    }
    let hidden = Tensor::cat(&rows, 0)?.to_device(&case.place.device)?;
    let logits = on_host(&linear(&hidden, &kept_head, None)?)?;
    let whole = linear_log_sum_exp(&hidden, &head)?.log_sum_exp;
    let of_kept = logits.log_sum_exp(D::Minus1)?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    for (name, normaliser) in [("target_p", of_kept), ("target_p_on_draft", whole)] {
        let name = format!("teacher.{name}");
        let Some(want) = stored(file, &name)? else { continue };
        let normaliser = Tensor::from_slice(&normaliser, (normaliser.len(), 1), &Device::Cpu)?;
        let distribution = logits.to_dtype(DType::F64)?.broadcast_sub(&normaliser)?.exp()?;
        let error = relative_error(&distribution, &filled(case, &want, 1)?)?;
        report.check(name, error, case.tolerance.grad);
    }
    Ok(())
}

/// Values of every token of the first step, where the case has them.
pub(super) fn check_activations(
    case: &Case<'_>,
    objective: &Eagle3Objective,
    (batch, features): (&Batch, &BatchFeatures),
    report: &mut CaseReport,
) -> Result<()> {
    let path = case.folder.join("activations.safetensors");
    if !path.is_file() {
        return Ok(());
    }
    let file = SafetensorsSource::open_file(&path)?;
    for (name, got) in objective.trace(batch, features)? {
        let error = match stored(&file, &name)? {
            None => continue,
            Some(want) if want.rank() != 3 || want.dim(0)? != case.lengths.len() => f64::INFINITY,
            Some(want) => relative_error(&got, &filled(case, &want, 0)?)?,
        };
        report.check(format!("activation {name}"), error, case.tolerance.grad);
    }
    Ok(())
}

/// The records' features from their tokens, where the case holds the target.
pub(super) fn check_capture(
    case: &Case<'_>,
    objective: &Eagle3Objective,
    batch: &Batch,
    report: &mut CaseReport,
) -> Result<()> {
    let Some(name) = case.meta["target_file"].as_str() else {
        return Ok(());
    };
    if name.contains(['/', '\\']) {
        return Err(malformed(case.folder, format!("`target_file` = {name} is not a file name")));
    }
    let config = TargetConfig::from_json(&case.meta["target_config"])
        .map_err(|problems| malformed(case.folder, format!("target_config: {problems}")))?;
    let weights = SafetensorsSource::open_file(&case.folder.join(name))?;
    let target = Target::from_source(config, &weights, &case.place.target_options())?;
    let layers = objective.eagle3().taps();
    let taps = [layers.as_slice(), &[Tap::FinalHidden]].concat();
    let mut first = 0;
    for (record, &length) in case.lengths.iter().enumerate() {
        let sequence = PackedSequence::single(&batch.ids[first..first + length]);
        first += length;
        let features = target.forward(&sequence, &Taps::of(&taps))?;
        let tapped = objective.eagle3().config().target_layers;
        for (name, got) in [
            ("aux_hidden_state", features.hidden_of(&tapped)?),
            ("hidden_state", features.final_hidden()?.clone()),
        ] {
            let error = relative_error(&got, &case.record_tensor(record, name)?)?;
            report.check(format!("record {record} {name}"), error, case.tolerance.grad);
        }
    }
    Ok(())
}
