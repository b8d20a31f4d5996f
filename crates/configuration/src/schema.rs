//! What can be configured: a JSON Schema for editors and a page for people, both from the types.

use std::fmt::Write;

use longdraft_train::checkpoint::StartFrom;
use longdraft_train::config::TrainConfig;
use serde_json::{Map, Value, json};

pub use super::check::schema_of;
use super::place::{Union, alternative};
use super::tree::inside;

/// JSON Schema of a configuration file: a stage, a curriculum or a fragment of either.
pub fn json_schema() -> Value {
    let mut schema = schema_of::<TrainConfig>();
    let stage = stage_properties(&schema);
    if let Some(root) = schema.as_object_mut() {
        // Defaults may bring what a file itself does not set.
        root.remove("required");
        root.insert("title".into(), "longdraft configuration".into());
        if let Some(properties) = root.get_mut("properties").and_then(Value::as_object_mut) {
            properties.insert("defaults".into(), defaults());
            properties.insert("model_name_or_path".into(), alias("target"));
            properties.insert("draft_model_name_or_path".into(), alias("draft.from"));
            properties.insert(
                "stages".into(),
                json!({
                    "description": "Stages of a curriculum, run one after the other; their keys go \
                                    over the file's own.",
                    "type": "array",
                    "items": { "type": "object", "properties": stage, "required": ["name"],
                               "additionalProperties": false },
                }),
            );
        }
    }
    schema
}

/// What a schema's reference stands for: all branches of a tagged union, else the object.
pub fn schema_places<'a>(root: &'a Value, schema: &'a Value) -> Vec<&'a Value> {
    let union = Union::of(root, schema, &Value::Null);
    union.map_or_else(|| vec![alternative(root, schema, &Value::Null)], |union| union.branches)
}

fn defaults() -> Value {
    json!({
        "description": "Files laid under this one, in order, relative to it; `_self_` is the \
                        file's own place among them (default: last).",
        "type": "array",
    })
}

fn alias(key: &str) -> Value {
    json!({ "description": format!("The published spelling of `{key}`."), "type": "string" })
}

fn stage_properties(schema: &Value) -> Map<String, Value> {
    let mut properties =
        schema.get("properties").and_then(Value::as_object).cloned().unwrap_or_default();
    properties.insert("defaults".into(), defaults());
    properties.insert(
        "name".into(),
        json!({ "description": "Names the stage and its folder.", "type": "string" }),
    );
    let mut start = schema_of::<StartFrom>();
    if let Some(start) = start.as_object_mut() {
        start.remove("$schema");
    }
    properties.insert("start_from".into(), start);
    properties
}

/// Tables of every key of a schema: type, default, meaning.
pub fn markdown_of(schema: &Value) -> String {
    let mut sections = vec![("Top level".to_owned(), String::new(), schema)];
    let mut out = String::new();
    let mut index = 0;
    while let Some((title, prefix, place)) = sections.get(index).cloned() {
        index += 1;
        let _ = writeln!(out, "\n## {title}\n");
        if let Some(text) =
            place.get("description").and_then(Value::as_str).filter(|_| !prefix.is_empty())
        {
            let _ = writeln!(out, "{text}\n");
        }
        let _ = writeln!(out, "| key | type | default | meaning |\n|---|---|---|---|");
        let required = place.get("required").and_then(Value::as_array);
        let Some(properties) = place.get("properties").and_then(Value::as_object) else { continue };
        for (key, property) in properties {
            let target = alternative(schema, property, &Value::Null);
            let items = target.get("items").map(|items| alternative(schema, items, &Value::Null));
            let full = inside(&prefix, key);
            if let Some(union) = Union::of(schema, property, &Value::Null) {
                for (name, branch) in union.names().into_iter().zip(union.branches) {
                    let title = format!("`{full}` with `{}: {name}`", union.tag);
                    sections.push((title, full.clone(), branch));
                }
            } else if target.get("properties").is_some() {
                sections.push((format!("`{full}`"), full.clone(), target));
            } else if let Some(items) = items.filter(|items| items.get("properties").is_some()) {
                sections.push((format!("`{full}[]`"), format!("{full}[]"), items));
            }
            let needed = required.is_some_and(|names| names.iter().any(|name| name == key));
            let default = match property.get("default") {
                _ if needed => "required".to_owned(),
                // Its own table gives the defaults.
                Some(value) if value.is_object() && target.get("properties").is_some() => {
                    "see below".to_owned()
                }
                Some(value) => format!("`{}`", in_one_line(value)),
                None => String::new(),
            };
            let description = property.get("description").or_else(|| target.get("description"));
            let meaning =
                description.and_then(Value::as_str).unwrap_or_default().replace('\n', " ");
            let _ = writeln!(
                out,
                "| `{key}` | {} | {default} | {meaning} |",
                type_name(schema, property).replace('|', "\\|")
            );
        }
    }
    out
}

/// A default as YAML in one line.
fn in_one_line(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let entry = |(key, value): (&String, &Value)| match value {
                Value::String(text) => format!("{key}: {text}"),
                other => format!("{key}: {other}"),
            };
            format!("{{{}}}", map.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

fn type_name(root: &Value, schema: &Value) -> String {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        let target = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
        return target.map_or_else(String::new, |target| type_name(root, target));
    }
    if schema.get("discriminator").is_some() {
        return "object".to_owned();
    }
    if let Some(value) = schema.get("const") {
        return value.as_str().map_or_else(|| value.to_string(), |text| format!("`{text}`"));
    }
    let joined = |values: Vec<String>| {
        let mut unique: Vec<String> = Vec::new();
        for value in values.into_iter().filter(|value| !value.is_empty() && value != "null") {
            if !unique.contains(&value) {
                unique.push(value);
            }
        }
        unique.join(" or ")
    };
    for key in ["oneOf", "anyOf"] {
        if let Some(branches) = schema.get(key).and_then(Value::as_array) {
            return joined(branches.iter().map(|branch| tagged(root, branch)).collect());
        }
    }
    if let Some(options) = schema.get("enum").and_then(Value::as_array) {
        let name =
            |value: &Value| value.as_str().map_or_else(|| value.to_string(), |t| format!("`{t}`"));
        return joined(options.iter().map(name).collect());
    }
    match schema.get("type") {
        Some(Value::String(name)) if name == "array" => {
            let items = schema.get("items").map(|items| type_name(root, items));
            items.map_or_else(|| "list".to_owned(), |items| format!("list of {items}"))
        }
        Some(Value::String(name)) => name.clone(),
        Some(Value::Array(names)) => {
            joined(names.iter().filter_map(Value::as_str).map(str::to_owned).collect())
        }
        _ => String::new(),
    }
}

/// A branch with a tag goes by it: `{kind: raw, fields, ...}`.
fn tagged(root: &Value, branch: &Value) -> String {
    let place = alternative(root, branch, &Value::Null);
    let Some(properties) = place.get("properties").and_then(Value::as_object) else {
        return type_name(root, branch);
    };
    let keys: Vec<String> = properties
        .iter()
        .map(|(key, property)| match property.get("const").and_then(Value::as_str) {
            Some(tag) => format!("{key}: {tag}"),
            None => key.clone(),
        })
        .collect();
    format!("`{{{}}}`", keys.join(", "))
}
