//! What is told of a template's errors.

use std::fmt::Display;

use minijinja::{Environment, Error};

/// Characters of an error that are shown.
pub(super) const SHOWN: usize = 1000;

/// An error in a line or some, without what steers terminals: it may quote anything.
pub(super) fn described(error: &impl Display) -> String {
    let text = error.to_string();
    let plain = text.chars().filter(|c| !c.is_control() || *c == '\n');
    plain.take(SHOWN).collect()
}

/// An error of a rewritten template, with the line of its source. The template as it was before (`plain`) is compiled,
/// too: where that fails, its error names what the author wrote.
pub(super) fn refusal(
    error: Error,
    environment: &mut Environment<'_>,
    plain: String,
    source: &str,
) -> String {
    let error = environment.add_template_owned("chat", plain).err().unwrap_or(error);
    match error.line().and_then(|line| source.lines().nth(line.checked_sub(1)?)) {
        Some(line) => described(&format!("{error}\n{}", line.trim())),
        None => described(&error),
    }
}
