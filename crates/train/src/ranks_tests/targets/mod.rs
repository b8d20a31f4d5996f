//! Targets that are spread over ranks, and rows that ranks share, come to what one process does.

mod zero_3;

use longdraft_kernels::graph::Backward;
use std::sync::Arc;

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_features::{run_target, sequence_of};
use longdraft_models::draft::block::{
    BlockConfig, BlockDraft, ChainKind, ChainSizes, LayerKind, SelectorSizes,
};
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::draft::glide::{GlideConfig, GlideDraft};
use longdraft_models::draft::{Init, Parameter, VocabularyMap};
use longdraft_models::target_model::{
    Features, PackedSequence, Ranks, Tap, Taps, Target, TargetOptions,
};
use longdraft_models::{LayerId, TargetConfig, TargetTokenId};
use longdraft_parallel::threads::{in_threads, with_gpus};
use longdraft_parallel::{DataParallel, Gradients, ParallelConfig, RowGroups, World, share_of};
use serde_json::{Value, json};

use crate::method::block::{
    BlockBudget, BlockDraws, BlockLoss, BlockObjective, Divisor, SelectorLoss, SlotForm,
    SlotLabels, SlotLoss, SlotWeights, SoftLoss,
};
use crate::method::dspark::{ChainLoss, ChainObjective};
use crate::method::eagle3::{
    Eagle3Loss, Eagle3Objective, Eagle3ObjectiveConfig, TeacherDistribution,
};
use crate::method::glide::{GlideObjective, GlideObjectiveConfig};
use crate::objective::{Objective, SoftTargetKind, TailKind};

/// Ranks that exchange tensors in main memory, or as if on a GPU each.
pub(super) fn exchanging(world: World, on_gpus: bool) -> World {
    if on_gpus { with_gpus(&world) } else { world }
}

fn config(more: &Value) -> TargetConfig {
    let config = json!({
        "model_type": "qwen2", "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64,
    });
    config_with(config, more)
}

/// A target's configuration with other values of some keys.
pub(super) fn config_with(mut config: Value, more: &Value) -> TargetConfig {
    for (key, value) in more.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    TargetConfig::from_json(&config).expect("configuration")
}

fn target(config: &TargetConfig, options: TargetOptions, world: Option<&World>) -> Target {
    let spread = world.map(|world| Arc::new(world.clone()) as Arc<dyn Ranks>);
    let options = TargetOptions { spread, ..options };
    Target::random(config.clone(), 5, &options).expect("target")
}

pub(super) fn sequence(row: usize) -> PackedSequence {
    let ids: Vec<u32> = (0..9 + row as u32).map(|i| (i * 7 + row as u32) % 61).collect();
    PackedSequence::single(&ids)
}

fn batch(row: usize) -> Batch {
    let PackedSequence { ids, position_ids, document_ids } = sequence(row);
    let tokens = ids.len();
    Batch {
        ids,
        position_ids,
        document_ids,
        // A row of which nothing is learned gathers what the others do.
        learned: if row == 0 { Vec::new() } else { vec![1, 3] },
        loss_mask: vec![true; tokens],
        row,
        ..Batch::default()
    }
}

pub(super) fn all_taps() -> [Taps; 3] {
    [
        Taps::of(&[Tap::LastKv]),
        Taps::of(&[Tap::Hidden(LayerId(1))]),
        Taps::of(&[Tap::LastKv, Tap::Hidden(LayerId(0)), Tap::FinalHidden]),
    ]
}

/// A rank's own of five rows of different lengths, of which some ranks have fewer than others, for all taps.
pub(super) fn own_features(world: &World, target: &Target) -> Vec<(usize, Taps, Features)> {
    let own = share_of(5, world.rank(), world.size());
    let mut seen = Vec::new();
    for taps in all_taps() {
        for round in 0..5_usize.div_ceil(world.size()) {
            match own.clone().nth(round) {
                Some(row) => {
                    let features = target.forward(&sequence(row), &taps);
                    seen.push((row, taps.clone(), features.expect("features")));
                }
                None => target.join_forward(&taps).expect("join"),
            }
        }
    }
    seen
}

fn bits(features: &Features) -> Vec<u32> {
    let kv = features.last_kv.iter().flat_map(|kv| [kv.k.clone(), kv.v.clone()]);
    let rest = features.hidden.values().chain(&features.final_hidden).cloned();
    let values = |t: Tensor| t.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values");
    kv.chain(rest).flat_map(values).map(f32::to_bits).collect()
}

/// One row of two documents.
pub(super) fn packed(tokens: u32) -> Batch {
    let count = tokens as usize;
    let border = count / 3;
    Batch {
        ids: (0..tokens).map(|i| (i * 11 + 5) % 61).collect(),
        position_ids: (0..tokens).map(|i| i % (border as u32 + 1)).collect(),
        document_ids: (0..count).map(|i| i32::from(i >= border)).collect(),
        learned: (0..tokens - 1).filter(|i| i % 5 != 2 && *i + 1 != border as u32).collect(),
        loss_mask: vec![true; count],
        ..Batch::default()
    }
}

/// One row of five documents and padding: a part has several pieces, and documents end within them.
pub(super) fn many_documents() -> Batch {
    let lengths = [11, 2, 17, 1, 8];
    let mut batch = Batch::default();
    for (document, tokens) in lengths.into_iter().enumerate() {
        let first = batch.ids.len() as u32;
        batch.ids.extend((first..first + tokens).map(|i| (i * 13 + 3) % 61));
        batch.position_ids.extend(0..tokens);
        batch.document_ids.extend((0..tokens).map(|_| document as i32));
        batch.learned.extend((first..first + tokens - 1).filter(|i| i % 4 != 1));
    }
    batch.loss_mask = vec![true; batch.ids.len()];
    batch.ids.extend([0; 4]);
    batch.position_ids.extend([0; 4]);
    batch.document_ids.extend([-1; 4]);
    batch.loss_mask.extend([false; 4]);
    batch
}

/// Ranks that share a row, and whether they exchange what they share as if on a GPU each.
const SHARING: [(usize, bool); 5] = [(2, false), (3, false), (4, false), (3, true), (4, true)];

pub(super) fn groups(world: &World, sequence: usize) -> RowGroups {
    let config = ParallelConfig { sequence, ..ParallelConfig::default() };
    RowGroups::new(world, &config).expect("groups")
}

#[test]
fn mpi_parts_of_a_row_have_the_bits_of_the_whole() {
    let windowed = json!({ "model_type": "mistral", "sliding_window": 5 });
    for (more, batch) in
        [(json!({}), packed(23)), (json!({}), many_documents()), (windowed, many_documents())]
    {
        parts_have_the_bits_of_the_whole(&config(&more), &batch);
    }
}

fn parts_have_the_bits_of_the_whole(config: &TargetConfig, batch: &Batch) {
    let whole = target(config, TargetOptions::default(), None);
    for taps in all_taps() {
        let want = whole.forward(&sequence_of(batch), &taps).expect("features");
        for (ranks, on_gpus) in SHARING {
            let parts = in_threads(ranks, |world| {
                let world = exchanging(world, on_gpus);
                // With and without a target that is spread as well.
                let part = groups(&world, ranks).part_of(&batch.document_ids).expect("part");
                [None, Some(&world)].map(|spread| {
                    let options = TargetOptions { gather_ahead: false, ..Default::default() };
                    let target = target(config, options, spread);
                    let features = target.forward_part(&sequence_of(batch), &part, &taps);
                    (part.rows().clone(), features.expect("features"))
                })
            });
            for (rows, got) in parts.into_iter().flatten() {
                let hidden = want.hidden.iter();
                let of = |all: &Tensor| rows.rows_of(all).expect("rows");
                let own = Features {
                    hidden: hidden.map(|(layer, states)| (*layer, of(states))).collect(),
                    final_hidden: want.final_hidden.as_ref().map(of),
                    ..want.clone()
                };
                assert_eq!(bits(&got), bits(&own), "{ranks} ranks, GPUs: {on_gpus}, {taps:?}");
            }
        }
    }
}

/// Loss and gradients of a GLIDE draft whose window is shorter than a part.
fn glide_step(world: &World, batch: &Batch, soft_targets: SoftTargetKind) -> (f64, Vec<Vec<f32>>) {
    let config = config(&json!({}));
    let target = Arc::new(target(&config, TargetOptions::default(), None));
    let mut glide = GlideConfig::for_target(&config, None);
    glide.self_window = 3;
    let draft = GlideDraft::initialise(&glide, &target, Init::Random, 7).expect("draft");
    let objective = GlideObjectiveConfig { soft_targets, top_k: 5, ..Default::default() };
    let objective = GlideObjective::new(Arc::clone(&target), draft, objective);
    let groups = groups(world, world.size());
    let own = groups.cut(batch.clone());
    let part = groups.part_of(&own.document_ids);
    let features = run_target(&target, &own, part.as_ref(), &objective.needs()).expect("features");
    let delays: Vec<u32> = (0..own.ids.len() as u32).map(|i| 1 + i % 3).collect();
    let loss = objective.loss((&own, &delays), &features, true).expect("loss");
    let own = loss.metrics.hard_sum + loss.metrics.soft_sum;
    summed(world, objective.draft().parameters(), (own, loss.numerator.as_ref()))
}

/// A number and the gradients of a loss, summed over the ranks.
fn summed(
    world: &World,
    parameters: &[Parameter],
    (own, loss): (f64, Option<&Tensor>),
) -> (f64, Vec<Vec<f32>>) {
    let mut gradients = Gradients::new(parameters);
    if let Some(loss) = loss {
        gradients.add(parameters, loss.gradients().expect("backward")).expect("gradients");
    }
    let parallel = DataParallel::by_blocks(world, &ParallelConfig::default(), parameters);
    let sums = parallel.reduce(gradients).and_then(Gradients::into_values).expect("sums");
    let mut sum = [own];
    world.all_reduce_sum(&mut sum);
    (sum[0], sums.into_iter().map(Option::unwrap_or_default).collect())
}

#[test]
fn mpi_parts_of_a_row_learn_like_the_whole() {
    for soft in [SoftTargetKind::Full, SoftTargetKind::TopK] {
        // A row that is shorter than the ranks are many is run by one of them; the second document
        // of the third row is not learned, so that ranks have nothing to learn.
        let mut one_sided = packed(23);
        one_sided.learned.retain(|token| *token < 5);
        for batch in [packed(23), packed(3), many_documents(), one_sided] {
            parts_learn_like_the_whole(|world| glide_step(world, &batch, soft));
        }
    }
}

/// A target and the objective of an EAGLE-3 draft for it.
pub(super) fn eagle3(
    switches: &Eagle3ObjectiveConfig,
    distribution: TeacherDistribution,
) -> (Target, Eagle3Objective) {
    let sizes = config(&json!({}));
    let target = target(&sizes, TargetOptions::default(), None);
    let sizes = Eagle3Config::for_target_layers(&sizes, 30, [0, 1, 2].map(LayerId));
    let kept: Vec<TargetTokenId> = (0..30).map(|id| TargetTokenId(2 * id)).collect();
    let map = VocabularyMap::new(kept, target.config().vocab_size).expect("map");
    let ends = target.hold_ends().expect("ends");
    let (table, head) = (ends.embedding().expect("table"), ends.head().expect("head"));
    let draft = Eagle3Draft::initialise(&sizes, map, &table, 7);
    let objective = Eagle3Objective::new(draft.expect("draft"), &head, switches.clone());
    let objective = objective.expect("objective").with_distribution(distribution);
    drop(ends);
    (target, objective)
}

/// Summed gradients and the loss of a row that the ranks share.
fn step(
    world: &World,
    batch: &Batch,
    target: &Target,
    objective: &dyn Objective,
) -> (f64, Vec<Vec<f32>>) {
    let groups = groups(world, world.size());
    let own = groups.cut(batch.clone());
    let part = groups.part_of(&own.document_ids);
    let features = run_target(target, &own, part.as_ref(), &objective.needs()).expect("features");
    let prepared = objective.prepare(&own, &features).expect("rows");
    let mut denominators = prepared.denominators.clone();
    world.all_reduce_sum(&mut denominators);
    let share = objective.share(&own, &features, &prepared, &denominators, true).expect("share");
    // A share is of the sum over the ranks.
    let loss = |loss: &Tensor| f64::from(loss.to_scalar::<f32>().expect("loss"));
    let own = share.loss.as_ref().map_or(0.0, loss);
    summed(world, objective.draft().parameters(), (own, share.loss.as_ref()))
}

#[test]
fn mpi_parts_of_a_row_learn_eagle3_like_the_whole() {
    // Documents end within a piece, nothing is learned of the second half, and a row that is shorter
    // than the ranks are many.
    let mut one_sided = packed(23);
    one_sided.loss_mask[11..].fill(false);
    let plain = Eagle3ObjectiveConfig { ttt_steps: 3, ..Default::default() };
    let mixed = Eagle3ObjectiveConfig { loss: Eagle3Loss::LkLambda, ..plain.clone() };
    let top_k = TeacherDistribution::TopK { k: 5, tail: TailKind::Bucket };
    for (config, distribution) in [
        (&plain, TeacherDistribution::Whole),
        (&mixed, TeacherDistribution::Whole),
        (&plain, top_k),
    ] {
        for batch in [packed(23), packed(3), many_documents(), one_sided.clone()] {
            parts_learn_like_the_whole(|world| {
                let (target, objective) = eagle3(config, distribution);
                step(world, &batch, &target, &objective)
            });
        }
    }
}

/// Ranks that share a row come to the loss and the gradients of one rank; that loss.
fn parts_learn_like_the_whole(step: impl Fn(&World) -> (f64, Vec<Vec<f32>>) + Sync) -> f64 {
    let (loss, gradients) = step(&World::single());
    let largest = gradients.iter().flatten().fold(0.0_f32, |m, g| m.max(g.abs()));
    for (ranks, on_gpus) in SHARING {
        for (sum, sums) in in_threads(ranks, |world| step(&exchanging(world, on_gpus))) {
            assert!((sum - loss).abs() <= 1e-5 * loss.abs(), "{ranks}: {sum} {loss}");
            assert_eq!(gradients.len(), sums.len());
            for (a, b) in gradients.iter().flatten().zip(sums.iter().flatten()) {
                assert!((a - b).abs() <= 1e-5 * largest, "{ranks} ranks: {a} {b}");
            }
        }
    }
    loss
}

/// A target and the objective of a block draft for it, whose sizes `change` adapts.
pub(super) fn blocks(
    change: impl Fn(BlockConfig) -> BlockConfig,
    objective: impl Fn(BlockDraft, &Tensor, BlockDraws) -> Box<dyn Objective>,
) -> (Target, Box<dyn Objective>) {
    let sizes = config(&json!({}));
    let target = target(&sizes, TargetOptions::default(), None);
    let sizes = change(BlockConfig {
        target_layers: [0, 2].map(LayerId).to_vec(),
        initializer_range: 0.3,
        ..BlockConfig::for_target(&sizes, 2, 4, 60)
    });
    let ends = target.hold_ends().expect("ends");
    let (table, head) = (ends.embedding().expect("table"), ends.head().expect("head"));
    let draft = BlockDraft::initialise(&sizes, &table, 7).expect("draft");
    let draws = BlockDraws { seed: 3, budget: BlockBudget::PerTokens(2) };
    let objective = objective(draft, &head, draws);
    drop(ends);
    (target, objective)
}

/// Ranks that share a row come to what one of them does with such a draft, which learns something.
fn parts_learn_blocks_like_the_whole(
    batch: &Batch,
    change: impl Fn(BlockConfig) -> BlockConfig + Sync,
    objective: impl Fn(BlockDraft, &Tensor, BlockDraws) -> Box<dyn Objective> + Sync,
) {
    let sum = parts_learn_like_the_whole(|world| {
        let (target, objective) = blocks(&change, &objective);
        step(world, batch, &target, objective.as_ref())
    });
    assert!(sum > 0.0, "nothing is learned");
}

#[test]
fn mpi_parts_of_a_row_learn_chains_like_the_whole() {
    let mut one_sided = packed(23);
    one_sided.loss_mask[9..].fill(false);
    let loss =
        ChainLoss { decay: 3.0, hard: 0.4, distance: 0.7, confidence: 0.9, ..ChainLoss::default() };
    let form = SlotForm::new(SlotLoss::LkLambda, None, None);
    let looking = ChainLoss { weights: SlotWeights::Dpard, form, by_reach: true, ..loss };
    for (kind, loss) in [
        (ChainKind::Vanilla, loss),
        (ChainKind::Gated, loss),
        (ChainKind::Rnn, loss),
        (ChainKind::Vanilla, looking),
    ] {
        for batch in [packed(23), packed(3), many_documents(), one_sided.clone()] {
            let chain = Some(ChainSizes { rank: 5, kind, confidence: Some(true) });
            let change = |sizes| BlockConfig { chain, ..sizes };
            parts_learn_blocks_like_the_whole(&batch, change, |draft, head, draws| {
                Box::new(ChainObjective::new(draft, head, loss, draws))
            });
        }
    }
}

#[test]
fn mpi_parts_of_a_row_learn_blocks_like_the_whole() {
    let mut one_sided = packed(23);
    one_sided.loss_mask[9..].fill(false);
    let plain = BlockLoss { decay: 3.0, ..BlockLoss::default() };
    let soft = |weight, distribution| Some(SoftLoss { weight, distribution });
    let top_k = TeacherDistribution::TopK { k: 5, tail: TailKind::Bucket };
    let dpace = BlockLoss { weights: SlotWeights::Dpace, ..plain.clone() };
    let selector = Some(SelectorLoss {
        weight: 0.7,
        over_hits: true,
        keeps_labels: false,
        stops_gradient: false,
    });
    let form = |loss| SlotForm::new(loss, None, None);
    let whole = soft(1.0, TeacherDistribution::Whole);
    for loss in [
        BlockLoss { divide_by: Divisor::Rows, ..dpace.clone() },
        BlockLoss { labels: SlotLabels::Target, ..dpace.clone() },
        BlockLoss { form: form(SlotLoss::LkLambda), ..plain.clone() },
        BlockLoss { form: form(SlotLoss::Renyi), soft: whole, ..plain.clone() },
        BlockLoss { selector, ..dpace.clone() },
        BlockLoss { soft: soft(0.6, TeacherDistribution::Whole), ..plain.clone() },
        BlockLoss { soft: soft(1.0, top_k), ..plain.clone() },
        dpace,
        plain,
    ] {
        // A block may reach beyond the piece that it begins in.
        for batch in [packed(23), packed(3), many_documents(), one_sided.clone()] {
            let selector = loss.selector.map(|_| SelectorSizes { rank: 5, top_k: 20 });
            let change = |sizes| BlockConfig { selector, ..sizes };
            parts_learn_blocks_like_the_whole(&batch, change, |draft, head, draws| {
                Box::new(BlockObjective::new(draft, head, loss.clone(), draws))
            });
        }
    }
}

#[test]
fn parts_of_a_row_learn_blocks_with_windows_like_the_whole() {
    let loss = BlockLoss { decay: 3.0, ..BlockLoss::default() };
    for is_causal in [None, Some(true)] {
        let change = |sizes| BlockConfig {
            layers: vec![LayerKind::Sliding, LayerKind::Full],
            sliding_window: Some(5),
            is_causal,
            ..sizes
        };
        parts_learn_blocks_like_the_whole(&many_documents(), change, |draft, head, draws| {
            Box::new(BlockObjective::new(draft, head, loss.clone(), draws))
        });
    }
}
