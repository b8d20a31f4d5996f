//! One object of a file, with its place for messages.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{DataError, Result};

/// One object of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The file it came from.
    pub path: PathBuf,
    /// Its line, from 1 (Parquet: its row; text: 1).
    pub line: usize,
    /// Its fields.
    pub fields: Map<String, Value>,
}

impl Row {
    /// A text field.
    ///
    /// # Errors
    /// - it is missing or no string; the message names the fields that exist
    pub fn text(&self, field: &str) -> Result<&str> {
        match self.value(field)? {
            Value::String(text) => Ok(text),
            other => {
                Err(self.problem(format!("field `{field}` is not a string but {}", short(other))))
            }
        }
    }

    /// A field of any type but null.
    ///
    /// # Errors
    /// - it is missing or null; the message names the fields that exist
    pub fn value(&self, field: &str) -> Result<&Value> {
        match self.fields.get(field) {
            Some(Value::Null) => Err(self.problem(format!("field `{field}` is null"))),
            None => {
                let names: Vec<&str> = self.fields.keys().map(String::as_str).collect();
                let names = names.join("`, `");
                Err(self.problem(format!("field `{field}` is missing (there are `{names}`)")))
            }
            Some(value) => Ok(value),
        }
    }

    /// `file:line`, the file by its name alone.
    pub fn origin(&self) -> String {
        origin(&self.path, self.line)
    }

    /// An error at this row.
    pub fn problem(&self, problem: impl Into<String>) -> DataError {
        DataError::Row { path: self.path.clone(), line: self.line, problem: problem.into() }
    }
}

/// A value for a message, cut where it is long.
pub(crate) fn short(value: &Value) -> String {
    const SHOWN: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// `file:line`, the file by its name alone.
pub(crate) fn origin(path: &Path, line: usize) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    format!("{}:{line}", name.to_string_lossy())
}
