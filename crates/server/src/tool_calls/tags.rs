//! Calls of Qwen3-Coder and its relatives: the values of arguments are plain text between tags.

use serde_json::{Map, Value};

use super::reader::Step;
use super::{Calls, Function};

pub(super) const FUNCTION: &str = "<function=";
pub(super) const FUNCTION_END: &str = "</function>";
pub(super) const PARAMETER: &str = "<parameter=";
pub(super) const PARAMETER_END: &str = "</parameter>";
/// Longest name in a tag, in bytes.
pub(super) const LONGEST_NAME: usize = 256;

/// Reads a call as its text comes, each byte a bounded number of times.
#[derive(Default)]
pub(super) struct TagsBody {
    /// Bytes that are read, and up to where the end of a value was looked for.
    at: usize,
    searched: usize,
    function: Option<String>,
    /// The parameter whose value comes.
    parameter: Option<String>,
    arguments: Map<String, Value>,
}

impl TagsBody {
    pub(super) fn read(&mut self, text: &str, calls: &Calls) -> Step {
        loop {
            let step = if let Some(parameter) = self.parameter.take() {
                self.value(text, parameter, calls)
            } else if self.function.is_none() {
                self.function(text, calls)
            } else {
                self.parameter(text)
            };
            if let Some(step) = step {
                return step;
            }
        }
    }

    /// Reads the tag of the function.
    fn function(&mut self, text: &str, calls: &Calls) -> Option<Step> {
        match self.tag(text, FUNCTION) {
            Ok((name, end)) if calls.function(&name).is_none() => Some(Step::Not(end)),
            Ok((name, end)) => {
                (self.function, self.at) = (Some(name), end);
                None
            }
            Err(step) => Some(step),
        }
    }

    /// Reads the tag of a parameter, or the end of the call.
    fn parameter(&mut self, text: &str) -> Option<Step> {
        match self.tag(text, PARAMETER) {
            Ok((name, end)) => {
                (self.parameter, self.at, self.searched) = (Some(name), end, end);
                None
            }
            // It has ended, or may.
            Err(_) if text[self.at..].starts_with(FUNCTION_END) => {
                let arguments = Value::Object(std::mem::take(&mut self.arguments)).to_string();
                let name = self.function.take().unwrap_or_default();
                Some(Step::Calls(self.at + FUNCTION_END.len(), vec![(name, arguments)]))
            }
            Err(_) if FUNCTION_END.starts_with(&text[self.at..]) => Some(Step::More),
            Err(step) => Some(step),
        }
    }

    /// The name in a tag and where the tag ends, with white space before it.
    fn tag(&mut self, text: &str, tag: &str) -> std::result::Result<(String, usize), Step> {
        let rest = text[self.at..].trim_start();
        self.at = text.len() - rest.len();
        let Some(name) = rest.strip_prefix(tag) else {
            return Err(if tag.starts_with(rest) { Step::More } else { Step::Not(self.at) });
        };
        match name.bytes().take(LONGEST_NAME + 1).position(|byte| byte == b'>') {
            Some(length) => {
                Ok((name[..length].trim().to_owned(), self.at + tag.len() + length + 1))
            }
            None if name.len() > LONGEST_NAME => Err(Step::Not(self.at + tag.len())),
            None => Err(Step::More),
        }
    }

    fn value(&mut self, text: &str, parameter: String, calls: &Calls) -> Option<Step> {
        let end = PARAMETER_END.as_bytes();
        // The end may have begun in what was looked at.
        let from = self.searched.saturating_sub(end.len() - 1).max(self.at);
        let found = text.as_bytes()[from..].windows(end.len()).position(|bytes| bytes == end);
        let Some(found) = found else {
            (self.searched, self.parameter) = (text.len(), Some(parameter));
            return Some(Step::More);
        };
        let value = &text[self.at..from + found];
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let function = self.function.as_deref().and_then(|name| calls.function(name));
        let value = typed(value, function.and_then(|function| schema(function, &parameter)));
        self.arguments.insert(parameter, value);
        self.at = from + found + end.len();
        None
    }
}

fn schema<'a>(function: &'a Function, parameter: &str) -> Option<&'a Value> {
    function.parameters.as_ref()?.get("properties")?.get(parameter)
}

/// A value of the type that its schema names: text where it may be text, else what it reads as. Templates
/// write Python's names for constants.
fn typed(text: &str, schema: Option<&Value>) -> Value {
    if schema.is_some_and(may_be_text) {
        return Value::from(text);
    }
    match text.trim() {
        "True" => Value::from(true),
        "False" => Value::from(false),
        "None" => Value::Null,
        other => serde_json::from_str(other).unwrap_or_else(|_| Value::from(text)),
    }
}

/// Whether a schema says that a value may be text.
pub(super) fn may_be_text(schema: &Value) -> bool {
    let is_text = |kind: &Value| kind == "string";
    let kind = match schema.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(is_text),
        Some(kind) => is_text(kind),
        None => false,
    };
    let of_several = ["anyOf", "oneOf"].into_iter().filter_map(|key| schema.get(key)?.as_array());
    let values = schema.get("enum").and_then(Value::as_array);
    kind || of_several.flatten().any(|schema| schema.get("type").is_some_and(is_text))
        || values.is_some_and(|values| !values.is_empty() && values.iter().all(Value::is_string))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_value_has_the_type_of_its_schema() {
        for (text, schema, wanted) in [
            ("7", json!({ "type": "string" }), json!("7")),
            ("7", json!({ "type": ["null", "string"] }), json!("7")),
            ("7", json!({ "anyOf": [{ "type": "string" }, { "type": "null" }] }), json!("7")),
            ("7", json!({ "enum": ["7", "8"] }), json!("7")),
            ("7", json!({ "enum": [7, 8] }), json!(7)),
            ("7", json!({ "type": "integer" }), json!(7)),
            (" 0.5 ", json!({ "type": "number" }), json!(0.5)),
            ("True", json!({ "type": "boolean" }), json!(true)),
            ("false", json!({ "type": "boolean" }), json!(false)),
            ("None", json!({ "type": ["integer", "null"] }), Value::Null),
            ("{\"a\": [1]}", json!({ "type": "object" }), json!({ "a": [1] })),
            ("no JSON", json!({ "type": "array" }), json!("no JSON")),
            ("plain", json!({}), json!("plain")),
        ] {
            assert_eq!(typed(text, Some(&schema)), wanted, "{text} {schema}");
        }
        assert_eq!(typed("[1, \"a\"]", None), json!([1, "a"]));
    }
}
