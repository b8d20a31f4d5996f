//! A composed tree against the types: every problem at once, each with its line.

use longdraft_rules::KeyPath;
use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Problem;
use super::interpolate;
use super::place::{Union, alternative, keys_at, place_at};
use super::tree::{Node, Tree, inside};
use super::validate::{Fault, FaultKind, faults, listed};

/// The JSON Schema of a configuration type.
pub fn schema_of<T: JsonSchema>() -> Value {
    let generator: SchemaGenerator = SchemaSettings::draft2020_12().into_generator();
    let schema: Schema = generator.into_root_schema_for::<T>();
    schema.to_value()
}

/// Reads a type from a tree.
/// It fails with all unknown keys (with the nearest known one), missing keys and wrong types.
pub(crate) fn typed<T: JsonSchema + DeserializeOwned>(node: &Node) -> Result<T, Vec<Problem>> {
    let schema = schema_of::<T>();
    let value = node.to_json();
    let mut problems = Vec::new();
    for fault in faults(&schema, &schema, &value) {
        explain(&fault, node, &schema, &mut problems);
    }
    broken_integers(node, (&schema, &schema), (&value, ""), &mut problems);
    if !problems.is_empty() {
        problems.dedup();
        return Err(problems);
    }
    // The schema says less than the types about some values; serde has the last word.
    serde_json::from_value(value).map_err(|error| vec![Problem::at(&node.origin, error)])
}

/// A tree without references, with a variable's own text where a text is wanted and its value reads as
/// something else: a job's number as a folder's name. `unresolved` is the tree with its references.
pub(crate) fn with_texts<T: JsonSchema>(mut resolved: Node, unresolved: &Node) -> Node {
    let schema = schema_of::<T>();
    let value = resolved.to_json();
    let mut places = Vec::new();
    text_places(&faults(&schema, &schema, &value), &schema, &value, &mut places);
    if places.is_empty() {
        return resolved;
    }
    let Ok(texts) = interpolate::resolve_as_texts(unresolved) else { return resolved };
    for place in places {
        let text = names_of(&place).try_fold(&texts, |node, name| node.child(&name));
        let node = names_of(&place).try_fold(&mut resolved, |node, name| node.child_mut(&name));
        let (Some(text), Some(node)) = (text, node) else { continue };
        let is_text =
            |tree: &Tree| matches!(tree, Tree::Scalar(Value::String(text)) if !text.is_empty());
        if matches!(node.value, Tree::Scalar(_)) && !is_text(&node.value) && is_text(&text.value) {
            node.value = text.value.clone();
        }
    }
    resolved
}

/// JSON pointers of what is no text where one is possible.
fn text_places(faults: &[Fault<'_>], schema: &Value, value: &Value, places: &mut Vec<String>) {
    for fault in faults {
        let is_text = match &fault.kind {
            FaultKind::Type(names) => names.contains(&"string"),
            FaultKind::Constant(options) => options.iter().any(Value::is_string),
            FaultKind::Alternatives(branches) => {
                let union = Union::at(schema, &dotted(&fault.place), value);
                let chosen = union.map(|union| union.chosen);
                for (index, branch) in branches.iter().enumerate() {
                    if chosen.is_none_or(|chosen| chosen == Some(index)) {
                        text_places(branch, schema, value, places);
                    }
                }
                false
            }
            _ => false,
        };
        if is_text {
            places.push(fault.place.clone());
        }
    }
}

/// Numbers with a point or an exponent where a whole number is wanted: to a schema `1e3` is whole, to
/// the types it is not.
fn broken_integers(
    node: &Node,
    (root, schema): (&Value, &Value),
    (value, key): (&Value, &str),
    problems: &mut Vec<Problem>,
) {
    let place = alternative(root, schema, value);
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                let schema = place.get("properties").and_then(|properties| properties.get(name));
                if let Some(schema) = schema {
                    broken_integers(node, (root, schema), (value, &inside(key, name)), problems);
                }
            }
        }
        Value::Array(list) => {
            for (index, value) in list.iter().enumerate() {
                if let Some(schema) = place.get("items") {
                    let key = inside(key, &index.to_string());
                    broken_integers(node, (root, schema), (value, &key), problems);
                }
            }
        }
        Value::Number(number) if number.is_f64() => {
            let whole = |kind: &Value| kind == "integer";
            let is_whole = match place.get("type") {
                Some(Value::Array(kinds)) => kinds.iter().any(whole),
                Some(kind) => whole(kind),
                None => false,
            };
            if is_whole {
                let text = format!("`{key}`: {number} is not written as a whole number of 64 bits");
                problems.push(Problem::of_key(node, key, text));
            }
        }
        _ => {}
    }
}

/// Rounds of taking faults away: what is left may have others.
const ROUNDS: usize = 8;

/// A type from what is sound of a tree, and the dotted keys that were left out or made up.
pub(crate) fn without_faults<T: JsonSchema + DeserializeOwned>(
    node: &Node,
) -> (Option<T>, Vec<KeyPath>) {
    let schema = schema_of::<T>();
    let mut value = node.to_json();
    let mut changed = Vec::new();
    for _ in 0..ROUNDS {
        let repairs: Vec<Repair> = faults(&schema, &schema, &value)
            .iter()
            .flat_map(|fault| repairs(fault, &schema, &value))
            .collect();
        if repairs.is_empty() {
            return (serde_json::from_value(value).ok(), changed);
        }
        for Repair { place, name, instead } in repairs {
            let key = inside(&dotted(&place), &name);
            let Some(map) = value.pointer_mut(&place).and_then(Value::as_object_mut) else {
                continue;
            };
            match instead {
                Some(instead) => map.insert(name, instead),
                None => map.shift_remove(&name),
            };
            changed.push(key.into());
        }
    }
    (None, changed)
}

/// A key of an object to take away or to make up.
struct Repair {
    /// JSON pointer of the object.
    place: String,
    name: String,
    instead: Option<Value>,
}

fn repairs(fault: &Fault<'_>, schema: &Value, value: &Value) -> Vec<Repair> {
    let pointer = &fault.place;
    let without =
        |name: &str| Repair { place: pointer.clone(), name: name.to_owned(), instead: None };
    match &fault.kind {
        FaultKind::Unknown(names) => names.iter().map(|name| without(name)).collect(),
        FaultKind::Missing(name) => {
            let properties = place_at(schema, &dotted(pointer), value);
            let property = properties.and_then(|place| place.get("properties")?.get(name));
            let instead = property.map(|property| placeholder(schema, property));
            vec![Repair { instead, ..without(name) }]
        }
        FaultKind::Alternatives(branches)
            if let Some(union) = Union::at(schema, &dotted(pointer), value) =>
        {
            let of_branch = |faults: &Vec<Fault<'_>>| {
                faults.iter().flat_map(|fault| repairs(fault, schema, value)).collect()
            };
            let chosen = union.chosen.and_then(|index| branches.get(index));
            chosen.map_or_else(|| vec![without(union.tag)], of_branch)
        }
        _ => {
            // The nearest key of an object; an item of a list goes with its list.
            let mut place = pointer.as_str();
            while let Some((outer, name)) = place.rsplit_once('/') {
                if value.pointer(outer).is_some_and(Value::is_object) {
                    let (place, name) = (outer.to_owned(), unescaped(name));
                    return vec![Repair { place, name, instead: None }];
                }
                place = outer;
            }
            Vec::new()
        }
    }
}

/// Something of the type that a schema asks for.
fn placeholder(root: &Value, schema: &Value) -> Value {
    let place = alternative(root, schema, &Value::Null);
    match place.get("type").and_then(Value::as_str) {
        Some("string") => Value::from(""),
        Some("array") => Value::Array(Vec::new()),
        Some("object") => Value::Object(serde_json::Map::new()),
        Some("integer" | "number") => Value::from(1),
        Some("boolean") => Value::from(false),
        _ => Value::Null,
    }
}

fn dotted(pointer: &str) -> String {
    names_of(pointer).collect::<Vec<_>>().join(".")
}

/// The names that a JSON pointer goes through.
fn names_of(pointer: &str) -> impl Iterator<Item = String> {
    pointer.split('/').skip(1).map(unescaped)
}

fn unescaped(name: &str) -> String {
    name.replace("~1", "/").replace("~0", "~")
}

fn explain(fault: &Fault<'_>, node: &Node, schema: &Value, problems: &mut Vec<Problem>) {
    let key = dotted(&fault.place);
    let at = |key: &str, text: String| Problem::of_key(node, key, text);
    match &fault.kind {
        FaultKind::Unknown(names) => unknown(names, &key, node, schema, problems),
        FaultKind::Missing(name) => {
            let name = inside(&key, name);
            problems.push(at(&name, format!("`{name}` is missing")));
        }
        FaultKind::Alternatives(branches) => {
            if let Some(union) = Union::at(schema, &key, &node.to_json()) {
                if let Some(faults) = union.chosen.and_then(|index| branches.get(index)) {
                    faults.iter().for_each(|fault| explain(fault, node, schema, problems));
                } else {
                    let (tag, names) = (inside(&key, union.tag), union.names().join("`, `"));
                    problems.push(at(&tag, format!("`{tag}` is none of `{names}`")));
                }
                return;
            }
            // The alternative that comes closest is the one that was meant: the tag fits, and the
            // fewest things are wrong.
            let distance = |faults: &Vec<Fault<'_>>| {
                let wrong_tag = faults.iter().any(|inner| match inner.kind {
                    FaultKind::Constant([_]) => true,
                    FaultKind::Type(_) => inner.place == fault.place,
                    _ => false,
                });
                (wrong_tag, faults.len())
            };
            match branches.iter().filter(|faults| !faults.is_empty()).min_by_key(|f| distance(f)) {
                Some(faults) if !distance(faults).0 => {
                    faults.iter().for_each(|fault| explain(fault, node, schema, problems));
                }
                _ => problems.push(at(&key, format!("`{key}`: {}", possible(fault, branches)))),
            }
        }
        _ => problems.push(at(&key, format!("`{key}`: {fault}"))),
    }
}

/// Tells of keys at a dotted place that the schema does not know.
fn unknown(names: &[&str], key: &str, node: &Node, schema: &Value, problems: &mut Vec<Problem>) {
    let at = |key: &str, text: String| Problem::of_key(node, key, text);
    let instance = node.to_json();
    let known = keys_at(schema, key, &instance);
    let union = Union::at(schema, key, &instance);
    for name in names {
        let full = inside(key, name);
        let owners = union.as_ref().map(|union| (union.tag, union.owners(name)));
        if let Some((tag, names)) = owners.filter(|(_, names)| !names.is_empty()) {
            let (tag, names) = (inside(key, tag), names.join("` or `"));
            problems.push(at(&full, format!("`{full}` is a key of `{tag}: {names}`")));
        } else {
            let hint = nearest(name, &known);
            problems.push(at(&full, format!("unknown key `{full}`{hint}")));
        }
    }
}

/// What would have been possible where no alternative fits.
fn possible(fault: &Fault<'_>, branches: &[Vec<Fault<'_>>]) -> String {
    let mut possible: Vec<String> = Vec::new();
    for inner in branches.iter().flatten() {
        if let FaultKind::Constant(options) = inner.kind {
            let text = listed(options);
            if !possible.contains(&text) {
                possible.push(text);
            }
        }
    }
    if possible.is_empty() {
        return fault.to_string();
    }
    format!("{} is none of {}", fault.value, possible.join(", "))
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
