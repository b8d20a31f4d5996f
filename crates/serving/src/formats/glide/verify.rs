//! Folders of the published GLIDE layer.

use longdraft_models::draft::files::PTH_FILE;
use longdraft_models::sha256;
use longdraft_models::weights::WeightSource;
use longdraft_models::weights::pth::PthSource;
use serde_json::Value;

use crate::checks::{Checks, Effect, Rule, meant, nearest, values};

const ARCHITECTURE: Rule = Rule::rejects(
    "architecture",
    "LlamaGlideDecoderLayer or Qwen2GlideDecoderLayer",
    "no model class of this name",
);
const MISSING_SIZE: Rule =
    Rule::rejects("missing-key", "the target's", "the layer cannot be built");
const NO_CONTEXT: Rule = Rule::rejects("missing-key", "the longest context", "the scripts read it");
const UNEXPECTED_TENSOR: Rule =
    Rule::rejects("unexpected-tensor", "the published names alone", "the class's loader is strict");
const PTH: Rule = Rule::rejects(
    "pth",
    "a state dict of plain tensors",
    "`torch.load(weights_only=True)` refuses it",
);
const OTHER_PTH: Rule =
    Rule::garbage("pth", "the same values", "which one is used depends on the script");

/// The published classes.
const CLASSES: [&str; 2] = ["LlamaGlideDecoderLayer", "Qwen2GlideDecoderLayer"];

/// Whether the keys name the layer's class, one that is published or another.
pub(super) fn is_layer(config: &Value) -> bool {
    is_named(config, |name| name.ends_with("GlideDecoderLayer"))
}

fn is_named(config: &Value, is_one: impl Fn(&str) -> bool) -> bool {
    let named = |name: &Value| name.as_str().is_some_and(&is_one);
    config["architectures"].as_array().is_some_and(|names| names.iter().any(named))
}

pub(super) fn check(checks: &mut Checks<'_>) {
    if !checks.config.is_object() {
        return;
    }
    if !is_named(&checks.config, |name| CLASSES.contains(&name)) {
        let found = checks.config["architectures"].to_string();
        checks.broken(&ARCHITECTURE, "config.json: `architectures`", found);
    }
    let size = |key: &str| checks.config[key].as_u64().map(|size| size as usize);
    let keys = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"];
    let missing: Vec<&str> =
        keys.into_iter().filter(|key| size(key).is_none_or(|s| s == 0)).collect();
    let sizes = keys.map(|key| size(key).unwrap_or(1).max(1));
    for key in missing.clone() {
        checks.broken(&MISSING_SIZE, format!("config.json: `{key}`"), "missing or no size");
    }
    if checks.config.get("model_max_length").is_none() {
        checks.broken(&NO_CONTEXT, "config.json: `model_max_length`", "missing");
    }
    let [hidden, inner, heads, kv_heads] = sizes;
    let head_dim = checks.config["head_dim"].as_u64().map(|d| d as usize);
    if missing.is_empty() && (hidden % heads != 0 || head_dim.is_some_and(|d| d != hidden / heads))
    {
        checks.error(
            "head-dim",
            "config.json: `head_dim`",
            format!("{head_dim:?}"),
            format!("hidden_size / num_attention_heads = {}", hidden / heads),
            Effect::Rejects,
            "the class computes it so",
        );
    }
    if missing.is_empty() {
        tensors(checks, hidden, inner, heads, kv_heads);
    }
    pth(checks);
}

fn tensors(checks: &mut Checks<'_>, hidden: usize, inner: usize, heads: usize, kv_heads: usize) {
    let head_dim = hidden / heads;
    let (query, kv) = (heads * head_dim, kv_heads.saturating_mul(head_dim));
    let mut wanted: Vec<(String, Vec<usize>)> = Vec::new();
    for norm in
        ["input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm"]
    {
        wanted.push((format!("{norm}.weight"), vec![hidden]));
    }
    for branch in ["self_attn", "cross_attn"] {
        for (module, outputs) in [("q_proj", query), ("k_proj", kv), ("v_proj", kv)] {
            wanted.push((format!("{branch}.{module}.weight"), vec![outputs, hidden]));
            wanted.push((format!("{branch}.{module}.bias"), vec![outputs]));
        }
        wanted.push((format!("{branch}.o_proj.weight"), vec![hidden, query]));
    }
    let bias = checks.config["mlp_bias"] == true;
    for (module, outputs, inputs) in
        [("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)]
    {
        wanted.push((format!("mlp.{module}.weight"), vec![outputs, inputs]));
        if bias {
            wanted.push((format!("mlp.{module}.bias"), vec![outputs]));
        }
    }
    for (name, shape) in &wanted {
        match checks.tensors.get(name).map(|tensor| tensor.shape.clone()) {
            None => checks.error(
                "missing-tensor",
                format!("tensor `{name}`"),
                "missing",
                format!("shape {shape:?}"),
                Effect::Rejects,
                "the class has it, and its loader is strict",
            ),
            Some(found) if found != *shape => checks.error(
                "shape",
                format!("tensor `{name}`"),
                format!("shape {found:?}"),
                format!("{shape:?}"),
                Effect::Rejects,
                "the parameter has another size",
            ),
            Some(_) => {}
        }
    }
    let found: Vec<_> = checks.tensors.values().cloned().collect();
    for tensor in found {
        if !wanted.iter().any(|(name, _)| *name == tensor.name) {
            let hint = meant(nearest(&tensor.name, wanted.iter().map(|(name, _)| name.as_str())));
            checks.broken(
                &UNEXPECTED_TENSOR,
                format!("tensor `{}`", tensor.name),
                format!("not of this layer{hint}"),
            );
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
        Err(error) => {
            checks.broken(&PTH, PTH_FILE, error.to_string());
            return;
        }
    };
    let found: Vec<_> = checks.tensors.values().cloned().collect();
    for tensor in found {
        let dtype = tensor.weight_type().unwrap_or(candle_core::DType::F32);
        let stored = source.load(&tensor.name, dtype).ok();
        let stored =
            stored.and_then(|t| longdraft_models::weights::safetensors::tensor_bytes(&t).ok());
        let own = tensor.read().ok();
        if stored.as_ref().map(|bytes| sha256::of_bytes(bytes))
            != own.as_ref().map(|bytes| sha256::of_bytes(bytes))
        {
            checks.broken(
                &OTHER_PTH,
                PTH_FILE,
                format!(
                    "tensor `{}` is missing or another one than in model.safetensors",
                    tensor.name
                ),
            );
        }
    }
}
