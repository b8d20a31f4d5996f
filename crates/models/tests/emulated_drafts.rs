//! Drafts that propose beside a target in bf16 on an NVIDIA GPU, its kernels emulated: held in bf16 without gradients, over
//! caches in bf16, against those in f32. It sets what holds for a whole process.
#![cfg(feature = "emulate-cuda")]

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::attention::KeyRanges;
use longdraft_kernels::dispatch::{Ops, Products, set_ops, set_products};
use longdraft_kernels::trace::Trace;
use longdraft_models::config::TargetConfig;
use longdraft_models::draft::eagle3::{Eagle3Config, Eagle3Draft};
use longdraft_models::draft::glide::{GlideConfig, GlideDraft};
use longdraft_models::draft::{Draft, HeldAs, Init, Seen, VocabularyMap};
use longdraft_models::ids::{LayerId, TargetTokenId};
use longdraft_models::target_model::{
    Features, KeyValues, KvCache, PackedSequence, Taps, Target, TargetOptions,
};
use serde_json::json;

/// Tokens that a draft has read, and those that it reads.
const READ: usize = 9;
const ROWS: usize = 3;
/// Largest error of a result, in parts of its largest value.
const ALLOWED: f32 = 2e-2;

fn target() -> Target {
    let config = json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 50,
        "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 256, "initializer_range": 0.08, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": true,
    });
    let config = TargetConfig::from_json(&config).expect("a configuration");
    let options = TargetOptions { dtype: DType::BF16, ..TargetOptions::default() };
    Target::random(config, 11, &options).expect("a target")
}

/// Ids and positions.
type Tokens = (Vec<u32>, Vec<u32>);

fn tokens() -> Tokens {
    let all = 0..(READ + ROWS) as u32;
    (all.clone().map(|i| i * 7 % 50).collect(), all.collect())
}

/// Keys and values in a cache of a draft's own, as it reads them.
fn cached(keys: &KeyValues) -> KeyValues {
    let (rows, heads, dim) = keys.k.dims3().expect("heads");
    let mut cache = KvCache::new(1, heads, dim, &Device::Cpu).expect("a cache");
    cache.reserve(rows).expect("room");
    let (k, v) = cache.append(0, &keys.k, &keys.v).expect("written");
    KeyValues { k, v }
}

/// What the last tokens see: all before them.
fn ranges() -> Arc<KeyRanges> {
    Arc::new(KeyRanges::appended(READ, ROWS))
}

fn last(tensor: &Tensor) -> Tensor {
    tensor.narrow(0, READ, ROWS).expect("rows")
}

/// A step of a draft beside a target whose features are these: what it gives, and the type of its cache.
type Step<D> = fn(&D, &Target, &Features) -> (Tensor, DType);

fn glide_step(draft: &GlideDraft, target: &Target, features: &Features) -> (Tensor, DType) {
    let (ids, positions) = tokens();
    let of_target = features.last_kv().expect("tapped").clone();
    let embeddings = target.hold_ends().and_then(|ends| ends.embed(&ids)).expect("embeddings");
    let table = |positions| target.rope().table(positions, &Device::Cpu).expect("angles");
    let own = draft.self_kv(&embeddings, &table(&positions)).expect("keys");
    let own = Seen { keys: cached(&own), ranges: ranges() };
    let dtype = own.keys.k.dtype();
    let cross = Seen { keys: of_target, ranges: ranges() };
    let (embeddings, table) = (last(&embeddings), table(&positions[READ..]));
    (draft.forward_each(&embeddings, &table, (&[own], &[cross])).expect("a step"), dtype)
}

fn eagle3_step(draft: &Eagle3Draft, _: &Target, features: &Features) -> (Tensor, DType) {
    let (ids, positions) = tokens();
    let aux = features.hidden_of(&draft.config().target_layers).expect("tapped");
    let state = draft.fuse(&aux).expect("states");
    let input = draft.attention_input(&draft.embed(&ids).expect("embeddings"), &state);
    let input = input.expect("input");
    let lengths = vec![ids.len() as u32; ids.len()];
    let table = draft.rope_table(&positions, &lengths).expect("angles");
    let keys = cached(&draft.key_values(&input, &table).expect("keys"));
    let dtype = keys.k.dtype();
    let seen = [Seen { keys, ranges: ranges() }];
    let table = draft.rope_table(&positions[READ..], &lengths[READ..]).expect("angles");
    let hidden = draft.layer(&last(&state), &last(&input), &table, &seen).expect("a step");
    (draft.head_input(&hidden).expect("a norm"), dtype)
}

/// What a step gives, and the kernels and products that made it.
fn traced(step: impl FnOnce() -> (Tensor, DType)) -> (Tensor, DType, Vec<String>) {
    let mut trace = Trace::of(&Device::Cpu).expect("emulated");
    trace.begin().expect("the only one");
    let (out, dtype) = step();
    trace.end().expect("a trace");
    (out, dtype, trace.ops().into_iter().map(|op| op.op).collect())
}

fn error(own: &Tensor, plain: &Tensor) -> f32 {
    let values = |t: &Tensor| t.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values");
    let (own, plain) = (values(own), values(plain));
    let largest = plain.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    own.iter().zip(&plain).fold(0.0_f32, |most, (own, plain)| most.max((own - plain).abs()))
        / largest
}

/// Holds a draft in bf16, and checks what that changes of a step.
fn check<D: Draft>(mut draft: D, target: &Target, step: Step<D>) {
    let method = draft.method();
    let features = target.forward(&PackedSequence::single(&tokens().0), &Taps::of(&draft.taps()));
    let features = &features.expect("a pass");
    // A CPU multiplies no bf16.
    draft.hold_as(HeldAs::Halves).expect("as it was");
    assert!(draft.weights().named().is_ok(), "{method} can be saved");
    let (plain, of_cache) = step(&draft, target, features);
    assert_eq!(of_cache, DType::F32);
    let in_f32 = draft.held_bytes();

    set_ops(Ops::Emulated);
    set_products(Products::Half);
    let of_training = step(&draft, target, features).0;
    draft.hold_as(HeldAs::Halves).expect("room");
    let held = draft.held_bytes();
    assert!(2 * held < in_f32 + in_f32 / 20, "{method}: {held} of {in_f32} bytes");
    assert!(draft.weights().named().is_err(), "{method} is not saved");
    let (own, of_cache, kernels) = traced(|| step(&draft, target, features));
    assert_eq!(of_cache, DType::BF16);
    assert!(!own.track_op(), "{method} has a gradient");
    for kernel in ["few_rows_bf16_1", "attention_few"] {
        assert!(kernels.iter().any(|name| name == kernel), "{method}, {kernel}: {kernels:?}");
    }
    let of_library = kernels.iter().find(|name| name.starts_with("product"));
    assert_eq!(of_library, None, "{method}: few rows read weights once, as they are held");
    let (own, of_training) = (error(&own, &plain), error(&of_training, &plain));
    assert!(own < ALLOWED && own < 2.0 * of_training, "{method}: {own:.2e}, {of_training:.2e}");
    set_ops(Ops::Fused);
    set_products(Products::Single);
}

#[test]
fn drafts_that_propose_on_a_gpu_are_held_in_bf16_without_gradients() {
    let target = target();
    let config = GlideConfig::for_target(target.config(), None);
    let glide = GlideDraft::initialise(&config, &target, Init::Random, 3).expect("a draft");
    check(glide, &target, glide_step);
    let layers = [1, 2, 4].map(LayerId);
    let config = Eagle3Config::for_target_layers(target.config(), 20, layers);
    let kept = (0..20).map(|i| TargetTokenId(2 * i + 1)).collect();
    let vocabulary = VocabularyMap::new(kept, 50).expect("a map");
    let embedding = target.hold_ends().and_then(|ends| ends.embedding()).expect("a table");
    let eagle3 = Eagle3Draft::initialise(&config, vocabulary, &embedding, 3).expect("a draft");
    check(eagle3, &target, eagle3_step);
}
