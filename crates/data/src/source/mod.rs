//! Rows of files: JSONL, JSON, CSV (plain, gzip, zstd), Parquet, Arrow, plain text; folders of them.
//!
//! Every reader streams: memory holds one row (Parquet: one row group's pages, Arrow: one batch), never a file. A row
//! that cannot be read is an item of its own, so that one bad line does not end a file.

pub mod align;
mod arrow;
mod config;
mod csv;
mod files;
mod json;
mod parquet;
mod text;

use std::borrow::Cow;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::{DataError, Result};

use crate::row::origin;

pub use crate::row::Row;
pub use config::{PromptOverflow, SourceConfig};
pub use files::{data_files, is_data_file};

/// Longest row that is read, in bytes.
pub(crate) const MAX_ROW_BYTES: usize = 256 << 20;

/// What a file holds at one place, before it is understood.
#[derive(Debug, Clone)]
pub(crate) enum Content {
    /// JSON that is not parsed yet: parsing is done by the threads that tokenise.
    Json(String),
    /// Fields, from a format with types of its own.
    Fields(Map<String, Value>),
    /// Something that cannot become a row.
    Broken {
        /// What is wrong.
        problem: String,
        /// What was found, as far as it is text.
        raw: String,
    },
}

/// A row before it is parsed.
#[derive(Debug, Clone)]
pub struct RawRow {
    path: Arc<Path>,
    line: usize,
    content: Content,
}

impl RawRow {
    pub(crate) fn new(path: &Arc<Path>, line: usize, content: Content) -> Self {
        Self { path: Arc::clone(path), line, content }
    }

    /// Parses the row.
    ///
    /// # Errors
    /// - it is no JSON object, no UTF-8, or too long
    pub fn parse(&self) -> Result<Row> {
        let fields = match &self.content {
            Content::Fields(fields) => fields.clone(),
            Content::Broken { problem, .. } => return Err(self.problem(problem.clone())),
            Content::Json(text) => match serde_json::from_str::<Value>(text) {
                Ok(Value::Object(fields)) => fields,
                Ok(_) => return Err(self.problem("a JSON object was expected".to_owned())),
                Err(error) => return Err(self.problem(format!("not JSON: {error}"))),
            },
        };
        Ok(Row { path: self.path.to_path_buf(), line: self.line, fields })
    }

    /// The row as text, for people and for hashes.
    pub fn raw(&self) -> Cow<'_, str> {
        match &self.content {
            Content::Json(text) | Content::Broken { raw: text, .. } => Cow::Borrowed(text),
            Content::Fields(fields) => Cow::Owned(Value::Object(fields.clone()).to_string()),
        }
    }

    /// `file:line`, the file by its name alone.
    pub fn origin(&self) -> String {
        origin(&self.path, self.line)
    }

    fn problem(&self, problem: String) -> DataError {
        DataError::Row { path: self.path.to_path_buf(), line: self.line, problem }
    }
}

/// Rows of one file.
pub(crate) type Rows = Box<dyn Iterator<Item = Result<RawRow>>>;

/// The rows of a file that `next` reads, each with its line. An error is the last item: a reader might give
/// the same one for ever.
fn rows_of(
    path: &Path,
    mut next: impl FnMut(&Path) -> Result<Option<(usize, Content)>> + 'static,
) -> Rows {
    let path: Arc<Path> = path.into();
    let mut done = false;
    Box::new(std::iter::from_fn(move || {
        if done {
            return None;
        }
        let row = next(&path).transpose();
        done = !matches!(row, Some(Ok(_)));
        row.map(|row| row.map(|(line, content)| RawRow::new(&path, line, content)))
    }))
}

/// The rows of a file of some kind with types of its own, whose fields `next` reads.
fn rows_of_fields<E: fmt::Display>(
    path: &Path,
    kind: &'static str,
    mut next: impl FnMut() -> std::result::Result<Option<Map<String, Value>>, E> + 'static,
) -> Rows {
    let mut line = 0;
    rows_of(path, move |path| {
        let fields = guarded(kind, &mut next)
            .map_err(|problem| DataError::source(path, format!("after row {line}: {problem}")))?;
        line += 1;
        Ok(fields.map(|fields| (line, bounded(fields, MAX_ROW_BYTES))))
    })
}

/// Fields, unless their texts have more bytes than `most`: packed columns hold them in next to none.
fn bounded(fields: Map<String, Value>, most: usize) -> Content {
    if fields.values().map(text_bytes).sum::<usize>() > most {
        return Content::Broken { problem: text::too_long(), raw: String::new() };
    }
    Content::Fields(fields)
}

/// Bytes of the texts of a value.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(fields) => fields.values().map(text_bytes).sum(),
        _ => 0,
    }
}

/// Damaged files make the reading libraries panic in places; that becomes an error here.
fn guarded<T, E: fmt::Display>(
    kind: &str,
    read: impl FnOnce() -> std::result::Result<T, E>,
) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(_) => Err(format!("damaged {kind} file")),
    }
}

/// Iterates over the rows of a file, or of every data file in a folder in the order of their names.
///
/// # Errors
/// - the path does not exist or is of no known kind; a later item is an error where a file cannot
///   be read on (damaged compression, failing disk), and then the last one of its file
pub fn read_rows(path: &Path) -> Result<impl Iterator<Item = Result<RawRow>> + use<>> {
    rows_of_files(data_files(path)?)
}

/// The same of files, of which one is open at a time. It fails as [`read_rows`] does.
pub(crate) fn rows_of_files(
    files: Vec<PathBuf>,
) -> Result<impl Iterator<Item = Result<RawRow>> + use<>> {
    // The first file is opened here, so that a wrong path is told before any work.
    let mut first = files.first().map(|file| files::open(file)).transpose()?;
    Ok(files.into_iter().flat_map(move |file| -> Rows {
        match first.take().map_or_else(|| files::open(&file), Ok) {
            Ok(rows) => rows,
            Err(error) => Box::new(std::iter::once(Err(error))),
        }
    }))
}

/// Parsed rows of a file, the first malformed one an error.
///
/// # Errors
/// - as [`read_rows`]; a later item is an error where a row is malformed
pub fn read_jsonl(path: &Path) -> Result<impl Iterator<Item = Result<Row>> + use<>> {
    Ok(read_rows(path)?.map(|row| row?.parse()))
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
        assert!(number.to_string().contains(":3: field `text` is not a string"));
        assert!(rows[2].as_ref().expect_err("array").to_string().contains(":4: a JSON object"));
        assert!(rows[3].as_ref().expect_err("broken").to_string().contains(":5: not JSON"));
    }

    #[test]
    fn fields_of_packed_columns_are_as_bounded_as_lines() {
        let row = serde_json::json!({"text": "four", "turns": [{"content": "seven.."}], "n": 5});
        let fields = row.as_object().expect("an object").clone();
        assert!(matches!(bounded(fields.clone(), 11), Content::Fields(_)));
        let Content::Broken { problem, .. } = bounded(fields, 10) else { panic!("kept") };
        assert!(problem.contains("longer than"), "{problem}");
    }

    #[test]
    fn a_folder_is_read_file_by_file_in_the_order_of_names() {
        let dir = tempfile::tempdir().expect("tempdir");
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
            std::fs::write(path, text).expect("write");
        };
        write("b.jsonl", "{\"text\": \"2\"}\n{\"text\": \"3\"}");
        write("a/x.md", "1");
        write("c.txt", "4");
        write("ignored.bin", "?");
        // What tells of the data is none of it, but data may have such names.
        write("README.md", "about the data");
        write("a/LICENSE.txt", "a licence");
        write("dataset_infos.json", "{}");
        write("changelog.jsonl", "{\"text\": \"5\"}");
        let texts: Vec<String> = read_jsonl(dir.path())
            .expect("folder")
            .map(|row| row.expect("row").text("text").expect("text").to_owned())
            .collect();
        assert_eq!(texts, ["1", "2", "3", "4", "5"]);
    }

    #[test]
    fn unknown_and_missing_files_are_named_with_the_known_kinds() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("rows.xlsx");
        std::fs::write(&path, "").expect("write");
        let message = read_rows(&path).err().expect("unknown").to_string();
        assert!(message.contains("rows.xlsx") && message.contains(".parquet"), "{message}");
        let message = read_rows(&dir.path().join("no.jsonl")).err().expect("missing").to_string();
        assert!(message.contains("no.jsonl"), "{message}");
        let empty = dir.path().join("empty");
        std::fs::create_dir(&empty).expect("folder");
        assert!(read_rows(&empty).err().expect("empty").to_string().contains("no data file"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn files_whose_names_are_no_text_are_read_too() {
        use std::os::unix::ffi::OsStrExt;
        let dir = tempfile::tempdir().expect("tempdir");
        let name = std::ffi::OsStr::from_bytes(b"donn\xe9es.jsonl");
        std::fs::write(dir.path().join(name), "{\"text\": \"a\"}").expect("write");
        let rows: Vec<_> = read_jsonl(dir.path()).expect("folder").collect();
        assert!(matches!(&rows[..], [Ok(_)]), "{rows:?}");
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_regular_file_is_refused_before_it_loses_rows() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("rows.jsonl");
        let _socket = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        for path in [path.as_path(), dir.path()] {
            let message = read_rows(path).err().expect("no file").to_string();
            assert!(message.contains("rows.jsonl: its rows could be read only once"), "{message}");
        }
    }
}
