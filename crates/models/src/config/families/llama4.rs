//! Llama 4's text part (<https://ai.meta.com/blog/llama-4-multimodal-intelligence/>): chunks in layers with rotary
//! embedding, of neighbours, with unweighted norms; queries that grow in the layers without; experts whose
//! inputs are weighed.

use super::super::parts::{QkNorm, QueryGrowth, Rotary, Router};
use super::{
    Defaults, ExpertsConfig, GgufKeys, JsonKeys, Parts, STILL_INTERVAL, Sizes, every, limits,
    sliding_of_gguf, still_layers,
};

/// What the class has where a file leaves the key out; GGUF files have no keys for most.
const CHUNK: usize = 8192;
const GROWTH: QueryGrowth =
    QueryGrowth { beta: 0.1, original_context: 8192.0, offset: 1, only_still: true };
/// The model of so many experts has no norms on queries and keys, and no key for it in GGUF files.
const EXPERTS_WITHOUT_NORMS: f64 = 128.0;

pub(super) fn defaults() -> Defaults {
    Defaults {
        vocab_size: Some(202_048),
        num_attention_heads: Some(40),
        num_key_value_heads: Some(8),
        head_dim: Some(128),
        max_position_embeddings: 131_072,
        intermediate_size: Some(16_384),
        rope_theta: 5e5,
        norm_eps: ("rms_norm_eps", 1e-5),
        mlp_width: "intermediate_size_mlp",
        reads_mlp_bias: false,
        ..Defaults::default()
    }
}

fn parts(still: Vec<bool>, norms: bool) -> Parts {
    Parts {
        chunked: true,
        qk_norm: if norms { QkNorm::Unweighted } else { QkNorm::None },
        rotary: Rotary { neighbours: true, still, ..Rotary::default() },
        router: Router::SigmoidOnInput,
        ..Parts::default()
    }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> Parts {
    // Published files list none where they mean the default.
    let empty = keys.value.get("no_rope_layers").and_then(|list| list.as_array());
    let listed = match empty {
        Some(list) if list.is_empty() => None,
        _ => keys.each_layer("no_rope_layers", sizes.num_hidden_layers),
    };
    let still = still_layers(keys, sizes, listed);
    let chunk = match keys.value.get("attention_chunk_size") {
        None => Some(CHUNK),
        Some(_) => keys.size_from_one("attention_chunk_size"),
    };
    let pattern = still.iter().map(|still| !still && chunk.is_some()).collect();
    let kinds = keys.layer_kinds(
        sizes.num_hidden_layers,
        &[("full_attention", false), ("chunked_attention", true)],
    );
    let mut parts = parts(still, keys.flag("use_qk_norm", true));
    parts.set_windows(chunk, kinds.unwrap_or(pattern), &mut keys.problems);
    if keys.flag("attn_temperature_tuning", true) {
        let beta = keys.finite("attn_scale").unwrap_or(GROWTH.beta);
        let beta = limits::within(&mut keys.problems, "attn_scale", beta, &limits::GROWTHS);
        parts.query_growth = Some(QueryGrowth {
            beta: beta.unwrap_or_default(),
            original_context: keys.tokens_in("floor_scale").unwrap_or(GROWTH.original_context),
            ..GROWTH
        });
    }
    parts
}

/// Experts stand in the layers of `moe_layers`, else in every `interleave_moe_layer_step`-th. Of an empty list there
/// are none.
pub(in super::super) fn experts(keys: &mut JsonKeys<'_>) -> Option<ExpertsConfig> {
    let layers = keys.size("num_hidden_layers").unwrap_or(0).min(limits::LAYERS);
    let width = keys.size("intermediate_size").unwrap_or(8192);
    let step = keys.size("interleave_moe_layer_step").unwrap_or(1);
    let listed = keys.value.get("moe_layers").filter(|list| !list.is_null());
    let listed = listed.map(|_| keys.sizes("moe_layers"));
    if listed.as_ref().is_some_and(Vec::is_empty) {
        return None;
    }
    if let Some(beyond) = listed.iter().flatten().find(|layer| **layer >= layers) {
        keys.problems.push(format!("`moe_layers` lists {beyond} of {layers} layers"));
    }
    let plain = |listed: &Vec<usize>| {
        let listed: std::collections::BTreeSet<_> = listed.iter().collect();
        (0..layers).filter(|layer| !listed.contains(layer)).collect()
    };
    Some(ExpertsConfig {
        num_experts: keys.size("num_local_experts").unwrap_or(16),
        num_experts_per_tok: keys.size("num_experts_per_tok").unwrap_or(1),
        moe_intermediate_size: width,
        shared_expert_intermediate_size: Some(width),
        norm_topk_prob: false,
        decoder_sparse_step: if listed.is_some() { 1 } else { step },
        mlp_only_layers: listed.as_ref().map(plain).unwrap_or_default(),
    })
}

/// A window of 0 says that all layers are full and turn.
pub(super) fn of_gguf(keys: &mut GgufKeys<'_>, sizes: Sizes) -> Parts {
    let norms = keys.number("expert_count") != Some(EXPERTS_WITHOUT_NORMS);
    if keys.number("attention.sliding_window") == Some(0.0) {
        return parts(Vec::new(), norms);
    }
    let chunked = sliding_of_gguf(keys, sizes, STILL_INTERVAL);
    let mut parts = parts(every(sizes, STILL_INTERVAL), norms);
    let chunk = keys.whole("attention.chunk_size").unwrap_or(CHUNK);
    parts.set_windows(Some(chunk), chunked, &mut keys.problems);
    parts.query_growth = Some(GROWTH);
    parts
}
