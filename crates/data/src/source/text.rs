//! Plain text: one document a file, in field `text`.

use std::io::{BufRead, Read};
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::{Content, MAX_ROW_BYTES, RawRow, Rows};
use crate::error::DataError;

/// What some programs begin a text with.
pub(super) const BYTE_ORDER_MARK: &str = "\u{feff}";

/// A text without the mark at its beginning.
pub(super) fn without_mark(mut text: String) -> String {
    if text.starts_with(BYTE_ORDER_MARK) {
        text.drain(..BYTE_ORDER_MARK.len());
    }
    text
}

/// One row with fields `text` and `file`.
pub(super) fn read(path: &Path, reader: Box<dyn BufRead + Send>) -> Rows {
    let path: Arc<Path> = path.into();
    Box::new(std::iter::once_with(move || {
        let mut bytes = Vec::new();
        reader
            .take(MAX_ROW_BYTES as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(DataError::io(path.to_path_buf()))?;
        let content = if bytes.len() > MAX_ROW_BYTES {
            Content::Broken { problem: too_long(), raw: String::new() }
        } else {
            match String::from_utf8(bytes) {
                Ok(text) => {
                    let name = path.file_name().unwrap_or_default().to_string_lossy();
                    let mut fields = Map::new();
                    fields.insert("text".into(), Value::String(without_mark(text)));
                    fields.insert("file".into(), Value::String(name.into_owned()));
                    Content::Fields(fields)
                }
                Err(error) => Content::Broken {
                    problem: format!("not UTF-8: {}", error.utf8_error()),
                    raw: String::new(),
                },
            }
        };
        Ok(RawRow::new(&path, 1, content))
    }))
}

/// What a row beyond the limit is told.
pub(super) fn too_long() -> String {
    format!("longer than {} MiB", MAX_ROW_BYTES >> 20)
}

#[cfg(test)]
mod tests {
    use super::super::read_jsonl;

    #[test]
    fn a_byte_order_mark_is_no_text() {
        let dir = tempfile::tempdir().expect("tempdir");
        for (name, written, read) in [
            ("a.txt", "\u{feff}one\ntwo\n", "one\ntwo\n"),
            ("b.md", "\u{feff}\u{feff}x", "\u{feff}x"),
            ("c.txt", "x\u{feff}", "x\u{feff}"),
            ("d.txt", "\u{feff}", ""),
        ] {
            let path = dir.path().join(name);
            std::fs::write(&path, written).expect("write");
            let rows: Vec<_> = read_jsonl(&path).expect("open").collect();
            let [Ok(row)] = &rows[..] else { panic!("{name}: one row") };
            assert_eq!((row.text("text").expect("text"), row.line), (read, 1), "{name}");
        }
    }
}
