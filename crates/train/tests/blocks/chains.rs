//! Drafts whose slots see the tokens chosen before them.

use super::*;

fn started(draft: BlockDraft, loss: ChainLoss, row: &Row) -> ChainObjective {
    let objective = ChainObjective::new(draft, &row.head, loss, draws());
    objective.with_starts(|_| ANCHORS.map(|(index, _)| index).to_vec())
}

#[test]
fn a_chain_learns_the_text_the_target_and_its_confidence_as_plain_ops_say() -> Result<()> {
    let row = Row::new();
    let chain = ChainSizes { rank: 5, kind: ChainKind::Vanilla, confidence: Some(true) };
    let config = BlockConfig { chain: Some(chain), ..toy() };
    let published =
        ChainLoss { decay: DECAY, alpha: ALPHA, confidence: 0.6, ..ChainLoss::default() };
    let dpard = ChainLoss {
        weights: SlotWeights::Dpard,
        form: SlotForm::new(SlotLoss::Renyi, None, None),
        hard: 0.0,
        distance: 1.0,
        ..published
    };
    let held = |loss| ChainLoss { form: SlotForm::new(loss, Some(0.9), None), ..published };
    let special = [
        dpard,
        ChainLoss { divide_by: Divisor::Rows, ..dpard },
        ChainLoss { divide_by: Divisor::Slots, by_reach: true, ..dpard },
        ChainLoss { weights: SlotWeights::Uniform, by_reach: true, ..published },
        ChainLoss { divide_by: Divisor::Slots, ..published },
    ];
    for loss in ALL.map(held).into_iter().chain(special) {
        let draft = fresh(&config);
        let objective = started(fresh(&config), loss, &row);
        let all = slots(&draft, &row)?;
        let chances = all.iter().map(Slot::chance).collect::<Result<Vec<_>>>()?;
        let weights = match loss.weights {
            SlotWeights::Dpard => credits(&all, &chances),
            SlotWeights::Uniform => vec![1.0; all.len()],
            _ => decays(&all),
        };
        let reached = |slot: &Slot| {
            let before =
                all.iter().zip(&chances).filter(|(o, _)| o.block == slot.block && o.k < slot.k);
            before.map(|(_, chance)| *chance).product::<f64>()
        };
        let of_confidence: Vec<f64> = match (loss.by_reach, loss.weights) {
            (true, _) => all.iter().map(reached).collect(),
            (false, SlotWeights::Dpard) => decays(&all),
            (false, _) => weights.clone(),
        };
        let total = |weights: &[f64]| weights.iter().sum::<f64>();
        let divisors = match loss.divide_by {
            Divisor::Weights => (total(&weights), total(&of_confidence)),
            Divisor::Slots => (all.len() as f64, all.len() as f64),
            Divisor::Rows => (1.0, total(&of_confidence)),
        };
        let of = |slot: &Slot| {
            let apart = slot.distance(loss.form, mean(&chances))?;
            (slot.hard()? * loss.hard)? + (apart * loss.distance)?
        };
        let losses = all.iter().map(of).collect::<Result<Vec<_>>>()?;
        let heads = draft.chain().expect("a chain");
        let told = |(slot, alpha): (&Slot, &f64)| {
            let embedded = heads.embed(&[slot.before]).expect("a token");
            let logit = heads.confidence(&slot.state, embedded.as_ref()).expect("a head");
            let told = (1.0 / (logit.expect("a logit").neg()?.exp()? + 1.0)?)?.sum_all()?;
            let kept = (told.log()? * *alpha)?;
            ((1.0 - told)?.log()? * (1.0 - alpha))?.neg()? - kept
        };
        let confidences = all.iter().zip(&chances).map(told).collect::<Result<Vec<_>>>()?;
        let of_heads = (sum(&confidences, &of_confidence)? * (loss.confidence / divisors.1))?;
        let want = ((sum(&losses, &weights)? / divisors.0)? + of_heads)?;
        assert_same(&format!("{loss:?}"), &objective, &row, &draft, &want);
    }
    Ok(())
}

#[test]
fn without_a_table_or_with_one_of_zeros_a_chain_is_a_block_that_proposes_from_slot_0() -> Result<()>
{
    let row = Row::new();
    let text = ChainLoss {
        weights: SlotWeights::Uniform,
        hard: 1.0,
        distance: 0.0,
        confidence: 0.0,
        ..ChainLoss::default()
    };
    let chained = |rank| {
        let chain = ChainSizes { rank, kind: ChainKind::Vanilla, confidence: None };
        BlockConfig { chain: Some(chain), ..toy() }
    };
    let objective = |draft| started(draft, text, &row);
    // Slot k learns the token k + 1 places after its anchor, by its own logits alone.
    let draft = fresh(&chained(0));
    let all = slots(&draft, &row)?;
    let labels: Vec<u32> = all.iter().map(|slot| slot.label as u32).collect();
    let places = ANCHORS.iter().flat_map(|(start, _)| start + 1..start + 5);
    assert_eq!(labels, places.map(|place| row.batch.ids[place]).collect::<Vec<_>>());
    let losses = all.iter().map(Slot::hard).collect::<Result<Vec<_>>>()?;
    let want = (sum(&losses, &[1.0; 8])? / 8.0)?;
    assert_same("rank 0", &objective(fresh(&chained(0))), &row, &draft, &want);

    let silent = |(name, value): (String, Tensor)| {
        let is_table = name == "markov_head.markov_w2.weight";
        let value = if is_table { value.zeros_like().expect("zeros") } else { value };
        (name, value)
    };
    let tensors = fresh(&chained(5)).weights().named().expect("tensors");
    let source = MemorySource::new(tensors.into_iter().map(silent));
    let config = chained(5);
    let draft = BlockDraft::from_source(&source, &config, &random((30, 16), 1)).expect("a draft");
    let told = step(&objective(draft), &row, &row.features()).metrics.loss();
    let want = f64::from(want.to_scalar::<f32>()?);
    assert!((told - want).abs() < 2e-5 * want, "{told} {want}");
    Ok(())
}

#[test]
fn a_teacher_of_the_draft_s_own_logits_is_at_no_distance_and_accepts_every_slot() -> Result<()> {
    let chain = ChainSizes { rank: 0, kind: ChainKind::Vanilla, confidence: None };
    let config = BlockConfig { chain: Some(chain), ..toy() };
    let loss = ChainLoss { hard: 0.0, distance: 1.0, confidence: 0.0, ..ChainLoss::default() };
    // The teacher of slot k is the row k places after the anchor, and no other.
    for (shift, is_own) in [(0, true), (1, false)] {
        let mut row = Row::new();
        let mut rows = (0..20).map(|i| row.teacher.narrow(0, i, 1)).collect::<Result<Vec<_>>>()?;
        for slot in slots(&fresh(&config), &row)? {
            rows[ANCHORS[slot.block].0 + slot.k + shift] = slot.state.detach();
        }
        row.teacher = Tensor::cat(&rows, 0)?;
        let objective = started(fresh(&config), loss, &row);
        let metrics = step(&objective, &row, &row.features()).metrics;
        let rates: Vec<f64> = metrics.by_delay.iter().map(DelayCounts::acceptance_rate).collect();
        assert_eq!(rates.len(), 4, "every slot proposes");
        assert_eq!(metrics.loss() < 1e-5, is_own, "{}", metrics.loss());
        assert_eq!(rates.iter().all(|rate| (rate - 1.0).abs() < 1e-5), is_own, "{rates:?}");
    }
    Ok(())
}

/// Weights of the slots and of their confidence differ, and stand in another ratio in each row.
#[test]
fn held_out_rows_of_a_chain_come_to_the_loss_of_a_step_over_all_of_them() {
    let (long, mut short) = (Row::new(), Row::new());
    short.batch.loss_mask[5..9].fill(false);
    short.batch.loss_mask[14..].fill(false);
    let chain = ChainSizes { rank: 5, kind: ChainKind::Vanilla, confidence: Some(true) };
    let config = BlockConfig { chain: Some(chain), ..toy() };
    let loss = ChainLoss { weights: SlotWeights::Dpace, decay: 1.0, ..ChainLoss::default() };
    let objective = ChainObjective::new(fresh(&config), &long.head, loss, draws());
    let rows = [long, short].map(|row| {
        let features = row.features();
        let prepared = objective.prepare(&row.batch, &features).expect("prepared");
        (row.batch, features, prepared)
    });
    let of_row = |row: usize, part: usize| rows[row].2.denominators[part];
    let totals = [0, 1].map(|part| of_row(0, part) + of_row(1, part));
    let ratios = [0, 1].map(|row| of_row(row, 0) / of_row(row, 1));
    assert!((ratios[0] - ratios[1]).abs() > 0.05, "{ratios:?}");
    let (mut trained, mut told) = (0.0, [DraftMetrics::default(), DraftMetrics::default()]);
    for (batch, features, prepared) in &rows {
        let share = objective.share(batch, features, prepared, &totals, true).expect("share");
        let loss = share.loss.map(|loss| loss.to_scalar::<f32>().expect("number"));
        trained += f64::from(loss.expect("a loss"));
        told[0].merge(&share.metrics);
        told[1].merge(&objective.measure(batch, features).expect("measured"));
    }
    for loss in told.map(|metrics| metrics.loss()) {
        assert!((loss - trained).abs() < 2e-5 * trained, "{loss} {trained}");
    }
}
