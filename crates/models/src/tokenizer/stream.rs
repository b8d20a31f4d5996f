//! Token by token decoding.

use super::TextTokenizer;
use crate::error::Result;

/// Tokens that are decoded again at most with a new one.
const MOST_CONTEXT: usize = 8;
/// Most bytes of a character that is not complete.
const MOST_UNFINISHED: usize = 3;

/// Decodes a growing list of tokens; a piece of text is returned once later tokens can no longer
/// change it (multi-byte characters arrive whole).
pub struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    /// Tokens that have a text.
    ids: Vec<u32>,
    /// Tokens before this one are no longer looked at, and those from it on keep leading spaces right.
    context: usize,
    /// Tokens before this one are printed.
    printed: usize,
    /// Bytes of the others: they end in the beginning of a character.
    held: Vec<Vec<u8>>,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a TextTokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), context: 0, printed: 0, held: Vec::new() }
    }

    /// A text that goes on where `before` ends.
    pub(super) fn after(tokenizer: &'a TextTokenizer, before: &[u32]) -> Result<Self> {
        let mut stream = Self::new(tokenizer);
        for first in (before.len().saturating_sub(MOST_CONTEXT)..before.len()).rev() {
            let text = tokenizer.decode(&before[first..], true)?;
            // The end of it that is a text by itself.
            if !text.is_empty() && !text.contains(char::REPLACEMENT_CHARACTER) {
                stream.ids = before[first..].to_vec();
                stream.printed = stream.ids.len();
                break;
            }
        }
        Ok(stream)
    }

    /// Adds a token; returns the text that became complete, possibly empty.
    ///
    /// # Errors
    /// - the tokenizer's decoder fails
    pub fn push(&mut self, id: u32) -> Result<String> {
        // Special tokens, and ids without a token, add nothing.
        if let Some(bytes) = self.tokenizer.bytes_of(id).filter(|bytes| !bytes.is_empty()) {
            self.ids.push(id);
            self.held.push(bytes);
        }
        self.text_until(self.ids.len() - self.unfinished())
    }

    /// The rest, with replacement characters for what never became complete.
    ///
    /// # Errors
    /// - the tokenizer's decoder fails
    pub fn finish(mut self) -> Result<String> {
        self.text_until(self.ids.len())
    }

    /// Tokens at the end that have a part in a character that is not complete.
    fn unfinished(&self) -> usize {
        let mut left = unfinished(&self.held.concat());
        let has_part = |bytes: &&Vec<u8>| {
            let has_part = left > 0;
            left = left.saturating_sub(bytes.len());
            has_part
        };
        self.held.iter().rev().take_while(has_part).count()
    }

    /// The text of the tokens that are not printed, up to one.
    fn text_until(&mut self, end: usize) -> Result<String> {
        if end == self.printed {
            return Ok(String::new());
        }
        let before = self.tokenizer.decode(&self.ids[self.context..self.printed], true)?;
        let now = self.tokenizer.decode(&self.ids[self.context..end], true)?;
        let new = match now.strip_prefix(before.as_str()) {
            Some(new) if !new.contains(char::REPLACEMENT_CHARACTER) => new.to_owned(),
            // An invalid byte spoils those beside it, whether they are printed or not.
            _ => self.tokenizer.decode(&self.ids[self.printed..end], true)?,
        };
        // What has no text by itself, like a space at the start, is context with what is before it.
        if !new.is_empty() || end - self.context >= MOST_CONTEXT {
            self.context = self.printed;
        }
        self.held.drain(..end - self.printed);
        self.printed = end;
        Ok(new)
    }
}

/// Bytes at the end that begin a character.
fn unfinished(bytes: &[u8]) -> usize {
    let begins = |count: &usize| {
        let end = &bytes[bytes.len() - count..];
        std::str::from_utf8(end)
            .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
    };
    (1..=bytes.len().min(MOST_UNFINISHED)).find(begins).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::checked;
    use super::*;

    /// Ids of the words, and of the byte 0.
    const SPACE: u32 = 1;
    const HELLO: u32 = 2;
    const WORLD: u32 = 3;
    const BYTES: u32 = 4;

    fn byte(byte: u8) -> u32 {
        BYTES + u32::from(byte)
    }

    /// Llama's way: a byte has a token, and the first space of a text is left out.
    fn tokenizer() -> TextTokenizer {
        let mut words = json!({ "<s>": 0, "\u{2581}": SPACE, "\u{2581}Hello": HELLO });
        words["\u{2581}world"] = WORLD.into();
        for own in 0..=u8::MAX {
            words[format!("<0x{own:02X}>")] = byte(own).into();
        }
        let document = json!({
            "version": "1.0", "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "added_tokens": [{
                "id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false
            }],
            "decoder": { "type": "Sequence", "decoders": [
                { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " },
                { "type": "ByteFallback" }, { "type": "Fuse" },
                { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
            ] },
            "model": { "type": "BPE", "vocab": words, "merges": [], "byte_fallback": true }
        });
        let bytes = serde_json::to_vec(&document).expect("JSON");
        TextTokenizer::new(checked::from_json(bytes).expect("tokenizer"), None, true)
    }

    /// Texts of the tokens one by one.
    fn pushed(mut stream: TextStream<'_>, ids: &[u32]) -> Vec<String> {
        let mut texts: Vec<String> =
            ids.iter().map(|id| stream.push(*id).expect("decoded")).collect();
        texts.push(stream.finish().expect("decoded"));
        texts
    }

    #[test]
    fn the_first_space_of_a_text_that_goes_on_stays() {
        let tokenizer = tokenizer();
        let (e, acute) = (byte(0xC3), byte(0xA9));
        for (before, next, wanted) in [
            (vec![0, HELLO], vec![WORLD], " world"),
            (vec![HELLO, SPACE], vec![WORLD], " world"),
            // A part of a character before it, and one that goes on.
            (vec![acute, HELLO], vec![WORLD], " world"),
            (vec![HELLO, e, acute], vec![e, acute], "\u{e9}"),
            // Text begins.
            (vec![0], vec![WORLD], "world"),
            (vec![], vec![WORLD], "world"),
        ] {
            let stream = tokenizer.stream_after(&before).expect("decoded");
            assert_eq!(pushed(stream, &next).concat(), wanted, "{before:?} {next:?}");
        }
        assert_eq!(pushed(tokenizer.stream(), &[SPACE, WORLD]), ["", " world", ""]);
    }

    /// However long they last, and whatever they end in.
    #[test]
    fn bytes_that_are_no_character_and_tokens_without_text_are_not_held() {
        let tokenizer = tokenizer();
        let character = [0xF0, 0x9F, 0x98, 0x80].map(byte);
        let replacement = [0xEF, 0xBF, 0xBD].map(byte);
        for (run, text) in [
            (vec![byte(0xFF)], "\u{FFFD}"),
            (vec![byte(0x80)], "\u{FFFD}"),
            (replacement.to_vec(), "\u{FFFD}"),
            (vec![0], ""),
            // No token has this id.
            (vec![u32::MAX], ""),
        ] {
            let mut stream = tokenizer.stream();
            assert_eq!(stream.push(HELLO).expect("decoded"), "Hello");
            for turn in 0..200 {
                let told: String =
                    run.iter().map(|id| stream.push(*id).expect("decoded")).collect();
                assert_eq!(told, text, "{run:?} {turn}");
                assert!(stream.ids.len() - stream.context <= MOST_CONTEXT, "{run:?} {turn}");
            }
            let rest = [&character[..], &[WORLD]].concat();
            assert_eq!(pushed(stream, &rest).concat(), "\u{1F600} world", "{run:?}");
        }
    }

    #[test]
    fn the_beginning_of_a_character_is_told_from_what_is_none() {
        for (bytes, count) in [
            (&b""[..], 0),
            (&b"a"[..], 0),
            (&b"a\xC3"[..], 1),
            (&b"\xC3\xA9"[..], 0),
            (&b"\xE2\x80"[..], 2),
            (&b"\xF0\x9F\x98"[..], 3),
            (&b"\xF0\x9F\x98\x80"[..], 0),
            (&b"\x80\x80"[..], 0),
            (&b"\xFF"[..], 0),
            (&b"\xE0\x80"[..], 0),
            (&b"\xFF\xE2"[..], 1),
        ] {
            assert_eq!(unfinished(bytes), count, "{bytes:?}");
        }
    }
}
