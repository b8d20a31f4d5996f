//! A selector's candidates, scores and greedy choices.

use candle_core::{DType, Tensor};
use longdraft_kernels::chosen_products::chosen_products;
use longdraft_kernels::top_k::linear_top_k;
use longdraft_models::draft::block::Selector;

use super::case::{Case, Row};
use crate::error::Result;
use crate::{CaseReport, relative_error};

/// Compares them for the blocks of a row, whose states are `hidden` `[R, H]`.
pub(super) fn check(
    case: &Case<'_>,
    (index, row): (usize, &Row),
    (selector, hidden): (Selector<'_>, &Tensor),
    report: &mut CaseReport,
) -> Result<()> {
    let (slots, k) = (case.config.block_size, selector.sizes().top_k);
    let head = case.head()?;
    let slot_scores = |slot: usize, before: u32, candidates: &[u32]| -> Result<Tensor> {
        let state = hidden.narrow(0, slot, 1)?;
        let logits = chosen_products(&state, &head, candidates)?;
        let projected = selector.project(&state)?;
        let preferences = selector.preferences(&projected, &[before], candidates)?;
        Ok((logits + preferences)?.detach().squeeze(0)?.to_dtype(DType::F32)?)
    };
    let top = linear_top_k(hidden, &head, k)?;
    let (candidates, walk) = (case.token_ids("out.candidates")?, case.integers("out.walk")?);
    let scores = case.tensor("out.scores")?.flatten_all()?;
    let blocks = case.blocks();
    let of_candidates = [candidates.len(), scores.elem_count()];
    if of_candidates != [blocks * slots * k; 2] || walk.len() != blocks * (slots - 1) {
        return Err(case.malformed("candidates, scores and choices are of different slots"));
    }
    let (mut own_ids, mut wanted_ids) = (Vec::new(), Vec::new());
    let (mut own_scores, mut wanted_scores) = (Vec::new(), Vec::new());
    let (mut own_walk, mut wanted_walk) = (Vec::new(), Vec::new());
    for (block, (&place, &anchor)) in row.places.iter().zip(&row.anchors).enumerate() {
        let mut chosen = row.batch.ids[anchor];
        for slot in 1..slots.min(row.batch.ids.len() - anchor) {
            let (at, first) = (block * slots + slot, (place * slots + slot) * k);
            let own = &top.ids[at * k..(at + 1) * k];
            let wanted = &candidates[first..first + k];
            // Logits that are equal but for rounding may come in either order: ids are compared as a set, scores
            // in the case's order.
            own_ids.extend(sorted(own));
            wanted_ids.extend(sorted(wanted));
            own_scores.push(slot_scores(at, row.batch.ids[anchor + slot - 1], wanted)?);
            wanted_scores.push(scores.narrow(0, first, k)?);
            let walked: u32 = slot_scores(at, chosen, own)?.argmax(0)?.to_scalar()?;
            chosen = own[walked as usize];
            own_walk.push(i64::from(chosen));
            wanted_walk.push(walk[place * (slots - 1) + slot - 1]);
        }
    }
    if own_scores.is_empty() {
        return Ok(());
    }
    let share = case.tolerance.count;
    report.check_choices(format!("row {index} candidates"), &own_ids, &wanted_ids, share);
    report.check_choices(format!("row {index} choices"), &own_walk, &wanted_walk, share);
    let error = relative_error(&Tensor::cat(&own_scores, 0)?, &Tensor::cat(&wanted_scores, 0)?)?;
    report.check(format!("row {index} scores"), error, case.tolerance.grad);
    Ok(())
}

fn sorted(ids: &[u32]) -> Vec<u32> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids
}
