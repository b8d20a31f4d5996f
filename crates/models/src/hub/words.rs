//! Text from a server, made fit for a terminal and a log.

/// Characters that are shown of one text.
const LONGEST: usize = 300;

/// One line without control characters, without `secrets`, of bounded length.
///
/// Characters that turn the direction of text are taken out as well: they make a line read as
/// another one.
pub fn printable(text: &str, secrets: &[&str]) -> String {
    let hide = |text: String| {
        let secrets = secrets.iter().filter(|secret| !secret.is_empty());
        secrets.fold(text, |text, secret| text.replace(secret, "***"))
    };
    // Twice: what is taken out of the text may have split a secret.
    let plain: String = hide(text.to_owned()).chars().filter_map(shown).collect();
    let plain = hide(plain);
    let words = plain.split_whitespace().collect::<Vec<_>>().join(" ");
    match words.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &words[..end]),
        None => words,
    }
}

fn shown(character: char) -> Option<char> {
    match character {
        '\n' | '\r' | '\t' | '\u{2028}' | '\u{2029}' => Some(' '),
        '\u{200b}'..='\u{200f}'
        | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}'
        | '\u{feff}' => None,
        other => (!other.is_control()).then_some(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_moves_the_cursor_or_tells_a_secret() {
        for (text, want) in [
            ("no such model", "no such model"),
            ("\u{1b}[2J\u{1b}]0;title\u{7}gone\r\nerror: x", "[2J]0;titlegone error: x"),
            ("\u{9b}31mred \u{202e}txt.exe", "31mred txt.exe"),
            ("bad token hf_secret here", "bad token *** here"),
            ("hf_se\u{0}cret", "***"),
        ] {
            assert_eq!(printable(text, &["hf_secret", ""]), want);
        }
        let long = printable(&"ü".repeat(1000), &[]);
        assert_eq!(long.chars().count(), LONGEST + 3);
        // What is cut off cannot leave a part of the secret.
        let cut = format!("{} hf_secret", "x".repeat(LONGEST - 4));
        assert!(!printable(&cut, &["hf_secret"]).contains("hf_"));
    }
}
