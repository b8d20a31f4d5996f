//! What tests of block drafts share: a small draft, values and a row.

use candle_core::{DType, Tensor};
use longdraft_data::Batch;
use longdraft_kernels::bend::Bend;
use longdraft_models::LayerId;
use longdraft_models::config::RopeParameters;
use longdraft_models::draft::block::{BlockConfig, LayerKind};
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::weights::{TensorSpec, WeightSource};

pub(crate) fn toy() -> BlockConfig {
    BlockConfig {
        hidden_size: 16,
        intermediate_size: 24,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        vocab_size: 30,
        draft_vocab_size: 30,
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
        bend: Bend::default(),
        embedding_scale: None,
        initializer_range: 0.3,
    }
}

pub(crate) fn random(shape: (usize, usize), seed: u64) -> Tensor {
    let spec = TensorSpec::new("noise.matrix", &[shape.0, shape.1]);
    let source = MemorySource::random(&[spec], 1.0, seed).expect("values");
    source.load("noise.matrix", DType::F32).expect("there")
}

/// Documents of these lengths, of which the first two tokens are not learned.
pub(crate) fn batch(lengths: &[usize]) -> Batch {
    let mut batch = Batch::default();
    for (document, length) in lengths.iter().enumerate() {
        batch.ids.extend((0..*length).map(|t| ((7 * t + document) % 29) as u32));
        batch.position_ids.extend(0..*length as u32);
        batch.document_ids.extend(vec![document as i32; *length]);
        batch.loss_mask.extend((0..*length).map(|t| t > 1));
    }
    batch
}
