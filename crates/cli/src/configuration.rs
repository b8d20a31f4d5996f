//! YAML files and `key=value` overrides into a checked configuration.

use std::path::Path;

use longdraft_train::config::TrainConfig;
use serde_json::Value;

use crate::failure::{Failure, Result};

/// Reads a file, applies overrides in order, checks the result; every problem is an exit 2.
pub(crate) fn read_train_config(path: &Path, overrides: &[String]) -> Result<TrainConfig> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
    parse_train_config(&text, &path.display().to_string(), overrides)
}

/// As [`read_train_config`] for a text that goes by `name`.
pub(crate) fn parse_train_config(
    text: &str,
    name: &str,
    overrides: &[String],
) -> Result<TrainConfig> {
    // A typed pass over the file alone finds its mistakes with their lines.
    let typed = serde_saphyr::from_str::<TrainConfig>(text);
    if let (Err(error), true) = (&typed, overrides.is_empty()) {
        return Err(Failure::usage(format!("{name}: {error}")));
    }
    let mut value: Value =
        serde_saphyr::from_str(text).map_err(|error| Failure::usage(format!("{name}: {error}")))?;
    for text in overrides {
        apply(&mut value, text)?;
    }
    let config: TrainConfig = serde_json::from_value(value).map_err(|error| {
        // A mistake that the file alone has is best told with its line.
        match typed {
            Err(located) => Failure::usage(format!("{name}: {located}")),
            Ok(_) => Failure::usage(format!("command-line overrides: {error}")),
        }
    })?;
    let problems = config.problems();
    if problems.is_empty() {
        return Ok(config);
    }
    Err(Failure::usage(format!("{name}: {}", problems.join("\n  "))))
}

/// Sets one dotted key; the value is read as YAML.
fn apply(value: &mut Value, text: &str) -> Result<()> {
    let wrong = |problem: &str| {
        Failure::usage(format!("override `{text}`: {problem}"))
            .hint("overrides are written dotted.key=value, e.g. train.steps=100")
    };
    let (key, new) = text.split_once('=').ok_or_else(|| wrong("there is no `=`"))?;
    let new: Value =
        serde_saphyr::from_str(new).map_err(|error| wrong(&format!("bad value: {error}")))?;
    let mut place = value;
    for part in key.split('.') {
        if part.is_empty() {
            return Err(wrong("a key is empty"));
        }
        if place.is_null() {
            *place = Value::Object(serde_json::Map::new());
        }
        let Value::Object(map) = place else {
            return Err(wrong(&format!("`{part}` is set inside something that has no keys")));
        };
        place = map.entry(part).or_insert(Value::Null);
    }
    *place = new;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "target: a/b\noutput: runs/x\ndata:\n  train: [{path: rows.jsonl}]\n";

    fn fails(text: &str, overrides: &[&str]) -> String {
        let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
        match parse_train_config(text, "file.yaml", &overrides) {
            Ok(_) => String::new(),
            Err(failure) => format!("{failure:?}"),
        }
    }

    #[test]
    fn overrides_replace_and_create_keys() {
        let overrides = ["train.steps=7".to_owned(), "draft.delay_weights=[1, 0.5]".to_owned()];
        let config = parse_train_config(MINIMAL, "file.yaml", &overrides).expect("valid");
        assert_eq!(config.train.steps, Some(7));
        assert_eq!(config.draft.delay_weights, Some(vec![1.0, 0.5]));
    }

    #[test]
    fn mistakes_in_the_file_are_told_with_their_line() {
        let message = fails(&format!("{MINIMAL}trian:\n  steps: 3\n"), &[]);
        assert!(message.contains("trian") && message.contains("line 5"), "{message}");
    }

    #[test]
    fn mistaken_overrides_name_the_key() {
        assert!(fails(MINIMAL, &["train.stepz=3"]).contains("stepz"));
        assert!(fails(MINIMAL, &["train.steps"]).contains("no `=`"));
        assert!(fails(MINIMAL, &["target.name=3"]).contains("no keys"));
    }

    #[test]
    fn every_senseless_combination_is_named_at_once() {
        let overrides = ["objective.soft_weight=2", "train.rows_per_step=0", "draft.gamma=0"];
        let message = fails(MINIMAL, &overrides);
        for part in ["objective.soft_weight", "train.rows_per_step", "draft.gamma"] {
            assert!(message.contains(part), "{part} not in {message}");
        }
    }
}
