//! Keys of a model's section by the names that the reference of its recipe gives them, which are read, too.

use serde_json::{Map, Value};

/// Names of the reference, each with ours.
const KEYS: [(&str, &str); 7] = [
    ("num_layers", "num_hidden_layers"),
    ("model_dim", "hidden_size"),
    ("num_heads", "num_attention_heads"),
    ("num_kv_heads", "num_key_value_heads"),
    ("mlp_dim", "intermediate_size"),
    ("tie_embeddings", "tie_word_embeddings"),
    ("logit_softcap", "final_logit_softcapping"),
];
const ROPE_KEYS: [(&str, &str); 1] = [("base", "rope_theta")];

/// Gives the keys of a section our names; their order stays.
pub(super) fn upgrade(section: &mut Map<String, Value>) {
    rename_keys(section, &KEYS);
    if let Some(rope) = section.get_mut("rope").and_then(Value::as_object_mut) {
        rename_keys(rope, &ROPE_KEYS);
    }
}

fn rename_keys(map: &mut Map<String, Value>, names: &[(&str, &str)]) {
    let of = |key: String| {
        names.iter().find(|(name, _)| *name == key).map_or(key, |(_, own)| (*own).to_owned())
    };
    *map = std::mem::take(map).into_iter().map(|(key, value)| (of(key), value)).collect();
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::language_model::LanguageModelConfig;

    #[test]
    fn a_section_with_the_references_names_gets_ours_in_its_order() {
        let keys = json!(LanguageModelConfig::default());
        for (section, names) in [(&keys, &KEYS[..]), (&keys["rope"], &ROPE_KEYS)] {
            for (other, own) in names {
                assert!(section.get(*own).is_some() && section.get(*other).is_none(), "{other}");
            }
        }
        let mut section = json!({
            "num_layers": 3, "model_dim": 32, "mlp_mult": 2, "rope": {"base": 5e5, "rule": "none"},
        });
        let section = section.as_object_mut().expect("a map");
        upgrade(section);
        let own = json!({
            "num_hidden_layers": 3, "hidden_size": 32, "mlp_mult": 2,
            "rope": {"rope_theta": 5e5, "rule": "none"},
        });
        assert_eq!(json!(section).to_string(), own.to_string());
        upgrade(section);
        assert_eq!(json!(section).to_string(), own.to_string());
    }
}
