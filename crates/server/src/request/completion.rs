//! `/v1/completions`.

use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use serde::Deserialize;
use serde_json::Value;

use super::{Asked, SamplingRequest, fields, refuse_unsupported, require_short};
use crate::error::{ApiError, Result};
use crate::{Model, Settings};

/// Tokens of an answer where the request does not say.
const TOKENS: usize = 16;
const MOST_PROMPTS: usize = 128;
/// Most tokens whose log-probabilities are told.
const MOST_TOP: usize = 20;

/// A text to continue, or several: as text or as tokens.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

impl Prompt {
    /// The texts that are to be cut into tokens.
    fn texts(&self) -> &[String] {
        match self {
            Self::Text(text) => std::slice::from_ref(text),
            Self::Texts(texts) => texts,
            Self::Tokens(_) | Self::TokenLists(_) => &[],
        }
    }

    /// Tokens of each text; those that are cut here get the model's start token, unless `starts` is false.
    pub(crate) fn tokens(
        &self,
        (model, tokenizer): (&Model, &TextTokenizer),
        starts: bool,
    ) -> Result<Vec<Vec<TargetTokenId>>> {
        let of_text = |text: &String| {
            let ids = if starts {
                tokenizer.encode_prompt(text, model.bos)?
            } else {
                tokenizer.encode(text)?.ids
            };
            Ok(ids.into_iter().map(TargetTokenId).collect())
        };
        let of_ids = |ids: &Vec<u32>| {
            require_ids("prompt", ids, model)?;
            Ok(ids.iter().map(|id| TargetTokenId(*id)).collect())
        };
        let count = match self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(texts) => texts.len(),
            Self::TokenLists(lists) => lists.len(),
        };
        if count == 0 || count > MOST_PROMPTS {
            let message = format!("prompt: 1 to {MOST_PROMPTS} are needed");
            return Err(ApiError::field("prompt", message));
        }
        match self {
            Self::Text(text) => Ok(vec![of_text(text)?]),
            Self::Texts(texts) => texts.iter().map(of_text).collect(),
            Self::Tokens(ids) => Ok(vec![of_ids(ids)?]),
            Self::TokenLists(lists) => lists.iter().map(of_ids).collect(),
        }
    }
}

/// Refuses numbers of a field that are no tokens of the model.
pub(crate) fn require_ids(field: &str, ids: &[u32], model: &Model) -> Result<()> {
    match ids.iter().find(|id| **id as usize >= model.vocabulary) {
        Some(id) => Err(ApiError::field(field, format!("{field}: {id} is not a token id"))),
        None => Ok(()),
    }
}

/// Texts to be continued.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct CompletionRequest {
    logprobs: Option<usize>,
    best_of: Option<usize>,
    /// Not OpenAI's, but of vLLM and SGLang.
    add_special_tokens: Option<bool>,
}

impl CompletionRequest {
    /// Reads a request's fields and makes them into what is asked for.
    pub(crate) fn asked(
        value: &Value,
        settings: &Settings,
        tokenizer: &TextTokenizer,
    ) -> Result<Asked> {
        let common: SamplingRequest = fields(value)?;
        let own: Self = fields(value)?;
        refuse_unsupported(value)?;
        let count = common.count()?;
        if own.best_of.is_some_and(|best_of| best_of != count) {
            return Err(ApiError::field("best_of", "best_of must be n: all answers are returned"));
        }
        if own.logprobs.is_some_and(|top| top > MOST_TOP) {
            return Err(ApiError::field("logprobs", format!("logprobs is 0 to {MOST_TOP}")));
        }
        let prompt = value.get("prompt").unwrap_or(&Value::Null);
        let problem = "prompt: a text, tokens, or a list of them is needed";
        let prompt = Prompt::deserialize(prompt).map_err(|_| ApiError::field("prompt", problem))?;
        for text in prompt.texts() {
            require_short(text, &settings.model, tokenizer)?;
        }
        let starts = own.add_special_tokens.unwrap_or(true);
        let prompts = prompt.tokens((&settings.model, tokenizer), starts)?;
        common.asked(settings, (prompts, false), (TOKENS, own.logprobs))
    }
}
