//! Values as Python writes them, where a template prints lists, mappings or fractions: some show tools so.

use std::fmt::{self, Write};
use std::sync::LazyLock;

use minijinja::value::{Rest, ValueKind};
use minijinja::{
    Error, ErrorKind, FormatStyle, Output, State, Value, escape_formatter, format_filter,
};
use regex::Regex;

use super::tuples::is_tuple;

/// Nesting that is written.
const DEEPEST: usize = 100;
/// Entries that are written of what is made as it is read, such as a part of a list.
const MOST_ENTRIES: usize = 1 << 16;

/// Prints a value.
pub(super) fn print(
    out: &mut Output<'_>,
    state: &State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    if is_own(value) { put(out, value, 0) } else { escape_formatter(out, state, value) }
}

/// The filter `string`.
pub(super) fn string(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.clone()),
        _ if is_own(value) => quoted(value),
        _ => Ok(value.to_string().into()),
    }
}

/// A value as Python's `repr` writes it.
fn quoted(value: &Value) -> Result<Value, Error> {
    let mut text = String::new();
    put(&mut text, value, 0)?;
    Ok(text.into())
}

/// The filter `format`, as Python's `text % arguments`.
pub(super) fn format(text: &Value, Rest(arguments): Rest<Value>) -> Result<String, Error> {
    static CONVERSION: LazyLock<Regex> = LazyLock::new(|| {
        let expression = r"(?s)%(?:\(([^)]*)\))?([-#0 +]*(?:\*|\d*)(?:\.(?:\*|\d*))?)[hlL]?(.?)";
        Regex::new(expression).expect("a valid expression")
    });
    let wrong = |problem: &'static str| Error::new(ErrorKind::InvalidOperation, problem);
    let text = text.as_str().ok_or_else(|| wrong("what is formatted is no text"))?;
    let conversions = || CONVERSION.captures_iter(text);
    let own = conversions().filter(|one| one.get(1).is_none() && &one[3] != "%");
    let places: usize = own.map(|one| 1 + one[2].matches('*').count()).sum();
    let arguments: Vec<Value> = match arguments.as_slice() {
        [list] if is_list(list) && places != 1 => list.try_iter()?.collect(),
        _ => arguments,
    };
    let is_mapping = matches!(arguments.as_slice(), [one] if one.kind() == ValueKind::Map);
    if arguments.len() > places && !is_mapping {
        return Err(wrong("more arguments than the format takes"));
    }
    let (mut out, mut end, mut in_turn) = (String::new(), 0, arguments.iter());
    let mut next = || {
        let next = in_turn.next().cloned();
        next.ok_or_else(|| wrong("fewer arguments than the format takes"))
    };
    for conversion in conversions() {
        let whole = conversion.get_match();
        out.push_str(&text[end..whole.start()]);
        end = whole.end();
        if &conversion[3] == "%" {
            out.push('%');
            continue;
        }
        // A star stands for a width that is given before the value.
        let mut sizes = conversion[2].to_owned();
        while let Some(star) = sizes.find('*') {
            sizes.replace_range(star..=star, &i64::try_from(next()?)?.to_string());
        }
        let value = match conversion.get(1) {
            Some(key) if is_mapping => arguments[0].get_attr(key.as_str())?,
            Some(_) => return Err(wrong("a format with names takes a mapping")),
            None => next()?,
        };
        let (kind, value) = match &conversion[3] {
            "s" => ("s", string(&value)?),
            "r" => ("s", quoted(&value)?),
            "d" | "i" | "u" => ("d", cut_off(value)),
            kind => (kind, value),
        };
        let one = format!("%{sizes}{kind}");
        out += &format_filter(FormatStyle::Printf, &one, &[value])?;
    }
    out.push_str(&text[end..]);
    Ok(out)
}

/// A number without its fraction, as `%d` writes it. Another value stays as it is.
fn cut_off(value: Value) -> Value {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() && number.abs() < 1e38 => (number as i128).into(),
        _ => value,
    }
}

/// Whether the library writes it otherwise.
fn is_own(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Map => true,
        ValueKind::Number => !value.is_integer(),
        _ => is_list(value),
    }
}

fn is_list(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Seq => true,
        ValueKind::Iterable => value.len().is_some_and(|length| length <= MOST_ENTRIES),
        _ => false,
    }
}

fn put(out: &mut impl Write, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > DEEPEST {
        let problem = "a value nests too deeply to be printed";
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    match value.kind() {
        ValueKind::String => put_text(out, value.as_str().unwrap_or_default())?,
        ValueKind::Number if !value.is_integer() => {
            out.write_str(&fraction(f64::try_from(value.clone())?))?;
        }
        ValueKind::Undefined => out.write_str("Undefined")?,
        ValueKind::Map => {
            out.write_char('{')?;
            for (at, key) in value.try_iter()?.enumerate() {
                out.write_str(if at > 0 { ", " } else { "" })?;
                put(out, &key, depth + 1)?;
                out.write_str(": ")?;
                put(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.write_char('}')?;
        }
        _ if is_list(value) => {
            let (open, close) = match value.len() {
                Some(1) if is_tuple(value) => ("(", ",)"),
                _ if is_tuple(value) => ("(", ")"),
                _ => ("[", "]"),
            };
            out.write_str(open)?;
            for (at, entry) in value.try_iter()?.enumerate() {
                out.write_str(if at > 0 { ", " } else { "" })?;
                put(out, &entry, depth + 1)?;
            }
            out.write_str(close)?;
        }
        _ => write!(out, "{value}")?,
    }
    Ok(())
}

/// A text in quotes.
fn put_text(out: &mut impl Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for character in text.chars() {
        match character {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\\' => out.write_str("\\\\")?,
            _ if character == quote => write!(out, "\\{character}")?,
            _ if character == ' ' || !is_hidden(character) => out.write_char(character)?,
            _ => match u32::from(character) {
                code @ 0..=0xff => write!(out, "\\x{code:02x}")?,
                code @ 0x100..=0xffff => write!(out, "\\u{code:04x}")?,
                code => write!(out, "\\U{code:08x}")?,
            },
        }
    }
    out.write_char(quote)
}

/// Whether Python writes a character by its number: it steers, joins or parts others, or means nothing to all.
fn is_hidden(character: char) -> bool {
    character.is_control()
        || character.is_whitespace()
        || matches!(
            character,
            '\u{ad}'
                | '\u{600}'..='\u{605}'
                | '\u{61c}'
                | '\u{6dd}'
                | '\u{70f}'
                | '\u{890}'..='\u{891}'
                | '\u{8e2}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{202a}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{e000}'..='\u{f8ff}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e00ff}'
                | '\u{e01f0}'..='\u{10ffff}'
        )
}

/// The shortest digits that tell a number, with an exponent below 1e-4 and from 1e16 on.
pub(super) fn fraction(number: f64) -> String {
    if !number.is_finite() {
        return number.to_string().to_lowercase();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((scientific.as_str(), "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = number.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_have_python_s_digits() {
        for (number, wanted) in [
            (0.0, "0.0"),
            (-1.0, "-1.0"),
            (2.5, "2.5"),
            (0.0001, "0.0001"),
            (0.000_01, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-1.5e100, "-1.5e+100"),
            (f64::NAN, "nan"),
            (f64::NEG_INFINITY, "-inf"),
        ] {
            assert_eq!(fraction(number), wanted);
        }
    }

    #[test]
    fn texts_are_quoted_as_in_python() {
        for (text, wanted) in [
            ("a", "'a'"),
            ("it's", "\"it's\""),
            ("\"it's\"", "'\"it\\'s\"'"),
            ("\"", "'\"'"),
            ("é日😀", "'é日😀'"),
            ("\\\n\r\t\0\u{7f}", "'\\\\\\n\\r\\t\\x00\\x7f'"),
            ("a b\u{a0}\u{200d}\u{feff}\u{e0001}", "'a b\\xa0\\u200d\\ufeff\\U000e0001'"),
        ] {
            let mut out = String::new();
            put_text(&mut out, text).expect("written");
            assert_eq!(out, wanted);
        }
    }
}
