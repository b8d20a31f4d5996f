//! Held-out rows that ranks share are measured as whole ones are.

use longdraft_data::Batch;
use longdraft_features::run_target;
use longdraft_models::draft::block::{BlockConfig, ChainKind, ChainSizes};
use longdraft_models::target_model::Target;
use longdraft_parallel::World;
use longdraft_parallel::threads::in_threads;

use super::targets::{blocks, eagle3, groups, many_documents, packed};
use crate::method::block::{BlockLoss, BlockObjective, SlotForm, SlotLoss, SlotWeights, SoftLoss};
use crate::method::dspark::{ChainLoss, ChainObjective};
use crate::method::eagle3::{Eagle3Loss, Eagle3ObjectiveConfig, TeacherDistribution};
use crate::metrics::DraftMetrics;
use crate::objective::{Objective, TailKind};

const TOP_K: TeacherDistribution = TeacherDistribution::TopK { k: 5, tail: TailKind::Bucket };

/// Counters of a row that the ranks share, and the bytes that this one sent to measure its part.
fn measured(
    world: &World,
    batch: &Batch,
    (target, objective): (&Target, &dyn Objective),
) -> (DraftMetrics, u64) {
    let groups = groups(world, world.size());
    let own = groups.cut(batch.clone());
    let part = groups.part_of(&own.document_ids);
    let needs = objective.held_out_needs();
    let features = run_target(target, &own, part.as_ref(), &needs).expect("features");
    let before = world.traffic();
    let metrics = objective.measure(&own, &features).expect("measured");
    let sent = (world.traffic() - before).sent_bytes;
    let mut total = DraftMetrics::default();
    for numbers in world.gather_varied(&metrics.to_numbers()) {
        DraftMetrics::list(&numbers).expect("counters").iter().for_each(|part| total.merge(part));
    }
    (total, sent)
}

fn assert_same(sum: &DraftMetrics, whole: &DraftMetrics) {
    let counts = |metrics: &DraftMetrics| -> Vec<(usize, usize)> {
        metrics.by_delay.iter().map(|delay| (delay.rows, delay.top1_count)).collect()
    };
    assert_eq!(counts(sum), counts(whole));
    let (loss, of_whole) = (sum.loss(), whole.loss());
    assert!((loss - of_whole).abs() <= 1e-5 * of_whole.abs(), "{loss} {of_whole}");
    assert_eq!(sum.as_trained.is_some(), whole.as_trained.is_some());
    if let (Some(sum), Some(whole)) = (&sum.as_trained, &whole.as_trained) {
        assert_same(sum, whole);
    }
}

/// Parts of rows come to the counters of the whole; in the second part of the last row nothing is learned.
fn parts_are_measured_like_the_whole(built: impl Fn() -> (Target, Box<dyn Objective>) + Sync) {
    let mut one_sided = packed(23);
    one_sided.loss_mask[9..].fill(false);
    let mut losses = 0.0;
    for batch in [packed(23), many_documents(), one_sided] {
        let of = |world: &World| {
            let (target, objective) = built();
            measured(world, &batch, (&target, objective.as_ref())).0
        };
        let whole = of(&World::single());
        for ranks in [2, 3] {
            in_threads(ranks, |world| of(&world)).iter().for_each(|sum| assert_same(sum, &whole));
        }
        losses += whole.loss();
    }
    assert!(losses > 0.0, "nothing is learned");
}

#[test]
fn blocks_are_mixed_by_the_mean_of_the_whole_row() {
    let form = SlotForm::new(SlotLoss::LkLambda, None, None);
    let top_k = SoftLoss { weight: 0.6, distribution: TOP_K };
    for (weights, soft) in [(SlotWeights::Decay, None), (SlotWeights::Dpard, Some(top_k))] {
        let loss = BlockLoss { weights, decay: 3.0, form, soft, ..BlockLoss::default() };
        parts_are_measured_like_the_whole(|| {
            blocks(
                |sizes| sizes,
                |draft, head, draws| {
                    Box::new(BlockObjective::new(draft, head, loss.clone(), draws))
                },
            )
        });
    }
}

#[test]
fn confidence_is_divided_by_what_the_whole_row_adds() {
    let plain = ChainLoss { decay: 3.0, weights: SlotWeights::Dpace, ..ChainLoss::default() };
    let form = SlotForm::new(SlotLoss::LkLambda, None, None);
    let looking = ChainLoss { weights: SlotWeights::Dpard, form, by_reach: true, ..plain };
    let chain = ChainSizes { rank: 5, kind: ChainKind::Vanilla, confidence: Some(true) };
    for loss in [plain, looking] {
        parts_are_measured_like_the_whole(|| {
            blocks(
                |sizes| BlockConfig { chain: Some(chain), ..sizes },
                |draft, head, draws| Box::new(ChainObjective::new(draft, head, loss, draws)),
            )
        });
    }
}

#[test]
fn steps_are_mixed_by_the_mean_of_the_whole_row() {
    let config =
        Eagle3ObjectiveConfig { ttt_steps: 3, loss: Eagle3Loss::LkLambda, ..Default::default() };
    parts_are_measured_like_the_whole(|| {
        let (target, objective) = eagle3(&config, TOP_K);
        (target, Box::new(objective))
    });
}

#[test]
fn steps_are_taken_once_however_much_of_the_teacher_is_learned() {
    let config = Eagle3ObjectiveConfig { ttt_steps: 3, ..Default::default() };
    let sent = |distribution| {
        in_threads(2, |world| {
            let (target, objective) = eagle3(&config, distribution);
            measured(&world, &many_documents(), (&target, &objective)).1
        })
    };
    // Keys and values of the first step.
    let once = sent(TeacherDistribution::Whole);
    assert!(once.iter().all(|bytes| *bytes > 0));
    assert_eq!(sent(TOP_K), once);
}

#[test]
fn a_row_that_is_too_short_to_share_is_replayed_once() {
    let rounds = |world: &World| {
        let (of_steps, steps) = eagle3(&Eagle3ObjectiveConfig::default(), TOP_K);
        let (of_blocks, blocks) = blocks(
            |sizes| sizes,
            |draft, head, draws| {
                Box::new(BlockObjective::new(draft, head, BlockLoss::default(), draws))
            },
        );
        let drafts: [(&Target, &dyn Objective); 2] =
            [(&of_steps, &steps), (&of_blocks, blocks.as_ref())];
        drafts.map(|draft| measured(world, &packed(3), draft).0.replayed)
    };
    let alone = rounds(&World::single());
    assert!(alone.iter().all(|replayed| replayed.rounds == 1), "{alone:?}");
    assert_eq!(in_threads(4, |world| rounds(&world)), [alone; 4]);
}
