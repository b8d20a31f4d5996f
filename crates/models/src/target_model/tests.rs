//! The ends of a target: a head that is held as blocks says what its logits say, and tables say which end they are.
//! Caches of layers with a window take the memory that was planned.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use longdraft_kernels::attention::Reach;
use longdraft_kernels::random::CounterRng;

use serde_json::json;

use super::cache::Layout;
use super::{KvCache, Taps, Target, TargetOptions, tensor_specs};
use crate::config::TargetConfig;
use crate::weights::TensorRole::{self, Embedding, Head, Layer};

/// The small target that the program carries, held as its file holds it.
fn stored() -> Target {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/target/demonstration.gguf");
    let options = TargetOptions { as_stored: true, ..TargetOptions::default() };
    let target = Target::open(path.to_str().expect("path"), &options).expect("target");
    let ends = target.hold_ends().expect("ends");
    assert!(ends.head_matrix().dense().is_none(), "held as blocks");
    drop(ends);
    target
}

/// States like those after a final norm, `[rows, H]`.
fn states(target: &Target, rows: usize) -> Tensor {
    let hidden = target.config().hidden_size;
    let mut random = CounterRng::new(7, "states", &[]);
    let values: Vec<f32> = (0..rows * hidden).map(|_| random.normal() as f32).collect();
    Tensor::from_vec(values, (rows, hidden), &Device::Cpu).expect("states")
}

#[test]
fn the_most_likely_tokens_of_a_head_of_blocks_are_those_of_its_logits() {
    let target = stored();
    // More rows than are read at a time.
    let (states, ends) = (states(&target, 150), target.hold_ends().expect("ends"));
    let logits = ends.logits(&states).expect("logits").to_vec2::<f32>().expect("values");
    let summary = ends.head_summary(&states).expect("summary");
    for k in [1, 7, target.config().vocab_size] {
        let found = ends.top_k(&states, k).expect("tokens");
        assert_eq!(found.ids.len(), logits.len() * k);
        for (row, logits) in logits.iter().enumerate() {
            let mut order: Vec<u32> = (0..logits.len() as u32).collect();
            order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            let all: f64 = logits.iter().map(|z| f64::from(*z).exp()).sum::<f64>().ln();
            assert_eq!(found.ids[row * k..][..k], order[..k], "row {row}, {k} tokens");
            assert!((summary.log_sum_exp[row] - all).abs() < 1e-5, "row {row}");
            assert_eq!(summary.argmax[row], order[0]);
            for (id, log_prob) in order.iter().zip(&found.log_probs[row * k..][..k]) {
                let want = f64::from(logits[*id as usize]) - all;
                assert!((f64::from(*log_prob) - want).abs() < 1e-5, "row {row}, token {id}");
            }
        }
    }
}

#[test]
fn tables_say_which_end_they_are() {
    let tables = |tied: bool| -> Vec<(String, TensorRole)> {
        let config = json!({
            "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 20,
            "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
            "tie_word_embeddings": tied,
        });
        let mut config = TargetConfig::from_json(&config).expect("a configuration");
        (config.parts.per_layer_input, config.parts.per_layer_vocabulary) = (4, 20);
        let specs = tensor_specs(&config).into_iter().filter(|spec| spec.role != Layer);
        specs.map(|spec| (spec.name, spec.role)).collect()
    };
    let named = |all: &[(&str, TensorRole)]| -> Vec<(String, TensorRole)> {
        all.iter().map(|(name, role)| (format!("{name}.weight"), *role)).collect()
    };
    let per_layer = ("model.embed_tokens_per_layer", Embedding);
    let apart = [("model.embed_tokens", Embedding), ("lm_head", Head), per_layer];
    assert_eq!(tables(false), named(&apart));
    // All rows of a table that is the head, too, are read for a token.
    assert_eq!(tables(true), named(&[("model.embed_tokens", Head), per_layer]));
}

const VOCABULARY: usize = 40;

/// Five layers with a window of 512 to a full one, as Gemma 3.
fn sliding(context: usize) -> Target {
    let config = json!({
        "model_type": "gemma3_text", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 6, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
        "vocab_size": VOCABULARY, "sliding_window": 512, "sliding_window_pattern": 6,
        "max_position_embeddings": context
    });
    let config = TargetConfig::from_json(&config).expect("valid configuration");
    Target::random(config, 1, &TargetOptions::default()).expect("random target")
}

fn read(target: &Target, cache: &mut KvCache, tokens: usize) {
    let ids: Vec<u32> =
        (cache.len()..cache.len() + tokens).map(|i| (i % VOCABULARY) as u32).collect();
    let positions: Vec<u32> = (cache.len() as u32..).take(tokens).collect();
    target.extend(&ids, &positions, cache, &Taps::of(&[])).expect("a pass");
}

#[test]
fn a_cache_of_16_bits_holds_finite_values_as_finite_ones() {
    let layouts = std::iter::once(Layout::Keys(1, 2));
    let cache = KvCache::of(layouts, Reach::All, DType::F16, &Device::Cpu).expect("cache");
    let own = Tensor::new(&[[[1e6_f32, -0.5]], [[-1e6, f32::INFINITY]]], &Device::Cpu);
    let own = own.expect("values");
    let (k, v) = cache.append(0, &own, &own).expect("appended");
    for held in [k, v] {
        let held = held.to_dtype(DType::F32).and_then(|held| held.flatten_all()?.to_vec1::<f32>());
        assert_eq!(held.expect("values"), [65_504.0, -0.5, -65_504.0, f32::INFINITY]);
    }
}

#[test]
fn a_long_context_of_a_sliding_model_takes_a_fifth_of_a_full_cache() {
    const CONTEXT: usize = 32_768;
    let target = sliding(CONTEXT);
    let mut cache = target.new_cache().expect("cache");
    let mut most = 0;
    while cache.len() < CONTEXT {
        read(&target, &mut cache, 512);
        most = most.max(cache.elements());
    }
    let (full, planned) = (6 * 2 * 8 * CONTEXT, target.config().cache_values(CONTEXT, 512));
    assert_eq!(cache.elements(), most, "a prompt that is read in pieces takes no more");
    assert!(cache.elements() <= planned && planned < cache.elements() + cache.elements() / 50);
    let share = cache.elements() as f64 / full as f64;
    assert!((0.19..0.21).contains(&share), "{share}");
}

#[test]
fn pieces_of_any_length_take_no_more_than_is_planned() {
    const CONTEXT: usize = 4096;
    let target = sliding(CONTEXT);
    let mut random = CounterRng::new(3, "pieces", &[]);
    let mut cache = target.new_cache().expect("cache");
    while cache.len() < CONTEXT {
        let most = [1, 7, 64, 512][random.below(4) as usize];
        let piece = (1 + random.below(most) as usize).min(CONTEXT - cache.len());
        read(&target, &mut cache, piece);
        let planned = target.config().cache_values(cache.len().max(256), 512);
        // Full layers grow by doubling.
        assert!(cache.elements() <= 2 * planned, "{} of {planned}", cache.elements());
    }
}
