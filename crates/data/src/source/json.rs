//! JSON objects: one a line, or the elements of one array, read as they come.

use std::io::BufRead;
use std::path::Path;

use super::text::{BYTE_ORDER_MARK, too_long, without_mark};
use super::{Content, MAX_ROW_BYTES, Rows, rows_of};
use crate::error::{DataError, Result};

/// A `.json` file: an array of objects, or objects a line.
pub(super) fn read_any(path: &Path, mut reader: Box<dyn BufRead + Send>) -> Result<Rows> {
    let begin = reader.fill_buf().map_err(DataError::io(path))?;
    if begin.starts_with(BYTE_ORDER_MARK.as_bytes()) {
        reader.consume(BYTE_ORDER_MARK.len());
    }
    let mut line = 1;
    loop {
        let buffer = reader.fill_buf().map_err(DataError::io(path))?;
        match buffer.first() {
            Some(byte) if byte.is_ascii_whitespace() => {
                line += usize::from(*byte == b'\n');
                reader.consume(1);
            }
            Some(b'[') => {
                reader.consume(1);
                let mut elements = Elements { reader, line, is_over: false };
                return Ok(rows_of(path, move |path| {
                    let element = elements.element().map_err(after(path, elements.line))?;
                    Ok(element.map(|(line, bytes, length)| (line, content(bytes, length))))
                }));
            }
            _ => return Ok(read_lines(path, reader, line)),
        }
    }
}

/// One object a line, the first one in the line `first`; blank lines are skipped.
pub(super) fn read_lines(path: &Path, mut reader: Box<dyn BufRead + Send>, first: usize) -> Rows {
    let mut line = first - 1;
    rows_of(path, move |path| {
        loop {
            let (mut bytes, mut length) = (Vec::new(), 0);
            read_line(&mut reader, &mut bytes, &mut length).map_err(after(path, line))?;
            if length == 0 {
                return Ok(None);
            }
            line += 1;
            let content = content(bytes, length);
            if !matches!(&content, Content::Json(text) if text.trim().is_empty()) {
                return Ok(Some((line, content)));
            }
        }
    })
}

/// Says after which line a file broke off (a cut gzip or zstd stream).
fn after(path: &Path, line: usize) -> impl FnOnce(std::io::Error) -> DataError {
    let fail = DataError::io(path);
    move |source| fail(std::io::Error::new(source.kind(), format!("after line {line}: {source}")))
}

/// Reads to the end of a line; beyond the limit bytes are counted but not kept.
fn read_line(
    reader: &mut dyn BufRead,
    bytes: &mut Vec<u8>,
    length: &mut usize,
) -> std::io::Result<()> {
    loop {
        let buffer = match reader.fill_buf() {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            other => other?,
        };
        let newline = buffer.iter().position(|byte| *byte == b'\n');
        let end = newline.unwrap_or(buffer.len());
        if bytes.len() + end <= MAX_ROW_BYTES {
            bytes.extend_from_slice(&buffer[..end]);
        }
        let used = end + usize::from(newline.is_some());
        *length += used;
        reader.consume(used);
        if newline.is_some() || used == 0 {
            return Ok(());
        }
    }
}

fn content(bytes: Vec<u8>, length: usize) -> Content {
    if length > bytes.len() + 1 {
        return Content::Broken { problem: too_long(), raw: String::new() };
    }
    match String::from_utf8(bytes) {
        Ok(text) => Content::Json(without_mark(text)),
        Err(error) => Content::Broken {
            problem: format!("not UTF-8: {}", error.utf8_error()),
            raw: String::from_utf8_lossy(error.as_bytes()).into_owned(),
        },
    }
}

/// Elements of an array, cut out by brackets and quotes alone; parsing them comes later.
struct Elements {
    reader: Box<dyn BufRead + Send>,
    line: usize,
    is_over: bool,
}

impl Elements {
    /// The next element with its first line and its length; none after the array.
    fn element(&mut self) -> std::io::Result<Option<(usize, Vec<u8>, usize)>> {
        if self.is_over {
            return self.end();
        }
        let (mut bytes, mut length, mut first) = (Vec::new(), 0, self.line);
        let (mut depth, mut quoted, mut escaped) = (0_usize, false, false);
        loop {
            let Some(&byte) = self.reader.fill_buf()?.first() else {
                return Err(std::io::Error::new(
                    std::io::ErrorKind::UnexpectedEof,
                    "the array has no end",
                ));
            };
            self.reader.consume(1);
            self.line += usize::from(byte == b'\n');
            if !quoted && depth == 0 && matches!(byte, b',' | b']') {
                self.is_over = byte == b']';
                // Commas between elements, and what stands before the end of an empty array.
                let blank = bytes.is_empty();
                if blank && self.is_over {
                    return self.end();
                }
                if !blank {
                    return Ok(Some((first, bytes, length)));
                }
                continue;
            }
            if bytes.is_empty() && byte.is_ascii_whitespace() {
                first = self.line;
                continue;
            }
            match byte {
                _ if escaped => escaped = false,
                b'\\' if quoted => escaped = true,
                b'"' => quoted = !quoted,
                b'{' | b'[' if !quoted => depth += 1,
                b'}' | b']' if !quoted => depth = depth.saturating_sub(1),
                _ => {}
            }
            length += 1;
            if bytes.len() < MAX_ROW_BYTES {
                bytes.push(byte);
            }
        }
    }

    /// No element more; white space alone may follow the array, for other rows would be lost.
    fn end<T>(&mut self) -> std::io::Result<Option<T>> {
        while let Some(&byte) = self.reader.fill_buf()?.first() {
            if !byte.is_ascii_whitespace() {
                return Err(std::io::Error::new(
                    std::io::ErrorKind::InvalidData,
                    "more follows the end of the array: give one array, or an object a line",
                ));
            }
            self.line += usize::from(byte == b'\n');
            self.reader.consume(1);
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::super::read_jsonl;
    use super::*;
    use std::io::Write;

    fn texts(path: &Path) -> Vec<std::result::Result<(usize, String), String>> {
        let row = |row: Result<super::super::Row>| {
            let row = row.map_err(|error| error.to_string())?;
            Ok((row.line, row.text("text").map_err(|error| error.to_string())?.to_owned()))
        };
        read_jsonl(path).expect("open").map(row).collect()
    }

    #[test]
    fn compressed_lines_read_like_plain_ones() {
        let dir = tempfile::tempdir().expect("tempdir");
        let plain = "\u{feff}{\"text\": \"a\"}\r\n\n{\"text\": \"b\"}\n";
        std::fs::write(dir.path().join("r.jsonl"), plain).expect("write");
        let file = std::fs::File::create(dir.path().join("r.jsonl.gz")).expect("create");
        let mut gzip = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
        gzip.write_all(plain.as_bytes()).expect("write");
        gzip.finish().expect("finish");
        let packed = zstd::encode_all(plain.as_bytes(), 1).expect("zstd");
        std::fs::write(dir.path().join("r.jsonl.zst"), &packed).expect("write");
        let expected = vec![Ok((1, "a".to_owned())), Ok((3, "b".to_owned()))];
        for name in ["r.jsonl", "r.jsonl.gz", "r.jsonl.zst"] {
            assert_eq!(texts(&dir.path().join(name)), expected, "{name}");
        }
        std::fs::write(dir.path().join("cut.jsonl.zst"), &packed[..packed.len() - 3]).expect("cut");
        let cut = texts(&dir.path().join("cut.jsonl.zst"));
        let last = cut.last().expect("an item").as_ref().expect_err("cut off");
        assert!(last.contains("cut.jsonl.zst: after line"), "{last}");
    }

    #[test]
    fn an_array_gives_its_elements_with_their_lines() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("rows.json");
        let text = "\n[ {\"text\": \"a, ]\\\"}\", \"l\": [1, {}]},\n\n {\"text\": \"b\"}, 7,\n{\"text\":}]";
        std::fs::write(&path, text).expect("write");
        let rows = texts(&path);
        assert_eq!(rows[0], Ok((2, "a, ]\"}".to_owned())));
        assert_eq!(rows[1], Ok((4, "b".to_owned())));
        assert!(rows[2].as_ref().expect_err("number").contains(":4: a JSON object"));
        assert!(rows[3].as_ref().expect_err("broken").contains(":5: not JSON"));
        assert_eq!(rows.len(), 4);
        std::fs::write(&path, "[]\n").expect("write");
        assert!(texts(&path).is_empty());
        std::fs::write(&path, "[{\"text\": \"a\"}]\n\n[{\"text\": \"b\"}]\n").expect("write");
        let rows = texts(&path);
        assert_eq!((rows.len(), &rows[0]), (2, &Ok((1, "a".to_owned()))));
        let message = rows[1].as_ref().expect_err("a second array");
        assert!(message.contains("after line 3: more follows the end of the array"), "{message}");
        std::fs::write(&path, "[{\"text\": \"a\"}, {").expect("write");
        let rows = texts(&path);
        assert!(rows[1].as_ref().expect_err("cut").contains("the array has no end"));
        for text in
            ["{\"text\": \"a\"}\n", "\u{feff}{\"text\": \"a\"}\n", "\u{feff}[{\"text\": \"a\"}]"]
        {
            std::fs::write(&path, text).expect("write");
            assert_eq!(texts(&path), [Ok((1, "a".to_owned()))], "{text}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_one_bad_row() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, b"\xff\xfe\n{\"text\": \"b\"}\n").expect("write");
        let rows = texts(&path);
        assert!(rows[0].as_ref().expect_err("bytes").contains(":1: not UTF-8"));
        assert_eq!(rows[1], Ok((2, "b".to_owned())));
    }
}
