//! Values that came from the environment, and records that do not tell them.

use serde::Serialize;
use serde_json::Value;

/// Places of a configuration whose values came from environment variables.
///
/// A record of the configuration (a file beside the run, a tracker's page) shows the reference, such
/// as `${oc.env:NAME}`, in place of the value: a variable may hold a secret.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct References(Vec<Reference>);

#[derive(Debug, Clone, PartialEq)]
struct Reference {
    /// Keys of maps and places in lists, from the top.
    path: Vec<String>,
    /// As it was written.
    text: String,
    /// What it came to.
    value: Value,
}

impl References {
    /// Notes that the value at `path` was written as `text` and came to `value`.
    pub fn push(&mut self, path: Vec<String>, text: String, value: Value) {
        self.0.push(Reference { path, text, value });
    }

    /// Whether nothing came from the environment.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A configuration with the references in place of their values.
    pub fn record(&self, config: &impl Serialize) -> Value {
        self.record_with(config, &|_| {})
    }

    /// The same as a file's content: what only looks like a reference is marked, so that the file
    /// comes to this configuration again.
    pub fn file_record(&self, config: &impl Serialize) -> Value {
        self.record_with(config, &|text| *text = text.replace("${", "\\${"))
    }

    fn record_with(&self, config: &impl Serialize, dress: &dyn Fn(&mut String)) -> Value {
        let mut record = serde_json::to_value(config).unwrap_or_default();
        // A value that was replaced since is no longer the environment's.
        let holds = |one: &&Reference| {
            let found = reach(&mut record.clone(), &one.path).cloned();
            match (found, &one.value) {
                (Some(Value::String(now)), Value::String(then)) => now.contains(then.as_str()),
                (found, _) => found.is_some(),
            }
        };
        let kept: Vec<&Reference> = self.0.iter().filter(holds).collect();
        each_text(&mut record, dress);
        for one in kept {
            if let Some(place) = reach(&mut record, &one.path) {
                *place = Value::String(one.text.clone());
            }
        }
        record
    }
}

/// The value at a path, or the text that stands for everything below.
fn reach<'a>(record: &'a mut Value, path: &[String]) -> Option<&'a mut Value> {
    let Some((first, rest)) = path.split_first() else { return Some(record) };
    match record {
        Value::Object(map) => reach(map.get_mut(first)?, rest),
        Value::Array(items) => reach(items.get_mut(first.parse::<usize>().ok()?)?, rest),
        Value::String(_) => Some(record),
        _ => None,
    }
}

fn each_text(value: &mut Value, change: &dyn Fn(&mut String)) {
    match value {
        Value::String(text) => change(text),
        Value::Array(items) => items.iter_mut().for_each(|item| each_text(item, change)),
        Value::Object(map) => map.values_mut().for_each(|item| each_text(item, change)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn path(text: &str) -> Vec<String> {
        text.split('/').map(str::to_owned).collect()
    }

    #[test]
    fn records_show_references_in_place_of_values() {
        let mut references = References::default();
        references.push(path("a/notes"), "${oc.env:X}".into(), json!("s3cret"));
        references.push(path("a/tags/1"), "at ${oc.env:X}".into(), json!("at s3cret"));
        references.push(path("steps"), "${oc.env:N}".into(), json!(7));
        references.push(path("from"), "${oc.env:X}".into(), json!("s3cret"));
        references.push(path("place/url"), "${oc.env:X}".into(), json!("s3cret"));
        references.push(path("gone/x"), "${oc.env:X}".into(), json!("s3cret"));
        let config = json!({
            "a": {"notes": "s3cret", "tags": ["x", "at s3cret"]}, "steps": 7.0,
            // Set by the program since.
            "from": "runs/base/draft",
            // A map that is written as one text.
            "place": "store at s3cret",
            "template": "${name}",
        });
        let want = json!({
            "a": {"notes": "${oc.env:X}", "tags": ["x", "at ${oc.env:X}"]},
            "steps": "${oc.env:N}", "from": "runs/base/draft", "place": "${oc.env:X}",
            "template": "${name}",
        });
        assert_eq!(references.record(&config), want);
        let file = references.file_record(&config);
        assert_eq!(file["template"], "\\${name}");
        assert_eq!(file["steps"], "${oc.env:N}");
    }
}
