//! Tables of text: a row of names, then a row a line; quoted fields may hold line breaks.

use std::io::{BufRead, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Map, Value};

use super::text::too_long;
use super::{Content, MAX_ROW_BYTES, Rows, rows_of};
use crate::error::{DataError, Result};

/// Rows of a table whose first row names the fields. Every value is a string.
pub(super) fn read(
    path: &Path,
    mut reader: Box<dyn BufRead + Send>,
    delimiter: u8,
) -> Result<Rows> {
    // The library counts a line where its line feed is read: with a carriage return before it that is
    // in the next row.
    let begin = reader.fill_buf().map_err(DataError::io(path))?;
    let end = begin.iter().position(|byte| *byte == b'\n').and_then(|at| at.checked_sub(1));
    let lines_before = usize::from(end.is_some_and(|at| begin[at] == b'\r'));
    let row_bytes = Arc::new(AtomicUsize::new(0));
    let bounded = Bounded { reader, row_bytes: Arc::clone(&row_bytes) };
    let mut records =
        csv::ReaderBuilder::new().delimiter(delimiter).flexible(true).from_reader(bounded);
    let names = records.byte_headers().map_err(|error| DataError::source(path, error))?;
    let name = |bytes: &[u8]| String::from_utf8(bytes.to_vec());
    let names: Vec<String> = names
        .iter()
        .map(name)
        .collect::<std::result::Result<_, _>>()
        .map_err(|_| DataError::source(path, "the names in its first row are not UTF-8"))?;
    let mut table = Table { records, names, lines_before, row_bytes };
    Ok(rows_of(path, move |path| table.row(path)))
}

/// Ends a row that is longer than any row may be: a quote that is never closed.
struct Bounded {
    reader: Box<dyn BufRead + Send>,
    row_bytes: Arc<AtomicUsize>,
}

impl Read for Bounded {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.reader.read(buffer)?;
        if self.row_bytes.fetch_add(count, Ordering::Relaxed) > MAX_ROW_BYTES {
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, too_long()));
        }
        Ok(count)
    }
}

struct Table {
    records: csv::Reader<Bounded>,
    names: Vec<String>,
    /// Lines that the library counts late.
    lines_before: usize,
    /// Bytes read for the row at hand.
    row_bytes: Arc<AtomicUsize>,
}

impl Table {
    /// The next row with its line; `None` at the end.
    fn row(&mut self, path: &Path) -> Result<Option<(usize, Content)>> {
        self.row_bytes.store(0, Ordering::Relaxed);
        let mut record = csv::ByteRecord::new();
        let is_row = self.records.read_byte_record(&mut record).map_err(|error| {
            let line = self.records.position().line();
            DataError::source(path, format!("after line {line}: {error}"))
        })?;
        let line = record.position().map_or(0, csv::Position::line) as usize;
        Ok(is_row.then(|| (line + self.lines_before, self.content(&record))))
    }

    fn content(&self, record: &csv::ByteRecord) -> Content {
        let raw = || record.iter().map(String::from_utf8_lossy).collect::<Vec<_>>().join("\t");
        if record.len() != self.names.len() {
            let (fields, names) = (record.len(), self.names.len());
            let problem = format!("{fields} fields where the first row names {names}");
            return Content::Broken { problem, raw: raw() };
        }
        let mut fields = Map::new();
        for (name, value) in self.names.iter().zip(record) {
            match std::str::from_utf8(value) {
                Ok(text) => fields.insert(name.clone(), Value::String(text.to_owned())),
                Err(error) => {
                    let problem = format!("field `{name}` is not UTF-8: {error}");
                    return Content::Broken { problem, raw: raw() };
                }
            };
        }
        Content::Fields(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{read_jsonl, read_rows};

    #[test]
    fn tables_give_rows_by_the_names_in_their_first_line() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("rows.csv");
        let text =
            b"\xef\xbb\xbfquestion,answer\n\"a, \"\"b\"\"\",\"two\nlines\"\nc,d,e\nf,g\nh,\xff\n";
        std::fs::write(&path, text).expect("write");
        let rows: Vec<_> = read_jsonl(&path).expect("open").collect();
        assert_eq!(rows.len(), 4);
        let first = rows[0].as_ref().expect("row");
        assert_eq!((first.line, first.text("question").expect("text")), (2, "a, \"b\""));
        assert_eq!(first.text("answer").expect("text"), "two\nlines");
        let message = rows[1].as_ref().expect_err("three fields").to_string();
        assert!(message.contains(":4: 3 fields where the first row names 2"), "{message}");
        assert_eq!(rows[2].as_ref().expect("row").line, 5);
        let second = read_rows(&path).expect("open").nth(1).expect("a row").expect("read");
        assert_eq!(second.raw(), "c\td\te");
        assert!(rows[3].as_ref().expect_err("bytes").to_string().contains("is not UTF-8"));
        let tabs = dir.path().join("rows.tsv");
        std::fs::write(&tabs, "text\tn\na,b\t1\n").expect("write");
        let rows: Vec<_> = read_jsonl(&tabs).expect("open").collect();
        assert_eq!(rows[0].as_ref().expect("row").text("text").expect("text"), "a,b");
        std::fs::write(&path, "text,n\r\na,1\r\nb,2\r\n").expect("write");
        let rows: Vec<_> = read_jsonl(&path).expect("open").map(|row| row.expect("row")).collect();
        assert_eq!(rows.iter().map(|row| row.line).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(rows[1].text("n").expect("text"), "2");
        std::fs::write(&path, "").expect("write");
        assert_eq!(read_jsonl(&path).expect("open").count(), 0);
    }
}
