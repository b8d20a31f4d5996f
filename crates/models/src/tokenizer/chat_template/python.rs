//! What templates take from Python and from Jinja2 where the library does otherwise.

use minijinja::value::{Rest, ValueKind};
use minijinja::{Environment, Error, State, Value};
use minijinja_contrib::globals;
use time::OffsetDateTime;

use super::{filters, methods, operators, tuples};

/// Name of the function that tells the date.
pub(super) const DATE: &str = "strftime_now";

/// Teaches an environment methods, tests, operators, tuples, what takes turns, and the date, which is today's unless one
/// is given.
pub(super) fn teach(environment: &mut Environment<'_>, day: Option<OffsetDateTime>) {
    environment.set_unknown_method_callback(method);
    filters::teach(environment);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_test("callable", is_callable);
    environment.add_test("number", is_number);
    operators::teach(environment);
    tuples::teach(environment);
    environment.add_function("cycler", |items: Rest<Value>| globals::cycler(items.0));
    environment.add_function("joiner", globals::joiner);
    // A function of the library alone: in Jinja2 the name is free.
    environment.remove_global("debug");
    environment.add_function(DATE, move |format: String| {
        written(&format, day.unwrap_or_else(OffsetDateTime::now_utc))
    });
}

/// Python's methods.
fn method(
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let found = match value.as_str() {
        Some(text) => methods::of_text(text, method, arguments)?,
        None if value.kind() == ValueKind::Seq => methods::of_list(value, method, arguments)?,
        None if value.kind() == ValueKind::Map && method == "items" && arguments.is_empty() => {
            Some(tuples::items(value)?)
        }
        None => None,
    };
    if let Some(found) = found {
        return Ok(found);
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)
}

/// Whether a loop may go over a value: over `none` the library's may, Jinja2's may not.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && minijinja::tests::is_iterable(value)
}

/// Whether a value has a length and parts: to Jinja2 texts and mappings have, too.
fn is_sequence(value: &Value) -> bool {
    let kind = value.kind();
    matches!(kind, ValueKind::Map | ValueKind::Seq | ValueKind::String | ValueKind::Undefined)
}

/// Whether a value is a number; to Python truth values are such.
fn is_number(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
}

/// Whether a value is a function.
fn is_callable(value: &Value) -> bool {
    value.kind() == ValueKind::Plain
}

/// A time as Python's `strftime` writes it. What is no directive that is known stays.
fn written(format: &str, time: OffsetDateTime) -> String {
    let mut text = String::with_capacity(format.len());
    let mut rest = format;
    while let Some((before, after)) = rest.split_once('%') {
        text.push_str(before);
        // `%-d` is `%d` without a zero before it.
        let unpadded = after.strip_prefix('-');
        let mut characters = unpadded.unwrap_or(after).chars();
        match characters.next().and_then(|directive| field(directive, time)) {
            Some(field) if unpadded.is_some() => text.push_str(without_zeros(&field)),
            Some(field) => text.push_str(&field),
            None => {
                text.push('%');
                characters = after.chars();
            }
        }
        rest = characters.as_str();
    }
    text + rest
}

fn without_zeros(field: &str) -> &str {
    let number = field.trim_start_matches(['0', ' ']);
    if number.is_empty() { "0" } else { number }
}

/// What a directive stands for.
fn field(directive: char, time: OffsetDateTime) -> Option<String> {
    let short = |name: String| -> String { name.chars().take(3).collect() };
    let hour = time.hour();
    Some(match directive {
        'Y' => time.year().to_string(),
        'y' => format!("{:02}", time.year().rem_euclid(100)),
        'm' => format!("{:02}", u8::from(time.month())),
        'B' => time.month().to_string(),
        'b' | 'h' => short(time.month().to_string()),
        'd' => format!("{:02}", time.day()),
        'e' => format!("{:2}", time.day()),
        'j' => format!("{:03}", time.ordinal()),
        'A' => time.weekday().to_string(),
        'a' => short(time.weekday().to_string()),
        'H' => format!("{hour:02}"),
        'I' => format!("{:02}", (hour + 11) % 12 + 1),
        'M' => format!("{:02}", time.minute()),
        'S' => format!("{:02}", time.second()),
        'p' => (if hour < 12 { "AM" } else { "PM" }).to_owned(),
        'F' => written("%Y-%m-%d", time),
        'T' => written("%H:%M:%S", time),
        '%' => "%".to_owned(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_python_writes_them() {
        // A Tuesday.
        let time = OffsetDateTime::from_unix_timestamp(1_793_696_707).expect("a time");
        for (format, wanted) in [
            ("%Y-%m-%d", "2026-11-03"),
            ("%d %B %Y", "03 November 2026"),
            ("%A, %b %-d, %y (%j)", "Tuesday, Nov 3, 26 (307)"),
            ("%I:%M %p, %H:%M:%S, %T, %-M", "09:05 AM, 09:05:07, 09:05:07, 5"),
            ("100%% %F", "100% 2026-11-03"),
            ("%Q %-Q %é %", "%Q %-Q %é %"),
            ("", ""),
        ] {
            assert_eq!(written(format, time), wanted, "{format}");
        }
        let midnight = OffsetDateTime::UNIX_EPOCH;
        assert_eq!(written("%I %p %-H", midnight), "12 AM 0");
    }
}
