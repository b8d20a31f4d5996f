//! A configuration as SwanLab keeps it: `{key: {desc, sort, value}}` in YAML.

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use serde_json::{Value, json};

/// The file's bytes. JSON is YAML, but for one thing: YAML 1.1 takes `1e-6` for a text and wants
/// `1.0e-6`.
pub(super) fn config_file(config: &Value) -> Vec<u8> {
    let entries = config.as_object().into_iter().flatten().enumerate();
    let entry = |(sort, (key, value)): (usize, (&String, &Value))| {
        (key.clone(), json!({ "desc": "", "sort": sort, "value": value }))
    };
    let file: serde_json::Map<String, Value> = entries.map(entry).collect();
    let mut bytes = Vec::new();
    // A value made of strings, numbers and a vector to write to: there is nothing to fail.
    let _ = file.serialize(&mut Serializer::with_formatter(&mut bytes, YamlNumbers));
    bytes
}

struct YamlNumbers;

impl Formatter for YamlNumbers {
    fn write_f64<W: std::io::Write + ?Sized>(
        &mut self,
        out: &mut W,
        value: f64,
    ) -> std::io::Result<()> {
        let text = json!(value).to_string();
        let Some((digits, exponent)) = text.split_once('e') else {
            return out.write_all(text.as_bytes());
        };
        let point = if digits.contains('.') { "" } else { ".0" };
        let sign = if exponent.starts_with(['-', '+']) { "" } else { "+" };
        write!(out, "{digits}{point}e{sign}{exponent}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_numbers_are_numbers_in_yaml() {
        let bytes = config_file(&json!({ "a": [1e-6, 0.5, 1.5e300, 3], "b": {"c": "1e-6"} }));
        assert_eq!(
            String::from_utf8(bytes).expect("text"),
            r#"{"a":{"desc":"","sort":0,"value":[1.0e-6,0.5,1.5e+300,3]},"b":{"desc":"","sort":1,"value":{"c":"1e-6"}}}"#
        );
    }
}
