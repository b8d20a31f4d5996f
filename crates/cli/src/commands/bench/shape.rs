//! Sizes by name, and weights that are drawn where they are used.

use candle_core::{DType, Device, Tensor};
use longdraft_data::Batch;
use longdraft_features::{BatchFeatures, TeacherFeatures};
use longdraft_models::TargetConfig;
use longdraft_models::published::{published_config, published_names};
use longdraft_models::target_model::{Target, tensor_specs};
use longdraft_models::weights::TensorSpec;
use longdraft_models::weights::memory::MemorySource;
use serde_json::json;

use super::Place;
use crate::cli::ShapeArguments;
use crate::failure::{Failure, Result};

const TINY: &str = "tiny";

/// Short names of published targets.
const SHORT: [(&str, &str); 2] = [
    ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ("llama3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"),
];

/// Sizes of the target `name`, with so many layers if given.
/// It fails where no target has this name, or not with so many.
pub(super) fn config(name: &str, layers: Option<usize>) -> Result<TargetConfig> {
    let published = SHORT.iter().find(|(short, _)| *short == name).map_or(name, |(_, full)| full);
    let mut config = match published {
        TINY => tiny()?,
        name => published_config(name).ok_or_else(|| unknown(name))?,
    };
    config.num_hidden_layers = layers.unwrap_or(config.num_hidden_layers);
    Ok(config)
}

fn tiny() -> Result<TargetConfig> {
    let config = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 512, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "max_position_embeddings": 4096, "tie_word_embeddings": false
    });
    TargetConfig::from_json(&config).map_err(Failure::work)
}

fn unknown(name: &str) -> Failure {
    let short = SHORT.map(|(short, _)| short.to_owned());
    let known: Vec<_> =
        [TINY.to_owned()].into_iter().chain(short).chain(published_names()).collect();
    Failure::usage(format!("no shape is called `{name}`"))
        .hint(format!("take {}", known.join(", ")))
}

/// A target of this shape with random weights.
/// It fails where the shape is unknown, or the device has no memory for it.
pub(super) fn target(shape: &ShapeArguments, place: &Place) -> Result<Target> {
    let config = config(&shape.shape, shape.layers)?;
    let source = draw(&tensor_specs(&config), config.initializer_range, place)?;
    Ok(Target::from_source(config, &MemorySource::new(source), &place.options)?)
}

/// Tensors by name, each as [`drawn`]. It fails where the device has no memory for them.
pub(super) fn draw(
    specs: &[TensorSpec],
    deviation: f64,
    place: &Place,
) -> candle_core::Result<Vec<(String, Tensor)>> {
    let draw = |spec: &TensorSpec| Ok((spec.name.clone(), drawn(spec, deviation, place)?));
    specs.iter().map(draw).collect()
}

/// A normal matrix of the frozen type, a norm of 1 or a bias of 0. It fails where the device has no memory for it.
pub(super) fn drawn(
    spec: &TensorSpec,
    deviation: f64,
    place: &Place,
) -> candle_core::Result<Tensor> {
    let shape = spec.shape.as_slice();
    if spec.name.rsplit('.').next() == Some("bias") {
        Tensor::zeros(shape, DType::F32, &place.device)
    } else if shape.len() == 1 {
        Tensor::ones(shape, DType::F32, &place.device)
    } else {
        normal(deviation, shape, &place.device)?.to_dtype(place.options.dtype)
    }
}

/// Normal values in f32. It fails where the device has no memory for them.
pub(super) fn normal(
    deviation: f64,
    shape: &[usize],
    device: &Device,
) -> candle_core::Result<Tensor> {
    Tensor::randn(0.0_f32, deviation as f32, shape, device)
}

/// A row of one document, all of it supervised.
pub(super) fn batch(tokens: usize, row: usize, vocabulary: usize) -> Batch {
    Batch::of_document((0..tokens).map(|t| token(t, row, vocabulary)))
}

/// Token `t` of row `row`: no row and no part of a row is like another.
pub(super) fn token(t: usize, row: usize, vocabulary: usize) -> u32 {
    ((t * 7919 + row * 104_729) % vocabulary) as u32
}

/// Random states of some layers side by side, `[T, L·H]`. It fails where the device has no memory for them.
pub(super) fn states(
    tokens: usize,
    layers: usize,
    config: &TargetConfig,
    place: &Place,
) -> Result<Tensor> {
    Ok(normal(1.0, &[tokens, layers * config.hidden_size], &place.device)?)
}

/// Features of some tapped layers as a store would give them, without a teacher.
/// It fails where the device has no memory for them.
pub(super) fn tapped(
    tokens: usize,
    layers: usize,
    config: &TargetConfig,
    place: &Place,
) -> Result<BatchFeatures> {
    Ok(BatchFeatures {
        part: None,
        last_kv: None,
        aux_hidden: Some(states(tokens, layers, config, place)?),
        teacher: TeacherFeatures::None,
    })
}

/// Embedding table and head of a target.
pub(super) struct Tables {
    pub(super) embedding: Tensor,
    pub(super) head: Tensor,
}

impl Tables {
    /// Those of `target`, or drawn ones. It fails where the device has no memory for them.
    pub(super) fn of(
        config: &TargetConfig,
        target: Option<&Target>,
        place: &Place,
    ) -> Result<Self> {
        if let Some(target) = target {
            let ends = target.hold_ends()?;
            return Ok(Self { embedding: ends.embedding()?, head: ends.head()? });
        }
        let draw = || -> Result<Tensor> {
            let shape = [config.vocab_size, config.hidden_size];
            let table = normal(config.initializer_range, &shape, &place.device)?;
            Ok(table.to_dtype(place.options.dtype)?)
        };
        let embedding = draw()?;
        let head = if config.tie_word_embeddings { embedding.clone() } else { draw()? };
        Ok(Self { embedding, head })
    }
}
