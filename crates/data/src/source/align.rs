//! Aligners: small changes to a row's fields, so that differently named data fits one template.

use longdraft_rules::Problem;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Row;
use crate::error::Result;

/// One change to a row's fields.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, tag = "kind", rename_all = "snake_case")]
pub enum Aligner {
    /// Adds the row's place, `file:line`, unless the field is there.
    AddId {
        /// The new field.
        #[serde(default = "id")]
        field: String,
    },
    /// Renames a field.
    Rename {
        /// Old name.
        from: String,
        /// New name.
        to: String,
    },
    /// Joins text fields; an empty or missing one is passed over, unless all are.
    Concat {
        /// Names of text fields.
        fields: Vec<String>,
        /// The new field.
        to: String,
        /// Between two texts.
        #[serde(default = "newline")]
        separator: String,
    },
    /// Fills fields from places inside other fields.
    Map {
        /// New field by dotted path (`data.0.text`) or JSON pointer (`/data/0/text`).
        fields: std::collections::BTreeMap<String, String>,
    },
}

fn id() -> String {
    "id".to_owned()
}

fn newline() -> String {
    "\n".to_owned()
}

impl Aligner {
    /// What is wrong with the aligner itself.
    pub(super) fn problem(&self) -> Option<Problem> {
        let is_empty = match self {
            Self::Concat { fields, .. } => fields.is_empty(),
            Self::Map { fields } => fields.is_empty(),
            _ => false,
        };
        is_empty.then(|| Problem::new("fields", "must name at least one field"))
    }

    /// Changes `row`.
    ///
    /// # Errors
    /// - a field that it reads is missing or of another type
    pub fn apply(&self, row: &mut Row) -> Result<()> {
        match self {
            Self::AddId { field } => {
                let origin = row.origin();
                row.fields.entry(field.clone()).or_insert(Value::String(origin));
            }
            Self::Rename { from, to } => {
                row.value(from)?;
                if let Some(value) = row.fields.shift_remove(from) {
                    row.fields.insert(to.clone(), value);
                }
            }
            Self::Concat { fields, to, separator } => {
                let mut texts = Vec::new();
                for field in fields {
                    if !matches!(row.fields.get(field), None | Some(Value::Null)) {
                        texts.push(row.text(field)?);
                    }
                }
                if texts.is_empty() {
                    let names = fields.join("`, `");
                    return Err(row.problem(format!("none of the fields `{names}` is there")));
                }
                texts.retain(|text| !text.is_empty());
                let text = texts.join(separator);
                row.fields.insert(to.clone(), Value::String(text));
            }
            Self::Map { fields } => {
                let mut found = Map::new();
                for (name, path) in fields {
                    let value = lookup(&row.fields, path)
                        .ok_or_else(|| row.problem(format!("there is nothing at `{path}`")))?;
                    found.insert(name.clone(), value.clone());
                }
                row.fields.extend(found);
            }
        }
        Ok(())
    }
}

/// The value at a dotted path or, with a leading `/`, a JSON pointer. Null counts as nothing.
pub(crate) fn lookup<'a>(fields: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    let parts: Vec<String> = match path.strip_prefix('/') {
        Some(rest) => {
            rest.split('/').map(|part| part.replace("~1", "/").replace("~0", "~")).collect()
        }
        None => path.split('.').map(str::to_owned).collect(),
    };
    let (first, rest) = parts.split_first()?;
    let start = fields.get(first)?;
    let value = rest.iter().try_fold(start, |value, part| match value {
        Value::Object(fields) => fields.get(part),
        Value::Array(list) => list.get(part.parse::<usize>().ok()?),
        _ => None,
    })?;
    (!value.is_null()).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aligned(aligners: &str, json: &str) -> Result<Row> {
        let aligners: Vec<Aligner> = serde_json::from_str(aligners).expect("aligners");
        let fields = serde_json::from_str(json).expect("object");
        let mut row = Row { path: "dir/rows.jsonl".into(), line: 4, fields };
        aligners.iter().try_for_each(|aligner| aligner.apply(&mut row))?;
        Ok(row)
    }

    #[test]
    fn aligners_work_one_after_another() -> Result<()> {
        let row = aligned(
            r#"[{"kind": "add_id"}, {"kind": "rename", "from": "q", "to": "question"},
                {"kind": "concat", "fields": ["head", "gone", "question"], "to": "text", "separator": " "},
                {"kind": "map", "fields": {"deep": "a.b.1", "odd": "/x~1y/0"}}]"#,
            r#"{"q": "why", "head": "So", "a": {"b": [1, {"c": 2}]}, "x/y": ["z"]}"#,
        )?;
        assert_eq!(
            Value::Object(row.fields),
            serde_json::json!({
                "head": "So", "a": {"b": [1, {"c": 2}]}, "x/y": ["z"], "id": "rows.jsonl:4",
                "question": "why", "text": "So why", "deep": {"c": 2}, "odd": "z"
            })
        );
        Ok(())
    }

    #[test]
    fn what_is_not_there_is_named_with_the_row() {
        let fails = |aligner: &str, part: &str| {
            let message = aligned(aligner, r#"{"a": {"b": 1}, "n": null}"#)
                .expect_err("nothing there")
                .to_string();
            assert!(message.contains("rows.jsonl:4") && message.contains(part), "{message}");
        };
        fails(r#"[{"kind": "rename", "from": "x", "to": "y"}]"#, "field `x` is missing");
        fails(r#"[{"kind": "map", "fields": {"x": "a.c"}}]"#, "nothing at `a.c`");
        fails(r#"[{"kind": "map", "fields": {"x": "n"}}]"#, "nothing at `n`");
        fails(r#"[{"kind": "concat", "fields": ["x", "y"], "to": "z"}]"#, "none of the fields");
        fails(r#"[{"kind": "concat", "fields": ["a"], "to": "z"}]"#, "is not a string");
    }
}
