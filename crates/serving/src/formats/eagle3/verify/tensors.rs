//! Names, shapes, types and values of a folder's tensors.

use std::collections::{BTreeMap, BTreeSet};

use longdraft_models::draft::eagle3::Eagle3Config;
use longdraft_models::sha256;

use super::super::engine::{Fate, fate};
use crate::checks::weights_file::FoundTensor;
use crate::checks::{Checks, Effect, Problem, Rule, Severity, meant, nearest, values};
use crate::profile::{Engine, Profile};

const TWO_LAYERS: Rule = Rule::garbage(
    "two-layers",
    "one of them: they are the same layer",
    "whichever is read last wins",
);
const UNREADABLE: Rule = Rule::rejects("unreadable", "its bytes", "the file cannot be read");
const WEIGHT_TYPE: Rule =
    Rule::rejects("weight-type", "BF16, F16 or F32", "no weight of this type is loaded");
const DUPLICATE_VALUES: Rule =
    Rule::garbage("duplicate-values", "values of its own", "one of them was overwritten");

/// Weight types with their names in `config.json`.
const WEIGHT_TYPES: [(&str, &str); 3] =
    [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32")];

/// Shapes of the published network, its layer's names after `layer`; `d2t`, `t2d` and embeddings
/// apart.
pub(super) fn expected(layer: &str, sizes: &Eagle3Config) -> BTreeMap<String, Vec<usize>> {
    let (hidden, wide) = (sizes.hidden_size, 2 * sizes.hidden_size);
    let (query, kv, inner) = (sizes.query_size(), sizes.kv_size(), sizes.intermediate_size);
    let blocks = sizes.target_layers.len() * sizes.target_hidden_size;
    let mut all = BTreeMap::from([
        ("fc.weight".to_owned(), vec![hidden, blocks]),
        ("norm.weight".to_owned(), vec![hidden]),
        ("lm_head.weight".to_owned(), vec![sizes.draft_vocab_size, hidden]),
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

pub(super) fn check(checks: &mut Checks<'_>) {
    let Some(sizes) = checks.sizes::<Eagle3Config>() else {
        each_tensor(checks);
        return;
    };
    let mut wanted = expected(checks.profile.layer_prefix(), &sizes);
    if checks.config["norm_before_fc"] == true {
        let blocks = sizes.target_layers.len() * sizes.target_hidden_size;
        wanted.insert("input_norm.weight".into(), vec![blocks]);
    }
    let shares_head = sizes.draft_vocab_size == sizes.vocab_size
        && sizes.hidden_size == sizes.target_hidden_size
        && checks.profile != Profile::Sglang;
    for (name, shape) in &wanted {
        match checks.tensors.get(name).map(|tensor| tensor.shape.clone()) {
            None if name == "lm_head.weight" && shares_head => {}
            None => missing(checks, name, shape),
            Some(found) if found != *shape => misshapen(checks, name, &found, shape),
            Some(_) => {}
        }
    }
    if sizes.hidden_size != sizes.target_hidden_size
        && !checks.tensors.contains_key("embed_tokens.weight")
    {
        missing(checks, "embed_tokens.weight", &[sizes.vocab_size, sizes.hidden_size]);
    }
    if let Some(found) =
        checks.tensors.get("embed_tokens.weight").map(|tensor| tensor.shape.clone())
        && found != [sizes.vocab_size, sizes.hidden_size]
    {
        misshapen(checks, "embed_tokens.weight", &found, &[sizes.vocab_size, sizes.hidden_size]);
    }
    left_over(checks, &wanted);
    each_tensor(checks);
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
        if wanted.contains_key(name)
            || ["d2t", "t2d", "embed_tokens.weight"].contains(&name.as_str())
        {
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

fn each_tensor(checks: &mut Checks<'_>) {
    let tensors: Vec<FoundTensor> = checks.tensors.values().cloned().collect();
    let mut hashes: BTreeMap<String, String> = BTreeMap::new();
    let mut types = BTreeSet::new();
    for tensor in &tensors {
        let FoundTensor { name, dtype, shape, .. } = tensor;
        let bytes = match tensor.read() {
            Ok(bytes) => bytes,
            Err(error) => {
                checks.broken(&UNREADABLE, format!("tensor `{name}`"), error.to_string());
                continue;
            }
        };
        if name == "d2t" || name == "t2d" {
            continue;
        }
        if !WEIGHT_TYPES.iter().any(|(known, _)| known == dtype) {
            checks.broken(&WEIGHT_TYPE, format!("tensor `{name}`"), dtype.clone());
            continue;
        }
        if name != "embed_tokens.weight" {
            types.insert(dtype.clone());
        }
        values::check(checks, name, shape, dtype, &bytes);
        let hash = sha256::of_bytes(&bytes);
        if shape.len() > 1
            && let Some(other) = hashes.insert(format!("{shape:?} {hash}"), name.clone())
            && !name.contains("cross_attn")
        {
            checks.broken(
                &DUPLICATE_VALUES,
                format!("tensor `{name}`"),
                format!("the same values as `{other}`"),
            );
        }
        checks.compare(name, &hash);
    }
    let wanted = checks.config["torch_dtype"].as_str().or(checks.config["dtype"].as_str());
    let wanted = wanted.map(str::to_owned);
    let found: Vec<&str> = WEIGHT_TYPES
        .iter()
        .filter(|(stored, _)| types.contains(*stored))
        .map(|(_, name)| *name)
        .collect();
    if let Some(wanted) = wanted.filter(|wanted| found != [wanted.as_str()] && !found.is_empty()) {
        checks.error(
            "dtype",
            "config.json: `torch_dtype`",
            wanted,
            format!("the tensors' {}", found.join(" and ")),
            Effect::Garbage,
            "weights are converted on load, or memory is planned wrong",
        );
    }
}

/// Embeddings against the target's own.
pub(super) fn check_target(checks: &mut Checks<'_>) {
    let (Some(target), Some(tensor)) = (checks.target, checks.tensors.get("embed_tokens.weight"))
    else {
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
