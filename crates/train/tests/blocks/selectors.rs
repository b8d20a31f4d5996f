//! Drafts that choose among the candidates of a slot.

use super::*;

#[test]
fn a_selector_may_keep_labels_and_leave_the_layers_alone() -> Result<()> {
    let row = Row::new();
    let config = BlockConfig { selector: Some(SelectorSizes { rank: 3, top_k: 5 }), ..toy() };
    let of = |weight: f64, keeps_labels: bool, stops_gradient: bool| {
        let selector = SelectorLoss { weight, over_hits: false, keeps_labels, stops_gradient };
        let block = BlockLoss {
            weights: SlotWeights::Uniform,
            selector: Some(selector),
            ..Default::default()
        };
        blocks(block, &config, &row)
    };
    let features = BatchFeatures { teacher: TeacherFeatures::None, ..row.features() };
    let draft = fresh(&config);
    let selector = draft.selector().expect("a selector");
    let all = slots(&draft, &row)?;
    let mut wanted = 0.0;
    let mut found = 0;
    for slot in &all {
        let mut candidates = linear_top_k(&slot.state.detach(), &row.head, 5)?.ids;
        let label = slot.label as u32;
        if candidates.contains(&label) {
            found += 1;
        } else {
            candidates[4] = label;
        }
        let logits = slot.state.detach().matmul(&row.head.t()?)?.squeeze(0)?;
        let at = Tensor::from_slice(&candidates, 5, &Device::Cpu)?;
        let projected = selector.project(&slot.state.detach()).expect("projected");
        let preferences = selector.preferences(&projected, &[slot.before], &candidates);
        let preferences = preferences.expect("preferences").squeeze(0)?;
        let scores: Vec<f32> = (logits.index_select(&at, 0)? + preferences)?.to_vec1()?;
        let total: f32 = scores.iter().map(|score| score.exp()).sum();
        let place = candidates.iter().position(|id| *id == label).expect("it is there");
        wanted += f64::from(total.ln() - scores[place]);
    }
    assert!(found < all.len(), "every label is a candidate");
    let share = step(&of(0.7, true, false), &row, &features);
    let part = share.metrics.parts[1];
    assert!((part.sum - wanted).abs() < 1e-4 * wanted, "{} {wanted}", part.sum);
    assert_eq!((share.metrics.candidate_hits, share.metrics.candidate_rows), (found, all.len()));
    let strict = step(&of(0.7, false, false), &row, &features);
    assert!(strict.metrics.parts[1].sum < part.sum);

    let gradients = |objective: &BlockObjective| {
        let loss = step(objective, &row, &features).loss.expect("a loss");
        let gradients = loss.gradients().expect("backward");
        let named = |p: &Parameter| (p.name.clone(), values(&gradients, p));
        objective.draft().parameters().iter().map(named).collect::<Vec<_>>()
    };
    let [stopped, flowing, without] =
        [(0.7, true), (0.7, false), (0.0, false)].map(|(w, stops)| gradients(&of(w, true, stops)));
    let of_selector = |name: &str| name.starts_with("candidate_selector.");
    for (((name, stopped), (_, flowing)), (_, without)) in
        stopped.iter().zip(&flowing).zip(&without)
    {
        if of_selector(name) {
            assert_eq!(stopped, flowing, "{name}");
        } else {
            assert_eq!(stopped, without, "{name}");
        }
    }
    let reached = flowing.iter().zip(&without).filter(|(own, other)| own != other);
    let mut reached = reached.filter(|((name, _), _)| !of_selector(name));
    assert!(reached.next().is_some(), "the selector's loss reaches no layer");
    Ok(())
}

#[test]
fn a_selector_counts_for_less_in_the_first_steps_of_training_and_not_when_it_is_measured() {
    let row = Row::new();
    let config = BlockConfig { selector: Some(SelectorSizes { rank: 3, top_k: 5 }), ..toy() };
    let of = |weight: f64| {
        let (over_hits, keeps_labels, stops_gradient) = (false, true, false);
        let selector = SelectorLoss { weight, over_hits, keeps_labels, stops_gradient };
        let loss =
            BlockLoss { selector: Some(selector), selector_ramp: 0.25, ..BlockLoss::default() };
        blocks(loss, &config, &row)
    };
    let features = BatchFeatures { teacher: TeacherFeatures::None, ..row.features() };
    let value = |objective: &BlockObjective| {
        let share = step(objective, &row, &features);
        let loss = share.loss.expect("a loss");
        let gradients = loss.gradients().expect("backward");
        let all = objective.draft().parameters().iter().map(|p| values(&gradients, p));
        let loss = loss.to_scalar::<f32>().expect("number");
        (loss, share.metrics.loss(), all.collect::<Vec<_>>())
    };
    // A quarter of 16 steps: the first weighs a quarter, the fourth and all others the whole.
    for (at, wanted) in [(1, 0.25), (2, 0.5), (4, 1.0), (16, 1.0)] {
        let mut ramped = of(0.8);
        ramped.begin_step(at, 16);
        let (own, plain) = (value(&ramped), value(&of(0.8 * wanted)));
        assert_eq!(own, plain, "step {at}");
        assert!((own.1 - f64::from(own.0)).abs() < 2e-5 * own.1, "step {at}: {own:?}");
        let measured = ramped.measure(&row.batch, &features).expect("measured");
        assert!((measured.parts[1].weight - 0.8).abs() < 1e-12, "held-out rows of step {at}");
    }
    // A row with nothing to learn tells the same weight as those that it is added to.
    let mut ramped = of(0.8);
    ramped.begin_step(1, 16);
    let mut silent = Row::new();
    silent.batch.loss_mask.fill(false);
    let share = step(&ramped, &silent, &features);
    assert!((share.metrics.parts[1].weight - 0.2).abs() < 1e-12);
}
