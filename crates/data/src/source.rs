//! JSONL files, read line by line.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{DataError, Result};

/// One object of a JSONL file.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The file it came from.
    pub path: PathBuf,
    /// Its line, from 1.
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
        match self.fields.get(field) {
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(self.problem(format!("field `{field}` is no string but {other}"))),
            None => {
                let names: Vec<&str> = self.fields.keys().map(String::as_str).collect();
                let names = names.join("`, `");
                Err(self.problem(format!("field `{field}` is missing (there are `{names}`)")))
            }
        }
    }

    /// `file:line`, the file by its name alone.
    pub fn origin(&self) -> String {
        let name = self.path.file_name().unwrap_or(self.path.as_os_str());
        format!("{}:{}", name.to_string_lossy(), self.line)
    }

    /// An error at this row.
    pub fn problem(&self, problem: impl Into<String>) -> DataError {
        DataError::Row { path: self.path.clone(), line: self.line, problem: problem.into() }
    }
}

/// Iterates over the rows of a JSONL file; blank lines are skipped.
///
/// # Errors
/// - the file cannot be opened; a later item is an error where a line is no JSON object
pub fn read_jsonl(path: &Path) -> Result<impl Iterator<Item = Result<Row>> + use<>> {
    let io = |path: &Path| {
        let path = path.to_path_buf();
        move |source| DataError::Io { path, source }
    };
    let reader = BufReader::new(File::open(path).map_err(io(path))?);
    let path = path.to_path_buf();
    Ok(reader.lines().enumerate().filter_map(move |(index, line)| {
        let line = match line {
            Ok(line) if line.trim().is_empty() => return None,
            Ok(line) => line,
            Err(source) => {
                return Some(Err(DataError::Io { path: path.clone(), source }));
            }
        };
        let row = |problem| DataError::Row { path: path.clone(), line: index + 1, problem };
        Some(match serde_json::from_str::<Value>(&line) {
            Ok(Value::Object(fields)) => Ok(Row { path: path.clone(), line: index + 1, fields }),
            Ok(_) => Err(row("a JSON object was expected".into())),
            Err(error) => Err(row(format!("not JSON: {error}"))),
        })
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_carry_their_line_and_bad_lines_are_named() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, "{\"text\": \"a\"}\n\n{\"text\": 3}\n[1]\n{broken\n").expect("write");
        let rows: Vec<_> = read_jsonl(&path).expect("open").collect();
        assert_eq!(rows.len(), 4);
        let first = rows[0].as_ref().expect("row");
        assert_eq!((first.line, first.text("text").expect("text")), (1, "a"));
        let message = first.text("body").expect_err("missing").to_string();
        assert!(message.ends_with(":1: field `body` is missing (there are `text`)"), "{message}");
        let number = rows[1].as_ref().expect("row").text("text").expect_err("no string");
        assert!(number.to_string().contains(":3: field `text` is no string"));
        assert!(rows[2].as_ref().expect_err("array").to_string().contains(":4: a JSON object"));
        assert!(rows[3].as_ref().expect_err("broken").to_string().contains(":5: not JSON"));
    }
}
