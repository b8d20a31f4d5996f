//! What became of the rows of a source.

use serde::{Deserialize, Serialize};

use crate::document::Document;
use crate::quarantine::BadRow;

/// What a row came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// A document of at least two tokens.
    Document(Document),
    /// Fewer than two tokens: nothing can be predicted.
    TooShort,
    /// A prompt beyond `max_prompt_tokens`.
    PromptTooLong,
    /// A malformed row.
    Bad(BadRow),
}

/// What some rows of a source come to.
pub(crate) struct Part {
    pub(crate) documents: Vec<Document>,
    pub(crate) bad: Vec<BadRow>,
    pub(crate) report: SourceReport,
}

/// Counts of one source.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceReport {
    /// The source as configured.
    pub source: String,
    /// The template's kind where it was recognised by itself.
    pub detected: Option<String>,
    /// Rows read; the next four and `documents` add up to it.
    pub rows: usize,
    /// Malformed rows.
    pub bad: usize,
    /// Rows with a prompt beyond the cap.
    pub prompt_too_long: usize,
    /// Rows of fewer than two tokens.
    pub too_short: usize,
    /// Documents.
    pub documents: usize,
    /// Tokens of the documents.
    pub tokens: usize,
    /// Labels that are learned.
    pub learned: usize,
    /// Documents of which nothing is learned.
    pub unlearned: usize,
}

impl SourceReport {
    /// Counts one row.
    pub fn add(&mut self, outcome: &Outcome) {
        let count = match outcome {
            Outcome::Document(document) => return self.add_document(document),
            Outcome::TooShort => &mut self.too_short,
            Outcome::PromptTooLong => &mut self.prompt_too_long,
            Outcome::Bad(_) => &mut self.bad,
        };
        *count += 1;
        self.rows += 1;
    }

    /// Counts a row that is a document.
    pub fn add_document(&mut self, document: &Document) {
        let learned = document.learned();
        self.rows += 1;
        self.documents += 1;
        self.tokens += document.ids.len();
        self.learned += learned;
        self.unlearned += usize::from(learned == 0);
    }

    /// Adds the counts of another part of the same source.
    pub fn merge(&mut self, part: &Self) {
        self.rows += part.rows;
        self.bad += part.bad;
        self.prompt_too_long += part.prompt_too_long;
        self.too_short += part.too_short;
        self.documents += part.documents;
        self.tokens += part.tokens;
        self.learned += part.learned;
        self.unlearned += part.unlearned;
    }

    /// What is worth saying beside the counts; none if every row became a document.
    pub fn remarks(&self) -> Vec<String> {
        let count = |rows: usize, what: &str| match rows {
            0 => None,
            rows => Some(format!("{}: {rows} of {} rows {what}", self.source, self.rows)),
        };
        [
            count(self.bad, "are malformed and were left out"),
            count(self.prompt_too_long, "have a prompt beyond max_prompt_tokens and were left out"),
            count(self.too_short, "have fewer than two tokens and were left out"),
            count(self.unlearned, "have no token to learn"),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}
