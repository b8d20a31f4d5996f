//! The target's tokenizer as the data crate sees it.

use std::ops::Range;

use longdraft_data::conversation::Conversation;
use longdraft_data::{GeneratedText, TextEncoder};
use longdraft_models::TargetConfig;
use longdraft_models::tokenizer::{ChatTemplate, TextTokenizer};
use serde_json::{Map, Value};

/// Names that an end-of-text token goes by.
const END_OF_TEXT: [&str; 3] = ["<|endoftext|>", "<|end_of_text|>", "</s>"];

/// A tokenizer with the token that ends a raw text.
pub struct Encoder<'a> {
    tokenizer: &'a TextTokenizer,
    /// Of no day: text has the same tokens whenever it is read.
    template: Option<ChatTemplate>,
    start_of_text: Option<u32>,
    end_of_text: Option<u32>,
    vocabulary: usize,
}

impl<'a> Encoder<'a> {
    /// The end-of-text token is the one that goes by a known name, else the first end token.
    pub fn new(tokenizer: &'a TextTokenizer, config: &TargetConfig) -> Self {
        let named = END_OF_TEXT.iter().find_map(|name| tokenizer.id(name));
        let end_of_text = named.or(config.eos_token_ids.first().copied());
        let undated =
            |template: &ChatTemplate| template.undated().unwrap_or_else(|_| template.clone());
        let template = tokenizer.chat_template().map(undated);
        let start_of_text = tokenizer.start_token(config.bos_token_id);
        Self { tokenizer, template, start_of_text, end_of_text, vocabulary: config.vocab_size }
    }

    /// The same whose chat template has more variables; those of a conversation win over them.
    #[must_use]
    pub fn with_variables(mut self, variables: &Map<String, Value>) -> Self {
        self.template = self.template.map(|template| template.with_variables(variables));
        self
    }
}

impl TextEncoder for Encoder<'_> {
    fn encode(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>), String> {
        let encoded = self.tokenizer.encode(text).map_err(|error| error.to_string())?;
        Ok((encoded.ids, encoded.offsets))
    }

    fn render_chat(
        &self,
        conversation: &Conversation,
        add_generation_prompt: bool,
    ) -> Result<String, String> {
        let template = self.template.as_ref().ok_or("the target has no chat template")?;
        template
            .with_variables(&conversation.variables)
            .render_messages(
                &conversation.messages,
                conversation.tools.as_ref(),
                add_generation_prompt,
            )
            .map_err(|error| error.to_string())
    }

    fn render_generated(
        &self,
        conversation: &Conversation,
    ) -> Result<Option<GeneratedText>, String> {
        let Some(template) = &self.template else { return Ok(None) };
        template
            .with_variables(&conversation.variables)
            .render_generated(&conversation.messages, conversation.tools.as_ref())
            .map_err(|error| error.to_string())
    }

    fn chat_fingerprint(&self) -> Option<String> {
        self.template.as_ref().map(ChatTemplate::fingerprint)
    }

    fn chat_fingerprint_with(&self, variables: &Map<String, Value>) -> Option<String> {
        let template = self.template.as_ref()?;
        Some(template.with_variables(variables).fingerprint())
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn fingerprint(&self) -> String {
        // A tokenizer without JSON form is equal to no other.
        self.tokenizer.fingerprint().unwrap_or_default()
    }

    fn start_of_text(&self) -> Option<u32> {
        self.start_of_text
    }

    fn end_of_text(&self) -> Option<u32> {
        self.end_of_text
    }
}
