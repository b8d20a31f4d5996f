//! Names, shapes, types and values of a folder's tensors.

use longdraft_models::draft::eagle3::{Eagle3Config, tensor_specs};
use longdraft_models::weights::TensorSpec;
use longdraft_models::weights::safetensors::tensor_bytes;

use super::super::engine::{Fate, fate};
use super::super::tensors::published_config;
use crate::checks::rules::{Rule, tensor_place};
use crate::checks::{Checks, Effect, Problem, Severity, meant, nearest, shapes, weights};
use crate::profile::{Engine, Profile};

/// The draft's head, and its embeddings.
pub(super) const HEAD: &str = "lm_head.weight";
pub(super) const EMBEDDINGS: &str = "embed_tokens.weight";

const TWO_LAYERS: Rule = Rule::garbage(
    "two-layers",
    "one of them: they are the same layer",
    "whichever is read last wins",
);
const MISSING: Rule = Rule::rejects("missing-tensor", "", "loading ends");
const UNEXPECTED: Rule = Rule::rejects("unexpected-tensor", "the published names alone", "")
    .remedy("rename or remove it, or export again");
const OTHER_EMBEDDINGS: Rule =
    Rule::garbage("embedding", "the target's bits", "keeps a copy of its own")
        .effect(Effect::Works)
        .doubtful()
        .remedy("export with --target naming the served model, or --no-embed");

/// Tensors of the published network, its layer's names after `layer`; `d2t` and `t2d` apart.
pub(super) fn expected(layer: &str, sizes: &Eagle3Config) -> Vec<TensorSpec> {
    let table = TensorSpec::new(EMBEDDINGS, &[sizes.vocab_size, sizes.hidden_size]);
    let all = tensor_specs(&published_config(sizes)).into_iter().chain([table]);
    let renamed =
        |spec: TensorSpec| TensorSpec::new(spec.name.replacen("midlayer.", layer, 1), &spec.shape);
    all.map(renamed).collect()
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
        wanted.push(TensorSpec::new("input_norm.weight", &[blocks]));
    }
    let needs_head = checks.profile == Profile::Sglang;
    for TensorSpec { name, shape, .. } in &wanted {
        match checks.tensors.get(name).map(|tensor| tensor.shape.clone()) {
            Some(found) => shapes::compare(checks, tensor_place(name), &found, shape),
            None if is_lent(name, &sizes) && !(needs_head && name == HEAD) => {}
            None => missing(checks, name, shape),
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
    let (found, expected) = (format!("missing{}", meant(near)), format!("shape {shape:?}"));
    let mut problem = MISSING.finding(tensor_place(name), found, expected);
    for engine in checks.engines() {
        let (effect, words) = match engine {
            Engine::Vllm => (Effect::Garbage, "the parameter keeps its initial value"),
            Engine::Sglang => {
                (Effect::Garbage, "the parameter keeps its random initial value, without a word")
            }
            Engine::Speculators => (Effect::Garbage, "drawn at random, with a warning"),
            Engine::Llamacpp | Engine::Longspec => (MISSING.effect, MISSING.words),
        };
        problem = problem.effect(*engine, effect, words);
    }
    checks.push(problem);
}

/// Names that nobody expects, as each engine takes them; the layer under two names.
fn left_over(checks: &mut Checks<'_>, wanted: &[TensorSpec]) {
    let names: Vec<String> = checks.tensors.keys().cloned().collect();
    let of = |prefix: &str| names.iter().any(|name| name.starts_with(prefix));
    if of("midlayer.") && of("layers.0.") {
        checks.broken(&TWO_LAYERS, "tensors", "both `midlayer.*` and `layers.0.*`");
    }
    for name in &names {
        let known = || wanted.iter().map(|spec| spec.name.as_str());
        if known().chain(["d2t", "t2d"]).any(|known| known == name) {
            continue;
        }
        let near = nearest(name, known());
        let found = format!("not of this network{}", meant(near));
        let mut problem = UNEXPECTED.finding(tensor_place(name), found, UNEXPECTED.expected);
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
        checks.push(problem);
    }
}

/// Embeddings against the target's own.
pub(super) fn check_target(checks: &mut Checks<'_>) {
    let (Some(target), Some(tensor)) = (checks.target, checks.tensors.get(EMBEDDINGS)) else {
        return;
    };
    let Some(stored) = &target.stored_embedding else { return };
    let Ok(wanted) = tensor_bytes(stored) else { return };
    let same_width =
        checks.sizes::<Eagle3Config>().is_some_and(|s| s.hidden_size == s.target_hidden_size);
    let equal = tensor.read().is_ok_and(|bytes| bytes == wanted);
    let place = tensor_place(EMBEDDINGS);
    if equal {
        let found = "equal to the target's bit for bit";
        let problem = Problem::new(Severity::Note, "shared-embedding", place, found, "");
        checks.push(problem.effect(Engine::Vllm, Effect::Works, "shares the target's"));
    } else if same_width {
        let (rule, found) = (&OTHER_EMBEDDINGS, "differs from the target's");
        checks.differs_in(Engine::Vllm, rule, place, found, rule.expected);
    }
}
