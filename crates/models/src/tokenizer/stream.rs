//! Token by token decoding.

use super::TextTokenizer;
use crate::error::Result;

/// Decodes a growing list of tokens; a piece of text is returned once later tokens can no longer
/// change it (multi-byte characters arrive whole).
pub struct TextStream<'a> {
    tokenizer: &'a TextTokenizer,
    ids: Vec<u32>,
    /// Tokens before this one are context that keeps leading spaces right.
    context: usize,
    /// Tokens before this one are printed.
    printed: usize,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a TextTokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), context: 0, printed: 0 }
    }

    /// Adds a token; returns the text that became complete, possibly empty.
    ///
    /// # Errors
    /// - the tokenizer's decoder fails
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        self.text_since(false)
    }

    /// The rest, with replacement characters for what never became complete.
    ///
    /// # Errors
    /// - the tokenizer's decoder fails
    pub fn finish(mut self) -> Result<String> {
        self.text_since(true)
    }

    fn text_since(&mut self, last: bool) -> Result<String> {
        let before = self.tokenizer.decode(&self.ids[self.context..self.printed], true)?;
        let now = self.tokenizer.decode(&self.ids[self.context..], true)?;
        if !last && now.ends_with('\u{FFFD}') {
            return Ok(String::new());
        }
        let new = match now.strip_prefix(before.as_str()) {
            Some(new) => new.to_owned(),
            // An invalid byte spoils the bytes before it, which are printed already.
            None => self.tokenizer.decode(&self.ids[self.printed..], true)?,
        };
        if !new.is_empty() {
            self.context = self.printed;
            self.printed = self.ids.len();
        }
        Ok(new)
    }
}
