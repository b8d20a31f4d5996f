//! The nested `config.json` of speculators folders, which every method's folders have in common.

use serde_json::{Map, Value, json};

use crate::error::Problems;

/// Sizes that files of speculators leave out where they equal their class's own.
fn class_defaults(model_type: &str) -> Option<Value> {
    match model_type {
        "llama" => Some(json!({
            "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0
        })),
        "qwen3" => Some(json!({
            "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32,
            "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151_936,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0
        })),
        _ => None,
    }
}

/// The keys of a plain `config.json`: those of `transformer_layer_config`, if there is one, with its
/// class's own sizes where they are left out, under those of the top level.
pub(in crate::draft) fn flattened(value: &Value, problems: &mut Problems) -> Value {
    let Some(layer) = value["transformer_layer_config"].as_object() else { return value.clone() };
    // Without a type the speculators library takes the layer for Qwen3's.
    let model_type = layer.get("model_type").and_then(Value::as_str).unwrap_or("qwen3");
    let Some(defaults) = class_defaults(model_type) else {
        problems.push(format!(
            "`transformer_layer_config.model_type` = \"{model_type}\" is unknown (llama, qwen3)"
        ));
        return value.clone();
    };
    let mut flat: Map<String, Value> = defaults.as_object().cloned().unwrap_or_default();
    let set = |from: &Map<String, Value>, flat: &mut Map<String, Value>| {
        let present = from.iter().filter(|(_, value)| !value.is_null());
        flat.extend(present.map(|(key, value)| (key.clone(), value.clone())));
    };
    set(layer, &mut flat);
    // A base given only in the newer spelling must not lose to the class's own.
    if !layer.contains_key("rope_theta")
        && let Some(theta) = layer.get("rope_parameters").map(|rope| &rope["rope_theta"])
        && !theta.is_null()
    {
        flat.insert("rope_theta".into(), theta.clone());
    }
    if let Some(top) = value.as_object() {
        set(top, &mut flat);
    }
    flat.insert("tie_word_embeddings".into(), false.into());
    flat.insert(
        "num_hidden_layers".into(),
        layer.get("num_hidden_layers").cloned().unwrap_or(
            // Both classes count 32 where nothing is said.
            json!(32),
        ),
    );
    Value::Object(flat)
}
