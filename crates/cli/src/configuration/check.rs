//! A composed tree against the types: every problem at once, each with its line.

use jsonschema::error::ValidationErrorKind;
use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Problem;
use super::tree::Node;

/// The JSON Schema of a configuration type.
pub(crate) fn schema_of<T: JsonSchema>() -> Value {
    let generator: SchemaGenerator = SchemaSettings::draft2020_12().into_generator();
    let schema: Schema = generator.into_root_schema_for::<T>();
    schema.to_value()
}

/// Reads a type from a tree.
///
/// # Errors
/// - unknown keys (with the nearest known one), missing keys, wrong types: all of them
pub(crate) fn typed<T: JsonSchema + DeserializeOwned>(node: &Node) -> Result<T, Vec<Problem>> {
    let schema = schema_of::<T>();
    let value = node.to_json();
    let validator = jsonschema::validator_for(&schema)
        .map_err(|error| vec![Problem::new(format!("the configuration's schema: {error}"))])?;
    let mut problems = Vec::new();
    for error in validator.iter_errors(&value) {
        explain(&error, node, &schema, &mut problems);
    }
    if !problems.is_empty() {
        problems.dedup();
        return Err(problems);
    }
    // The schema says less than the types about some values; serde has the last word.
    serde_json::from_value(value).map_err(|error| vec![Problem::at(&node.origin, error)])
}

fn explain(
    error: &jsonschema::ValidationError<'_>,
    node: &Node,
    schema: &Value,
    problems: &mut Vec<Problem>,
) {
    let pointer = error.instance_path().to_string();
    let key = pointer.trim_start_matches('/').replace('/', ".");
    let inside =
        |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    let at = |key: &str, text: String| Problem::at(node.origin_of(key), text);
    match error.kind() {
        ValidationErrorKind::AdditionalProperties { unexpected } => {
            let known = keys_at(schema, &key, &node.to_json());
            for name in unexpected {
                let full = inside(name);
                let hint = nearest(name, &known);
                problems.push(at(&full, format!("unknown key `{full}`{hint}")));
            }
        }
        ValidationErrorKind::Required { property } => {
            let name = property.as_str().unwrap_or_default();
            problems.push(at(&key, format!("`{}` is missing", inside(name))));
        }
        ValidationErrorKind::AnyOf { context } | ValidationErrorKind::OneOfNotValid { context } => {
            // The alternative that comes closest is the one that was meant: the tag fits, and the
            // fewest things are wrong.
            let distance = |errors: &Vec<jsonschema::ValidationError<'_>>| {
                let wrong_tag = errors.iter().any(|error| {
                    matches!(error.kind(), ValidationErrorKind::Constant { .. })
                        || (error.instance_path().to_string() == pointer
                            && matches!(error.kind(), ValidationErrorKind::Type { .. }))
                });
                (wrong_tag, errors.len())
            };
            match context.iter().filter(|errors| !errors.is_empty()).min_by_key(|e| distance(e)) {
                Some(errors) if !distance(errors).0 => {
                    errors.iter().for_each(|error| explain(error, node, schema, problems));
                }
                _ => problems.push(at(&key, format!("`{key}`: {}", alternatives(error, context)))),
            }
        }
        _ => problems.push(at(&key, format!("`{key}`: {error}"))),
    }
}

/// What would have been possible where no alternative fits.
fn alternatives(
    error: &jsonschema::ValidationError<'_>,
    context: &[Vec<jsonschema::ValidationError<'_>>],
) -> String {
    let mut possible: Vec<String> = Vec::new();
    for error in context.iter().flatten() {
        let text = match error.kind() {
            ValidationErrorKind::Constant { expected_value } => expected_value.to_string(),
            ValidationErrorKind::Enum { options } => options.to_string(),
            _ => continue,
        };
        if !possible.contains(&text) {
            possible.push(text);
        }
    }
    if possible.is_empty() {
        return error.to_string();
    }
    format!("{} is none of {}", error.instance(), possible.join(", "))
}

/// ` (did you mean ...?)`, or the possible keys where none is near.
fn nearest(name: &str, known: &[String]) -> String {
    let best = known
        .iter()
        .map(|key| (strsim::damerau_levenshtein(name, key), key))
        .min_by_key(|(distance, _)| *distance);
    match best {
        Some((distance, key)) if distance <= name.len().max(key.len()) / 2 => {
            format!(" (did you mean `{key}`?)")
        }
        Some(_) => format!(" (there are `{}`)", known.join("`, `")),
        None => String::new(),
    }
}

/// The keys that a schema knows at a dotted place of an instance.
fn keys_at(schema: &Value, key: &str, instance: &Value) -> Vec<String> {
    let (mut place, mut value) = (alternative(schema, schema, instance), instance);
    for part in key.split('.').filter(|part| !part.is_empty()) {
        value = value
            .get(part)
            .or_else(|| value.get(part.parse::<usize>().ok()?))
            .unwrap_or(&Value::Null);
        let child =
            place.get("properties").and_then(|p| p.get(part)).or_else(|| place.get("items"));
        match child {
            Some(child) => place = alternative(schema, child, value),
            None => return Vec::new(),
        }
    }
    let properties = place.get("properties").and_then(Value::as_object);
    properties.map(|p| p.keys().cloned().collect()).unwrap_or_default()
}

/// Follows references, and of several alternatives takes the one with the instance's tag (or the
/// only object).
pub(crate) fn alternative<'a>(root: &'a Value, schema: &'a Value, instance: &Value) -> &'a Value {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        let target = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
        return target.map_or(schema, |target| alternative(root, target, instance));
    }
    let branches = ["oneOf", "anyOf"].iter().find_map(|key| schema.get(*key)?.as_array());
    let Some(branches) = branches else { return schema };
    let fits = |branch: &&Value| {
        let branch = alternative(root, branch, instance);
        let Some(properties) = branch.get("properties").and_then(Value::as_object) else {
            return false;
        };
        properties.iter().all(|(key, property)| {
            property.get("const").is_none_or(|tag| instance.get(key) == Some(tag))
        })
    };
    branches.iter().find(fits).map_or(schema, |branch| alternative(root, branch, instance))
}
