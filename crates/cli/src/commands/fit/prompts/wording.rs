//! Texts of prompts: what tells them apart, and the pieces of a plain text.

/// Letters of a piece of a plain text that is asked.
const PIECE: usize = 800;

/// A text's words: numbers and punctuation alone make no other prompt. A text without words stands for itself.
pub(super) fn wording(text: &str) -> String {
    let words: Vec<&str> = text
        .split(|letter: char| !letter.is_alphabetic())
        .filter(|word| !word.is_empty())
        .collect();
    if words.is_empty() { text.to_owned() } else { words.join(" ") }
}

/// Paragraphs of a text, as many together as make a piece; a long paragraph is several pieces.
pub(super) fn pieces(text: &str) -> Vec<String> {
    let text = text.replace("\r\n", "\n");
    let mut pieces: Vec<String> = Vec::new();
    for paragraph in text.split("\n\n").map(str::trim).filter(|text| !text.is_empty()) {
        match pieces.last_mut() {
            Some(last) if last.len() < PIECE / 2 => {
                last.push_str("\n\n");
                last.push_str(paragraph);
            }
            _ => pieces.push(paragraph.to_owned()),
        }
    }
    pieces.iter().flat_map(|piece| cut(piece)).collect()
}

/// A text in parts of at most [`PIECE`] letters, between words where it has spaces.
fn cut(text: &str) -> Vec<String> {
    let (mut rest, mut parts) = (text, Vec::new());
    while let Some((end, _)) = rest.char_indices().nth(PIECE) {
        let space = rest[..end].rfind(char::is_whitespace).filter(|space| *space >= end / 2);
        let (part, after) = rest.split_at(space.unwrap_or(end));
        parts.push(part.trim().to_owned());
        rest = after.trim_start();
    }
    parts.push(rest.to_owned());
    parts.retain(|part| !part.is_empty());
    parts
}

/// Case and spaces tell nothing apart.
pub(super) fn normalised(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_asked_piece_by_piece() {
        let text = format!("A title\r\n\r\n{}\r\n\r\nAn end.", "some words ".repeat(200));
        let pieces = pieces(&text);
        assert!(pieces.len() >= 3 && pieces.iter().all(|piece| piece.chars().count() <= PIECE));
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(pieces.iter().flat_map(|piece| words(piece)).collect::<Vec<_>>(), words(&text));
        assert_eq!(cut(&"是".repeat(2 * PIECE + 1)).len(), 3);
    }
}
