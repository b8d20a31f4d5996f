//! JSON as templates write it.

use std::io::Write;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::Value;

/// Widest indent.
const WIDEST_INDENT: usize = 100;
/// Most bytes of both separators.
const WIDEST_SEPARATORS: usize = 16;

/// JSON as Python's `json.dumps` writes it: `", "` and `": "`, nothing escaped for HTML. Models were
/// trained on tool descriptions in this form.
#[expect(clippy::needless_pass_by_value, reason = "filters take their options so")]
pub(super) fn to_json(value: &minijinja::Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _ = options.get::<Option<minijinja::Value>>("ensure_ascii");
    let is_sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        None => (", ", ": "),
        Some([item, key]) if item.len() + key.len() <= WIDEST_SEPARATORS => {
            (item.as_str(), key.as_str())
        }
        Some(_) => {
            let problem = "tojson: separators are two short texts";
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        }
    };
    let fail = |error: serde_json::Error| {
        Error::new(ErrorKind::BadSerialization, "tojson").with_source(error)
    };
    let mut bytes = Vec::new();
    let value = serde_json::to_value(value).map_err(fail)?;
    let value = if is_sorted { sorted(value) } else { value };
    match indent {
        Some(width) if width > WIDEST_INDENT => {
            let problem = format!("tojson: an indent of {width}, at most {WIDEST_INDENT}");
            return Err(Error::new(ErrorKind::InvalidOperation, problem));
        }
        Some(width) => {
            let spaces = vec![b' '; width];
            let pretty = serde_json::ser::PrettyFormatter::with_indent(&spaces);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, pretty))
        }
        None => {
            let spaced = Spaced { item: item.as_bytes(), key: key.as_bytes() };
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, spaced))
        }
    }
    .map_err(fail)?;
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

/// One line with these between items, and after keys.
struct Spaced<'a> {
    item: &'a [u8],
    key: &'a [u8],
}

impl serde_json::ser::Formatter for Spaced<'_> {
    fn begin_array_value<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(self.item) }
    }

    fn begin_object_key<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(self.item) }
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(self.key)
    }
}
