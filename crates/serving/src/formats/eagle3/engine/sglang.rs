//! SGLang's loader of EAGLE-3 drafts.
//!
//! Names are tried as they are, then with `model.` before them. **What fits nothing is ignored without
//! a word, and a parameter that no tensor fits keeps its random initial value.** Layer ids are read
//! from `eagle_config` alone, inside a catch-all: any mistake there means the default.

use longdraft_models::draft::eagle3::LAYER_IDS;
use serde_json::Value;

use super::{Fate, SeenLayers, default_outputs, fused, integers, is_parameter};

/// The only architecture that is served.
pub(crate) const ARCHITECTURE: &str = "LlamaForCausalLMEagle3";

/// What becomes of a tensor.
pub(crate) fn fate(name: &str, config: &Value) -> Fate {
    if name.contains("d2t") {
        return Fate::Loaded("hot_token_id".into());
    }
    if name.contains("t2d") {
        return Fate::Ignored("skipped: the engine needs no `t2d`");
    }
    let plain = name.strip_prefix("model.").unwrap_or(name);
    let plain = fused(&plain.replace("layers.0.", "midlayer."));
    if is_parameter(&plain, config, "midlayer.") {
        let prefix = if plain.contains("lm_head") { "" } else { "model." };
        Fate::Loaded(format!("{prefix}{plain}"))
    } else {
        Fate::Ignored("ignored without a word")
    }
}

/// The nested list, counted as outputs of layers.
pub(crate) fn layers(config: &Value, target_layers: Option<usize>) -> SeenLayers {
    match integers(&config["eagle_config"][LAYER_IDS]) {
        Some(outputs) => SeenLayers { outputs: Some(outputs), from: "`eagle_config`" },
        None => SeenLayers {
            outputs: default_outputs(target_layers),
            from: "its default (1, n/2-1, n-4)",
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_loaded_or_ignored_never_rejected() {
        let table: [(&str, Option<&str>); 9] = [
            ("midlayer.hidden_norm.weight", Some("model.midlayer.hidden_norm.weight")),
            ("layers.0.hidden_norm.weight", Some("model.midlayer.hidden_norm.weight")),
            ("model.fc.weight", Some("model.fc.weight")),
            ("lm_head.weight", Some("lm_head.weight")),
            ("midlayer.self_attn.q_proj.weight", Some("model.midlayer.self_attn.qkv_proj.weight")),
            ("d2t", Some("hot_token_id")),
            ("t2d", None),
            ("midlayer.hiden_norm.weight", None),
            ("verifier_norm.weight", None),
        ];
        for (name, wanted) in table {
            let found = match fate(name, &json!({})) {
                Fate::Loaded(parameter) => Some(parameter),
                Fate::Ignored(_) => None,
                Fate::Rejected(reason) => panic!("{name}: {reason}"),
            };
            assert_eq!(found.as_deref(), wanted, "{name}");
        }
    }

    #[test]
    fn layers_come_from_the_nested_list_alone() {
        let seen = |config: Value| layers(&config, Some(30)).outputs.expect("layers");
        assert_eq!(seen(json!({"eagle_config": {LAYER_IDS: [3, 9, 20]}})), [3, 9, 20]);
        assert_eq!(seen(json!({LAYER_IDS: [4, 10, 21]})), [1, 14, 26], "the top level is not read");
        let broken = json!({"eagle_config": {LAYER_IDS: ["3", 9, 20]}});
        assert_eq!(seen(broken), [1, 14, 26], "a mistake means the default");
    }
}
