//! Layers that ranks share (tensor parallel) come to what one rank computes, within the rounding of f32.

use std::path::Path;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use longdraft_kernels::matrix::{BlockFormat, QuantisedMatrix};
use longdraft_models::target_model::{
    Extension, Features, PackedSequence, RowPart, Tap, Taps, Target, TargetOptions, tensor_specs,
};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::memory::MemorySource;
use longdraft_models::{LayerId, TargetConfig};
use longdraft_parallel::World;
use longdraft_parallel::threads::in_threads;
use serde_json::{Value, json};

use super::targets::{config_with, own_features, sequence};

/// Largest difference, as a share of a tensor's largest value: sums of f32 in another order.
const BOUND: f32 = 1e-5;
/// With activations of 8-bit fixed-point numbers, which may round to a neighbour after other sums.
const FIXED_BOUND: f32 = 5e-2;

/// Four key-value heads, so that two and four ranks can share them.
fn config(more: &Value) -> TargetConfig {
    let config = json!({
        "model_type": "llama", "vocab_size": 61, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64,
        "tie_word_embeddings": false, "initializer_range": 0.2,
    });
    config_with(config, more)
}

fn shared_by(world: &World) -> TargetOptions {
    TargetOptions { tensor: Some(world.as_ranks()), ..TargetOptions::default() }
}

fn tensors(features: &Features) -> Vec<Tensor> {
    let kv = features.last_kv.iter().flat_map(|kv| [kv.k.clone(), kv.v.clone()]);
    let keys = features.last_keys_unrotated.iter().cloned();
    kv.chain(keys)
        .chain(features.hidden.values().cloned())
        .chain(features.final_hidden.clone())
        .collect()
}

pub(super) fn values(tensor: &Tensor) -> Vec<f32> {
    let tensor = tensor.to_dtype(DType::F32).and_then(|t| t.flatten_all());
    tensor.and_then(|t| t.to_vec1()).expect("values")
}

#[track_caller]
fn assert_close(got: &Features, want: &Features, bound: f32, what: &str) {
    let (got, want) = (tensors(got), tensors(want));
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(&want) {
        assert_eq!(got.dims(), want.dims(), "{what}");
        let (got, want) = (values(got), values(want));
        let largest = want.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        for (a, b) in got.iter().zip(&want) {
            assert!((a - b).abs() <= bound * largest, "{what}: {a} {b}, largest {largest}");
        }
    }
}

/// The rows of all ranks.
fn features_over_ranks(
    ranks: usize,
    open: impl Fn(&World) -> Target + Sync,
) -> Vec<(usize, Taps, Features)> {
    let all = in_threads(ranks, |world| own_features(&world, &open(&world)));
    all.into_iter().flatten().collect()
}

#[test]
fn mpi_shared_layers_compute_what_whole_ones_do() {
    let experts = json!({
        "num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2,
        "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
    });
    let mixture = |kind: &str| {
        let mut config = experts.clone();
        config["model_type"] = kind.into();
        config
    };
    for more in [
        json!({ "attention_bias": true, "mlp_bias": true }),
        json!({ "model_type": "qwen2", "num_attention_heads": 4 }),
        json!({ "model_type": "qwen3", "tie_word_embeddings": true }),
        mixture("mixtral"),
        mixture("qwen2_moe"),
        mixture("qwen3_moe"),
    ] {
        let config = config(&more);
        let whole = Target::random(config.clone(), 5, &TargetOptions::default()).expect("target");
        for ranks in [2, 4] {
            let open = |world: &World| {
                let target = Target::random(config.clone(), 5, &shared_by(world)).expect("target");
                assert_eq!(target.fingerprint(), whole.fingerprint());
                target
            };
            let seen = features_over_ranks(ranks, open);
            assert_eq!(seen.len(), 15, "five rows for three sets of taps");
            for (row, taps, got) in &seen {
                let want = whole.forward(&sequence(*row), taps).expect("features");
                assert_close(
                    got,
                    &want,
                    BOUND,
                    &format!("{ranks} ranks, row {row}, {taps:?}, {more}"),
                );
            }
            let again = features_over_ranks(ranks, open);
            for ((_, _, one), (_, _, other)) in seen.iter().zip(&again) {
                let bits = |features: &Features| {
                    tensors(features).iter().flat_map(values).map(f32::to_bits).collect::<Vec<_>>()
                };
                assert_eq!(bits(one), bits(other), "sums run in the order of the ranks");
            }
        }
    }
}

#[test]
fn mpi_shared_last_layer_is_put_together_for_a_draft() {
    let config = config(&json!({ "attention_bias": true, "mlp_bias": true }));
    let whole = Target::random(config.clone(), 5, &TargetOptions::default()).expect("target");
    let want = whole.last_layer().expect("layer");
    for ranks in [2, 4] {
        let all = in_threads(ranks, |world| {
            let target = Target::random(config.clone(), 5, &shared_by(&world)).expect("target");
            target.last_layer().expect("layer")
        });
        for mut got in all {
            assert_eq!(got.len(), want.len());
            for (name, want) in &want {
                let place = got.iter().position(|(other, _)| other == name).expect("a tensor");
                let (_, got) = got.swap_remove(place);
                assert_eq!(got.dims(), want.dims(), "{name}");
                assert_eq!(values(&got), values(want), "{name}");
            }
        }
    }
}

/// Ranks that all run one row, as in a curriculum's comparison, run it once.
#[test]
fn mpi_shared_layers_run_a_common_row_once() {
    let config = config(&json!({}));
    let taps = Taps::of(&[Tap::Hidden(LayerId(0)), Tap::FinalHidden]);
    let sent = |rows: fn(usize) -> usize| {
        let sent = in_threads(2, |world| {
            let target = Target::random(config.clone(), 5, &shared_by(&world)).expect("target");
            let before = world.traffic();
            let features = target.forward(&sequence(rows(world.rank())), &taps).expect("features");
            assert_eq!(tensors(&features).len(), 2);
            (world.traffic() - before).sent_bytes
        });
        sent[0]
    };
    let (one, two) = (sent(|_| 3), sent(|rank| 3 + rank));
    assert!(two as f64 > 1.9 * one as f64, "{one} bytes for one row, {two} for two");
}

/// Weights that are held as blocks, and the same values widened.
struct Blocks {
    tensors: MemorySource,
    format: (GgmlDType, BlockFormat),
}

impl Blocks {
    fn of(config: &TargetConfig, format: (GgmlDType, BlockFormat)) -> Self {
        let specs = tensor_specs(config);
        let tensors = MemorySource::random(&specs, config.initializer_range, 5).expect("tensors");
        Self { tensors, format }
    }

    fn blocks(&self, name: &str) -> Option<QTensor> {
        let tensor = self.tensors.load(name, DType::F32).expect("a tensor");
        let matrix = tensor.rank() == 2;
        matrix.then(|| QTensor::quantize(&tensor, self.format.0).expect("blocks"))
    }
}

impl WeightSource for Blocks {
    fn path(&self) -> &Path {
        self.tensors.path()
    }

    fn names(&self) -> Vec<String> {
        self.tensors.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.tensors.shape(name)
    }

    fn load(&self, name: &str, dtype: DType) -> longdraft_models::Result<Tensor> {
        match self.blocks(name) {
            Some(blocks) => Ok(blocks.dequantize(&Device::Cpu)?.to_dtype(dtype)?),
            None => self.tensors.load(name, dtype),
        }
    }

    fn load_quantised(&self, name: &str) -> longdraft_models::Result<Option<QuantisedMatrix>> {
        let Some(blocks) = self.blocks(name) else { return Ok(None) };
        let (outputs, inputs) = blocks.shape().dims2()?;
        let bytes = blocks.data()?;
        Ok(Some(QuantisedMatrix::new(self.format.1, outputs, inputs, &bytes)?))
    }
}

#[test]
fn mpi_shared_layers_of_quantised_blocks_compute_what_whole_ones_do() {
    let config = config(&json!({ "num_attention_heads": 4, "head_dim": 32 }));
    for format in [(GgmlDType::Q4_1, BlockFormat::Q4_1), (GgmlDType::Q8_0, BlockFormat::Q8_0)] {
        let source = |config: &TargetConfig| Blocks::of(config, format);
        let options = TargetOptions { as_stored: true, ..TargetOptions::default() };
        let whole = Target::from_source(config.clone(), &source(&config), &options);
        let whole = whole.expect("target");
        let ends = whole.hold_ends().expect("ends");
        assert!(ends.head_matrix().dense().is_none(), "held as blocks");
        for ranks in [2, 4] {
            let seen = features_over_ranks(ranks, |world| {
                let options = TargetOptions { as_stored: true, ..shared_by(world) };
                let target = Target::from_source(config.clone(), &source(&config), &options);
                target.expect("target")
            });
            for (row, taps, got) in seen {
                let want = whole.forward(&sequence(row), &taps).expect("features");
                assert_close(&got, &want, FIXED_BOUND, &format!("{ranks} ranks, {format:?}"));
            }
        }
        // 96 inner states over two ranks are one and a half blocks each.
        let config = TargetConfig { intermediate_size: 96, ..config.clone() };
        let errors = in_threads(2, |world| {
            let options = TargetOptions { as_stored: true, ..shared_by(&world) };
            let target = Target::from_source(config.clone(), &source(&config), &options);
            target.err().map(|error| error.to_string()).unwrap_or_default()
        });
        let wanted = "`model.layers.0.mlp.down_proj.weight` shared by 2 ranks: inputs ";
        assert!(errors[0].starts_with(wanted), "{}", errors[0]);
        assert!(errors[0].ends_with("share it by fewer, or hold it as f32"), "{}", errors[0]);
    }
}

#[test]
fn what_shared_layers_cannot_do_is_an_error() {
    let sizes = config(&json!({}));
    let errors = in_threads(3, |world| {
        let target = Target::random(sizes.clone(), 5, &shared_by(&world));
        target.err().map(|error| error.to_string()).unwrap_or_default()
    });
    assert!(
        errors[0].contains("`num_key_value_heads` = 4 is not a multiple of 3"),
        "{}",
        errors[0]
    );
    in_threads(2, |world| {
        let spread = TargetOptions { spread: Some(world.as_ranks()), ..shared_by(&world) };
        assert!(Target::random(sizes.clone(), 5, &spread).is_err(), "cut twice");
        let target = Target::random(sizes.clone(), 5, &shared_by(&world)).expect("target");
        let taps = Taps::of(&[Tap::FinalHidden]);
        let row = PackedSequence::single(&[1, 2, 3, 4]);
        let part = RowPart::of(&world.as_ranks(), &[0; 4]);
        assert!(target.forward_part(&row, &part, &taps).is_err());
        let mut cache = target.new_cache().expect("cache");
        let (ids, position_ids, cache) = (&[1], &[0], &mut cache);
        let tokens = Extension { ids, position_ids, parents: None, is_text: false, cache };
        let error = target.extend_each(&mut [tokens], &taps).expect_err("decoding");
        assert!(error.to_string().contains("2 ranks share the target's layers"), "{error}");
    });
}
