//! Rules of calls whose arguments stand between tags: text as it is, everything else as JSON.

use serde_json::Value;

use super::super::Function;
use super::super::tags::{
    FUNCTION, FUNCTION_END, LONGEST_NAME, PARAMETER, PARAMETER_END, may_be_text,
};
use super::{literal, schema};
use crate::error::{ApiError, Result};
use crate::grammar::on_one_line;

/// A schema that everything has.
static ANY: Value = Value::Bool(true);

/// The rule of a value that is any text. It ends with the first tag that ends one, as readers take it.
pub(super) fn text() -> String {
    format!("text[lazy]: /(?s:.*)/ {}\n", literal(PARAMETER_END))
}

/// The rule of a call of a function, of this number, and those of its parameters. These stand in the order of
/// the schema, without those that need not be there as the model likes.
///
/// # Errors
/// - the schema is none of an object, or something of it cannot stand in a tag or between tags
pub(super) fn call(function: &Function, place: usize) -> Result<String> {
    let whole = schema(function)?;
    let mut body = vec![literal(&tag(FUNCTION, &function.name)?)];
    let mut rules = Vec::new();
    for (index, (name, own, is_required)) in parameters(&whole).into_iter().enumerate() {
        let (rule, json) = (format!("p{place}_{index}"), format!("j{place}_{index}"));
        let begin = literal(&tag(PARAMETER, name)?);
        let end = format!("\n{PARAMETER_END}\n");
        rules.push(match texts(own) {
            None if may_be_text(own) => format!("{rule}: {begin} text {}\n", literal("\n")),
            None => {
                let own = with_definitions(own, &whole);
                format!("{rule}: {begin} {json} {}\n{json}: %json {own}\n", literal(&end))
            }
            Some(texts) if texts.is_empty() => {
                return Err(wrong(&format!("no value of `{name}` can stand between tags")));
            }
            Some(texts) => {
                // Each with its end: one may begin another.
                let each = texts.iter().map(|text| literal(&format!("{text}{end}")));
                format!("{rule}: {begin} ({})\n", each.collect::<Vec<_>>().join(" | "))
            }
        });
        body.push(if is_required { rule } else { format!("{rule}?") });
    }
    body.push(literal(FUNCTION_END));
    Ok(format!("f{place}: {}\n{}", body.join(" "), rules.concat()))
}

fn wrong(problem: &str) -> ApiError {
    ApiError::field("tools", format!("tools: {problem}, which forced calls need"))
}

/// A tag with a name, on a line of its own.
fn tag(begin: &str, name: &str) -> Result<String> {
    let is_fit = !name.is_empty()
        && name.len() <= LONGEST_NAME
        && name.trim() == name
        && !name.contains('>');
    let problem = || wrong(&format!("`{name}` cannot stand in a tag"));
    if is_fit { Ok(format!("{begin}{name}>\n")) } else { Err(problem()) }
}

/// Names, schemas, and whether they are required; what is required without a schema may be any JSON.
fn parameters(whole: &Value) -> Vec<(&str, &Value, bool)> {
    let required = whole.get("required").and_then(Value::as_array).into_iter().flatten();
    let required: Vec<&str> = required.filter_map(Value::as_str).collect();
    let properties = whole.get("properties").and_then(Value::as_object);
    let known = properties.into_iter().flatten();
    let known = known.map(|(name, own)| (name.as_str(), own, required.contains(&name.as_str())));
    let is_known = |name: &str| properties.is_some_and(|all| all.contains_key(name));
    let others = required.iter().filter(|name| !is_known(name));
    known.chain(others.map(|name| (*name, &ANY, true))).collect()
}

/// The texts that a value may be, where a schema lists what it may be and that may be text.
fn texts(own: &Value) -> Option<Vec<&str>> {
    let values = own.get("enum").and_then(Value::as_array).map(Vec::as_slice);
    let values = values.or_else(|| own.get("const").map(std::slice::from_ref))?;
    let texts = values.iter().filter_map(Value::as_str);
    let fit = texts.filter(|text| !text.contains(PARAMETER_END));
    may_be_text(own).then(|| fit.collect())
}

/// A parameter's schema, with what its references lead to.
fn with_definitions(own: &Value, whole: &Value) -> Value {
    let mut schema = on_one_line(own);
    if own.to_string().contains("\"$ref\"") {
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = whole.get(key).filter(|_| own.get(key).is_none()) {
                schema[key] = definitions.clone();
            }
        }
    }
    schema
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn function(parameters: Value) -> Function {
        Function { name: "say".to_owned(), parameters: Some(parameters) }
    }

    #[test]
    fn parameters_keep_their_order_and_what_is_required_alone_comes_last() {
        let schema = json!({
            "type": "object", "required": ["other", "b"],
            "properties": { "b": { "type": "string" }, "a": { "type": "integer" } },
        });
        let found: Vec<_> =
            parameters(&schema).into_iter().map(|(name, _, needed)| (name, needed)).collect();
        assert_eq!(found, [("b", true), ("a", false), ("other", true)]);
        assert!(parameters(&json!({ "type": "object", "properties": 3 })).is_empty());
    }

    #[test]
    fn texts_that_a_schema_lists_are_told_apart_from_json() {
        for (schema, wanted) in [
            (json!({ "enum": ["a", "b"] }), Some(vec!["a", "b"])),
            (json!({ "type": ["string", "null"], "enum": ["a", null] }), Some(vec!["a"])),
            (json!({ "type": "string", "const": "a" }), Some(vec!["a"])),
            (json!({ "type": "string", "enum": ["</parameter>"] }), Some(vec![])),
            (json!({ "enum": ["a", 1] }), None),
            (json!({ "enum": [1] }), None),
            (json!({ "type": "string" }), None),
        ] {
            assert_eq!(texts(&schema), wanted, "{schema}");
        }
    }

    #[test]
    fn what_cannot_be_written_is_refused() {
        let string = json!({ "type": "string" });
        for name in ["", " a", "a>b", &"a".repeat(LONGEST_NAME + 1)] {
            let schema = json!({ "type": "object", "properties": { name: string } });
            assert!(call(&function(schema), 0).is_err(), "{name}");
        }
        let listed = json!({ "type": "string", "enum": ["</parameter>"] });
        let schema = json!({ "type": "object", "properties": { "a": listed } });
        assert!(call(&function(schema), 0).is_err());
        let longest = "a".repeat(LONGEST_NAME);
        let schema = json!({ "type": "object", "properties": { longest: string } });
        assert!(call(&function(schema), 0).is_ok());
    }
}
