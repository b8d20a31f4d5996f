//! Python's methods of texts and lists that the library lacks, or that it has for bytes where Python counts characters.

use minijinja::{Error, ErrorKind, Value};

use super::arguments::Arguments;
use super::tuples::tuple;

/// Most characters that a text is filled up to, or that stand before its lines.
const WIDEST: i64 = 1 << 20;

/// The value of a method of a text; `None` where the library's method is as good.
pub(super) fn of_text(text: &str, name: &str, given: &[Value]) -> Result<Option<Value>, Error> {
    match name {
        "find" | "rfind" | "index" | "rindex" | "count" | "startswith" | "endswith" => {
            searched(text, name, given)
        }
        "split" | "rsplit" | "partition" | "rpartition" | "splitlines" => parted(text, name, given),
        "center" | "ljust" | "rjust" | "zfill" => filled(text, name, given).map(Some),
        "removeprefix" | "removesuffix" => {
            let arguments = Arguments::of(given, &["affix"])?;
            let Some(affix) = arguments.text(0)? else { return Ok(None) };
            let is_first = name == "removeprefix";
            let rest = if is_first { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            Ok(Some(rest.unwrap_or(text).into()))
        }
        _ if given.is_empty() => Ok(told(text, name)),
        _ => Ok(None),
    }
}

/// The value of a method of a list; `None` where the library has it.
pub(super) fn of_list(list: &Value, name: &str, given: &[Value]) -> Result<Option<Value>, Error> {
    match (name, given) {
        ("copy", []) => Ok(Some(list.clone())),
        ("index", [wanted]) => {
            let place = list.try_iter()?.position(|item| item == *wanted);
            place.map(|place| Some(place.into())).ok_or_else(absent)
        }
        _ => Ok(None),
    }
}

fn absent() -> Error {
    Error::new(ErrorKind::InvalidOperation, "`index`: there is no such part")
}

/// Methods without arguments.
fn told(text: &str, name: &str) -> Option<Value> {
    let is_cased = |of: fn(char) -> bool, other: fn(char) -> bool| {
        Value::from(text.chars().any(of) && !text.chars().any(other))
    };
    Some(match name {
        "isupper" => is_cased(char::is_uppercase, char::is_lowercase),
        "islower" => is_cased(char::is_lowercase, char::is_uppercase),
        "isdecimal" => (!text.is_empty() && text.chars().all(|c| c.is_ascii_digit())).into(),
        "isdigit" | "isnumeric" | "isalpha" | "isalnum" | "isspace" if text.is_empty() => {
            false.into()
        }
        "casefold" => text.to_lowercase().replace('ß', "ss").into(),
        "swapcase" => {
            let swapped = |c: char| {
                let is_large = c.is_uppercase();
                if is_large { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() }
            };
            text.chars().map(swapped).collect::<String>().into()
        }
        _ => return None,
    })
}

/// Methods that look for a text, from one character to another.
fn searched(text: &str, name: &str, given: &[Value]) -> Result<Option<Value>, Error> {
    let arguments = Arguments::of(given, &["sub", "start", "end"])?;
    let start = arguments.number(1)?.unwrap_or(0);
    let (before, part) = part(text, start, arguments.number(2)?.unwrap_or(i64::MAX));
    let is_end = match name {
        "startswith" | "endswith" => true,
        _ => arguments.text(0)?.is_none(),
    };
    if is_end {
        let ends = |end: &Value| match end.as_str() {
            Some(end) if name == "startswith" => Ok(part.starts_with(end)),
            Some(end) => Ok(part.ends_with(end)),
            None => Err(Error::new(ErrorKind::InvalidOperation, "an argument is no text")),
        };
        let Some(wanted) = arguments.value(0) else { return Ok(None) };
        if wanted.as_str().is_some() {
            return ends(wanted).map(|ends| Some(ends.into()));
        }
        for one in wanted.try_iter()? {
            if ends(&one)? {
                return Ok(Some(true.into()));
            }
        }
        return Ok(Some(false.into()));
    }
    let wanted = arguments.text(0)?.unwrap_or_default();
    if name == "count" {
        return Ok(Some(part.matches(wanted).count().into()));
    }
    let is_last = name.starts_with('r');
    let found = if is_last { part.rfind(wanted) } else { part.find(wanted) };
    match found {
        Some(byte) => Ok(Some((before + part[..byte].chars().count()).into())),
        None if name.ends_with("index") => Err(absent()),
        None => Ok(Some(Value::from(-1))),
    }
}

/// The characters of a text from one place to another, and how many are before them. Negative places count from the end.
fn part(text: &str, start: i64, end: i64) -> (usize, &str) {
    let length = text.chars().count();
    let place = |at: i64| {
        let far = usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX);
        if at < 0 { length.saturating_sub(far) } else { far.min(length) }
    };
    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
    let (start, end) = (place(start), place(end));
    (start, text.get(byte(start)..byte(end)).unwrap_or(""))
}

/// Methods that cut a text into parts.
fn parted(text: &str, name: &str, given: &[Value]) -> Result<Option<Value>, Error> {
    let list = |parts: Vec<&str>| parts.into_iter().map(Value::from).collect::<Value>();
    let three = |parts: [&str; 3]| tuple(parts.map(Value::from));
    if name == "splitlines" {
        let arguments = Arguments::of(given, &["keepends"])?;
        return Ok(Some(list(lines(text, arguments.is_true(0)))));
    }
    let arguments = Arguments::of(given, &["sep", "maxsplit"])?;
    let separator = arguments.text(0)?;
    if separator == Some("") {
        return Err(Error::new(ErrorKind::InvalidOperation, "a separator is empty"));
    }
    let most = arguments.number(1)?.and_then(|most| usize::try_from(most).ok());
    let most = most.unwrap_or(usize::MAX);
    Ok(Some(match (name, separator) {
        ("split", Some(by)) => list(text.splitn(most.saturating_add(1), by).collect()),
        ("split", None) => list(words(text, most)),
        ("rsplit", by) => {
            let mut parts: Vec<&str> = match by {
                Some(by) => text.rsplitn(most.saturating_add(1), by).collect(),
                None => last_words(text, most),
            };
            parts.reverse();
            list(parts)
        }
        ("partition", Some(by)) => match text.split_once(by) {
            Some((before, after)) => three([before, by, after]),
            None => three([text, "", ""]),
        },
        ("rpartition", Some(by)) => match text.rsplit_once(by) {
            Some((before, after)) => three([before, by, after]),
            None => three(["", "", text]),
        },
        _ => return Ok(None),
    }))
}

/// Words, and after so many the rest.
fn words(text: &str, most: usize) -> Vec<&str> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_start());
    while let Some((word, after)) = rest.split_once(char::is_whitespace) {
        if parts.len() == most {
            break;
        }
        parts.push(word);
        rest = after.trim_start();
    }
    parts.extend(Some(rest).filter(|rest| !rest.is_empty()));
    parts
}

/// Words from the last one on, and after so many the rest.
fn last_words(text: &str, most: usize) -> Vec<&str> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_end());
    while let Some((before, word)) = rest.rsplit_once(char::is_whitespace) {
        if parts.len() == most {
            break;
        }
        parts.push(word);
        rest = before.trim_end();
    }
    parts.extend(Some(rest).filter(|rest| !rest.is_empty()));
    parts
}

/// Lines, with or without what ends them.
pub(super) fn lines(text: &str, keeps_ends: bool) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_end) {
        let sign = rest[at..].chars().next().map_or(0, char::len_utf8);
        let after = at + if rest[at..].starts_with("\r\n") { 2 } else { sign };
        lines.push(&rest[..if keeps_ends { after } else { at }]);
        rest = &rest[after..];
    }
    lines.extend(Some(rest).filter(|rest| !rest.is_empty()));
    lines
}

/// A width that a template asks for. A negative one is none.
///
/// # Errors
/// - it is above [`WIDEST`]
pub(super) fn width(asked: i64) -> Result<usize, Error> {
    if asked > WIDEST {
        let problem = format!("a width of {asked}, at most {WIDEST}");
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    Ok(usize::try_from(asked).unwrap_or(0))
}

/// Methods that fill a text up.
fn filled(text: &str, name: &str, given: &[Value]) -> Result<Value, Error> {
    let is_number = name == "zfill";
    let takes: &[&str] = if is_number { &["width"] } else { &["width", "fillchar"] };
    let arguments = Arguments::of(given, takes)?;
    let width = width(arguments.number(0)?.unwrap_or(0))?;
    let fill = arguments.text(1)?.unwrap_or(if is_number { "0" } else { " " });
    if fill.chars().count() != 1 {
        let problem = "a text is filled up with one character";
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    let missing = width.saturating_sub(text.chars().count());
    // Python puts the odd one before a text in a place of odd width.
    let centred = missing / 2 + (missing & width & 1);
    let before = match name {
        "ljust" => 0,
        "center" => centred,
        _ => missing,
    };
    let is_signed = is_number && text.starts_with(['+', '-']);
    let (sign, rest) = text.split_at(usize::from(is_signed));
    let [before, after] = [before, missing - before].map(|count| fill.repeat(count));
    Ok([sign, &before, rest, &after].concat().into())
}
