//! What each engine does with a draft's files, as rules that need no engine.
//!
//! Every loader is a table: a tensor name is loaded, renamed, ignored or an error; layer ids are read
//! from one key under one convention. `verify` runs a folder through all of them.

pub(crate) mod llamacpp;
pub(crate) mod sglang;
pub(crate) mod speculators;
pub(crate) mod vllm;

use serde_json::Value;

use crate::profile::Engine;

/// What becomes of a tensor of this name in a file.
pub(crate) fn fate(engine: Engine, name: &str, config: &Value) -> Fate {
    match engine {
        Engine::Vllm => vllm::fate(name, config),
        Engine::Sglang => sglang::fate(name, config),
        Engine::Llamacpp => llamacpp::fate(name),
        Engine::Speculators => speculators::fate(name, config),
        Engine::Longspec => Fate::Loaded(name.to_owned()),
    }
}

/// Outputs of layers that the engine hands to the draft, and from which key.
pub(crate) fn layers(engine: Engine, config: &Value, target_layers: Option<usize>) -> SeenLayers {
    match engine {
        Engine::Vllm | Engine::Speculators | Engine::Longspec => {
            vllm::layers(config, target_layers)
        }
        Engine::Sglang => sglang::layers(config, target_layers),
        Engine::Llamacpp => llamacpp::folder_layers(target_layers),
    }
}

/// What a loader does with a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It becomes the parameter of this name.
    Loaded(String),
    /// It is left out, with or without a message.
    Ignored(&'static str),
    /// Loading ends here.
    Rejected(String),
}

/// The layers that an engine hands out, as outputs counted from 0; −1 are the embeddings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SeenLayers {
    /// `None` if nothing says them and the target's number of layers is not known.
    pub outputs: Option<Vec<i64>>,
    /// Which key, or the default.
    pub from: &'static str,
}

/// A list of whole numbers.
pub(crate) fn integers(value: &Value) -> Option<Vec<i64>> {
    value.as_array()?.iter().map(Value::as_i64).collect()
}

/// The published layers of a target with `n`, as engines compute them: whatever `n` is.
pub(crate) fn default_outputs(target_layers: Option<usize>) -> Option<Vec<i64>> {
    target_layers.map(|n| vec![1, (n / 2) as i64 - 1, (n as i64).saturating_sub(4)])
}

/// A parameter of the published network under the names that loaders give it, after fusing q, k and v
/// and gate and up.
pub(crate) fn is_parameter(name: &str, config: &Value, layer: &str) -> bool {
    const OF_LAYER: [&str; 7] = [
        "self_attn.qkv_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.gate_up_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
        "hidden_norm.weight",
        "post_attention_layernorm.weight",
    ];
    let flag = |key: &str| {
        let nested = config["eagle_config"][key].as_bool();
        config[key].as_bool().or(nested).unwrap_or(false)
    };
    if let Some(rest) = name.strip_prefix(layer) {
        return OF_LAYER.contains(&rest);
    }
    match name {
        "fc.weight" | "norm.weight" | "embed_tokens.weight" | "lm_head.weight" => true,
        "input_norm.weight" => flag("norm_before_fc"),
        _ => {
            let index = name.strip_prefix("fc_norm.").and_then(|rest| rest.strip_suffix(".weight"));
            flag("fc_norm")
                && index.is_some_and(|index| index.parse::<usize>().is_ok_and(|i| i < 3))
        }
    }
}

/// q, k and v under their fused name, gate and up likewise.
pub(crate) fn fused(name: &str) -> String {
    let mut fused = name.to_owned();
    for (part, whole) in [
        (".q_proj.", ".qkv_proj."),
        (".k_proj.", ".qkv_proj."),
        (".v_proj.", ".qkv_proj."),
        (".gate_proj.", ".gate_up_proj."),
        (".up_proj.", ".gate_up_proj."),
    ] {
        fused = fused.replace(part, whole);
    }
    fused
}
