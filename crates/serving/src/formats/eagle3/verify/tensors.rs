//! Names, shapes, types and values of a folder's tensors.

use std::collections::BTreeMap;

use longdraft_models::draft::eagle3::Eagle3Config;

use super::super::engine::{Fate, fate};
use crate::checks::{Checks, Effect, Problem, Rule, Severity, meant, nearest, weights};
use crate::profile::{Engine, Profile};

/// The draft's head, and its embeddings.
pub(super) const HEAD: &str = "lm_head.weight";
pub(super) const EMBEDDINGS: &str = "embed_tokens.weight";

const TWO_LAYERS: Rule = Rule::garbage(
    "two-layers",
    "one of them: they are the same layer",
    "whichever is read last wins",
);

/// Shapes of the published network, its layer's names after `layer`; `d2t` and `t2d` apart.
pub(super) fn expected(layer: &str, sizes: &Eagle3Config) -> BTreeMap<String, Vec<usize>> {
    let (hidden, wide) = (sizes.hidden_size, 2 * sizes.hidden_size);
    let (query, kv, inner) = (sizes.query_size(), sizes.kv_size(), sizes.intermediate_size);
    let blocks = sizes.target_layers.len() * sizes.target_hidden_size;
    let mut all = BTreeMap::from([
        ("fc.weight".to_owned(), vec![hidden, blocks]),
        ("norm.weight".to_owned(), vec![hidden]),
        (HEAD.to_owned(), vec![sizes.draft_vocab_size, hidden]),
        (EMBEDDINGS.to_owned(), vec![sizes.vocab_size, hidden]),
    ]);
    for (name, shape) in [
        ("input_layernorm", vec![hidden]),
        ("hidden_norm", vec![hidden]),
        ("post_attention_layernorm", vec![hidden]),
        ("self_attn.q_proj", vec![query, wide]),
        ("self_attn.k_proj", vec![kv, wide]),
        ("self_attn.v_proj", vec![kv, wide]),
        ("self_attn.o_proj", vec![hidden, query]),
        ("mlp.gate_proj", vec![inner, hidden]),
        ("mlp.up_proj", vec![inner, hidden]),
        ("mlp.down_proj", vec![hidden, inner]),
    ] {
        all.insert(format!("{layer}{name}.weight"), shape);
    }
    if sizes.fc_norm {
        for i in 0..sizes.target_layers.len() {
            all.insert(format!("fc_norm.{i}.weight"), vec![sizes.target_hidden_size]);
        }
    }
    all
}

/// Whether the target lends a tensor that a draft of its width leaves out: embeddings, and the head of a draft
/// that proposes every token.
pub(super) fn is_lent(name: &str, sizes: &Eagle3Config) -> bool {
    let is_whole = sizes.draft_vocab_size == sizes.vocab_size;
    sizes.hidden_size == sizes.target_hidden_size
        && (name == EMBEDDINGS || (name == HEAD && is_whole))
}

pub(super) fn check(checks: &mut Checks<'_>) {
    let Some(sizes) = checks.sizes::<Eagle3Config>() else {
        weights::check(checks);
        return;
    };
    let mut wanted = expected(checks.profile.layer_prefix(), &sizes);
    if checks.config["norm_before_fc"] == true {
        let blocks = sizes.target_layers.len() * sizes.target_hidden_size;
        wanted.insert("input_norm.weight".into(), vec![blocks]);
    }
    let needs_head = checks.profile == Profile::Sglang;
    for (name, shape) in &wanted {
        match checks.tensors.get(name).map(|tensor| tensor.shape.clone()) {
            None if is_lent(name, &sizes) && !(needs_head && name == HEAD) => {}
            None => missing(checks, name, shape),
            Some(found) if found != *shape => misshapen(checks, name, &found, shape),
            Some(_) => {}
        }
    }
    left_over(checks, &wanted);
    weights::check(checks);
}

fn missing(checks: &mut Checks<'_>, name: &str, shape: &[usize]) {
    let near = nearest(name, checks.tensors.keys().map(String::as_str)).filter(|near| {
        // Not another tensor that is expected itself.
        !near.contains("_proj") || near.rsplit('.').nth(1) == name.rsplit('.').nth(1)
    });
    let hint = meant(near);
    let mut problem = Problem::new(
        Severity::Error,
        "missing-tensor",
        format!("tensor `{name}`"),
        format!("missing{hint}"),
        format!("shape {shape:?}"),
    );
    for engine in checks.engines() {
        let (effect, words) = match engine {
            Engine::Vllm => (Effect::Garbage, "the parameter keeps its initial value"),
            Engine::Sglang => {
                (Effect::Garbage, "the parameter keeps its random initial value, without a word")
            }
            Engine::Speculators => (Effect::Garbage, "drawn at random, with a warning"),
            Engine::Llamacpp | Engine::Longspec => (Effect::Rejects, "loading ends"),
        };
        problem = problem.effect(*engine, effect, words);
    }
    checks.push(problem);
}

fn misshapen(checks: &mut Checks<'_>, name: &str, found: &[usize], wanted: &[usize]) {
    let turned =
        found.len() == 2 && wanted.len() == 2 && found[0] == wanted[1] && found[1] == wanted[0];
    let what = if turned { " (transposed: rows are outputs)" } else { "" };
    let problem = Problem::new(
        Severity::Error,
        "shape",
        format!("tensor `{name}`"),
        format!("shape {found:?}{what}"),
        format!("{wanted:?}"),
    );
    checks.push(problem.effect_on(
        checks.profile,
        Effect::Rejects,
        "the parameter has another size",
    ));
}

/// Names that nobody expects, as each engine takes them; the layer under two names.
fn left_over(checks: &mut Checks<'_>, wanted: &BTreeMap<String, Vec<usize>>) {
    let names: Vec<String> = checks.tensors.keys().cloned().collect();
    let of = |prefix: &str| names.iter().any(|name| name.starts_with(prefix));
    if of("midlayer.") && of("layers.0.") {
        checks.broken(&TWO_LAYERS, "tensors", "both `midlayer.*` and `layers.0.*`");
    }
    for name in &names {
        if wanted.contains_key(name) || ["d2t", "t2d"].contains(&name.as_str()) {
            continue;
        }
        let near = nearest(name, wanted.keys().map(String::as_str));
        let hint = meant(near);
        let mut problem = Problem::new(
            Severity::Error,
            "unexpected-tensor",
            format!("tensor `{name}`"),
            format!("not of this network{hint}"),
            "the published names alone",
        );
        let mut harmless = true;
        for engine in checks.engines() {
            let (effect, words) = match fate(*engine, name, &checks.config) {
                Fate::Loaded(parameter) => (Effect::Works, format!("loads it as `{parameter}`")),
                Fate::Ignored(words) => (Effect::Ignores, words.to_owned()),
                Fate::Rejected(words) => (Effect::Rejects, words),
            };
            harmless &= effect == Effect::Works && near.is_none();
            problem = problem.effect(*engine, effect, words);
        }
        if harmless {
            // Another spelling that every engine of the profile reads.
            problem.severity = Severity::Warning;
        }
        checks.push(problem.remedy("rename or remove it, or export again"));
    }
}

/// Embeddings against the target's own.
pub(super) fn check_target(checks: &mut Checks<'_>) {
    let (Some(target), Some(tensor)) = (checks.target, checks.tensors.get(EMBEDDINGS)) else {
        return;
    };
    let Some(stored) = &target.stored_embedding else { return };
    let Ok(wanted) = longdraft_models::weights::safetensors::tensor_bytes(stored) else { return };
    let same_width =
        checks.sizes::<Eagle3Config>().is_some_and(|s| s.hidden_size == s.target_hidden_size);
    let equal = tensor.read().is_ok_and(|bytes| bytes == wanted);
    let place = "tensor `embed_tokens.weight`";
    let problem = if equal {
        let problem = Problem::new(
            Severity::Note,
            "shared-embedding",
            place,
            "equal to the target's bit for bit",
            "",
        );
        problem.effect(Engine::Vllm, Effect::Works, "shares the target's")
    } else if same_width {
        let problem = Problem::new(
            Severity::Warning,
            "embedding",
            place,
            "differs from the target's",
            "the target's bits",
        );
        problem
            .effect(Engine::Vllm, Effect::Works, "keeps a copy of its own")
            .remedy("export with --target naming the served model, or --no-embed")
    } else {
        return;
    };
    checks.push(problem);
}
