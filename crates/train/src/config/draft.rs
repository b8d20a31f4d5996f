//! The draft as a tagged union: `method` chooses the type that reads the keys beside it.
//!
//! The keys stand flat beside their tag, so that a method's name is written once, and the parser itself
//! refuses another method's keys.

use std::borrow::Cow;
use std::path::PathBuf;

use longdraft_models::draft::files::SavedDraft;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::checkpoint::saved_draft;
use crate::error::Result;
use crate::method::{DraftMethod, Method};

/// The draft.
#[derive(Debug, Clone)]
pub struct DraftConfig {
    /// Start from this draft file or folder instead of initial values.
    pub from: Option<PathBuf>,
    /// Which draft is trained, with its own keys.
    pub method: Box<dyn DraftMethod>,
}

impl Default for DraftConfig {
    fn default() -> Self {
        Self { from: None, method: Method::first().fresh() }
    }
}

/// A draft section with what it leaves open from the draft to start from.
#[derive(Debug, Clone)]
pub struct CompletedDraft {
    /// The draft to start from.
    pub start: Option<SavedDraft>,
    /// The method with all its keys.
    pub method: Box<dyn DraftMethod>,
    /// Those that came from that draft.
    pub taken: Map<String, Value>,
}

impl DraftConfig {
    /// Opens the draft to start from, if there is one, and takes from it what the section leaves open.
    ///
    /// # Errors
    /// - what is said of that draft is unusable
    pub fn completed(&self) -> Result<CompletedDraft> {
        let Some(path) = &self.from else {
            return Ok(CompletedDraft {
                start: None,
                method: self.method.clone(),
                taken: Map::new(),
            });
        };
        let start = saved_draft(path)?;
        let taken = self.method.left_open(&self.method.keys_of(&start)?);
        let method = self.method.with(taken.clone())?;
        Ok(CompletedDraft { start: Some(start), method, taken })
    }
}

impl PartialEq for DraftConfig {
    fn eq(&self, other: &Self) -> bool {
        self.from == other.from && *self.method == *other.method
    }
}

impl Serialize for DraftConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = Map::new();
        map.insert("method".into(), self.method.name().into());
        map.insert("from".into(), json!(self.from));
        map.extend(self.method.keys());
        map.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for DraftConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let mut map = Map::deserialize(deserializer)?;
        let method = match map.shift_remove("method") {
            None => Method::first(),
            Some(name) => Method::named(name.as_str().unwrap_or_default()).ok_or_else(|| {
                let names: Vec<&str> = Method::all().map(Method::name).collect();
                D::Error::custom(format!("`method`: {name} is none of {}", names.join(", ")))
            })?,
        };
        let from = map.shift_remove("from").unwrap_or_default();
        let from = serde_json::from_value(from).map_err(D::Error::custom)?;
        Ok(Self { from, method: method.read(map).map_err(D::Error::custom)? })
    }
}

impl JsonSchema for DraftConfig {
    fn schema_name() -> Cow<'static, str> {
        "DraftConfig".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let from = json!({
            "description": "Start from this draft file or folder instead of initial values.",
            "type": ["string", "null"], "default": null,
        });
        let mut branch = |method: &Method| {
            let mut branch = method.schema(generator).to_value();
            let own = branch.get_mut("properties").map(Value::take).unwrap_or_default();
            let mut tag = json!({
                "description": "Which draft is trained.", "type": "string", "const": method.name(),
            });
            // Without a tag it is the first method.
            if method.name() == Method::first().name() {
                tag["default"] = method.name().into();
            } else {
                branch["required"] = json!(["method"]);
            }
            let mut properties =
                Map::from_iter([("method".into(), tag), ("from".into(), from.clone())]);
            properties.extend(own.as_object().cloned().unwrap_or_default());
            branch["properties"] = properties.into();
            branch["additionalProperties"] = false.into();
            branch
        };
        let branches: Vec<Value> = Method::all().map(&mut branch).collect();
        json_schema!({
            "description": "The draft: `method` says which keys stand beside it.",
            "discriminator": { "propertyName": "method" },
            "oneOf": branches,
        })
    }
}
