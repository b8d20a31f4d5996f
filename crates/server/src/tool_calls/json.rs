//! Calls as JSON: an object with a name and arguments, or a list of such objects.

use std::ops::ControlFlow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::Calls;
use super::reader::Step;

/// Reads them as their text comes, each byte once.
#[derive(Default)]
pub(super) struct JsonBody {
    value: JsonValue,
}

impl JsonBody {
    pub(super) fn read(&mut self, text: &str, calls: &Calls) -> Step {
        let (start, end) = match self.value.read(text) {
            ControlFlow::Continue(()) => return Step::More,
            ControlFlow::Break(Err(end)) => return Step::Not(end),
            ControlFlow::Break(Ok(range)) => range,
        };
        let spoken = spoken(&text[start..end]).filter(|spoken| {
            !spoken.is_empty() && spoken.iter().all(|(name, _)| calls.function(name).is_some())
        });
        spoken.map_or(Step::Not(end), |spoken| Step::Calls(end, spoken))
    }
}

/// One call as models write it.
#[derive(Deserialize)]
struct Spoken<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

/// Names and arguments of JSON that is calls.
fn spoken(text: &str) -> Option<Vec<(String, String)>> {
    let spoken: Vec<Spoken<'_>> = if text.starts_with('[') {
        serde_json::from_str(text).ok()?
    } else {
        vec![serde_json::from_str(text).ok()?]
    };
    let pair = |Spoken { name, arguments }: Spoken<'_>| {
        Some((name, object(arguments.map_or("{}", RawValue::get))?))
    };
    spoken.into_iter().map(pair).collect()
}

/// The text of an object, as the model wrote it: no number loses digits. Some models write the object as a
/// string, as requests have it.
fn object(text: &str) -> Option<String> {
    if text.starts_with('{') {
        return Some(text.to_owned());
    }
    let inner: String = serde_json::from_str(text).ok()?;
    let inner: &RawValue = serde_json::from_str(&inner).ok()?;
    inner.get().starts_with('{').then(|| inner.get().to_owned())
}

/// The arguments alone, where the name stands before them.
pub(super) fn arguments(text: &str) -> Option<String> {
    let value: &RawValue = serde_json::from_str(text).ok()?;
    value.get().starts_with('{').then(|| value.get().to_owned())
}

/// Finds where an object or list ends, with white space before it.
#[derive(Default)]
pub(super) struct JsonValue {
    /// Bytes read, and where the value began.
    at: usize,
    start: usize,
    /// The brackets that are to come.
    closing: Vec<u8>,
    in_string: bool,
    is_escaped: bool,
}

impl JsonValue {
    /// Goes on in a text of which more has come. Ends with the bytes of the value, or with the byte at which
    /// it cannot be one.
    pub(super) fn read(
        &mut self,
        text: &str,
    ) -> ControlFlow<std::result::Result<(usize, usize), usize>> {
        for (at, byte) in text.bytes().enumerate().skip(self.at) {
            let has_begun = !self.closing.is_empty();
            match (has_begun, byte) {
                (false, b' ' | b'\n' | b'\r' | b'\t') => {}
                (false, b'{' | b'[') => {
                    self.start = at;
                    self.closing.push(closing(byte));
                }
                (true, _) if self.goes_on(byte) => {
                    if self.closing.is_empty() {
                        return ControlFlow::Break(Ok((self.start, at + 1)));
                    }
                }
                _ => return ControlFlow::Break(Err(at)),
            }
            self.at = at + 1;
        }
        ControlFlow::Continue(())
    }

    /// Whether a byte may come next within the value.
    fn goes_on(&mut self, byte: u8) -> bool {
        if self.in_string {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = true,
                b'"' => self.in_string = false,
                // JSON has them escaped.
                0..=0x1f => return false,
                _ => {}
            }
            return true;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.closing.push(closing(byte)),
            b'}' | b']' => return self.closing.pop() == Some(byte),
            b' ' | b'\n' | b'\r' | b'\t' | b',' | b':' | b'+' | b'-' | b'.' => {}
            other => return other.is_ascii_alphanumeric(),
        }
        true
    }
}

/// The bracket that ends what another one begins.
fn closing(bracket: u8) -> u8 {
    if bracket == b'{' { b'}' } else { b']' }
}
