//! What must hold of the objective of block drafts without reference cases.

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_models::LayerId;
use longdraft_models::config::RopeParameters;
use longdraft_models::draft::block::{BlockConfig, BlockDraft, LayerKind};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::memory::MemorySource;
use longdraft_train::features::{BatchFeatures, TeacherFeatures};
use longdraft_train::method::block::{BlockBudget, BlockDraws, BlockLoss, BlockObjective, SlotWeights};
use longdraft_train::objective::Objective;

fn features(states: Tensor) -> BatchFeatures {
    BatchFeatures {
        last_kv: None,
        aux_hidden: Some(states),
        teacher: TeacherFeatures::None,
        part: None,
    }
}

fn toy() -> BlockConfig {
    BlockConfig {
        hidden_size: 16,
        intermediate_size: 24,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        vocab_size: 30,
        rms_norm_eps: 1e-6,
        rope: RopeParameters::plain(1e4),
        max_position_embeddings: 64,
        attention_bias: false,
        layers: vec![LayerKind::Full; 2],
        sliding_window: None,
        is_causal: Some(false),
        block_size: 4,
        mask_token_id: 29,
        target_layers: vec![LayerId(1), LayerId(2)],
        num_target_layers: 4,
        convolution: None,
        selector: None,
        chain: None,
        initializer_range: 0.3,
    }
}

fn random(shape: (usize, usize), seed: u64) -> Tensor {
    let spec = longdraft_models::weights::TensorSpec::new("noise.matrix", &[shape.0, shape.1]);
    let source = MemorySource::random(&[spec], 1.0, seed).expect("values");
    source.load("noise.matrix", DType::F32).expect("there")
}

fn objective(weights: SlotWeights) -> BlockObjective {
    let draft = BlockDraft::initialise(&toy(), &random((30, 16), 1), 2).expect("draft");
    let loss = BlockLoss { weights, decay: 3.0, alpha: 0.5, divide_by_rows: false, selector: None };
    let draws = BlockDraws { seed: 4, budget: BlockBudget::PerRow(6) };
    BlockObjective::new(draft, &random((30, 16), 3), loss, draws)
}

/// Documents of these lengths, of which the first two tokens are not learned.
fn batch(lengths: &[usize]) -> Batch {
    let mut batch = Batch::default();
    for (document, length) in lengths.iter().enumerate() {
        batch.ids.extend((0..*length).map(|t| ((7 * t + document) % 29) as u32));
        batch.position_ids.extend(0..*length as u32);
        batch.document_ids.extend(vec![document as i32; *length]);
        batch.loss_mask.extend((0..*length).map(|t| t > 1));
    }
    batch
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
