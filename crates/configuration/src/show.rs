//! A composed configuration as YAML, every value with where it came from. What came from the
//! environment is shown as its reference.

use std::fmt::Write;

use serde_json::Value;

use super::{Composed, Located};

/// YAML of everything that was composed; a comment names each value's origin.
pub fn show(composed: &Composed) -> String {
    match composed {
        Composed::Stage(located) => one(located),
        Composed::Curriculum { stages, .. } => stages
            .iter()
            .map(|stage| {
                let start = format!("{:?}", stage.start_from).to_lowercase();
                format!("# stage {}, starts from {start}\n{}", stage.name, one(&stage.located))
            })
            .collect::<Vec<_>>()
            .join("---\n"),
    }
}

fn one(located: &Located) -> String {
    let value = located.config.record();
    let mut lines = Vec::new();
    if let Value::Object(map) = &value {
        for (key, value) in map {
            write_entry(located, &mut lines, key, value, key, 0);
        }
    }
    let width = lines.iter().map(|(text, _)| text.chars().count()).max().unwrap_or(0).min(60);
    lines.into_iter().fold(String::new(), |mut out, (text, origin)| {
        let _ = match origin {
            Some(origin) => writeln!(out, "{text:width$}  # {origin}"),
            None => writeln!(out, "{text}"),
        };
        out
    })
}

/// Lines of one key: text and, where a value stands, its origin.
fn write_entry(
    located: &Located,
    lines: &mut Vec<(String, Option<String>)>,
    key: &str,
    value: &Value,
    path: &str,
    depth: usize,
) {
    let indent = "  ".repeat(depth);
    match value {
        Value::Object(map) if !map.is_empty() => {
            lines.push((format!("{indent}{key}:"), None));
            for (name, value) in map {
                write_entry(located, lines, name, value, &format!("{path}.{name}"), depth + 1);
            }
        }
        Value::Array(items) if items.iter().any(serde_json::Value::is_object) => {
            lines.push((format!("{indent}{key}:"), None));
            for (index, item) in items.iter().enumerate() {
                let from = lines.len();
                let Value::Object(map) = item else { continue };
                for (name, value) in map {
                    let path = format!("{path}.{index}.{name}");
                    write_entry(located, lines, name, value, &path, depth + 2);
                }
                // The first key of an item carries its dash.
                if let Some((text, _)) = lines.get_mut(from) {
                    let dash = depth * 2 + 2;
                    text.replace_range(dash..dash + 2, "- ");
                }
            }
        }
        _ => {
            let origin = match located.tree.at(path) {
                Some(node) => node.origin.to_string(),
                None => "default".to_owned(),
            };
            lines.push((format!("{indent}{key}: {value}"), Some(origin)));
        }
    }
}
