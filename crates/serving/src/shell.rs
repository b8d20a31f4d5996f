//! Words and folders in command lines.

/// A word as a shell reads it.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@+=,%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Whether what follows a part of a command line stands in its single quotes.
pub(crate) fn in_quotes(command: &str) -> bool {
    let mut is_quoted = false;
    let mut characters = command.chars();
    while let Some(c) = characters.next() {
        match c {
            '\'' => is_quoted = !is_quoted,
            '\\' if !is_quoted => drop(characters.next()),
            _ => {}
        }
    }
    is_quoted
}

/// A text inside of a JSON string that stands in single quotes.
pub(crate) fn in_json(text: &str) -> String {
    let json = serde_json::Value::from(text).to_string();
    json[1..json.len() - 1].replace('\'', r"'\''")
}
