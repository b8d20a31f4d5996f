//! A value against the part of JSON Schema that configuration types use: all that does not fit.

use std::fmt;

use serde_json::{Map, Value};

/// Something that does not fit.
#[derive(Debug)]
pub(crate) struct Fault<'a> {
    /// JSON pointer of the value that it is about.
    pub(crate) place: String,
    /// That value.
    pub(crate) value: &'a Value,
    pub(crate) kind: FaultKind<'a>,
}

/// What does not fit about a value.
#[derive(Debug)]
pub(crate) enum FaultKind<'a> {
    /// Keys that the schema does not know.
    Unknown(Vec<&'a str>),
    /// A key that is not there.
    Missing(&'a str),
    /// None of several schemas fits, or several do where one is to; what does not fit each of them.
    Alternatives(Vec<Vec<Fault<'a>>>),
    /// It has to be one of these.
    Constant(&'a [Value]),
    /// It has to be of one of these types.
    Type(Vec<&'a str>),
    /// In words, and the limit.
    Limit(&'static str, &'a Value),
}

impl fmt::Display for Fault<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.value;
        match &self.kind {
            FaultKind::Unknown(names) => write!(f, "unknown keys: {}", names.join(", ")),
            FaultKind::Missing(name) => write!(f, "`{name}` is missing"),
            FaultKind::Alternatives(_) => write!(f, "{value} fits none of the possible forms"),
            FaultKind::Constant(options) => write!(f, "{value} is none of {}", listed(options)),
            FaultKind::Type(names) => {
                let names: Vec<&str> = names.iter().map(|name| in_words(name)).collect();
                write!(f, "{value} is not {}", names.join(" or "))
            }
            FaultKind::Limit(words, limit) => write!(f, "{value} {words} {limit}"),
        }
    }
}

/// Values with commas between them.
pub(crate) fn listed(values: &[Value]) -> String {
    values.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn in_words(name: &str) -> &str {
    match name {
        "integer" => "a whole number",
        "number" => "a number",
        "string" => "a text",
        "boolean" => "true or false",
        "array" => "a list",
        "object" => "a map of keys",
        other => other,
    }
}

/// All that does not fit a schema, whose references lead into `root`.
pub(crate) fn faults<'a>(root: &'a Value, schema: &'a Value, value: &'a Value) -> Vec<Fault<'a>> {
    let mut walk = Walk { root, found: Vec::new() };
    walk.value(schema, value, "");
    walk.found
}

struct Walk<'a> {
    root: &'a Value,
    found: Vec<Fault<'a>>,
}

impl<'a> Walk<'a> {
    fn tell(&mut self, place: &str, value: &'a Value, kind: FaultKind<'a>) {
        self.found.push(Fault { place: place.to_owned(), value, kind });
    }

    fn value(&mut self, schema: &'a Value, value: &'a Value, place: &str) {
        // `true` lets everything through.
        let Some(schema) = schema.as_object() else { return };
        let root = self.root;
        let reference = schema.get("$ref").and_then(Value::as_str);
        let target = reference.and_then(|reference| root.pointer(reference.strip_prefix('#')?));
        if let Some(target) = target {
            self.value(target, value, place);
        }
        let types: Vec<&str> = match schema.get("type") {
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            Some(name) => name.as_str().into_iter().collect(),
            None => Vec::new(),
        };
        if !types.is_empty() && !types.iter().any(|name| is_of(value, name)) {
            self.tell(place, value, FaultKind::Type(types));
        }
        let options = schema.get("enum").and_then(Value::as_array).map(Vec::as_slice);
        let options = options.or_else(|| schema.get("const").map(std::slice::from_ref));
        if let Some(options) = options.filter(|options| !options.contains(value)) {
            self.tell(place, value, FaultKind::Constant(options));
        }
        for (name, is_enough) in [("anyOf", true), ("oneOf", false)] {
            if let Some(branches) = schema.get(name).and_then(Value::as_array) {
                self.alternatives(branches, is_enough, (value, place));
            }
        }
        match value {
            Value::Object(map) => self.object(schema, map, (value, place)),
            Value::Array(items) => self.list(schema, items, (value, place)),
            Value::Number(number) => self.number(schema, number.as_f64(), (value, place)),
            _ => {}
        }
    }

    /// Several schemas of which one has to fit, and no other one unless `is_enough`.
    fn alternatives(
        &mut self,
        branches: &'a [Value],
        is_enough: bool,
        (value, place): (&'a Value, &str),
    ) {
        let root = self.root;
        let of_branch = |branch: &'a Value| {
            let mut walk = Walk { root, found: Vec::new() };
            walk.value(branch, value, place);
            walk.found
        };
        let found: Vec<Vec<Fault<'a>>> = branches.iter().map(of_branch).collect();
        let fitting = found.iter().filter(|faults| faults.is_empty()).count();
        if fitting == 0 || (fitting > 1 && !is_enough) {
            self.tell(place, value, FaultKind::Alternatives(found));
        }
    }

    fn object(
        &mut self,
        schema: &'a Map<String, Value>,
        map: &'a Map<String, Value>,
        (value, place): (&'a Value, &str),
    ) {
        let required = schema.get("required").and_then(Value::as_array);
        for name in required.into_iter().flatten().filter_map(Value::as_str) {
            if !map.contains_key(name) {
                self.tell(place, value, FaultKind::Missing(name));
            }
        }
        let properties = schema.get("properties").and_then(Value::as_object);
        let others = schema.get("additionalProperties");
        let mut unknown = Vec::new();
        for (name, inner) in map {
            match properties.and_then(|properties| properties.get(name)).or(others) {
                Some(Value::Bool(false)) => unknown.push(name.as_str()),
                Some(schema) => {
                    let name = name.replace('~', "~0").replace('/', "~1");
                    self.value(schema, inner, &format!("{place}/{name}"));
                }
                None => {}
            }
        }
        if !unknown.is_empty() {
            self.tell(place, value, FaultKind::Unknown(unknown));
        }
    }

    fn list(
        &mut self,
        schema: &'a Map<String, Value>,
        items: &'a [Value],
        (value, place): (&'a Value, &str),
    ) {
        let limit = |name: &str| {
            let limit = schema.get(name)?;
            Some((limit, usize::try_from(limit.as_u64()?).ok()?))
        };
        if let Some((limit, _)) = limit("minItems").filter(|(_, least)| items.len() < *least) {
            self.tell(place, value, FaultKind::Limit("has fewer items than", limit));
        }
        if let Some((limit, _)) = limit("maxItems").filter(|(_, most)| items.len() > *most) {
            self.tell(place, value, FaultKind::Limit("has more items than", limit));
        }
        let first = schema.get("prefixItems").and_then(Value::as_array);
        for (index, item) in items.iter().enumerate() {
            let own = first.and_then(|first| first.get(index));
            if let Some(schema) = own.or_else(|| schema.get("items")) {
                self.value(schema, item, &format!("{place}/{index}"));
            }
        }
    }

    fn number(
        &mut self,
        schema: &'a Map<String, Value>,
        number: Option<f64>,
        (value, place): (&'a Value, &str),
    ) {
        let limit = |name: &str| schema.get(name).filter(|limit| limit.is_number());
        if let Some(least) = limit("minimum").filter(|least| number < least.as_f64()) {
            self.tell(place, value, FaultKind::Limit("is less than", least));
        }
        if let Some(most) = limit("maximum").filter(|most| number > most.as_f64()) {
            self.tell(place, value, FaultKind::Limit("is more than", most));
        }
    }
}

fn is_of(value: &Value, name: &str) -> bool {
    match name {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "number" => value.is_number(),
        // `1e3` is whole to a schema.
        "integer" => {
            let is_whole = |number: f64| number.fract() == 0.0;
            value.is_i64() || value.is_u64() || value.as_f64().is_some_and(is_whole)
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(schema: &Value, value: &Value) -> Vec<String> {
        let faults = faults(schema, schema, value);
        faults.iter().map(|fault| format!("{}: {fault}", fault.place)).collect()
    }

    #[test]
    fn all_faults_are_found_with_their_places() {
        let schema = json!({
            "type": "object", "required": ["a"], "additionalProperties": false,
            "properties": {
                "a": { "type": ["integer", "null"], "minimum": 0, "maximum": 255 },
                "b/c": { "type": "array", "items": { "$ref": "#/$defs/text" }, "maxItems": 2 },
                "d": { "type": "array", "prefixItems": [{ "type": "number" }], "minItems": 1 },
                "e": { "type": "object", "additionalProperties": { "type": "boolean" } },
                "f": true,
            },
            "$defs": { "text": { "type": "string", "enum": ["x", "y"] } },
        });
        let good = json!({ "a": 1e2, "b/c": ["x"], "d": [0.5, {}], "e": { "k": true }, "f": [] });
        assert_eq!(told(&schema, &good), [""; 0]);
        let bad = json!({ "b/c": ["z", "x", 1], "d": [], "e": { "k": 1 }, "g": 0, "h": 0 });
        let expected = [
            ": `a` is missing",
            r#"/b~1c: ["z","x",1] has more items than 2"#,
            r#"/b~1c/0: "z" is none of "x", "y""#,
            "/b~1c/2: 1 is not a text",
            r#"/b~1c/2: 1 is none of "x", "y""#,
            "/d: [] has fewer items than 1",
            "/e/k: 1 is not true or false",
            ": unknown keys: g, h",
        ];
        assert_eq!(told(&schema, &bad), expected);
        assert_eq!(told(&schema, &json!({ "a": -1 })), ["/a: -1 is less than 0"]);
        assert_eq!(told(&schema, &json!({ "a": 256 })), ["/a: 256 is more than 255"]);
        assert_eq!(told(&schema, &json!({ "a": 0.5 })), ["/a: 0.5 is not a whole number or null"]);
        assert_eq!(told(&schema, &json!(7)), [": 7 is not a map of keys"]);
    }

    #[test]
    fn one_alternative_has_to_fit() {
        let branches = json!([{ "const": 1 }, { "type": "integer" }, { "type": "string" }]);
        let any = json!({ "anyOf": branches });
        let one = json!({ "oneOf": branches });
        let is_fault = |schema: &Value, value: Value| !told(schema, &value).is_empty();
        assert!(
            !is_fault(&any, json!(1)) && !is_fault(&any, json!(2)) && is_fault(&any, json!(0.5))
        );
        assert!(
            is_fault(&one, json!(1)) && !is_fault(&one, json!(2)) && is_fault(&one, json!(null))
        );
        let value = json!(null);
        let faults = faults(&one, &one, &value);
        let [Fault { kind: FaultKind::Alternatives(branches), .. }] = &faults[..] else {
            panic!("{faults:?}");
        };
        assert_eq!(branches.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 1]);
    }
}
