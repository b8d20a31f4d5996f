//! What must hold of the objective of block drafts without reference cases.

mod blocks;

use std::cell::Cell;
use std::rc::Rc;

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures};
use longdraft_models::draft::block::BlockDraft;
use longdraft_train::method::block::{
    BlockBudget, BlockDraws, BlockLoss, BlockObjective, SlotWeights,
};
use longdraft_train::objective::Objective;

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

fn loss(weights: SlotWeights) -> BlockLoss {
    BlockLoss { weights, decay: 3.0, ..BlockLoss::default() }
}

fn objective(weights: SlotWeights) -> BlockObjective {
    let draws = BlockDraws { seed: 4, budget: BlockBudget::PerRow(6) };
    BlockObjective::new(draft(), &random((30, 16), 3), loss(weights), draws)
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
    let loss = loss(SlotWeights::Decay);
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
