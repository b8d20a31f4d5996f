//! Comparison with the values that the case holds.

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_features::BatchFeatures;
use longdraft_models::draft::glide::Trace;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::safetensors::SafetensorsSource;
use longdraft_train::method::glide::GlideObjective;
use longdraft_train::metrics::DraftMetrics;
use serde_json::Value;

use super::case::Case;
use crate::error::Result;
use crate::training::{Tolerance, check_lengths};
use crate::{CaseReport, Part, on_host, relative, relative_error};

/// Compares what the activations file holds of the first step.
pub(super) fn check_activations(
    case: &Case<'_>,
    objective: &GlideObjective,
    (batch, delays): (&Batch, &[u32]),
    features: &BatchFeatures,
    (micro, report): (usize, &mut CaseReport),
) -> Result<()> {
    let path = case.folder.join("activations.safetensors");
    if !path.is_file() {
        return Ok(());
    }
    let file = SafetensorsSource::open_file(&path)?;
    let mut trace: Trace = Vec::new();
    objective.hidden((batch, delays), features, &mut trace)?;
    let mut values: Vec<(String, Tensor)> =
        trace.into_iter().map(|(name, tensor)| (format!("draft.{name}"), tensor)).collect();
    values.push(("target.last_k".into(), features.last_kv()?.k.clone()));
    values.push(("target.last_v".into(), features.last_kv()?.v.clone()));
    let real: Vec<u32> =
        (0..).zip(&batch.document_ids).filter(|(_, id)| **id >= 0).map(|(t, _)| t).collect();
    let real = Tensor::from_slice(&real, real.len(), &candle_core::Device::Cpu)?;
    for (name, got) in values {
        // The default mode stores one output a micro-batch, and keys with a leading [M].
        let own_name = format!("{name}.{micro}");
        let (stored, single) = match (file.shape(&own_name), file.shape(&name)) {
            (Some(_), _) => (own_name, true),
            (None, Some(_)) => (name, false),
            (None, None) => continue,
        };
        let mut want = file.load(&stored, DType::F32)?;
        if !single && !case.compat {
            if want.dims().first().is_none_or(|micros| *micros <= micro) {
                report.check(format!("activation {stored}"), f64::INFINITY, case.tolerance.grad);
                continue;
            }
            want = want.narrow(0, micro, 1)?;
        }
        if want.elem_count() != got.elem_count() {
            report.check(format!("activation {stored}"), f64::INFINITY, case.tolerance.grad);
            continue;
        }
        let want = want.reshape(got.shape())?;
        let error =
            relative_error(&on_host(&got)?.index_select(&real, 0)?, &want.index_select(&real, 0)?)?;
        report.check(format!("activation {stored} ({micro})"), error, case.tolerance.grad);
    }
    Ok(())
}

/// Counters and rates, where the case has them.
pub(super) fn check_metrics(
    case: &Case<'_>,
    want: &Value,
    got: &DraftMetrics,
    part: &mut Part<'_>,
) {
    for (key, value) in [("hard_loss", got.hard_loss()), ("soft_loss", got.soft_loss())] {
        if let Some(want) = want[key].as_f64() {
            part.check(key, relative(value, want), case.tolerance.loss);
        }
    }
    let Tolerance { rate, count, .. } = case.tolerance;
    if let Some(by_delay) = want["by_delay"].as_object() {
        for (delay, want) in by_delay {
            let counts =
                delay.parse::<usize>().ok().and_then(|d| got.by_delay.get(d.checked_sub(1)?));
            let counts = counts.copied().unwrap_or_default();
            let rows = counts.rows as f64;
            // A row that counts on the other side moves a rate by as much.
            let one_row = (count * rows).ceil() / rows.max(1.0);
            let numbers = [
                ("rows", counts.rows as f64, 0.0),
                ("top1_count", counts.top1_count as f64, (count * rows).ceil()),
                ("acceptance_sum", counts.acceptance_sum, rate * rows),
                ("top1_agreement", counts.top1_agreement(), rate.max(one_row)),
                ("acceptance_rate", counts.acceptance_rate(), rate),
            ];
            for (key, value, tolerance) in numbers {
                if let Some(want) = want[key].as_f64() {
                    part.check(&format!("delay {delay} {key}"), (value - want).abs(), tolerance);
                }
            }
        }
    }
    let gamma = case.objective("gamma").as_u64().unwrap_or(5) as usize;
    // Up to gamma rates are multiplied and added.
    let within = case.length_tolerance(gamma);
    check_lengths(want, |rate| got.simulated_acceptance_length(rate, gamma), within, part);
}
