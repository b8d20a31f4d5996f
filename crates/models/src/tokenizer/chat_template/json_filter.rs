//! JSON as templates write it.

use std::io::Write;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::Value;

use super::repr;

/// Widest indent.
const WIDEST_INDENT: usize = 100;
/// Most bytes of both separators.
const WIDEST_SEPARATORS: usize = 16;

/// JSON as Python's `json.dumps` writes it: `", "` and `": "`, nothing escaped for HTML. Models were
/// trained on tool descriptions in this form.
#[expect(clippy::needless_pass_by_value, reason = "filters take their options so")]
pub(super) fn to_json(value: &minijinja::Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let escapes = options.get::<Option<minijinja::Value>>("ensure_ascii")?;
    let is_ascii = escapes.is_some_and(|escapes| escapes.is_true());
    let is_sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = match separators.as_deref() {
        None => (item, ": "),
        Some([item, key]) if item.len() + key.len() <= WIDEST_SEPARATORS => {
            (item.as_str(), key.as_str())
        }
        Some(_) => {
            let problem = "tojson: separators are two short texts";
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        }
    };
    if let Some(width) = indent.filter(|width| *width > WIDEST_INDENT) {
        let problem = format!("tojson: an indent of {width}, at most {WIDEST_INDENT}");
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    let fail = |error: serde_json::Error| {
        Error::new(ErrorKind::BadSerialization, "tojson").with_source(error)
    };
    let mut bytes = Vec::new();
    let value = serde_json::to_value(value).map_err(fail)?;
    let value = if is_sorted { sorted(value) } else { value };
    let (item, key) = (item.as_bytes(), key.as_bytes());
    let layout = Layout { item, key, indent, is_ascii, depth: 0, is_empty: true };
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, layout);
    value.serialize(&mut serializer).map_err(fail)?;
    String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "tojson").with_source(error))
}

/// The same with the keys of all objects in order.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.into_iter().map(|(k, v)| (k, sorted(v))).collect();
            fields.sort_by(|one, other| one.0.cmp(&other.0));
            Value::Object(fields.into_iter().collect())
        }
        Value::Array(values) => values.into_iter().map(sorted).collect(),
        other => other,
    }
}

/// These between items and after keys, and with an indent a line for each item.
struct Layout<'a> {
    item: &'a [u8],
    key: &'a [u8],
    indent: Option<usize>,
    /// Whether characters beyond ASCII are written by their numbers.
    is_ascii: bool,
    depth: usize,
    /// Whether the innermost list has no item so far.
    is_empty: bool,
}

impl Layout<'_> {
    fn open<W: Write + ?Sized>(&mut self, out: &mut W, bracket: &[u8]) -> std::io::Result<()> {
        self.depth += 1;
        self.is_empty = true;
        out.write_all(bracket)
    }

    fn close<W: Write + ?Sized>(&mut self, out: &mut W, bracket: &[u8]) -> std::io::Result<()> {
        self.depth -= 1;
        if !self.is_empty {
            self.line(out)?;
        }
        self.is_empty = false;
        out.write_all(bracket)
    }

    fn begin_item<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        self.is_empty = false;
        if !first {
            out.write_all(self.item)?;
        }
        self.line(out)
    }

    fn line<W: Write + ?Sized>(&self, out: &mut W) -> std::io::Result<()> {
        let Some(width) = self.indent else { return Ok(()) };
        out.write_all(b"\n")?;
        out.write_all(&vec![b' '; width * self.depth])
    }
}

impl serde_json::ser::Formatter for Layout<'_> {
    fn write_f64<W: Write + ?Sized>(&mut self, out: &mut W, number: f64) -> std::io::Result<()> {
        out.write_all(repr::fraction(number).as_bytes())
    }

    fn write_string_fragment<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        fragment: &str,
    ) -> std::io::Result<()> {
        if !self.is_ascii {
            return out.write_all(fragment.as_bytes());
        }
        let is_plain = |character: char| matches!(character, ' '..='~');
        for character in fragment.chars() {
            if is_plain(character) {
                write!(out, "{character}")?;
                continue;
            }
            for unit in character.encode_utf16(&mut [0; 2]) {
                write!(out, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }

    fn begin_array<W: Write + ?Sized>(&mut self, out: &mut W) -> std::io::Result<()> {
        self.open(out, b"[")
    }

    fn end_array<W: Write + ?Sized>(&mut self, out: &mut W) -> std::io::Result<()> {
        self.close(out, b"]")
    }

    fn begin_object<W: Write + ?Sized>(&mut self, out: &mut W) -> std::io::Result<()> {
        self.open(out, b"{")
    }

    fn end_object<W: Write + ?Sized>(&mut self, out: &mut W) -> std::io::Result<()> {
        self.close(out, b"}")
    }

    fn begin_array_value<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.begin_item(out, first)
    }

    fn begin_object_key<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.begin_item(out, first)
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(self.key)
    }
}
