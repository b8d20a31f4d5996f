//! gpt-oss (OpenAI 2025, <https://arxiv.org/abs/2508.10925>): a sink in each head's softmax, windows in every second
//! layer, biases everywhere, experts with a clamped unit.

use longdraft_kernels::rope::RopeScaling;
use longdraft_kernels::swiglu::Clamped;

use super::super::parts::Router;
use super::super::rope::yarn_attention_factor;
use super::{
    Defaults, ExpertsConfig, GgufKeys, JsonKeys, Parts, RopeParameters, Sizes, sliding_of_gguf,
};

/// What the class has where a file leaves the key out; GGUF files have no keys for the unit.
const WINDOW: usize = 128;
const UNIT: Clamped = Clamped { alpha: 1.702, limit: 7.0 };
/// The stretching of a file without any.
const STRETCH: f64 = 32.0;
const ORIGINAL_CONTEXT: f64 = 4096.0;

pub(super) fn defaults() -> Defaults {
    Defaults {
        vocab_size: Some(201_088),
        num_attention_heads: Some(64),
        num_key_value_heads: Some(8),
        head_dim: Some(64),
        max_position_embeddings: 131_072,
        rope_theta: 150_000.0,
        norm_eps: ("rms_norm_eps", 1e-5),
        reads_mlp_bias: false,
        ..Defaults::default()
    }
}

fn parts(clamped: Clamped) -> Parts {
    Parts {
        sinks: true,
        router: Router::Biased,
        expert_biases: true,
        clamped: Some(clamped),
        ..Parts::default()
    }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> (RopeParameters, Parts) {
    let mut parts = parts(Clamped {
        alpha: keys.scale("swiglu_alpha", Some(UNIT.alpha)).unwrap_or(UNIT.alpha),
        limit: keys.scale("swiglu_limit", Some(UNIT.limit)).unwrap_or(UNIT.limit),
    });
    let window = keys.window(Some(WINDOW));
    let pattern = sizes.each_layer(|layer| window.is_some() && layer.is_multiple_of(2));
    let sliding = keys.layer_types(sizes.num_hidden_layers).unwrap_or(pattern);
    parts.set_windows(window, sliding, &mut keys.problems);
    let mut rope = keys.rope(sizes);
    if keys.rotary_keys().is_none() {
        rope.scaling = RopeScaling::Yarn {
            factor: STRETCH,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_context: ORIGINAL_CONTEXT,
            attention_factor: yarn_attention_factor(STRETCH, None, None, None),
            truncate: false,
        };
    }
    (rope, parts)
}

/// Experts are as wide as the key of the MLP says; every layer has them.
pub(in super::super) fn experts(keys: &mut JsonKeys<'_>) -> ExpertsConfig {
    let per_token = keys.size("num_experts_per_tok").or_else(|| keys.size("experts_per_token"));
    let count = keys.size("num_local_experts").or_else(|| keys.size("num_experts"));
    ExpertsConfig {
        num_experts: count.unwrap_or(128),
        num_experts_per_tok: per_token.unwrap_or(4),
        moe_intermediate_size: keys.size("intermediate_size").unwrap_or(1),
        shared_expert_intermediate_size: None,
        norm_topk_prob: true,
        decoder_sparse_step: 1,
        mlp_only_layers: Vec::new(),
    }
}

pub(super) fn of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> Parts {
    let mut parts = parts(UNIT);
    let window = keys.whole("attention.sliding_window").unwrap_or(WINDOW);
    let sliding = sliding_of_gguf(keys, sizes, 2);
    parts.set_windows(Some(window), sliding, &mut keys.problems);
    parts
}
