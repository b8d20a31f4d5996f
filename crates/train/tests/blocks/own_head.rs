//! Drafts that propose some of the target's tokens, through rows of its head that are their own.

use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::draft::block::OwnHead;
use longdraft_train::objective::TailKind;

use super::*;

/// Tokens that are proposed: labels of the row lie among them, and outside.
fn kept() -> Vec<u32> {
    (0..30).filter(|id| id % 3 != 1).collect()
}

fn draft(config: &BlockConfig, row: &Row) -> BlockDraft {
    let map = VocabularyMap::new(kept().into_iter().map(TargetTokenId).collect(), 30);
    let rows = select_rows(&row.head, &kept()).expect("rows");
    let own = OwnHead::new(map.expect("a map"), &rows).expect("a head");
    let config = BlockConfig { draft_vocab_size: 20, ..config.clone() };
    BlockDraft::initialise_with(&config, &random((30, 16), 1), Some(own), 2).expect("a draft")
}

/// A slot over the proposed tokens.
struct Known {
    /// Beside the target's distribution over them, rescaled.
    rescaled: Slot,
    /// Beside the target's true probabilities.
    of_all: Slot,
    is_proposed: bool,
}

impl Known {
    fn hard(&self) -> Result<Tensor> {
        if self.is_proposed { self.rescaled.hard() } else { self.rescaled.hard()?.zeros_like() }
    }

    fn distance(&self, form: SlotForm, mean: f64) -> Result<Tensor> {
        let mixed = |chance: f64| {
            let rejected = (1.0 - self.of_all.accepted()?)?;
            let ce = SlotForm::new(SlotLoss::Ce, None, None);
            mixed(form, chance, (&self.rescaled.distance(ce, mean)?, &rejected))
        };
        match form.loss {
            SlotLoss::Ce => self.rescaled.distance(form, mean),
            SlotLoss::L1 => (1.0 - self.of_all.accepted()?)? * 2.0,
            SlotLoss::LkLambda => mixed(mean),
            SlotLoss::LkHybrid => mixed(self.of_all.chance()?),
            _ => self.of_all.distance(form, mean),
        }
    }
}

fn known(draft: &BlockDraft, row: &Row) -> Result<Vec<Known>> {
    let rows = select_rows(&row.head, &kept()).expect("rows");
    let over_kept = Row { head: rows.clone(), ..Row { batch: row.batch.clone(), ..Row::new() } };
    let all = slots(draft, &over_kept)?.into_iter().map(|slot| {
        let teacher = row.teacher.narrow(0, ANCHORS[slot.block].0 + slot.k, 1)?;
        let normaliser = |head: &Tensor| teacher.matmul(&head.t()?)?.log_sum_exp(1)?.sum_all();
        let mass = (normaliser(&rows)? - normaliser(&row.head)?)?;
        let place = kept().iter().position(|id| *id as usize == slot.label);
        let label = place.unwrap_or(0);
        let of_all = Slot {
            log_q: slot.log_q.clone(),
            log_p: slot.log_p.broadcast_add(&mass)?,
            state: slot.state.clone(),
            label,
            ..slot
        };
        let rescaled = Slot { label, ..slot };
        Ok(Known { rescaled, of_all, is_proposed: place.is_some() })
    });
    all.collect()
}

fn objective(loss: BlockLoss, row: &Row) -> BlockObjective {
    let objective = BlockObjective::new(draft(&toy(), row), &row.head, loss, draws());
    objective.with_starts(|_| ANCHORS.map(|(index, _)| index).to_vec())
}

#[test]
fn slots_learn_the_targets_distribution_over_what_they_propose() -> Result<()> {
    let row = Row::new();
    for loss in &ALL[..6] {
        for (weight, distribution) in [
            (1.0, TeacherDistribution::Whole),
            (0.3, TeacherDistribution::Whole),
            (0.3, TeacherDistribution::TopK { k: 30, tail: TailKind::Renormalise }),
        ] {
            let form = SlotForm::new(*loss, Some(0.8), None);
            let soft = Some(SoftLoss { weight, distribution });
            let block = BlockLoss { form, decay: DECAY, soft, ..BlockLoss::default() };
            let own = draft(&toy(), &row);
            let objective = objective(block, &row);
            let all = known(&own, &row)?;
            let proposed = all.iter().filter(|slot| slot.is_proposed).count();
            assert!((1..all.len()).contains(&proposed), "{proposed} of {} labels", all.len());
            let chances = all.iter().map(|slot| slot.of_all.chance());
            let chances = chances.collect::<Result<Vec<_>>>()?;
            let of = |slot: &Known| {
                let learned = slot.distance(form, mean(&chances))?;
                (slot.hard()? * (1.0 - weight))? + (learned * weight)?
            };
            let want = weighted(&all, &decays_of(&all), of)?;
            let name = format!("{loss:?} {weight} {distribution:?}");
            assert_same(&name, &objective, &row, &own, &want);
            let metrics = step(&objective, &row, &row.features()).metrics;
            let told: f64 = metrics.by_delay.iter().map(DelayCounts::acceptance_rate).sum::<f64>();
            // Blocks of both documents have three slots each.
            let of_delay =
                |k| chances.iter().zip(&all).filter(move |(_, slot)| slot.rescaled.k == k);
            let want: f64 =
                (0..3).map(|k| of_delay(k).map(|(chance, _)| chance).sum::<f64>() / 2.0).sum();
            assert!((told - want).abs() < 1e-4, "{name}: {told} {want}");
        }
    }
    Ok(())
}

fn decays_of(all: &[Known]) -> Vec<f64> {
    all.iter().map(|slot| (-(slot.rescaled.k as f64) / DECAY).exp()).collect()
}

#[test]
fn a_label_that_is_not_proposed_is_not_learned_and_counts_as_wrong() -> Result<()> {
    let row = Row::new();
    // A distance to labels tells no loss of such a label, either.
    for loss in [SlotLoss::Tv, SlotLoss::L1, SlotLoss::LkHybrid] {
        let form = SlotForm::new(loss, None, None);
        let block = BlockLoss { form, decay: DECAY, ..BlockLoss::default() };
        let share = step(&objective(block, &row), &row, &row.features());
        let loss = f64::from(share.loss.expect("a loss").to_scalar::<f32>()?);
        let told = share.metrics.loss();
        assert!((told - loss).abs() < 2e-5 * told, "{form:?}: told {told} {loss}");
    }
    let block = BlockLoss { decay: DECAY, ..BlockLoss::default() };
    let own = draft(&toy(), &row);
    let objective = objective(block, &row);
    let all = known(&own, &row)?;
    let want = weighted(&all, &decays_of(&all), Known::hard)?;
    assert_same("labels", &objective, &row, &own, &want);
    let best = |slot: &Known| -> Result<bool> {
        let best = slot.rescaled.log_q.argmax(D::Minus1)?.to_vec1::<u32>()?[0];
        Ok(slot.is_proposed && best as usize == slot.rescaled.label)
    };
    let right = all.iter().map(best).collect::<Result<Vec<_>>>()?;
    let right = right.iter().filter(|right| **right).count() as f64;
    let metrics = step(&objective, &row, &row.features()).metrics;
    let told: f64 = metrics.by_delay.iter().map(|of| 2.0 * of.top1_agreement()).sum();
    assert!((told - right).abs() < 1e-9, "{told} {right}");
    let held_out = objective.measure(&row.batch, &row.features()).expect("measured");
    assert!(held_out.replayed.tokens >= held_out.replayed.rounds && held_out.loss() > 0.0);
    Ok(())
}

/// The chance that a label which is not proposed holds is 0, and so is that of the slots after it.
#[test]
fn weights_know_that_such_a_label_is_never_proposed() -> Result<()> {
    let row = Row::new();
    let block = BlockLoss {
        weights: SlotWeights::Dpace,
        decay: DECAY,
        alpha: ALPHA,
        ..BlockLoss::default()
    };
    let own = draft(&toy(), &row);
    let objective = objective(block, &row);
    let all = known(&own, &row)?;
    let chance = |slot: &Known| -> Result<f64> {
        let loss = f64::from(slot.rescaled.hard()?.to_scalar::<f32>()?);
        Ok(if slot.is_proposed { (-loss).exp() } else { 0.0 })
    };
    let chances = all.iter().map(chance).collect::<Result<Vec<_>>>()?;
    let losses = all.iter().map(Known::hard).collect::<Result<Vec<_>>>()?;
    let slots: Vec<Slot> = all.into_iter().map(|slot| slot.rescaled).collect();
    let weights = credits(&slots, &chances);
    let want = (sum(&losses, &weights)? / weights.iter().sum::<f64>())?;
    assert_same("dpace", &objective, &row, &own, &want);
    Ok(())
}

#[test]
fn a_chain_adds_to_the_logits_of_what_is_proposed() -> Result<()> {
    let row = Row::new();
    let chain = ChainSizes { rank: 5, kind: ChainKind::Vanilla, confidence: None };
    let config = BlockConfig { chain: Some(chain), ..toy() };
    for loss in &ALL[..6] {
        let form = SlotForm::new(*loss, Some(0.9), None);
        let chained = ChainLoss { decay: DECAY, form, confidence: 0.0, ..ChainLoss::default() };
        let own = draft(&config, &row);
        let objective = ChainObjective::new(draft(&config, &row), &row.head, chained, draws());
        let objective = objective.with_starts(|_| ANCHORS.map(|(index, _)| index).to_vec());
        let all = known(&own, &row)?;
        let chances = all.iter().map(|slot| slot.of_all.chance()).collect::<Result<Vec<_>>>()?;
        let of = |slot: &Known| {
            let apart = slot.distance(form, mean(&chances))?;
            (slot.hard()? * chained.hard)? + (apart * chained.distance)?
        };
        let want = weighted(&all, &decays_of(&all), of)?;
        assert_same(&format!("{loss:?}"), &objective, &row, &own, &want);
        objective.measure(&row.batch, &row.features()).expect("measured");
    }
    Ok(())
}
