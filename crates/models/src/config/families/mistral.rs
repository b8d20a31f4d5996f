//! Mistral, Mixtral and Ministral 3: a window in every layer where there is one.

use super::super::parts::QueryGrowth;
use super::{Architecture, Defaults, GgufKeys, JsonKeys, Parts, Sizes, limits};

/// The window of a Mistral whose file does not say.
const WINDOW: usize = 4096;

pub(super) fn defaults(architecture: Architecture) -> Defaults {
    let head_dim = (architecture == Architecture::Ministral3).then_some(128);
    let num_key_value_heads = Some(8);
    Defaults {
        num_key_value_heads,
        head_dim,
        max_position_embeddings: 131_072,
        ..Defaults::default()
    }
}

pub(super) fn of_json(keys: &mut JsonKeys<'_>, sizes: Sizes) -> Parts {
    let query_growth =
        if sizes.architecture == Architecture::Ministral3 { growth(keys) } else { None };
    let mut parts = Parts { query_growth, ..Parts::default() };
    let window = keys.window((sizes.architecture == Architecture::Mistral).then_some(WINDOW));
    let pattern = sizes.each_layer(|_| window.is_some());
    let sliding = keys.layer_types(sizes.num_hidden_layers).unwrap_or(pattern);
    parts.set_windows(window, sliding, &mut keys.problems);
    parts
}

/// How queries grow, as it stands among the keys of the rotary embedding.
fn growth(keys: &mut JsonKeys<'_>) -> Option<QueryGrowth> {
    let rope = keys.object("rope_parameters").or_else(|| keys.object("rope_scaling"))?;
    let (beta, original) = ("llama_4_scaling_beta", "original_max_position_embeddings");
    let mut inner = JsonKeys::of(rope);
    let growth = (|| {
        let value = inner.finite(beta)?;
        let beta = limits::within(&mut inner.problems, beta, value, &limits::GROWTHS)?;
        let original_context = inner.tokens_in(original)?;
        Some(QueryGrowth { beta, original_context, offset: 0, only_still: false })
    })();
    if growth.is_none() && rope.get(beta).is_some_and(|value| !value.is_null()) {
        inner.problems.push(format!("`{beta}` needs a number, and a positive `{original}`"));
    }
    keys.problems.0.append(&mut inner.problems.0);
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
