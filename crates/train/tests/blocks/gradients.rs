//! Where gradients go, and what they are.

use super::*;

/// Of a step whose weights and mixes stay as they are.
#[test]
fn gradients_are_finite_differences_of_the_told_loss() {
    const STEP: f32 = 2e-3;
    let row = Row::new();
    let soft = Some(SoftLoss { weight: 1.0, distribution: TeacherDistribution::Whole });
    for loss in ALL.into_iter().filter(|loss| *loss != SlotLoss::LkHybrid) {
        let form = SlotForm::new(loss, None, None);
        let block = BlockLoss { form, soft, weights: SlotWeights::Dpard, ..BlockLoss::default() };
        let objective = blocks(block, &toy(), &row);
        let features = row.features();
        let prepared = objective.prepare(&row.batch, &features).expect("prepared");
        let share = || {
            let own = &prepared.denominators;
            objective.share(&row.batch, &features, &prepared, own, true).expect("share")
        };
        let parameters = objective.draft().parameters();
        let norm = parameters.iter().find(|p| p.name == "norm.weight").expect("a norm");
        let gradients = share().loss.expect("a loss").gradients().expect("backward");
        let own = values(&gradients, norm);
        let largest = own.iter().fold(0.0_f32, |most, g| most.max(g.abs()));
        let at = norm.var.as_tensor().copy().and_then(|t| t.to_vec1::<f32>()).expect("values");
        let told = |values: &[f32]| {
            let values = Tensor::from_slice(values, 16, &Device::Cpu).expect("values");
            norm.var.set(&values).expect("set");
            share().metrics.loss()
        };
        for (i, own) in own.iter().enumerate() {
            let moved = |by: f32| {
                let mut values = at.clone();
                values[i] += by;
                told(&values)
            };
            let want = (moved(STEP) - moved(-STEP)) / (2.0 * f64::from(STEP));
            let error = (f64::from(*own) - want).abs();
            assert!(error < 3e-2 * f64::from(largest), "{loss:?} {i}: {own} {want}");
        }
        told(&at);
    }
}

#[test]
fn no_gradient_reaches_the_targets_table_or_head() {
    let row = Row::new();
    let chain = ChainSizes { rank: 5, kind: ChainKind::Vanilla, confidence: None };
    for chain in [None, Some(chain)] {
        let trained = |seed| Var::from_tensor(&random((30, 16), seed)).expect("a variable");
        let (table, head) = (trained(1), trained(3));
        let config = BlockConfig { chain, ..toy() };
        let draft = BlockDraft::initialise(&config, table.as_tensor(), 2).expect("draft");
        let objective: Box<dyn Objective> = if chain.is_some() {
            let loss = ChainLoss::default();
            Box::new(ChainObjective::new(draft, head.as_tensor(), loss, draws()))
        } else {
            let soft = Some(SoftLoss { weight: 0.5, distribution: TeacherDistribution::Whole });
            let loss = BlockLoss { soft, ..BlockLoss::default() };
            Box::new(BlockObjective::new(draft, head.as_tensor(), loss, draws()))
        };
        let loss = step(objective.as_ref(), &row, &row.features()).loss.expect("a loss");
        let gradients = loss.gradients().expect("backward");
        for frozen in [&table, &head] {
            assert!(gradients.get(frozen.as_tensor()).is_none(), "the target trains along");
        }
        let trains = |p: &&Parameter| gradients.get(p.var.as_tensor()).is_some();
        let count = objective.draft().parameters().iter().filter(trains).count();
        assert_eq!(count, objective.draft().parameters().len(), "a tensor of the draft does not");
        // They are none of its tensors, so files hold no copy.
        let names = objective.draft().parameters().iter().map(|p| p.name.as_str());
        let mut names =
            names.filter(|name| name.contains("embed_tokens") || name.contains("lm_head"));
        assert_eq!(names.next(), None);
    }
}

#[test]
fn what_training_reads_of_the_target_also_weighs_and_mixes_held_out_slots() {
    let row = Row::new();
    let features = row.features();
    let distribution = TeacherDistribution::TopK { k: 5, tail: TailKind::Bucket };
    let soft = Some(SoftLoss { weight: 0.7, distribution });
    for (weights, loss) in
        [(SlotWeights::Decay, SlotLoss::LkLambda), (SlotWeights::Dpard, SlotLoss::Tv)]
    {
        let form = SlotForm::new(loss, None, None);
        let loss = BlockLoss { weights, form, soft, ..BlockLoss::default() };
        let objective = blocks(loss, &toy(), &row);
        let trained = step(&objective, &row, &features).metrics.loss();
        let measured = objective.measure(&row.batch, &features).expect("measured");
        let as_trained = measured.as_trained.expect("as they are trained").loss();
        assert!((as_trained - trained).abs() < 1e-9, "{weights:?}: {as_trained} {trained}");
    }
}

#[test]
fn a_row_without_a_learned_slot_counts_where_rows_divide() {
    let mut row = Row::new();
    row.batch.loss_mask.fill(false);
    let features = row.features();
    let chain = ChainSizes { rank: 5, kind: ChainKind::Vanilla, confidence: None };
    let config = BlockConfig { chain: Some(chain), ..toy() };
    for (divide_by, wanted) in
        [(Divisor::Rows, 1.0), (Divisor::Slots, 0.0), (Divisor::Weights, 0.0)]
    {
        let weights = SlotWeights::Dpard;
        let loss = ChainLoss { divide_by, weights, ..ChainLoss::default() };
        let of_chain = ChainObjective::new(fresh(&config), &row.head, loss, draws());
        let soft = Some(SoftLoss { weight: 1.0, distribution: TeacherDistribution::Whole });
        let block = BlockLoss { divide_by, weights, soft, ..BlockLoss::default() };
        let of_blocks = blocks(block, &toy(), &row);
        let objectives: [&dyn Objective; 2] = [&of_chain, &of_blocks];
        for objective in objectives {
            let share = step(objective, &row, &features);
            assert!(share.loss.is_none());
            let parts: Vec<f64> = share.metrics.parts.iter().map(|part| part.denominator).collect();
            assert_eq!(parts, [wanted], "{divide_by:?}");
        }
    }
}
