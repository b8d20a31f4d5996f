//! Tokens of one row with their loss mask.

use std::ops::Range;
use std::path::Path;

use crate::error::{DataError, Result};
use crate::source::{Row, read_jsonl};
use crate::template::{Learn, Template};

/// What this crate needs of a tokenizer.
pub trait TextEncoder {
    /// Ids of a text and the byte range that each covers.
    ///
    /// # Errors
    /// - the text cannot be encoded; the message says why
    fn encode(&self, text: &str) -> std::result::Result<(Vec<u32>, Vec<Range<usize>>), String>;

    /// Text of `(role, content)` turns through the model's chat template.
    ///
    /// # Errors
    /// - there is no template or it refuses the turns
    fn render_chat(
        &self,
        turns: &[(&str, &str)],
        add_generation_prompt: bool,
    ) -> std::result::Result<String, String>;

    /// The end-of-text token.
    fn end_of_text(&self) -> Option<u32>;
}

/// One training text. Its index in the data set keys its random draws.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    /// Token ids, `[T]`.
    pub ids: Vec<u32>,
    /// Whether a token may be learned as a label, `[T]`.
    pub loss_mask: Vec<bool>,
    /// `file:line` that it came from.
    pub origin: String,
}

impl Document {
    /// Encodes a row in one pass; a token is learned if it touches a learned byte.
    ///
    /// # Errors
    /// - the row cannot be rendered or encoded
    pub fn from_row(
        row: &Row,
        template: &Template,
        learn: Learn,
        encoder: &dyn TextEncoder,
    ) -> Result<Self> {
        let rendered = template.render(row, learn, encoder)?;
        let (mut ids, offsets) =
            encoder.encode(&rendered.text).map_err(|problem| row.problem(problem))?;
        let learned = &rendered.learned;
        let mut loss_mask: Vec<bool> = offsets
            .iter()
            .map(|token| token.start < learned.end && token.end > learned.start)
            .collect();
        if rendered.append_end
            && let Some(end) = encoder.end_of_text()
        {
            ids.push(end);
            loss_mask.push(true);
        }
        Ok(Self { ids, loss_mask, origin: row.origin() })
    }
}

/// Reads a whole JSONL file into documents, at most `limit_tokens` tokens of it.
///
/// # Errors
/// - the file is unreadable, a row malformed, or no token is left to learn
pub fn read_documents(
    path: &Path,
    template: &Template,
    learn: Learn,
    encoder: &dyn TextEncoder,
    limit_tokens: Option<usize>,
) -> Result<Vec<Document>> {
    let mut documents = Vec::new();
    let (mut tokens, mut rows) = (0, 0);
    for row in read_jsonl(path)? {
        let document = Document::from_row(&row?, template, learn, encoder)?;
        rows += 1;
        tokens += document.ids.len();
        // A single token has no label after it.
        if document.ids.len() >= 2 {
            documents.push(document);
        }
        if limit_tokens.is_some_and(|limit| tokens >= limit) {
            break;
        }
    }
    if !documents.iter().any(|d| d.loss_mask[1..].contains(&true)) {
        return Err(DataError::Empty { path: path.to_path_buf(), rows });
    }
    Ok(documents)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Bytes as tokens, `<role>content` as chat template, 256 as end of text.
    pub(crate) struct Bytes;

    impl TextEncoder for Bytes {
        fn encode(&self, text: &str) -> std::result::Result<(Vec<u32>, Vec<Range<usize>>), String> {
            Ok((text.bytes().map(u32::from).collect(), (0..text.len()).map(|i| i..i + 1).collect()))
        }

        fn render_chat(
            &self,
            turns: &[(&str, &str)],
            prompt: bool,
        ) -> std::result::Result<String, String> {
            let mut text: String =
                turns.iter().map(|(role, content)| format!("<{role}>{content}|")).collect();
            if prompt {
                text.push_str("<assistant>");
            }
            Ok(text)
        }

        fn end_of_text(&self) -> Option<u32> {
            Some(256)
        }
    }

    fn row(json: &str) -> Row {
        let fields = serde_json::from_str(json).expect("object");
        Row { path: "rows.jsonl".into(), line: 9, fields }
    }

    #[test]
    fn raw_text_learns_every_token_and_its_end() -> Result<()> {
        let template =
            Template::Raw { fields: vec!["a".into(), "b".into()], separator: "-".into() };
        let row = row(r#"{"a": "x", "b": "yz"}"#);
        let document = Document::from_row(&row, &template, Learn::All, &Bytes)?;
        assert_eq!(document.ids, [120, 45, 121, 122, 256]);
        assert!(document.loss_mask.iter().all(|m| *m));
        Ok(())
    }

    #[test]
    fn answers_are_learned_with_their_end_of_turn() -> Result<()> {
        let template = Template::Chat { user: "q".into(), assistant: "a".into(), system: None };
        let row = row(r#"{"q": "1+1", "a": "2"}"#);
        let document = Document::from_row(&row, &template, Learn::Answer, &Bytes)?;
        let learned: Vec<u8> = document
            .ids
            .iter()
            .zip(&document.loss_mask)
            .filter(|(_, learned)| **learned)
            .map(|(id, _)| *id as u8)
            .collect();
        assert_eq!(learned, b"2|");
        Ok(())
    }

    #[test]
    fn a_file_without_labels_is_an_error() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, "").expect("write");
        let error = read_documents(&path, &Template::default(), Learn::All, &Bytes, None);
        assert!(matches!(error, Err(DataError::Empty { rows: 0, .. })));
    }
}
