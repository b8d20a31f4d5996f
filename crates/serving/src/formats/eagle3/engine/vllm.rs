//! vLLM's loader of EAGLE-3 drafts.
//!
//! Names containing `t2d` are dropped; `d2t` becomes a buffer; all but `lm_head` get the prefix
//! `model.`; `midlayer.` is `layers.0.`; q, k, v and gate, up are fused. Any name that is left is an
//! error.

use longdraft_models::draft::eagle3::LAYER_IDS;
use serde_json::Value;

use super::{Fate, SeenLayers, default_outputs, fused, integers, is_parameter};

/// Architectures that are served as EAGLE-3 drafts.
pub(crate) const ARCHITECTURES: [&str; 4] =
    ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"];

/// What becomes of a tensor.
pub(crate) fn fate(name: &str, config: &Value) -> Fate {
    if name.contains("t2d") {
        return Fate::Ignored("dropped: the engine needs no `t2d`");
    }
    if name.contains("d2t") {
        return Fate::Loaded("draft_id_to_target_id".into());
    }
    if name.contains("mask_hidden") {
        let parallel = config["eagle_config"]["parallel_drafting"].as_bool().unwrap_or(false);
        return if parallel {
            Fate::Loaded("mask_hidden".into())
        } else {
            Fate::Ignored("skipped with a warning: parallel drafting is off")
        };
    }
    let plain = fused(&name.replace("midlayer.", "layers.0."));
    if is_parameter(&plain, config, "layers.0.") {
        let prefix = if plain.contains("lm_head") { "" } else { "model." };
        Fate::Loaded(format!("{prefix}{plain}"))
    } else {
        Fate::Rejected(format!("no parameter `model.{plain}`: loading ends with a KeyError"))
    }
}

/// The top-level list, counted as states that enter layers; the nested one is read by newer versions
/// only, under the same count.
pub(crate) fn layers(config: &Value, target_layers: Option<usize>) -> SeenLayers {
    let outputs = |ids: Vec<i64>| Some(ids.into_iter().map(|id| id.saturating_sub(1)).collect());
    if let Some(ids) = integers(&config[LAYER_IDS]) {
        return SeenLayers { outputs: outputs(ids), from: "the top-level list" };
    }
    if let Some(ids) = integers(&config["eagle_config"][LAYER_IDS]) {
        return SeenLayers {
            outputs: outputs(ids),
            from: "`eagle_config` (newer versions), counted as entered layers",
        };
    }
    SeenLayers { outputs: default_outputs(target_layers), from: "its default (2, n/2, n-3)" }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_loaded_renamed_ignored_or_rejected() {
        let config = json!({});
        let table: [(&str, &str); 14] = [
            ("fc.weight", "model.fc.weight"),
            ("norm.weight", "model.norm.weight"),
            ("lm_head.weight", "lm_head.weight"),
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("midlayer.hidden_norm.weight", "model.layers.0.hidden_norm.weight"),
            ("layers.0.hidden_norm.weight", "model.layers.0.hidden_norm.weight"),
            ("layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
            ("midlayer.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
            ("d2t", "draft_id_to_target_id"),
            ("t2d", "ignored"),
            ("mask_hidden", "ignored"),
            ("verifier_norm.weight", "rejected"),
            ("model.fc.weight", "rejected"),
            ("fc_norm.0.weight", "rejected"),
        ];
        for (name, wanted) in table {
            let found = match fate(name, &config) {
                Fate::Loaded(parameter) => parameter,
                Fate::Ignored(_) => "ignored".into(),
                Fate::Rejected(_) => "rejected".into(),
            };
            assert_eq!(found, wanted, "{name}");
        }
        let normed = json!({"fc_norm": true});
        assert_eq!(
            fate("fc_norm.2.weight", &normed),
            Fate::Loaded("model.fc_norm.2.weight".into())
        );
        assert!(matches!(fate("fc_norm.3.weight", &normed), Fate::Rejected(_)));
    }

    #[test]
    fn layers_come_from_the_top_level_before_all_else() {
        let seen = |config: Value| layers(&config, Some(32)).outputs.expect("layers");
        let (top, nested) = (json!([2, 16, 29]), json!([1, 15, 28]));
        assert_eq!(seen(json!({LAYER_IDS: top, "eagle_config": {LAYER_IDS: nested}})), [1, 15, 28]);
        assert_eq!(seen(json!({"eagle_config": {LAYER_IDS: nested}})), [0, 14, 27], "one too low");
        assert_eq!(seen(json!({})), [1, 15, 28]);
        assert_eq!(layers(&json!({}), None).outputs, None);
        assert_eq!(seen(json!({LAYER_IDS: [i64::MIN, 16, 29]})), [i64::MIN, 15, 28]);
    }
}
