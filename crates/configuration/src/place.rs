//! Places in a JSON Schema: which keys it knows where, and which alternative an instance asks for.

use serde_json::Value;

/// A tagged union of a schema: the value of one key says which others there are.
pub(crate) struct Union<'a> {
    pub(crate) tag: &'a str,
    pub(crate) branches: Vec<&'a Value>,
    /// The branch that an instance asks for.
    pub(crate) chosen: Option<usize>,
}

impl<'a> Union<'a> {
    /// The union that a schema is.
    pub(crate) fn of(root: &'a Value, schema: &'a Value, instance: &Value) -> Option<Self> {
        if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            return Self::of(root, root.pointer(reference.strip_prefix('#')?)?, instance);
        }
        let tag = schema.get("discriminator")?.get("propertyName")?.as_str()?;
        let branches: Vec<&Value> = schema.get("oneOf")?.as_array()?.iter().collect();
        let asks_for = |branch: &&Value| match instance.get(tag) {
            Some(name) => *name == branch["properties"][tag]["const"],
            None => !is_required(branch, tag),
        };
        let chosen = branches.iter().position(asks_for);
        Some(Self { tag, branches, chosen })
    }

    /// The union at a dotted place of an instance.
    pub(crate) fn at(root: &'a Value, key: &str, instance: &Value) -> Option<Self> {
        let (outer, name) = key.rsplit_once('.').unwrap_or(("", key));
        let schema = place_at(root, outer, instance)?.get("properties")?.get(name)?;
        let value = instance.pointer(&format!("/{}", key.replace('.', "/")));
        Self::of(root, schema, value.unwrap_or(&Value::Null))
    }

    /// Values of the tag.
    pub(crate) fn names(&self) -> Vec<&'a str> {
        let name = |branch: &&'a Value| branch["properties"][self.tag]["const"].as_str();
        self.branches.iter().filter_map(name).collect()
    }

    /// Values of the tag whose branches have a key.
    pub(crate) fn owners(&self, key: &str) -> Vec<&'a str> {
        let all = self.branches.iter().zip(self.names());
        all.filter(|(it, _)| it["properties"].get(key).is_some()).map(|(_, name)| name).collect()
    }
}

fn is_required(branch: &Value, key: &str) -> bool {
    let required = branch.get("required").and_then(Value::as_array);
    required.is_some_and(|names| names.iter().any(|name| name == key))
}

/// The keys that a schema knows at a dotted place of an instance.
pub(crate) fn keys_at(schema: &Value, key: &str, instance: &Value) -> Vec<String> {
    let place = place_at(schema, key, instance);
    let properties = place.and_then(|place| place.get("properties")).and_then(Value::as_object);
    properties.map(|p| p.keys().cloned().collect()).unwrap_or_default()
}

/// What a schema says of a dotted place of an instance.
pub(crate) fn place_at<'a>(schema: &'a Value, key: &str, instance: &Value) -> Option<&'a Value> {
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
            None => return None,
        }
    }
    Some(place)
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
            property.get("const").is_none_or(|tag| match instance.get(key) {
                Some(given) => given == tag,
                // Without a tag it is the branch that needs none.
                None => !is_required(branch, key),
            })
        })
    };
    branches.iter().find(fits).map_or(schema, |branch| alternative(root, branch, instance))
}
