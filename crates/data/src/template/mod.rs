//! How a row becomes text, and which part of the text is learned.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::document::TextEncoder;
use crate::error::Result;
use crate::source::Row;

/// Which tokens are learned as labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Learn {
    /// Every token.
    #[default]
    All,
    /// The assistant's answer with its end-of-turn (chat only).
    Answer,
}

/// A row's way to text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, tag = "kind", rename_all = "snake_case")]
pub enum Template {
    /// The fields' texts one after another, then the end-of-text token.
    Raw {
        /// Names of text fields.
        fields: Vec<String>,
        /// Between two fields.
        #[serde(default = "newline")]
        separator: String,
    },
    /// One question and its answer through the model's chat template.
    Chat {
        /// Field of the user's turn.
        user: String,
        /// Field of the assistant's turn.
        assistant: String,
        /// Text of a system turn, if one is wanted.
        #[serde(default)]
        system: Option<String>,
    },
}

fn newline() -> String {
    "\n".to_owned()
}

impl Default for Template {
    fn default() -> Self {
        Self::Raw { fields: vec!["text".to_owned()], separator: newline() }
    }
}

/// Text and the bytes of it that are learned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// What the tokenizer reads.
    pub text: String,
    /// Learned bytes.
    pub learned: Range<usize>,
    /// Whether the end-of-text token follows.
    pub append_end: bool,
}

impl Template {
    /// Renders one row.
    ///
    /// # Errors
    /// - a field is missing, the model has no chat template or refuses the row
    pub fn render(&self, row: &Row, learn: Learn, encoder: &dyn TextEncoder) -> Result<Rendered> {
        match self {
            Self::Raw { fields, separator } => {
                let texts: Vec<&str> =
                    fields.iter().map(|field| row.text(field)).collect::<Result<_>>()?;
                let text = texts.join(separator);
                Ok(Rendered { learned: 0..text.len(), text, append_end: true })
            }
            Self::Chat { user, assistant, system } => {
                let mut turns: Vec<(&str, &str)> = Vec::new();
                turns.extend(system.iter().map(|text| ("system", text.as_str())));
                turns.push(("user", row.text(user)?));
                let fail = |problem: String| row.problem(problem);
                let prompt = encoder.render_chat(&turns, true).map_err(fail)?;
                turns.push(("assistant", row.text(assistant)?));
                let text = encoder.render_chat(&turns, false).map_err(fail)?;
                let start = match learn {
                    Learn::All => 0,
                    Learn::Answer if text.starts_with(&prompt) => prompt.len(),
                    Learn::Answer => {
                        return Err(fail(
                            "the chat template does not keep the prompt as a prefix".into(),
                        ));
                    }
                };
                Ok(Rendered { learned: start..text.len(), text, append_end: false })
            }
        }
    }
}
