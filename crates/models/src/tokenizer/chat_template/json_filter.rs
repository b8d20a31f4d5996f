//! JSON as templates write it.

use std::io::Write;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind};
use serde::Serialize;

/// Widest indent.
const WIDEST_INDENT: usize = 100;

/// JSON as Python's `json.dumps` writes it: `", "` and `": "`, nothing escaped for HTML. Models were
/// trained on tool descriptions in this form.
#[expect(clippy::needless_pass_by_value, reason = "filters take their options so")]
pub(super) fn to_json(value: &minijinja::Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    for ignored in ["ensure_ascii", "sort_keys", "separators"] {
        let _ = options.get::<Option<minijinja::Value>>(ignored);
    }
    options.assert_all_used()?;
    let fail = |error: serde_json::Error| {
        Error::new(ErrorKind::BadSerialization, "tojson").with_source(error)
    };
    let mut bytes = Vec::new();
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
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced)),
    }
    .map_err(fail)?;
    String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "tojson").with_source(error))
}

/// One line with a space after commas and colons.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: Write + ?Sized>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}
