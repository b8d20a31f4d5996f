//! What must hold of the objective of block drafts without reference cases.

mod blocks;

use longdraft_kernels::graph::Backward;
use std::cell::Cell;
use std::rc::Rc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures};
use longdraft_kernels::rows::select_rows;
use longdraft_kernels::top_k::linear_top_k;
use longdraft_models::draft::block::{Anchor, BlockDraft, Visible};
use longdraft_models::draft::{Draft, Parameter};
use longdraft_train::method::block::{
    BlockBudget, BlockDraws, BlockLoss, BlockObjective, SlotWeights, SoftLoss,
};
use longdraft_train::objective::{Objective, TailKind, TeacherDistribution};

use blocks::{batch, random, toy};

fn features(states: Tensor) -> BatchFeatures {
    BatchFeatures {
        last_kv: None,
        aux_hidden: Some(states),
        teacher: TeacherFeatures::None,
        part: None,
    }
}

fn draft() -> BlockDraft {
    BlockDraft::initialise(&toy(), &random((30, 16), 1), 2).expect("draft")
}

fn loss(weights: SlotWeights, soft: Option<SoftLoss>) -> BlockLoss {
    BlockLoss { weights, decay: 3.0, soft, ..BlockLoss::default() }
}

fn objective(weights: SlotWeights) -> BlockObjective {
    let draws = BlockDraws { seed: 4, budget: BlockBudget::PerRow(6) };
    BlockObjective::new(draft(), &random((30, 16), 3), loss(weights, None), draws)
}

#[test]
fn a_packed_row_is_its_documents_one_by_one() {
    let starts = |batch: &Batch| match batch.ids.len() {
        20 => vec![3, 6, 12, 17],
        9 => vec![3, 6],
        _ => vec![3, 8],
    };
    for weights in [SlotWeights::Decay, SlotWeights::Dpace] {
        let objective = objective(weights).with_starts(starts);
        let states = random((20, 32), 5);
        let sum = |batch: &Batch, first: usize| {
            let rows = states.narrow(0, first, batch.ids.len()).expect("rows");
            let metrics = objective.measure(batch, &features(rows)).expect("measured");
            (metrics.parts[0].sum, metrics.parts[0].denominator, metrics.replayed.tokens)
        };
        let (packed, one) = (sum(&batch(&[9, 11]), 0), sum(&batch(&[9]), 0));
        // The second document of a packed row has other ids.
        let mut second = batch(&[9, 11]);
        second.ids = second.ids[9..].to_vec();
        second.position_ids = (0..11).collect();
        second.document_ids = vec![0; 11];
        second.loss_mask = second.loss_mask[9..].to_vec();
        let second = sum(&second, 9);
        assert!((packed.0 - one.0 - second.0).abs() < 1e-4 * packed.0, "{packed:?}");
        assert!((packed.1 - one.1 - second.1).abs() < 1e-6 * packed.1, "{packed:?}");
        assert_eq!(packed.2, one.2 + second.2);
    }
}

#[test]
fn a_row_without_two_supervised_tokens_in_a_row_teaches_nothing() {
    let objective = objective(SlotWeights::Dpace);
    let mut batch = batch(&[6]);
    batch.loss_mask = vec![true, false, true, false, true, false];
    let features = features(random((6, 32), 5));
    let prepared = objective.prepare(&batch, &features).expect("prepared");
    assert_eq!(prepared.denominators, [0.0]);
    let share = objective.share(&batch, &features, &prepared, &[0.0], true).expect("share");
    assert!(share.loss.is_none() && share.metrics.rows == 0);
}

/// `Σ w ℓ / Σ w` of blocks at 3 and 12 of two documents by plain ops, with the draft's gradients.
fn plain_loss(
    draft: &BlockDraft,
    (batch, states, teacher, head): (&Batch, &Tensor, &Tensor, &Tensor),
    soft: SoftLoss,
) -> candle_core::Result<Tensor> {
    let anchors = [(3, 0), (12, 9)].map(|(index, document_start)| Anchor { index, document_start });
    let known = anchors.iter().map(|a| (batch.ids[a.index], batch.position_ids[a.index]));
    let (ids, positions) = draft.config().inputs(known);
    let context = draft.context(states, &batch.position_ids).expect("context");
    let visible = Visible::new(draft.config(), &anchors, 4, batch.ids.len());
    let all = draft.blocks(&ids, &positions, &context, &visible).expect("states");
    let log_softmax = |states: &Tensor| -> candle_core::Result<Tensor> {
        let logits = states.matmul(&head.t()?)?;
        logits.broadcast_sub(&logits.exp()?.sum_keepdim(1)?.log()?)
    };
    let mut terms = Vec::new();
    let mut total = 0.0;
    for (block, anchor) in anchors.iter().enumerate() {
        for slot in 1..4 {
            let place = anchor.index + slot;
            let log_q = log_softmax(&all.narrow(0, 4 * block + slot, 1)?)?;
            let p = log_softmax(&teacher.narrow(0, place - 1, 1)?)?.exp()?;
            let hard = log_q.narrow(1, batch.ids[place] as usize, 1)?.sum_all()?.neg()?;
            let learned = match soft.distribution {
                TeacherDistribution::Whole => (&p * &log_q)?.sum_all()?.neg()?,
                TeacherDistribution::TopK { k, tail } => {
                    let mut values: Vec<f32> = p.flatten_all()?.to_vec1()?;
                    values.sort_by(|a, b| b.total_cmp(a));
                    let chosen = p.ge(f64::from(values[k - 1]))?.to_dtype(DType::F32)?;
                    let (p, q) = ((&p * &chosen)?, (log_q.exp()? * &chosen)?);
                    let learned = (&p * &log_q)?.sum_all()?.neg()?;
                    let mass = p.sum_all()?;
                    match tail {
                        TailKind::Renormalise => (learned / mass)?,
                        TailKind::Bucket => {
                            let left = (1.0 - q.sum_all()?)?.log()?;
                            (learned - ((1.0 - mass)? * left)?)?
                        }
                    }
                }
            };
            let weight = (-(slot as f64 - 1.0) / 3.0).exp();
            total += weight;
            let term = ((hard * (1.0 - soft.weight))? + (learned * soft.weight)?)?;
            terms.push((term * weight)?);
        }
    }
    Tensor::stack(&terms, 0)?.sum_all()? / total
}

#[test]
fn the_targets_distribution_is_learned_as_plain_ops_say() {
    let top = |k, tail| TeacherDistribution::TopK { k, tail };
    let (batch, head) = (batch(&[9, 11]), random((30, 16), 3));
    let (states, teacher) = (random((20, 32), 5), random((20, 16), 6));
    for (weight, distribution) in [
        (1.0, TeacherDistribution::Whole),
        (0.3, TeacherDistribution::Whole),
        (1.0, top(4, TailKind::Bucket)),
        (0.7, top(4, TailKind::Renormalise)),
        (0.5, top(30, TailKind::Renormalise)),
    ] {
        let soft = SoftLoss { weight, distribution };
        let draws = BlockDraws { seed: 4, budget: BlockBudget::PerRow(6) };
        let loss = loss(SlotWeights::Decay, Some(soft));
        let objective = BlockObjective::new(draft(), &head, loss, draws);
        let objective = objective.with_starts(|_| vec![3, 12]);
        let draft = draft();
        let want = plain_loss(&draft, (&batch, &states, &teacher, &head), soft).expect("loss");
        let gradients = want.gradients().expect("backward");
        let want = want.to_scalar::<f32>().expect("number");
        // As the target gives it, and as a store keeps it.
        let mut teachers = vec![TeacherFeatures::EveryToken { hidden: teacher.clone() }];
        if let TeacherDistribution::TopK { k, .. } = distribution {
            let rows = select_rows(&teacher, &objective.teacher_tokens(&batch)).expect("rows");
            let entries = linear_top_k(&rows, &head, k).expect("entries");
            teachers.push(TeacherFeatures::TopK { entries, k, hidden: None });
        }
        for teacher in teachers {
            let features = BatchFeatures { teacher, ..features(states.clone()) };
            let prepared = objective.prepare(&batch, &features).expect("prepared");
            let denominators = prepared.denominators.clone();
            let share = objective.share(&batch, &features, &prepared, &denominators, true);
            let share = share.expect("share");
            let (told, loss) = (share.metrics.loss(), share.loss.expect("a loss"));
            let found = loss.to_scalar::<f32>().expect("number");
            assert!((found - want).abs() < 1e-5 * want, "{soft:?}: {found} {want}");
            assert!((told - f64::from(want)).abs() < 1e-5 * told, "{soft:?}: {told} {want}");
            let own = loss.gradients().expect("backward");
            for (a, b) in draft.parameters().iter().zip(objective.draft().parameters()) {
                let values = |gradients: &GradStore, parameter: &Parameter| -> Vec<f32> {
                    let gradient = gradients.get(&parameter.var).expect("a gradient");
                    gradient.flatten_all().and_then(|g| g.to_vec1()).expect("values")
                };
                let (a_values, b_values) = (values(&gradients, a), values(&own, b));
                let largest = a_values.iter().fold(0.0_f32, |m, g| m.max(g.abs()));
                for (x, y) in a_values.iter().zip(&b_values) {
                    assert!((x - y).abs() < 2e-5 * largest, "{soft:?} {}: {x} {y}", a.name);
                }
            }
        }
    }
}

#[test]
fn held_out_text_is_decoded_again_round_by_round() {
    // A head that knows two tokens, so that proposals often hold.
    let known = random((1, 16), 3);
    let rest = Tensor::zeros((28, 16), DType::F32, &candle_core::Device::Cpu).expect("zeros");
    let head = Tensor::cat(&[&known, &known.neg().expect("other"), &rest], 0).expect("head");
    let mut batch = batch(&[40, 31]);
    batch.ids = (0..71_u32).map(|t| (t * t / 3 + t / 7) % 2).collect();
    batch.loss_mask[20..25].fill(false);
    let features = features(random((71, 32), 5));
    let draws = BlockDraws { seed: 4, budget: BlockBudget::PerRow(6) };
    let loss = loss(SlotWeights::Decay, None);
    let objective = BlockObjective::new(draft(), &head, loss.clone(), draws.clone());
    let replayed = objective.measure(&batch, &features).expect("measured").replayed;

    let root = Rc::new(Cell::new(0));
    let at = Rc::clone(&root);
    let objective = BlockObjective::new(draft(), &head, loss, draws);
    let objective = objective.with_starts(move |_| vec![at.get()]);
    let (mut rounds, mut tokens) = (0, 0);
    for run in [2..20, 25..40, 42..71] {
        root.set(run.start);
        while root.get() + 1 < run.end {
            let metrics = objective.measure(&batch, &features).expect("measured");
            let slots = metrics.by_delay.iter().take_while(|slot| slot.top1_count == 1);
            // Then the target's own token, unless the text ends before it.
            let committed = (slots.count() + 1).min(run.end - 1 - root.get());
            rounds += 1;
            tokens += committed;
            root.set(root.get() + committed);
        }
    }
    assert_eq!((replayed.rounds, replayed.tokens), (rounds, tokens));
    assert!(rounds < tokens && tokens < 3 * rounds, "{rounds} {tokens}: no proposal holds, or all");
    // What the rates of drawn blocks promise is another figure.
    assert_eq!(tokens, 17 + 14 + 28);
}
