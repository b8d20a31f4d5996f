//! Ranks whose devices exchange tensors come to what those do that exchange them in main memory.

use candle_core::{DType, Device, Tensor, Var};
use longdraft_kernels::graph::Backward;
use longdraft_models::target_model::{Features, RowPart, Tap, Taps, Target, TargetOptions};
use longdraft_models::{LayerId, TargetConfig};
use longdraft_parallel::World;
use longdraft_parallel::threads::in_threads;
use serde_json::json;

use super::targets::{all_taps, exchanging, sequence};
use super::tensor::values;

fn config() -> TargetConfig {
    let config = json!({
        "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64,
        "initializer_range": 0.2,
    });
    TargetConfig::from_json(&config).expect("configuration")
}

fn values_of(features: &Features) -> Vec<Vec<f32>> {
    let kv = features.last_kv.iter().flat_map(|kv| [&kv.k, &kv.v]);
    kv.chain(features.hidden.values()).chain(&features.final_hidden).map(values).collect()
}

/// What each rank has of its own row, whose length is another on every rank; the last one has none.
fn shared_layers(ranks: usize, on_gpus: bool, dtype: DType, taps: &Taps) -> Vec<Vec<Vec<f32>>> {
    let config = config();
    in_threads(ranks, |world| {
        let world = exchanging(world, on_gpus);
        let tensor = Some(world.as_ranks());
        let options = TargetOptions { tensor, dtype, ..TargetOptions::default() };
        let target = Target::random(config.clone(), 5, &options).expect("target");
        if world.rank() + 1 == ranks {
            target.join_forward(taps).expect("joined");
            return Vec::new();
        }
        values_of(&target.forward(&sequence(world.rank()), taps).expect("features"))
    })
}

#[test]
fn shared_layers_are_summed_alike_on_devices() {
    for taps in all_taps() {
        for (ranks, dtype) in [(2, DType::F32), (4, DType::F32), (2, DType::BF16)] {
            // The stand-in sums in the order of the ranks, too.
            let [host, devices] =
                [false, true].map(|on_gpus| shared_layers(ranks, on_gpus, dtype, &taps));
            assert!(!host[0].is_empty());
            assert_eq!(host, devices, "{ranks} ranks, {dtype:?}, {taps:?}");
        }
    }
}

/// A part's gathered rows, the gradient of its own ones, and the rows after them.
fn gathered(world: &World, tokens: usize, after: usize) -> [Vec<f32>; 3] {
    // Two documents, of which the second is the longer one.
    let documents: Vec<i32> = (0..tokens).map(|t| i32::from(3 * t >= tokens)).collect();
    let part = RowPart::of(&world.as_ranks(), &documents);
    let rows = part.rows();
    let all = Tensor::arange(0.0_f32, 6.0 * tokens as f32, &Device::Cpu).expect("values");
    let all = all.reshape((tokens, 2, 3)).expect("rows");
    let own = rows.rows_of(&all).expect("own rows");
    let variable = Var::from_tensor(&own).expect("variable");
    let whole = part.gather(variable.as_tensor()).expect("gathered");
    // Every rank asks for something else.
    let weights = all.affine(0.01, world.rank() as f64).expect("weights");
    let loss = (&whole * weights).and_then(|product| product.sum_all()).expect("loss");
    let gradients = loss.gradients().expect("backward");
    let gradient = gradients.get(variable.as_tensor()).expect("a gradient");
    let flat = own.flatten_from(1).expect("a matrix");
    let known = part.seeing_ahead(after).known();
    let after = part.with_rows_after(&flat, after).expect("rows after");
    assert_eq!(values(&whole), values(&all));
    assert_eq!(values(&after), values(&known.rows_of(&all).expect("known rows")));
    // What all ranks ask for together.
    let ranks = world.size() as f64;
    let sum = own.affine(0.01 * ranks, ranks * (ranks - 1.0) / 2.0).expect("sums");
    let pairs = values(gradient).into_iter().zip(values(&sum));
    assert!(pairs.clone().len() == 6 * rows.len());
    assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(1.0)));
    [&whole, gradient, &after].map(values)
}

#[test]
fn parts_of_rows_are_gathered_and_summed_alike_on_devices() {
    for (ranks, tokens) in [(2, 6), (2, 7), (3, 7), (4, 4), (4, 11), (3, 40)] {
        for after in [0, 1, 3, 20] {
            let [host, devices] = [false, true].map(|on_gpus| {
                in_threads(ranks, |world| gathered(&exchanging(world, on_gpus), tokens, after))
            });
            assert_eq!(host[0][0].len(), 6 * tokens);
            assert_eq!(host, devices, "{ranks} ranks, {tokens} tokens, {after} after");
        }
    }
}

#[test]
fn spread_layers_are_gathered_alike_ahead_or_when_they_are_due() {
    let config = config();
    let taps = Taps::of(&[Tap::Hidden(LayerId(1))]);
    in_threads(3, |world| {
        let world = exchanging(world, true);
        let spread = Some(world.as_ranks());
        for (dtype, gather_ahead) in [(DType::F32, true), (DType::BF16, true), (DType::F32, false)]
        {
            let options = TargetOptions { dtype, gather_ahead, ..TargetOptions::default() };
            let whole = Target::random(config.clone(), 5, &options).expect("target");
            let options = TargetOptions { spread: spread.clone(), ..options };
            let target = Target::random(config.clone(), 5, &options).expect("target");
            let run = |target: &Target| {
                values_of(&target.forward(&sequence(0), &taps).expect("features"))
            };
            assert_eq!(run(&target), run(&whole), "{dtype:?}, ahead: {gather_ahead}");
        }
    });
}
