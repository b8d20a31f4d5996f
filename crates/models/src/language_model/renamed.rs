//! Keys of a model's section that had other names in earlier versions.

use serde_json::{Map, Value};

/// Names of earlier versions, each with its name of this one.
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

/// The name of this version in a table of names.
pub fn new_name<'a>(names: &[(&str, &'a str)], old: &str) -> Option<&'a str> {
    names.iter().find(|(known, _)| *known == old).map(|(_, new)| *new)
}

/// Gives keys of a map the names of this version; their order stays.
pub fn rename_keys(map: &mut Map<String, Value>, names: &[(&str, &str)]) {
    let entries = std::mem::take(map).into_iter();
    map.extend(entries.map(|(key, value)| match new_name(names, &key) {
        Some(new) => (new.to_owned(), value),
        None => (key, value),
    }));
}

/// Where a dotted key of an earlier version stands now, both within the section.
pub fn renamed(key: &str) -> Option<String> {
    match key.strip_prefix("rope.") {
        Some(key) => new_name(&ROPE_KEYS, key).map(|new| format!("rope.{new}")),
        None => new_name(&KEYS, key).map(str::to_owned),
    }
}

/// Brings the section as an earlier version recorded it to the keys of this one.
pub fn upgrade(record: &mut Map<String, Value>) {
    rename_keys(record, &KEYS);
    if let Some(rope) = record.get_mut("rope").and_then(Value::as_object_mut) {
        rename_keys(rope, &ROPE_KEYS);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::language_model::LanguageModelConfig;

    #[test]
    fn every_new_name_is_a_key_and_no_old_one_is() {
        let keys = json!(LanguageModelConfig::default());
        for (section, names) in [(&keys, &KEYS[..]), (&keys["rope"], &ROPE_KEYS)] {
            for (old, new) in names {
                assert!(section.get(*new).is_some() && section.get(*old).is_none(), "{old}, {new}");
            }
        }
        assert_eq!(renamed("num_kv_heads").as_deref(), Some("num_key_value_heads"));
        assert_eq!(renamed("rope.base").as_deref(), Some("rope.rope_theta"));
        assert_eq!(
            (renamed("base"), renamed("mlp_mult"), renamed("rope.rule")),
            (None, None, None)
        );
    }

    #[test]
    fn a_record_of_an_earlier_version_has_the_names_of_this_one_in_its_order() {
        let mut record = json!({
            "num_layers": 3, "model_dim": 32, "mlp_mult": 2, "rope": {"base": 5e5, "rule": "none"},
        });
        let record = record.as_object_mut().expect("a map");
        upgrade(record);
        let new = json!({
            "num_hidden_layers": 3, "hidden_size": 32, "mlp_mult": 2,
            "rope": {"rope_theta": 5e5, "rule": "none"},
        });
        assert_eq!(json!(record).to_string(), new.to_string());
        upgrade(record);
        assert_eq!(json!(record).to_string(), new.to_string());
    }
}
