//! The bytes of text that tokens stand for.

use super::TextTokenizer;

/// The space as SentencePiece writes it.
const SPACE: char = '\u{2581}';

/// The byte that a character of a byte-level vocabulary stands for (GPT-2): visible characters of Latin-1
/// are themselves, the other bytes follow each other from U+0100 on.
fn byte_of(character: char) -> Option<u8> {
    let is_visible = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(character) {
        code @ 0..=0xff => Some(code as u8).filter(is_visible),
        code => {
            let place = code.checked_sub(0x100)? as usize;
            (0..=u8::MAX).filter(|byte| !is_visible(byte)).nth(place)
        }
    }
}

impl TextTokenizer {
    /// The bytes that each token adds to a text, by id; none of ids without a token, `None` for special
    /// tokens.
    pub fn token_bytes(&self) -> Vec<Option<Vec<u8>>> {
        let count = self.inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        (0..count as u32).map(|id| self.bytes_of(id)).collect()
    }

    /// The bytes that a token adds to a text; none of an id without a token, `None` for special tokens.
    pub fn bytes_of(&self, id: u32) -> Option<Vec<u8>> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        if added.get(&self.known(id)).is_some_and(|token| token.special) {
            return None;
        }
        Some(written(&self.token(id).unwrap_or_default(), self.is_byte_level))
    }

    /// Most bytes of a text that a token stands for, unless it stands for what the vocabulary does not have.
    pub fn longest_token(&self) -> usize {
        // No way of writing a token is shorter than its text.
        let longest = || self.inner.get_vocab(true).keys().map(String::len).max().unwrap_or(0);
        *self.longest.get_or_init(longest)
    }
}

/// What a token of the vocabulary stands for, by the way in which it is written.
fn written(token: &str, is_byte_level: bool) -> Vec<u8> {
    if is_byte_level {
        let bytes: Option<Vec<u8>> = token.chars().map(byte_of).collect();
        // One with other characters is decoded as it is written.
        return bytes.unwrap_or_else(|| token.as_bytes().to_vec());
    }
    let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match hex.filter(|hex| hex.len() == 2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace(SPACE, " ").into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_stand_for_all_bytes() {
        let characters = ('!'..='\u{143}').filter_map(byte_of);
        let mut bytes: Vec<u8> = characters.collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=u8::MAX).collect::<Vec<_>>());
        assert_eq!(written("\u{120}a\u{10a}", true), b" a\n");
        assert_eq!(written("a b", true), b"a b");
        assert_eq!(written("\u{2581}a", false), b" a");
        assert_eq!(written("<0x0A>", false), b"\n");
        assert_eq!(written("<0xA>", false), b"<0xA>");
    }
}
