//! Comparison with the values that the case holds.

use longdraft_train::method::eagle3::RowPlan;
use longdraft_train::metrics::{DelayCounts, DraftMetrics, LossPart};
use serde_json::Value;

use super::case::Case;
use crate::error::Result;
use crate::training::check_lengths;
use crate::{Part, malformed, note, relative, worst};

type Step<'a> = (&'a DelayCounts, &'a LossPart);

/// A list with a value a step.
type OfStep = fn(Step<'_>) -> f64;

/// Losses, rates and counters, where `want` has them.
pub(super) fn check_metrics(
    case: &Case<'_>,
    want: &Value,
    (plan, got): (&RowPlan, &DraftMetrics),
    part: &mut Part<'_>,
) -> Result<()> {
    let tolerance = &case.tolerance;
    let mut largest = 0.0;
    check_list(case, (want, "step_losses"), got, part, &mut |step, want| {
        let error = relative(step.1.mean(), want);
        largest = worst(largest, error);
        (error, tolerance.loss)
    })?;
    note(&mut part.report.loss_error, largest);
    let rates: [(&str, OfStep); 2] =
        [("acc", |step| step.0.top1_agreement()), ("acceptance", |step| step.0.acceptance_rate())];
    for (key, of) in rates {
        check_list(case, (want, key), got, part, &mut |step, want| {
            ((of(step) - want).abs(), tolerance.rate)
        })?;
    }
    let sums: [(&str, OfStep); 2] =
        [("acceptance_sum", |step| step.0.acceptance_sum), ("step_loss_sum", |step| step.1.sum)];
    for (key, of) in sums {
        check_list(case, (want, key), got, part, &mut |step, want| {
            ((of(step) - want).abs(), tolerance.rate * rows(step))
        })?;
    }
    check_list(case, (want, "acc_count"), got, part, &mut |step, want| {
        ((step.0.top1_count as f64 - want).abs(), (tolerance.count * rows(step)).ceil())
    })?;
    for key in ["rows_R_and_M", "rows_m_and_M"] {
        let Some(pairs) = want[key].as_array() else { continue };
        let pair = |(supervised, learned): (usize, usize)| vec![supervised as u64, learned as u64];
        let got: Vec<Vec<u64>> = plan.counts().into_iter().map(pair).collect();
        let numbers = |pair: &Value| {
            pair.as_array().map(|pair| pair.iter().filter_map(Value::as_u64).collect::<Vec<_>>())
        };
        let want: Vec<Vec<u64>> = pairs.iter().filter_map(numbers).collect();
        part.check_equal(key, &got, &want);
    }
    let length = |rate| got.simulated_acceptance_length(rate, got.by_delay.len());
    check_lengths(want, length, tolerance.rate, part);
    Ok(())
}

fn rows((counts, _): Step<'_>) -> f64 {
    counts.rows.max(1) as f64
}

/// Compares a list with a value a step; `error` gives error and tolerance of one.
fn check_list(
    case: &Case<'_>,
    (want, key): (&Value, &str),
    got: &DraftMetrics,
    part: &mut Part<'_>,
    error: &mut dyn FnMut(Step<'_>, f64) -> (f64, f64),
) -> Result<()> {
    let Some(values) = want[key].as_array() else {
        return Ok(());
    };
    if values.len() != got.parts.len() {
        let problem = format!("meta.json: `{key}` has {} values", values.len());
        return Err(malformed(case.folder, problem));
    }
    for (i, (step, want)) in got.by_delay.iter().zip(&got.parts).zip(values).enumerate() {
        let (error, tolerance) = error(step, want.as_f64().unwrap_or(f64::NAN));
        part.check(&format!("{key} {i}"), error, tolerance);
    }
    Ok(())
}
