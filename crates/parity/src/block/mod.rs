//! Kinds `dflash`, `dflash2` and `dspark`: hidden states, loss and gradients of blocks, and a selector's
//! choices.

mod case;
mod selector;

use std::path::Path;

use candle_core::Tensor;
use longdraft_kernels::factors::with_factors;
use longdraft_models::draft::Draft;
use longdraft_models::draft::block::{Anchor, BlockDraft, Visible};
use longdraft_parallel::Gradients;
use longdraft_train::metrics::DraftMetrics;
use longdraft_train::objective::{Objective, Prepared};
use serde_json::Value;

use super::{CaseReport, Place, note, relative, relative_error, worst};
use crate::error::Result;
use case::{Case, Row};

/// Recomputes a case.
pub(super) fn run(
    folder: &Path,
    meta: &Value,
    (name, kind): (&str, &'static str),
    place: &Place,
) -> Result<CaseReport> {
    let case = Case::open(folder, meta, place)?;
    let mut report = CaseReport::new(name, kind);
    let objective = case.objective()?;
    let draft: &BlockDraft = objective
        .draft()
        .of_kind()
        .ok_or_else(|| case.malformed("its draft is not a block draft"))?;
    let width = case.config.block_size * case.config.hidden_size;
    let wanted = case.tensor("out.hidden")?.reshape(((), width))?;
    for (index, row) in case.rows.iter().enumerate() {
        if row.anchors.is_empty() {
            continue;
        }
        let hidden = hidden(&case, draft, (index, row))?.detach();
        let want = row.places.iter().map(|place| wanted.get(*place)).collect::<Vec<_>>();
        let want = Tensor::stack(&want.into_iter().collect::<candle_core::Result<Vec<_>>>()?, 0)?;
        let error = relative_error(&hidden, &want.reshape(hidden.shape())?)?;
        report.check(format!("row {index} hidden"), error, case.tolerance.grad);
        if let Some(selector) = draft.selector() {
            selector::check(&case, (index, row), (selector, &hidden), &mut report)?;
        }
    }
    let (metrics, gradients) = step(&case, objective.as_ref())?;
    check_loss(&case, &metrics, &gradients, &mut report)?;
    for (index, parameter) in draft.parameters().iter().enumerate() {
        // What no block's loss depends on has a gradient of zeros, which a case may leave out.
        let (device, shape) = (parameter.var.device(), parameter.var.shape());
        let own = gradients.on(device, index, shape)?;
        let want = match case.optional(&format!("grad.{}", parameter.name))? {
            Some(want) => want,
            None => own.zeros_like()?,
        };
        let error = relative_error(&own, &want)?;
        report.check(format!("gradient {}", parameter.name), error, case.tolerance.grad);
        note(&mut report.grad_error, error);
    }
    Ok(report)
}

/// States of a row's blocks after the final norm, `[R, H]`.
fn hidden(case: &Case<'_>, draft: &BlockDraft, (index, row): (usize, &Row)) -> Result<Tensor> {
    let config = draft.config();
    let features = case.features(index)?;
    let context = draft.context(&features, &row.batch.position_ids)?;
    let starts = row.anchors.iter().map(|start| (row.batch.ids[*start], *start as u32));
    let (ids, positions) = config.inputs(starts);
    let anchors = row.anchors.iter().map(|index| Anchor { index: *index, document_start: 0 });
    let anchors: Vec<Anchor> = anchors.collect();
    let visible = Visible::new(config, &anchors, config.block_size, row.batch.ids.len());
    Ok(draft.blocks(&ids, &positions, &context, &visible)?)
}

/// Counters and gradients of one step over all rows.
fn step(case: &Case<'_>, objective: &dyn Objective) -> Result<(DraftMetrics, Gradients)> {
    let parameters = objective.draft().parameters();
    let (mut gradients, mut metrics) = (Gradients::new(parameters), DraftMetrics::default());
    let features = (0..case.rows.len()).map(|row| case.batch_features(row));
    let features = features.collect::<Result<Vec<_>>>()?;
    let rows = || case.rows.iter().map(|row| &row.batch).zip(&features);
    let prepared: Vec<Prepared> = rows()
        .map(|(batch, features)| Ok(objective.prepare(batch, features)?))
        .collect::<Result<_>>()?;
    let mut totals = vec![0.0; prepared.first().map_or(0, |first| first.denominators.len())];
    for own in prepared.iter().flat_map(|prepared| prepared.denominators.iter().enumerate()) {
        totals[own.0] += own.1;
    }
    for ((batch, features), prepared) in rows().zip(&prepared) {
        // As a step of training does it.
        let own = with_factors(|| -> Result<_> {
            let share = objective.share(batch, features, prepared, &totals, true)?;
            if let Some(loss) = share.loss {
                gradients.add_of(parameters, &loss)?;
            }
            Ok(share.metrics)
        })?;
        metrics.merge(&own);
    }
    Ok((metrics, gradients))
}

/// The loss, its parts, its gradient's norm, and what the case counts.
fn check_loss(
    case: &Case<'_>,
    metrics: &DraftMetrics,
    gradients: &Gradients,
    report: &mut CaseReport,
) -> Result<()> {
    let mut of_values = vec![
        ("loss", metrics.loss(), case.number("loss")),
        ("gradient norm", gradients.norm()?, case.number("grad_norm")),
    ];
    for (name, part) in ["out.base_loss", "out.selector_loss"].into_iter().zip(&metrics.parts) {
        let want = case.optional(name)?.map(|want| want.flatten_all()?.to_vec1::<f32>());
        let want = want.transpose()?.and_then(|want| want.first().map(|value| f64::from(*value)));
        of_values.push((name, part.mean(), want));
    }
    for (name, own, want) in of_values {
        let Some(want) = want else { continue };
        let error = relative(own, want);
        report.check(name, error, case.tolerance.loss);
        note(&mut report.loss_error, error);
    }
    let right = metrics.by_delay.iter().map(|delay| delay.top1_count).sum();
    for (name, own) in [
        ("out.metric.acc", [right, metrics.rows]),
        ("out.recall", [metrics.candidate_hits, metrics.candidate_rows]),
    ] {
        let Some(want) = case.optional(name)? else { continue };
        let want: Vec<f32> = want.flatten_all()?.to_vec1()?;
        let own = own.map(|count| count as f32);
        let allowed = (case.tolerance.count * metrics.rows as f64).ceil();
        let off = own.iter().zip(&want).map(|(own, want)| f64::from((own - want).abs()));
        let error = if want.len() == 2 { off.fold(0.0, worst) } else { f64::INFINITY };
        report.check(name, error, allowed);
    }
    Ok(())
}
