//! Jinja2's filters where the library's take other arguments or give other values.

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::arguments::Arguments;
use super::{methods, repr};

/// Digits after the point that `round` keeps at most; numbers have fewer.
const MOST_DIGITS: i64 = 400;
/// Digits before the point that it drops at most: the largest power of ten that is a number.
const MOST_DROPPED: i64 = 308;

/// Teaches an environment the filters.
pub(super) fn teach(environment: &mut Environment<'_>) {
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("round", round);
    environment.add_filter("join", join);
    environment.add_filter("indent", indent);
    environment.add_filter("replace", replace);
    environment.add_filter("title", title);
    environment.add_filter("escape", escape);
    environment.add_filter("e", escape);
    environment.add_filter("first", first);
    environment.add_filter("last", last);
}

fn wrong(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// What does not exist has no parts.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { minijinja::filters::length(value) }
}

fn first(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() { Ok(Value::UNDEFINED) } else { minijinja::filters::first(value) }
}

fn last(value: Value) -> Result<Value, Error> {
    if value.is_undefined() { Ok(value) } else { minijinja::filters::last(value) }
}

/// A whole number, or the default where the value is none.
fn int(value: &Value, Rest(given): Rest<Value>) -> Result<Value, Error> {
    let arguments = Arguments::of(&given, &["default", "base"])?;
    let base = arguments.number(1)?.unwrap_or(10);
    let default = || arguments.value(0).cloned().unwrap_or_else(|| Value::from(0));
    let cut = |number: f64| {
        let is_whole = number.is_finite() && number.abs() < 1e38;
        is_whole.then(|| Value::from(number.trunc() as i128))
    };
    let number = match value.as_str() {
        Some(text) => {
            let plain = text.trim().replace('_', "");
            let found = whole(&plain, base).map(Value::from);
            found.or_else(|| plain.parse().ok().and_then(cut))
        }
        None if value.is_integer() => Some(value.clone()),
        None if value.kind() == ValueKind::Bool => Some(i64::from(value.is_true()).into()),
        None => f64::try_from(value.clone()).ok().and_then(cut),
    };
    Ok(number.unwrap_or_else(default))
}

/// The number that digits to a base write.
fn whole(text: &str, base: i64) -> Option<i128> {
    let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?;
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let small = digits.to_lowercase();
    let digits = small.strip_prefix(prefix).unwrap_or(&small);
    let is_plain = digits.chars().all(|digit| digit.is_digit(base));
    is_plain.then(|| i128::from_str_radix(&format!("{sign}{digits}"), base).ok()).flatten()
}

/// A number with a fraction, or the default where the value is none.
fn float(value: &Value, Rest(given): Rest<Value>) -> Result<Value, Error> {
    let arguments = Arguments::of(&given, &["default"])?;
    let number = match value.as_str() {
        Some(text) => text.trim().replace('_', "").parse().ok(),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => f64::try_from(value.clone()).ok(),
    };
    let default = || arguments.value(0).cloned().unwrap_or_else(|| Value::from(0.0));
    Ok(number.map_or_else(default, Value::from))
}

/// A number with so many digits after the point: the nearest one, of two such the even one, or the next one down or up.
fn round(value: &Value, Rest(given): Rest<Value>) -> Result<Value, Error> {
    let arguments = Arguments::of(&given, &["precision", "method"])?;
    let digits = arguments.number(0)?.unwrap_or(0).clamp(-MOST_DROPPED, MOST_DIGITS);
    let method = arguments.text(1)?.unwrap_or("common");
    if value.is_integer() && method == "common" && digits >= 0 {
        return Ok(value.clone());
    }
    let number = f64::try_from(value.clone()).map_err(|_| wrong("`round` takes a number"))?;
    let power = |exponent: i64| 10f64.powi(i32::try_from(exponent).unwrap_or(0));
    let cut = |to_whole: fn(f64) -> f64| {
        let scale = power(digits);
        let whole = to_whole(number * scale);
        // A number that is too large for the scale has no such digits.
        if whole.is_finite() { whole / scale } else { number }
    };
    let rounded = match method {
        // The digits that are written round as Python's do, whatever the scale does to the number.
        "common" if digits >= 0 => {
            let places = usize::try_from(digits).unwrap_or(0);
            format!("{number:.places$}").parse().unwrap_or(number)
        }
        // Powers above one are whole numbers; those below it are not exact.
        "common" => (number / power(-digits)).round_ties_even() * power(-digits),
        "floor" => cut(f64::floor),
        "ceil" => cut(f64::ceil),
        _ => return Err(wrong("`round` knows `common`, `floor` and `ceil`")),
    };
    if value.is_integer() && method == "common" {
        return Ok((rounded as i128).into());
    }
    Ok(rounded.into())
}

/// Values one after the other, as Python prints them.
fn join(value: &Value, Rest(given): Rest<Value>) -> Result<String, Error> {
    let arguments = Arguments::of(&given, &["d", "attribute"])?;
    let between = arguments.value(0).map(repr::string).transpose()?;
    let between = between.as_ref().and_then(Value::as_str).unwrap_or_default();
    let mut text = String::new();
    for (at, item) in value.try_iter()?.enumerate() {
        if at > 0 {
            text.push_str(between);
        }
        let item = match arguments.value(1) {
            Some(path) => attribute(item, path)?,
            None => item,
        };
        text.push_str(repr::string(&item)?.as_str().unwrap_or_default());
    }
    Ok(text)
}

/// What lies at a path of names and places with points between them.
fn attribute(mut value: Value, path: &Value) -> Result<Value, Error> {
    let Some(names) = path.as_str() else { return value.get_item(path) };
    for name in names.split('.') {
        let key = name.parse::<i64>().map_or_else(|_| Value::from(name), Value::from);
        value = value.get_item(&key)?;
    }
    Ok(value)
}

/// A text with spaces, or another text, before its lines.
fn indent(value: &Value, Rest(given): Rest<Value>) -> Result<String, Error> {
    let arguments = Arguments::of(&given, &["width", "first", "blank"])?;
    let before = match arguments.value(0).and_then(Value::as_str) {
        Some(text) => text.to_owned(),
        None => " ".repeat(methods::width(arguments.number(0)?.unwrap_or(4))?),
    };
    // The end of a line at the end is kept.
    let text = format!("{}\n", repr::string(value)?);
    let mut indented = String::with_capacity(text.len());
    for (at, line) in methods::lines(&text, false).into_iter().enumerate() {
        if at > 0 {
            indented.push('\n');
        }
        let is_indented = match at {
            0 => arguments.is_true(1),
            _ => !line.is_empty() || arguments.is_true(2),
        };
        if is_indented {
            indented.push_str(&before);
        }
        indented.push_str(line);
    }
    Ok(indented)
}

/// A text with another one in place of all that are, or of the first ones.
fn replace(value: &Value, Rest(given): Rest<Value>) -> Result<String, Error> {
    let arguments = Arguments::of(&given, &["old", "new", "count"])?;
    let (Some(old), Some(new)) = (arguments.value(0), arguments.value(1)) else {
        return Err(wrong("`replace` takes what it replaces, and by what"));
    };
    let (value, old, new) = (repr::string(value)?, repr::string(old)?, repr::string(new)?);
    let [value, old, new] = [&value, &old, &new].map(|text| text.as_str().unwrap_or_default());
    Ok(match arguments.number(2)?.map(usize::try_from) {
        Some(Ok(count)) => value.replacen(old, new, count),
        _ => value.replace(old, new),
    })
}

/// A text whose words begin with a large letter; an apostrophe and a line below begin none.
fn title(value: &Value) -> Result<String, Error> {
    let text = repr::string(value)?;
    let (mut out, mut begins) = (String::new(), true);
    for character in text.as_str().unwrap_or_default().chars() {
        if begins {
            out.extend(character.to_uppercase());
        } else {
            out.extend(character.to_lowercase());
        }
        begins = character.is_whitespace() || matches!(character, '-' | '(' | '{' | '[' | '<');
    }
    Ok(out)
}

/// A text that is safe in HTML.
fn escape(value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let text = repr::string(value)?;
    let mut out = String::new();
    for character in text.as_str().unwrap_or_default().chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            _ => out.push(character),
        }
    }
    Ok(Value::from_safe_string(out))
}
