//! Folders of the published GLIDE layer.

use longdraft_models::draft::files::PTH_FILE;
use longdraft_models::draft::glide::{Compat, FinalNorm, GlideConfig, tensor_specs};
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::pth::PthSource;
use longdraft_models::weights::safetensors::tensor_bytes;
use serde_json::Value;

use crate::checks::rules::{KeyRule, Rule, is_there, key, key_place, tensor_place};
use crate::checks::{Checks, shapes, values};

const CLASSES: [&str; 2] = ["LlamaGlideDecoderLayer", "Qwen2GlideDecoderLayer"];

const MISSING_SIZE: Rule =
    Rule::rejects("missing-key", "the target's", "the layer cannot be built");
const OTHER_CLASS: Rule = Rule::rejects(
    "architecture",
    "LlamaGlideDecoderLayer or Qwen2GlideDecoderLayer",
    "no model class of this name",
);
const NO_LENGTH: Rule = Rule::rejects("missing-key", "the longest context", "the scripts read it");
const KEYS: [KeyRule; 6] = [
    key("architectures", |names| is_named(names, |name| CLASSES.contains(&name)), OTHER_CLASS),
    key("hidden_size", is_size, MISSING_SIZE),
    key("intermediate_size", is_size, MISSING_SIZE),
    key("num_attention_heads", is_size, MISSING_SIZE),
    key("num_key_value_heads", is_size, MISSING_SIZE),
    key("model_max_length", is_there, NO_LENGTH),
];
const HEAD_DIM: Rule = Rule::rejects("head-dim", "", "the class computes it so");
const MISSING_TENSOR: Rule =
    Rule::rejects("missing-tensor", "", "the class has it, and its loader is strict");
const UNEXPECTED_TENSOR: Rule =
    Rule::rejects("unexpected-tensor", "the published names alone", "the class's loader is strict");
const PTH: Rule = Rule::rejects(
    "pth",
    "a state dict of plain tensors",
    "`torch.load(weights_only=True)` refuses it",
);
const OTHER_PTH: Rule =
    Rule::garbage("pth", "the same values", "which one is used depends on the script");

/// Whether the keys name the layer's class, one that is published or another.
pub(super) fn is_layer(config: &Value) -> bool {
    is_named(config.get("architectures"), |name| name.ends_with("GlideDecoderLayer"))
}

fn is_named(names: Option<&Value>, is_one: impl Fn(&str) -> bool) -> bool {
    let mut names = names.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    names.any(is_one)
}

/// A size, not so large that products of sizes could not be counted.
fn is_size(value: Option<&Value>) -> bool {
    value.and_then(Value::as_u64).is_some_and(|size| (1..=u64::from(u32::MAX)).contains(&size))
}

pub(super) fn check(checks: &mut Checks<'_>) {
    if !checks.config.is_object() {
        return;
    }
    checks.keys(KEYS);
    if let Some(layer) = described(checks) {
        let found = checks.config["head_dim"].as_u64().map(|size| size as usize);
        let is_whole = layer.hidden_size == layer.query_size();
        if !is_whole || found.is_some_and(|found| found != layer.head_dim) {
            let expected = format!("hidden_size / num_attention_heads = {}", layer.head_dim);
            checks.differs(&HEAD_DIM, key_place("head_dim"), format!("{found:?}"), expected);
        }
        tensors(checks, &layer);
    }
    pth(checks);
}

/// The layer that the keys describe, with every tensor that is published; `None` without its sizes.
fn described(checks: &Checks<'_>) -> Option<GlideConfig> {
    let size = |key: &str| {
        let value = checks.config.get(key).filter(|value| is_size(Some(value)))?;
        value.as_u64().map(|size| size as usize)
    };
    let (hidden_size, num_attention_heads) = (size("hidden_size")?, size("num_attention_heads")?);
    Some(GlideConfig {
        hidden_size,
        intermediate_size: size("intermediate_size")?,
        num_attention_heads,
        num_key_value_heads: size("num_key_value_heads")?,
        head_dim: hidden_size / num_attention_heads,
        vocab_size: 1,
        rms_norm_eps: 1e-6,
        mlp_bias: checks.config["mlp_bias"] == true,
        self_window: GlideConfig::SELF_WINDOW,
        gamma: 1,
        final_norm: FinalNorm::None,
        compat: Some(Compat::Longspec),
        initializer_range: 0.0,
        draft_vocab_size: None,
    })
}

fn tensors(checks: &mut Checks<'_>, layer: &GlideConfig) {
    let (wanted, found) = (tensor_specs(layer), checks.shapes());
    shapes::check(checks, &wanted, &found, &MISSING_TENSOR);
    for tensor in checks.tensors.clone().into_values() {
        if let Some(words) = shapes::stranger(&tensor.name, &wanted) {
            checks.broken(&UNEXPECTED_TENSOR, tensor_place(&tensor.name), words);
        }
        if let Ok(bytes) = tensor.read() {
            values::check(checks, &tensor.name, &tensor.shape, &tensor.dtype, &bytes);
        }
    }
}

/// The `.pth` beside it holds the same tensors, and nothing that runs.
fn pth(checks: &mut Checks<'_>) {
    let path = checks.folder.join(PTH_FILE);
    if !path.is_file() {
        return;
    }
    let source = match PthSource::open(&path) {
        Ok(source) => source,
        Err(error) => return checks.broken(&PTH, PTH_FILE, error.to_string()),
    };
    for tensor in checks.tensors.clone().into_values() {
        let dtype = tensor.weight_type().unwrap_or(candle_core::DType::F32);
        let stored = source.load(&tensor.name, dtype).ok().and_then(|t| tensor_bytes(&t).ok());
        if stored != tensor.read().ok() {
            let what = "is missing or another one than in model.safetensors";
            checks.broken(&OTHER_PTH, PTH_FILE, format!("tensor `{}` {what}", tensor.name));
        }
    }
}
