//! Micro-batches with the draws that a case pins.

use longdraft_data::Batch;
use longdraft_data::batch::anchored_positions;
use longdraft_models::weights::WeightSource;
use serde_json::Value;

use super::case::Case;
use crate::error::Result;
use crate::{CaseReport, malformed};

/// A micro-batch and the delays of its tokens.
pub(super) struct MicroBatch {
    pub(super) batch: Batch,
    pub(super) delays: Vec<u32>,
}

/// Micro-batches of one step, with its pinned draws; also checks the rules that make them.
pub(super) fn batches(
    case: &Case<'_>,
    index: usize,
    step: &Value,
    report: &mut CaseReport,
) -> Result<Vec<MicroBatch>> {
    let (rows, length) = (case.rows, case.seq_len);
    let ids = case.integers("input_ids", rows * length)?;
    let ids: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
    let steps = case.steps()?.len();
    if case.compat {
        return Ok(vec![compat_batch(case, index, step, &ids, report)?]);
    }
    let documents = case.integers("document_ids", rows * length)?;
    let mask = case.integers("loss_mask", rows * length)?;
    let positions = case.integers("position_ids", steps * rows * length)?;
    let delays = case.integers("delays", steps * rows * length)?;
    let mut learned_rows = 0;
    let batches: Vec<MicroBatch> = (0..rows)
        .map(|row| {
            let tokens = row * length..(row + 1) * length;
            let drawn = index * rows * length + tokens.start..index * rows * length + tokens.end;
            let documents = &documents[tokens.clone()];
            let mask = &mask[tokens.clone()];
            let learned: Vec<u32> = (0..length - 1)
                .filter(|&t| {
                    mask[t + 1] != 0 && documents[t] >= 0 && documents[t] == documents[t + 1]
                })
                .map(|t| t as u32)
                .collect();
            learned_rows += learned.len();
            let batch = Batch {
                ids: ids[tokens].to_vec(),
                position_ids: positions[drawn.clone()].iter().map(|p| *p as u32).collect(),
                document_ids: documents.iter().map(|d| *d as i32).collect(),
                learned,
                row,
                ..Batch::default()
            };
            let delays = delays[drawn].iter().map(|d| (*d).max(0) as u32).collect();
            MicroBatch { batch, delays }
        })
        .collect();
    if index == 0 {
        let want = case.objective("supervised_rows");
        report.check_count("learned rows", learned_rows as u64, want);
    }
    check_anchors(index, step, &batches, report);
    Ok(batches)
}

/// All rows as documents of one packed batch: attention, window and delays stay within a row.
fn compat_batch(
    case: &Case<'_>,
    index: usize,
    step: &Value,
    ids: &[u32],
    report: &mut CaseReport,
) -> Result<MicroBatch> {
    let (rows, length) = (case.rows, case.seq_len);
    let labels = case.integers("labels", rows * length)?;
    let positions = case.integers("position_ids", case.steps()?.len() * length)?;
    let positions: Vec<u32> =
        positions[index * length..(index + 1) * length].iter().map(|p| *p as u32).collect();
    let (sink, offset) = (step["sink"].as_u64(), step["offset"].as_u64());
    let drawn =
        anchored_positions(length, sink.unwrap_or(0) as usize, offset.unwrap_or(0) as usize);
    report.check_equal(format!("step {} position ids", index + 1), &drawn, &positions);
    if index == 0 && case.inputs.names().iter().any(|name| name == "labels_in") {
        let ignored = case.objective("label_ignore_token").as_i64().unwrap_or(0);
        let made: Vec<i64> = case
            .integers("labels_in", rows * length)?
            .into_iter()
            .map(|label| if label == ignored { -100 } else { label })
            .collect();
        report.check_equal("labels", &made, &labels);
    }
    let learned: Vec<u32> = (0..rows)
        .flat_map(|row| (0..length - 1).map(move |t| row * length + t))
        .filter(|&t| labels[t + 1] != -100)
        .map(|t| t as u32)
        .collect();
    if index == 0 {
        let want = case.objective("supervised_rows");
        report.check_count("learned rows", learned.len() as u64, want);
    }
    let delay = step["delay"].as_u64();
    let delay = delay.ok_or_else(|| malformed(case.folder, "meta.json: a step has no `delay`"))?;
    let batch = Batch {
        ids: ids.to_vec(),
        position_ids: positions.repeat(rows),
        document_ids: (0..rows).flat_map(|row| vec![row as i32; length]).collect(),
        learned,
        ..Batch::default()
    };
    Ok(MicroBatch { batch, delays: vec![delay as u32; rows * length] })
}

/// Position ids of every document follow from its anchors and offset.
fn check_anchors(index: usize, step: &Value, batches: &[MicroBatch], report: &mut CaseReport) {
    let Some(anchors) = step["anchors"].as_array() else {
        return;
    };
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for anchor in anchors {
        let number = |key: &str| anchor[key].as_u64().map(|n| n as usize);
        let (Some(row), Some(document)) = (number("row"), anchor["document"].as_i64()) else {
            continue;
        };
        let Some(MicroBatch { batch, .. }) = batches.get(row) else {
            continue;
        };
        let of_document = batch.document_ids.iter().zip(&batch.position_ids);
        let positions: Vec<u32> = of_document
            .filter(|(id, _)| i64::from(**id) == document)
            .map(|(_, position)| *position)
            .collect();
        let (sink, offset) = (number("sink").unwrap_or(0), number("offset").unwrap_or(0));
        got.extend(anchored_positions(positions.len(), sink, offset));
        want.extend(positions);
    }
    report.check_equal(format!("step {} position ids", index + 1), &got, &want);
}
