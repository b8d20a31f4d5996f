//! A target as an NVIDIA GPU runs it with products in bf16, its kernels emulated, against the CPU's f32: many rows with
//! bf16 between norms and sums, and decoding over a bf16 cache. It sets what holds for a whole process.
#![cfg(feature = "emulate-cuda")]

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::dispatch::{Ops, Products, set_ops, set_products};
use longdraft_kernels::trace::Trace;
use longdraft_models::config::TargetConfig;
use longdraft_models::ids::LayerId;
use longdraft_models::target_model::{PackedSequence, Tap, Taps, Target, TargetOptions};
use serde_json::json;

/// Rows of a pass that is not one of few rows.
const MANY: usize = 80;
/// Tokens that are decoded after them, some at a time.
const LATER: [usize; 3] = [1, 5, 2];
/// Largest errors, in parts of the largest value. Of 0.4 % that bf16 rounds by, several steps of a layer add up.
const ALLOWED: f64 = 2e-2;

/// The family whose MLPs are mixtures of experts.
const MIXTURE: &str = "qwen3_moe";

fn config(family: &str) -> TargetConfig {
    let mut config = json!({
        "model_type": family, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 50,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "initializer_range": 0.08, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": true,
    });
    if family == MIXTURE {
        // Every token visits all experts: none is chosen otherwise because something was rounded.
        let experts = [("num_experts", 3), ("num_experts_per_tok", 3), ("decoder_sparse_step", 1)];
        experts.into_iter().for_each(|(key, value)| config[key] = json!(value));
        config["moe_intermediate_size"] = json!(32);
        config["norm_topk_prob"] = json!(true);
    }
    TargetConfig::from_json(&config).expect("a configuration")
}

/// What a target hands out of tokens in one pass, and by decoding.
struct Outputs {
    /// A layer's output, the final states, the last keys and values.
    packed: Vec<Tensor>,
    decoded: Tensor,
    cache: &'static str,
    /// Kernels that ran, where they are traced.
    kernels: Vec<String>,
}

fn outputs(family: &str, dtype: DType, is_traced: bool) -> Outputs {
    let options = TargetOptions { dtype, ..TargetOptions::default() };
    let target = Target::random(config(family), 11, &options).expect("a target");
    let all = MANY + LATER.iter().sum::<usize>();
    let ids: Vec<u32> = (0..all as u32).map(|i| i * 7 % 50).collect();
    let positions: Vec<u32> = (0..all as u32).collect();
    let mut trace = is_traced.then(|| Trace::of(&Device::Cpu).expect("emulated"));
    trace.iter_mut().for_each(|trace| trace.begin().expect("the only one"));

    let taps = Taps::of(&[Tap::Hidden(LayerId(1)), Tap::FinalHidden, Tap::LastKv]);
    let features = target.forward(&PackedSequence::single(&ids), &taps).expect("a pass");
    let last_kv = features.last_kv().expect("tapped").clone();
    let final_hidden = features.final_hidden.clone().expect("tapped");
    let packed = vec![features.hidden[&LayerId(1)].clone(), final_hidden, last_kv.k, last_kv.v];

    let mut cache = target.new_cache().expect("a cache");
    let (mut decoded, mut first) = (Vec::new(), 0);
    let final_hidden = Taps::of(&[Tap::FinalHidden]);
    for rows in [MANY].into_iter().chain(LATER) {
        let new = first..first + rows;
        let features =
            target.extend(&ids[new.clone()], &positions[new.clone()], &mut cache, &final_hidden);
        decoded.push(features.expect("a pass").final_hidden.expect("tapped"));
        first = new.end;
    }
    trace.iter_mut().for_each(|trace| trace.end().expect("a trace"));
    let ops = trace.iter().flat_map(Trace::ops);
    Outputs {
        packed,
        decoded: Tensor::cat(&decoded, 0).expect("rows"),
        cache: target.cache_type(),
        kernels: ops.map(|op| op.op).collect(),
    }
}

/// The largest difference in parts of the largest value.
fn error(own: &Tensor, plain: &Tensor) -> f64 {
    assert_eq!((own.dtype(), own.dims()), (DType::F32, plain.dims()));
    let values = |t: &Tensor| -> Vec<f32> {
        t.flatten_all().and_then(|t| t.to_vec1()).expect("values of f32")
    };
    let (own, plain) = (values(own), values(plain));
    let largest = plain.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    let off = own.iter().zip(&plain).map(|(own, plain)| f64::from((own - plain).abs()));
    off.fold(0.0, f64::max) / f64::from(largest)
}

#[test]
fn a_target_in_bf16_is_near_the_one_in_f32() {
    // Biases, norms of heads, and neither; experts; weights held in either type.
    for (family, dtype) in [
        ("llama", DType::BF16),
        ("qwen2", DType::BF16),
        ("qwen3", DType::BF16),
        (MIXTURE, DType::BF16),
        ("llama", DType::F32),
    ] {
        set_ops(Ops::Fused);
        set_products(Products::Single);
        let plain = outputs(family, dtype, false);
        assert_eq!(plain.cache, "f32");
        set_ops(Ops::Emulated);
        set_products(Products::Half);
        let own = outputs(family, dtype, true);
        assert_eq!(own.cache, "bf16");
        let of_mlp: &[&str] = if family == MIXTURE {
            &["expert_gates", "expert_outputs", "few_rows_bf16_experts_2"]
        } else {
            &["swiglu_halves"]
        };
        for kernel in ["rms_norm_to_halves", "rope_halves", "attention_few"].iter().chain(of_mlp) {
            assert!(own.kernels.iter().any(|name| name == *kernel), "{kernel}: {:?}", own.kernels);
        }
        let norms_heads = own.kernels.iter().any(|name| name == "rms_norm_of_halves");
        assert_eq!(norms_heads, family.starts_with("qwen3"));
        let pairs = own.packed.iter().zip(&plain.packed);
        for (place, (own, plain)) in pairs.enumerate() {
            let error = error(own, plain);
            assert!(error < ALLOWED, "{family} in {dtype:?}, output {place}: {error:.2e}");
        }
        let error = error(&own.decoded, &plain.decoded);
        assert!(error < ALLOWED, "{family} in {dtype:?}, decoded: {error:.2e}");
    }
    set_ops(Ops::Fused);
    set_products(Products::Single);
}
