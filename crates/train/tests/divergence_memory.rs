//! What a divergence of whole distributions holds, beside what is planned for it.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures};
use longdraft_kernels::linear_cross_entropy::logits_at_once;
use longdraft_kernels::memory::{Allocator, Budget};
use longdraft_models::TargetConfig;
use longdraft_models::draft::block::{BlockConfig, BlockDraft, ChainKind, ChainSizes};
use longdraft_models::published::published_config;
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::{TensorSpec, WeightSource};
use longdraft_train::footprint::Row;
use longdraft_train::method::DraftMethod;
use longdraft_train::method::block::{
    BlockBudget, BlockDraws, BlockKeys, BlockLoss, BlockObjective, SlotForm, SlotLoss, SoftLoss,
};
use longdraft_train::method::dflash::Dflash;
use longdraft_train::method::dspark::{ChainLoss, ChainObjective, Dspark};
use longdraft_train::objective::{Objective, TeacherConfig, TeacherDistribution};

#[global_allocator]
static MEMORY: Allocator = Allocator::new();

const WIDTH: usize = 16;
const VOCABULARY: usize = 1 << 14;
const TOKENS: usize = 128;
const SLOTS: usize = 16;
const RANK: usize = 32;
const STARTS: [usize; 4] = [10, 35, 60, 90];
/// What the draft's own pass and the results take beside the loss.
const BESIDE: usize = 8 << 20;

/// A narrow target of many tokens.
fn target() -> TargetConfig {
    let name = "HuggingFaceTB/SmolLM2-135M-Instruct";
    let mut target = published_config(name).expect("a published target");
    target.hidden_size = WIDTH;
    target.intermediate_size = 24;
    target.num_attention_heads = 2;
    target.num_key_value_heads = 1;
    target.head_dim = 8;
    target.vocab_size = VOCABULARY;
    target
}

fn random(shape: (usize, usize), seed: u64) -> Tensor {
    let spec = TensorSpec::new("noise.matrix", &[shape.0, shape.1]);
    let source = MemorySource::random(&[spec], 1.0, seed).expect("values");
    source.load("noise.matrix", DType::F32).expect("there")
}

/// Bytes that are planned for a chunk of the loss.
fn planned(loss: SlotLoss, chained: bool) -> usize {
    let (layers, target_layers) = (1, Some(vec![3]));
    let block_size = SLOTS;
    let shared = BlockKeys { blocks_per_row: Some(STARTS.len()), ..BlockKeys::default() };
    let method: Box<dyn DraftMethod> = if chained {
        Box::new(Dspark {
            layers,
            target_layers,
            block_size,
            shared,
            markov_rank: RANK,
            confidence: false,
            distance: loss,
            ..Dspark::default()
        })
    } else {
        Box::new(Dflash {
            layers,
            target_layers,
            block_size,
            shared,
            soft_weight: 1.0,
            loss,
            ..Dflash::default()
        })
    };
    let footprint = method.footprint(&TeacherConfig::default(), &target()).expect("sizes that fit");
    let tokens = TOKENS as u64;
    let (threads, half_products) = (1, false);
    let row = Row {
        tokens,
        learned: tokens,
        parts: 1,
        teacher_logits: true,
        threads,
        half_products,
        stored_head: false,
        chunk_logits: logits_at_once(None),
    };
    footprint.row_memory(&row).chunks as usize
}

/// A loss over a row's blocks.
fn objective(loss: SlotLoss, chained: bool) -> Box<dyn Objective> {
    let chain = ChainSizes { rank: RANK, kind: ChainKind::Vanilla, confidence: None };
    let config = BlockConfig {
        chain: chained.then_some(chain),
        ..BlockConfig::for_target(&target(), 1, SLOTS, 7)
    };
    let draft = BlockDraft::initialise(&config, &random((VOCABULARY, WIDTH), 1), 2).expect("draft");
    let head = random((VOCABULARY, WIDTH), 3);
    let draws = BlockDraws { seed: 4, budget: BlockBudget::PerRow(STARTS.len()) };
    let form = SlotForm::new(loss, None, None);
    if chained {
        let loss = ChainLoss { form, ..ChainLoss::default() };
        let objective = ChainObjective::new(draft, &head, loss, draws);
        return Box::new(objective.with_starts(|_| STARTS.to_vec()));
    }
    let soft = Some(SoftLoss { weight: 1.0, distribution: TeacherDistribution::Whole });
    let loss = BlockLoss { form, soft, ..BlockLoss::default() };
    let objective = BlockObjective::new(draft, &head, loss, draws);
    Box::new(objective.with_starts(|_| STARTS.to_vec()))
}

/// Whether the loss of a row with its gradients takes no more than so many bytes.
fn fits(loss: SlotLoss, chained: bool, bytes: usize) -> bool {
    let budget = Budget::new(bytes);
    let (sender, receiver) = channel();
    let held = Arc::clone(&budget);
    std::thread::spawn(move || {
        let objective = objective(loss, chained);
        let batch = Batch::of_document(0..TOKENS as u32);
        let teacher = TeacherFeatures::EveryToken { hidden: random((TOKENS, WIDTH), 5) };
        let aux_hidden = Some(random((TOKENS, WIDTH), 6));
        let features = BatchFeatures { last_kv: None, aux_hidden, teacher, part: None };
        let prepared = objective.prepare(&batch, &features).expect("prepared");
        let own = &prepared.denominators;
        held.within(|| {
            let share = objective.share(&batch, &features, &prepared, own, true).expect("share");
            assert!(share.metrics.loss().is_finite() && share.loss.is_some());
        });
        // Nobody may hear.
        let _ = sender.send(());
    });
    loop {
        match receiver.recv_timeout(Duration::from_millis(5)) {
            Ok(()) => return true,
            Err(RecvTimeoutError::Disconnected) => panic!("{loss:?}: the loss failed"),
            Err(RecvTimeoutError::Timeout) if budget.is_exceeded() => return false,
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

#[test]
fn a_divergence_takes_what_is_planned_for_its_chunk_and_little_less() {
    for loss in [SlotLoss::ReverseKl, SlotLoss::Jsd, SlotLoss::Renyi] {
        for chained in [false, true] {
            let planned = planned(loss, chained);
            assert!(fits(loss, chained, planned + BESIDE), "{loss:?} {chained}: {planned} bytes");
            let less = planned / 4 * 3;
            assert!(!fits(loss, chained, less), "{loss:?} {chained}: {less} bytes are enough");
        }
    }
}
