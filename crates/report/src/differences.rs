//! Configurations side by side: the keys in which they differ.

use std::collections::BTreeSet;

use serde_json::Value;

use super::run::Run;

/// One key that is not the same everywhere.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Difference {
    /// Dotted; list items as `[0]`.
    pub key: String,
    /// One for each configuration, empty where the key is absent or null.
    pub values: Vec<String>,
}

/// Names of the configurations that could be read, and where they differ.
pub fn of_runs(runs: &[Run]) -> (Vec<String>, Vec<Difference>) {
    let stages = runs.iter().flat_map(|run| run.stages.iter().map(move |stage| (run, stage)));
    let (names, values): (Vec<String>, Vec<&Value>) = stages
        .filter_map(|(run, stage)| {
            let value = stage.config.as_ref()?.value.as_ref()?;
            Some((run.stage_name(stage), value))
        })
        .unzip();
    let differences = differences(&values);
    (names, differences)
}

fn differences(configs: &[&Value]) -> Vec<Difference> {
    let flat: Vec<Vec<(String, String)>> = configs
        .iter()
        .map(|config| {
            let mut pairs = Vec::new();
            flatten(config, String::new(), &mut pairs);
            pairs
        })
        .collect();
    // In the order of the first file that has the key.
    let mut seen = BTreeSet::new();
    let keys: Vec<&String> =
        flat.iter().flatten().map(|(key, _)| key).filter(|key| seen.insert(*key)).collect();
    let value_of = |pairs: &[(String, String)], key: &str| {
        pairs.iter().find(|pair| pair.0 == key).map_or_else(String::new, |pair| pair.1.clone())
    };
    keys.into_iter()
        .map(|key| Difference {
            key: key.clone(),
            values: flat.iter().map(|pairs| value_of(pairs, key)).collect(),
        })
        .filter(|difference| difference.values.windows(2).any(|pair| pair[0] != pair[1]))
        .collect()
}

/// Leaves of a tree with their dotted keys.
fn flatten(value: &Value, key: String, pairs: &mut Vec<(String, String)>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (name, value) in map {
                let dot = if key.is_empty() { "" } else { "." };
                flatten(value, format!("{key}{dot}{name}"), pairs);
            }
        }
        Value::Array(items) if items.iter().any(|item| item.is_object() || item.is_array()) => {
            for (i, item) in items.iter().enumerate() {
                flatten(item, format!("{key}[{i}]"), pairs);
            }
        }
        // As if the key were not there.
        Value::Null => {}
        Value::String(text) => pairs.push((key, text.clone())),
        leaf => pairs.push((key, leaf.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_keys_that_differ_are_listed() {
        let a = json!({"target": "t", "train": {"seed": 0, "steps": 5}, "betas": [0.9, 0.95],
                       "data": [{"path": "a"}]});
        let b = json!({"target": "t", "train": {"seed": 1, "steps": 5}, "betas": [0.9, 0.99],
                       "data": [{"path": "a"}, {"path": "b"}]});
        let rows: Vec<(String, Vec<String>)> =
            differences(&[&a, &b]).into_iter().map(|row| (row.key, row.values)).collect();
        let row = |key: &str, a: &str, b: &str| (key.to_owned(), vec![a.into(), b.into()]);
        assert_eq!(
            rows,
            [
                row("train.seed", "0", "1"),
                row("betas", "[0.9,0.95]", "[0.9,0.99]"),
                row("data[1].path", "", "b"),
            ]
        );
    }

    #[test]
    fn a_key_that_is_null_is_one_that_is_absent() {
        let (a, b) = (json!({"a": null, "b": null}), json!({"b": 1}));
        let rows = differences(&[&a, &b]);
        let keys: Vec<&str> = rows.iter().map(|row| row.key.as_str()).collect();
        assert_eq!((keys, &rows[0].values[..]), (vec!["b"], &[String::new(), "1".into()][..]));
    }

    #[test]
    fn one_configuration_has_no_differences() {
        assert!(differences(&[&json!({"a": 1})]).is_empty());
        assert!(differences(&[]).is_empty());
    }
}
