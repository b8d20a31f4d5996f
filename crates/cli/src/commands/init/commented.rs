//! A configuration as YAML, with what its schema says of every key above the key.

use std::fmt::Write;

use serde_json::{Map, Value};

use longdraft_configuration::schema_places;

/// Columns of a comment.
const COLUMNS: usize = 100;
/// Blanks of a level.
const STEP: usize = 2;

/// Writes a map of keys under a schema.
pub(super) fn commented(schema: &Value, keys: &Map<String, Value>) -> String {
    let mut out = String::new();
    write_map(&mut out, (schema, schema), keys, 0);
    out
}

fn write_map(out: &mut String, place: (&Value, &Value), keys: &Map<String, Value>, indent: usize) {
    let (root, schema) = place;
    let places = fitting(branches(root, schema), keys);
    for (key, value) in keys {
        let found =
            places.iter().find_map(|place| Some((*place, place.get("properties")?.get(key)?)));
        let property = found.map(|(_, property)| property);
        let own = property.and_then(|property| description(root, property, value));
        // A tag says which of several things the map is.
        let tagged = || found.filter(|(_, property)| property.get("const").is_some());
        let own = own.or_else(|| tagged()?.0.get("description")?.as_str());
        if let Some(text) = own {
            comment(out, text, indent);
        }
        let blanks = " ".repeat(indent);
        let inner = property.unwrap_or(&Value::Null);
        match value {
            Value::Object(map) if !map.is_empty() => {
                let _ = writeln!(out, "{blanks}{key}:");
                write_map(out, (root, inner), map, indent + STEP);
            }
            Value::Array(items) if items.iter().any(Value::is_object) => {
                let _ = writeln!(out, "{blanks}{key}:");
                let items_schema = schema_places(root, inner)
                    .into_iter()
                    .find_map(|place| place.get("items"))
                    .unwrap_or(&Value::Null);
                for item in items.iter().filter_map(Value::as_object) {
                    // A comment may follow the dash alone.
                    let _ = writeln!(out, "{blanks}  -");
                    write_map(out, (root, items_schema), item, indent + 2 * STEP);
                }
            }
            other => {
                let _ = writeln!(out, "{blanks}{key}: {}", inline(other));
            }
        }
    }
}

/// Of the branches of a tagged union those whose tag is given.
fn fitting<'a>(places: Vec<&'a Value>, keys: &Map<String, Value>) -> Vec<&'a Value> {
    let fits = |place: &&Value| {
        let properties = place.get("properties").and_then(Value::as_object);
        properties.into_iter().flatten().all(|(key, property)| {
            match (property.get("const"), keys.get(key)) {
                (Some(tag), Some(given)) => tag == given,
                _ => true,
            }
        })
    };
    places.into_iter().filter(fits).collect()
}

/// What a schema stands for, every branch of a choice on its own.
fn branches<'a>(root: &'a Value, schema: &'a Value) -> Vec<&'a Value> {
    let mut found = Vec::new();
    for place in schema_places(root, schema) {
        let choice = ["oneOf", "anyOf"].iter().find_map(|key| place.get(*key)?.as_array());
        match choice {
            Some(choice) => found.extend(choice.iter().flat_map(|branch| branches(root, branch))),
            None => found.push(place),
        }
    }
    found
}

/// What a schema says of a key, or of the type that the key has.
fn description<'a>(root: &'a Value, property: &'a Value, value: &Value) -> Option<&'a str> {
    let own = property.get("description").and_then(Value::as_str);
    own.or_else(|| {
        let places = match value.as_object() {
            Some(keys) => fitting(branches(root, property), keys),
            None => schema_places(root, property),
        };
        places.first()?.get("description")?.as_str()
    })
}

/// A text as comment lines of bounded width.
fn comment(out: &mut String, text: &str, indent: usize) {
    let blanks = " ".repeat(indent);
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() && indent + 3 + line.len() + word.len() > COLUMNS {
            let _ = writeln!(out, "{blanks}# {line}");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    if !line.is_empty() {
        let _ = writeln!(out, "{blanks}# {line}");
    }
}

/// A value in one line.
fn inline(value: &Value) -> String {
    match value {
        Value::String(text) if is_plain(text) => text.clone(),
        Value::Array(items) => {
            format!("[{}]", items.iter().map(inline).collect::<Vec<_>>().join(", "))
        }
        // JSON is YAML.
        other => other.to_string(),
    }
}

/// Whether YAML reads a text without quotes as this text.
fn is_plain(text: &str) -> bool {
    let begins = |c: char| c.is_ascii_alphabetic() || c == '/';
    let plain = |c: char| c.is_ascii_alphanumeric() || "_./-".contains(c);
    let words = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"];
    text.starts_with(begins)
        && text.chars().all(plain)
        && !words.contains(&text.to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use longdraft_configuration::schema_of;
    use longdraft_pretrain::PretrainConfig;
    use longdraft_train::config::TrainConfig;
    use serde_json::json;

    use super::*;

    fn map(value: &Value) -> Map<String, Value> {
        value.as_object().cloned().expect("a map")
    }

    #[test]
    fn every_key_has_the_words_of_the_schema_above_it() {
        let schema = schema_of::<TrainConfig>();
        let keys = map(&json!({
            "target": "org/name:Q4_K_M",
            "draft": { "method": "glide", "gamma": 5 },
            "data": {
                "train": [{ "path": "a b.jsonl", "template": { "kind": "raw", "fields": ["text"] } }],
                "row_tokens": 64,
            },
        }));
        let text = commented(&schema, &keys);
        let said = |pointer: &str| {
            let text = schema.pointer(pointer).and_then(Value::as_str).expect(pointer);
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let plain =
            |text: &str| text.replace("# ", "").split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(plain(&text).contains(&said("/properties/target/description")), "{text}");
        assert!(plain(&text).contains(&said("/properties/data/description")), "{text}");
        for line in ["target: \"org/name:Q4_K_M\"", "  method: glide", "      path: \"a b.jsonl\""]
        {
            assert!(text.lines().any(|own| own == line), "{line} not in {text}");
        }
        // No key is without a comment.
        let lines: Vec<&str> = text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let line = line.trim();
            if !line.starts_with('#') && line != "-" {
                let before = index.checked_sub(1).map(|before| lines[before].trim());
                assert!(before.is_some_and(|before| before.starts_with('#')), "{line} in {text}");
            }
        }
        let pretrain = map(&json!({ "output": "runs/x", "model": { "num_hidden_layers": 4 } }));
        let text = commented(&schema_of::<PretrainConfig>(), &pretrain);
        assert!(text.contains("# Blocks.\n  num_hidden_layers: 4\n"), "{text}");
    }

    #[test]
    fn texts_that_yaml_would_read_otherwise_are_quoted() {
        for (text, plain) in [
            ("runs/a-1.x", true),
            ("/data/x", true),
            ("yes", false),
            ("1e3", false),
            ("a: b", false),
            ("#x", false),
            ("", false),
            ("~", false),
            ("org/name:Q4", false),
        ] {
            assert_eq!(is_plain(text), plain, "{text}");
        }
    }
}
