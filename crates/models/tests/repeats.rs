//! Passes of decoding that are made of recorded starts, in the emulator, against plain passes. It sets what holds for a whole
//! process.
#![cfg(feature = "emulate-cuda")]

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::device::repeat_passes;
use longdraft_kernels::dispatch::{Ops, Products, set_ops, set_products};
use longdraft_kernels::trace::Trace;
use longdraft_models::config::TargetConfig;
use longdraft_models::ids::LayerId;
use longdraft_models::target_model::{Extension, KvCache, Tap, Taps, Target, TargetOptions};
use serde_json::{Value, json};

fn target(family: &str, more: &[(&str, Value)]) -> Target {
    let mut config = json!({
        "model_type": family, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 50,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 1024, "initializer_range": 0.08, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": true,
    });
    more.iter().for_each(|(key, value)| config[*key] = value.clone());
    let config = TargetConfig::from_json(&config).expect("a configuration");
    let options = TargetOptions { dtype: DType::BF16, ..TargetOptions::default() };
    Target::random(config, 11, &options).expect("a target")
}

/// A pass: so many rows, or nodes of a tree, of which the first so many are kept.
type Pass = (Option<&'static [Option<usize>]>, usize, usize);

const TREE: &[Option<usize>] = &[None, Some(0), Some(0), Some(1)];
const OTHER_TREE: &[Option<usize>] = &[None, None, Some(1), Some(2)];

/// Chains of one and of three rows and trees, across the end of a cache's room at 256 tokens.
fn passes() -> Vec<Pass> {
    let round =
        [(None, 1, 1), (None, 3, 2), (Some(TREE), 4, 2), (Some(OTHER_TREE), 4, 1), (None, 1, 1)];
    std::iter::repeat_n(round, 10).flatten().collect()
}

/// What all passes tap, one after the other.
fn outputs(target: &Target, cache: &mut KvCache, taps: &Taps) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    let mut extend = |cache: &mut KvCache, parents: Option<&[Option<usize>]>, rows: usize| {
        let first = cache.len();
        let ids: Vec<u32> = (0..rows).map(|i| ((first + i) * 7 % 50) as u32).collect();
        let depths = |i: usize| match parents {
            None => i,
            Some(parents) => std::iter::successors(Some(i), |&node| parents[node]).count() - 1,
        };
        let position_ids: Vec<u32> = (0..rows).map(|i| (first + depths(i)) as u32).collect();
        let position_ids = &position_ids[..];
        let rows = Extension { ids: &ids, position_ids, parents, is_text: false, cache };
        let features = target.extend_each(&mut [rows], taps).expect("a pass");
        let kv = features.last_kv.iter().flat_map(|kv| [&kv.k, &kv.v]);
        let rest = features.hidden.values().chain(&features.final_hidden);
        for tensor in kv.chain(rest) {
            let values: Vec<f32> =
                tensor.flatten_all().and_then(|t| t.to_vec1()).expect("values of f32");
            all.push(values.into_iter().map(f32::to_bits).collect());
        }
    };
    extend(cache, None, 70);
    extend(cache, None, 63);
    extend(cache, None, 62);
    for (parents, rows, kept) in passes() {
        let first = cache.len();
        extend(cache, parents, rows);
        let path: Vec<usize> =
            if parents.is_some() { vec![0, 2][..kept].to_vec() } else { (0..kept).collect() };
        cache.compact(first, &path).expect("kept");
    }
    all
}

/// Final states of passes of one row. They run after a prompt, after tokens were taken back, after a prefix of another cache, and
/// after all tokens were taken back. A pass repeats from the fourth one of its kind on.
fn after_other_tokens(target: &Target) -> Vec<Vec<u32>> {
    let taps = Taps::of(&[Tap::FinalHidden]);
    let extend = |cache: &mut KvCache, rows: usize, salt: usize| {
        let first = cache.len();
        let ids: Vec<u32> = (0..rows).map(|i| ((first + i) * 11 + salt) as u32 % 50).collect();
        let positions: Vec<u32> = (first..first + rows).map(|at| at as u32).collect();
        let features = target.extend(&ids, &positions, cache, &taps).expect("a pass");
        bits(features.final_hidden().expect("tapped"))
    };
    let new = || target.new_cache().expect("room");
    let (mut cache, mut other) = (new(), new());
    extend(&mut other, 90, 1);
    let mut all = vec![extend(&mut cache, 70, 2)];
    all.extend((0..6).map(|salt| extend(&mut cache, 1, salt)));
    cache.truncate(72);
    all.extend((7..10).map(|salt| extend(&mut cache, 1, salt)));
    cache.copy_prefix(&other, 40).expect("of the same target");
    assert_eq!(cache.len(), 40);
    all.extend((0..3).map(|salt| extend(&mut cache, 1, salt)));
    cache.truncate(0);
    all.push(extend(&mut cache, 80, 3));
    all.extend((0..3).map(|salt| extend(&mut cache, 1, salt)));
    all
}

fn starts(target: &Target, cache: &mut KvCache, taps: &Taps) -> usize {
    let mut trace = Trace::of(&Device::Cpu).expect("emulated");
    trace.begin().expect("the only one");
    let at = cache.len() as u32;
    target.extend(&[3], &[at], cache, taps).expect("a pass");
    trace.end().expect("a trace");
    trace.ops().iter().map(|op| op.starts).sum()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let values: Vec<f32> = tensor
        .to_dtype(DType::F32)
        .and_then(|t| t.flatten_all())
        .and_then(|t| t.to_vec1())
        .expect("values");
    values.into_iter().map(f32::to_bits).collect()
}

#[test]
fn passes_of_recorded_starts_have_the_bits_of_plain_ones() {
    set_ops(Ops::Emulated);
    set_products(Products::Half);
    for (family, more) in [
        ("llama", vec![]),
        ("qwen2", vec![]),
        ("qwen3", vec![("tie_word_embeddings", json!(false))]),
    ] {
        let target = target(family, &more);
        let few = [Taps::of(&[Tap::FinalHidden])];
        let all = [Taps::of(&[Tap::Hidden(LayerId(1)), Tap::FinalHidden, Tap::LastKv])];
        for taps in if family == "llama" { all } else { few } {
            let (mut own, mut plain) =
                (target.new_cache().expect("room"), target.new_cache().expect("room"));
            let before = target.repeated_passes();
            let repeated = outputs(&target, &mut own, &taps);
            assert_eq!(target.not_repeated_because(), None);
            // Of 50, the first three of each of three kinds run, and again after the room has grown: 33 repeat before.
            let made = target.repeated_passes() - before;
            assert!((34..42).contains(&made), "{made} passes of {family}");
            repeat_passes(false);
            assert_eq!(outputs(&target, &mut plain, &taps), repeated, "{family}");
            assert_eq!(target.repeated_passes() - before, made);
            repeat_passes(true);
            let (k, v) = own.last_layer().expect("keys");
            let (plain_k, plain_v) = plain.last_layer().expect("keys");
            assert_eq!((bits(&k), bits(&v)), (bits(&plain_k), bits(&plain_v)));
        }
        let before = target.repeated_passes();
        let repeated = after_other_tokens(&target);
        assert_eq!(target.repeated_passes() - before, 3 * 4, "{family}");
        repeat_passes(false);
        assert!(after_other_tokens(&target) == repeated, "{family}");
        repeat_passes(true);
        // A trace times every start by itself.
        let mut cache = target.new_cache().expect("room");
        assert!((0..5).all(|_| starts(&target, &mut cache, &Taps::of(&[Tap::FinalHidden])) > 30));
    }
    // What is computed otherwise than by our kernels, and what depends on more than the words, runs as it did.
    let scaled: &[(&str, Value)] =
        &[("attention_multiplier", json!(0.3)), ("embedding_multiplier", json!(2.0))];
    for (family, more) in [("granite", scaled), ("llama", &[])] {
        let target = target(family, more);
        let mut cache = target.new_cache().expect("room");
        let taps = Taps::of(&[Tap::FinalHidden]);
        let at = cache.len();
        for _ in 0..6 {
            target.extend(&[1], &[at as u32], &mut cache, &taps).expect("a pass");
            cache.truncate(at);
        }
        assert_eq!(target.repeated_passes(), 0, "{family}: all after the same tokens");
        for at in 0..6 {
            target.extend(&[1], &[at], &mut cache, &taps).expect("a pass");
        }
        if family == "granite" {
            let reason = target.not_repeated_because().expect("an op of candle");
            assert!(reason.contains("something else in every pass"), "{reason}");
            assert_eq!(target.repeated_passes(), 0);
        } else {
            assert!(target.repeated_passes() > 0);
        }
    }
    set_ops(Ops::Fused);
    set_products(Products::Single);
}
