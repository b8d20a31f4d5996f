//! Mistral, Mixtral and Ministral 3: a window in every layer where there is one.

use longdraft_kernels::rope::RopeScaling;
use serde_json::Value;

use super::super::parts::QueryGrowth;
use super::{
    Architecture, Defaults, ExpertDefaults, GgufKeys, JsonKeys, Parts, RopeParameters, Sizes,
    limits,
};

/// The window of a Mistral whose file does not say.
const WINDOW: usize = 4096;
/// The context before stretching of a Ministral 3 whose file does not say, its rotary embedding, and how its queries
/// grow.
const ORIGINAL_CONTEXT: f64 = 16_384.0;
const STRETCHED: RopeParameters = RopeParameters {
    theta: 1e6,
    scaling: RopeScaling::Yarn {
        factor: 16.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_context: ORIGINAL_CONTEXT,
        // The ratio of two multipliers, both 1.
        attention_factor: 1.0,
        truncate: true,
    },
    divisors: None,
};
const GROWTH: QueryGrowth =
    QueryGrowth { beta: 0.1, original_context: ORIGINAL_CONTEXT, offset: 0, only_still: false };

pub(super) fn defaults(architecture: Architecture) -> Defaults {
    let common = Defaults {
        num_key_value_heads: Some(8),
        max_position_embeddings: 131_072,
        ..Defaults::default()
    };
    match architecture {
        Architecture::Mixtral => Defaults {
            rope_theta: 1e6,
            norm_eps: ("rms_norm_eps", 1e-5),
            experts: ExpertDefaults {
                num_experts: Some(8),
                num_experts_per_tok: Some(2),
                ..ExpertDefaults::default()
            },
            ..common
        },
        Architecture::Ministral3 => Defaults {
            head_dim: Some(128),
            max_position_embeddings: 262_144,
            norm_eps: ("rms_norm_eps", 1e-5),
            ..common
        },
        _ => common,
    }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> (RopeParameters, Parts) {
    let (rope, query_growth) = match (sizes.architecture, keys.rotary_keys()) {
        (Architecture::Ministral3, None) => (STRETCHED, Some(GROWTH)),
        (Architecture::Ministral3, Some(stated)) => (keys.rope(sizes), growth(keys, stated)),
        _ => (keys.rope(sizes), None),
    };
    let mut parts = Parts { query_growth, ..Parts::default() };
    let window = keys.window((sizes.architecture == Architecture::Mistral).then_some(WINDOW));
    let pattern = sizes.each_layer(|_| window.is_some());
    let sliding = keys.layer_types(sizes.num_hidden_layers).unwrap_or(pattern);
    parts.set_windows(window, sliding, &mut keys.problems);
    (rope, parts)
}

/// How queries grow, as it stands among the keys of the rotary embedding.
fn growth(keys: &mut JsonKeys<'_>, rope: &Value) -> Option<QueryGrowth> {
    let (beta, original) = ("llama_4_scaling_beta", "original_max_position_embeddings");
    let mut inner = JsonKeys::of(rope);
    let growth = (|| {
        let value = inner.finite(beta)?;
        let beta = limits::within(&mut inner.problems, beta, value, &limits::GROWTHS)?;
        // What stands at top level wins.
        let outer = keys.tokens_in(original);
        let original_context = outer.or_else(|| inner.tokens_in(original))?;
        Some(QueryGrowth { beta, original_context, offset: 0, only_still: false })
    })();
    if growth.is_none() && rope.get(beta).is_some_and(|value| !value.is_null()) {
        inner.problems.push(format!("`{beta}` needs a number, and a positive `{original}`"));
    }
    keys.problems.0.append(&mut inner.into_problems().0);
    growth.filter(|growth| growth.beta != 0.0)
}

/// `mistral3` files: no window; the growth of queries has a key of its own.
pub(super) fn of_gguf(keys: &mut GgufKeys<'_>, _: Sizes) -> Parts {
    let key = "attention.temperature_scale";
    let beta = keys.finite(key).filter(|beta| *beta != 0.0);
    let beta = beta.and_then(|b| limits::within(&mut keys.problems, key, b, &limits::GROWTHS));
    let original_context = keys.tokens_in("rope.scaling.original_context_length");
    if beta.is_some() && original_context.is_none() {
        let key = "rope.scaling.original_context_length";
        keys.problems.push(format!("`attention.temperature_scale` needs `{key}`"));
    }
    let query_growth = beta.zip(original_context).map(|(beta, original_context)| QueryGrowth {
        beta,
        original_context,
        offset: 0,
        only_still: false,
    });
    Parts { query_growth, ..Parts::default() }
}
