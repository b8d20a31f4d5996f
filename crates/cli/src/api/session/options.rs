//! How a session drafts, and what an answer is asked for.

use std::path::PathBuf;

use longdraft_decode::DraftShape;
use longdraft_models::DeviceChoice;
use serde_json::{Map, Value};

use crate::api::error::Result;
use crate::api::models::Draft;
use crate::cli::{
    DecodingArguments, LookupChoice, OpenOptions, PaceChoice, TemplateArguments, VerifyChoice,
    names_of, parse_tree, parse_variables,
};
use crate::failure::Failure;

/// How a session drafts.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// Draft with the target's own block for prediction of several tokens, in place of a draft.
    pub mtp: bool,
    /// Tokens of a chain, proposed per round.
    pub draft_len: usize,
    /// A tree in place of the chain; [`layout`] reads one.
    pub tree: Option<DraftShape>,
    /// Also propose what stood earlier in the text.
    pub lookup: Option<LookupChoice>,
    /// Rows in whose answers lookup also looks.
    pub datastore: Vec<PathBuf>,
    /// Propose no further where a draft with a confidence head gives less than this; 0 never stops.
    pub confidence_threshold: f64,
    /// How proposals are tested at a temperature.
    pub verify: VerifyChoice,
    /// A file with the tokens that are proposed, a token id a line.
    pub draft_vocab: Option<PathBuf>,
    /// Of them, so many.
    pub draft_vocab_size: Option<usize>,
    /// Who decides how much is drafted.
    pub pace: PaceChoice,
    /// Variables of the target's chat template (`enable_thinking`, ...).
    pub chat_template_kwargs: Map<String, Value>,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            mtp: false,
            draft_len: 4,
            tree: None,
            lookup: None,
            datastore: Vec::new(),
            confidence_threshold: 0.0,
            verify: VerifyChoice::Ratio,
            draft_vocab: None,
            draft_vocab_size: None,
            pace: PaceChoice::Measured,
            chat_template_kwargs: Map::new(),
        }
    }
}

impl SessionOptions {
    /// As the commands take them.
    pub(in crate::api) fn arguments(
        &self,
        draft: Option<&Draft>,
        open: &OpenOptions,
    ) -> DecodingArguments {
        DecodingArguments {
            draft: draft.map(|draft| draft.path.clone()),
            mtp: self.mtp,
            lookup: self.lookup,
            datastore: self.datastore.clone(),
            draft_len: self.draft_len,
            tree: self.tree.clone(),
            confidence_threshold: self.confidence_threshold,
            verify: self.verify,
            draft_vocab: self.draft_vocab.clone(),
            draft_vocab_size: self.draft_vocab_size,
            held: *open,
            template: TemplateArguments::of(self.chat_template_kwargs.clone()),
            pace: Some(self.pace),
            ..DecodingArguments::plain()
        }
    }
}

/// Reads a layout of proposals as `--tree` does: `static:4,8,8`, `dynamic:10,6,60`, `sampled:3,2,1`.
///
/// # Errors
/// - it is none
pub fn layout(text: &str) -> Result<DraftShape> {
    Ok(parse_tree(text).map_err(|problem| Failure::usage(format!("tree `{text}`: {problem}")))?)
}

/// Reads variables of a chat template as `--chat-template-kwargs` does: a JSON object.
///
/// # Errors
/// - it is none
pub fn template_variables(text: &str) -> Result<Map<String, Value>> {
    let variables = parse_variables(text);
    Ok(variables.map_err(|problem| Failure::usage(format!("chat_template_kwargs: {problem}")))?)
}

/// Reads a choice by its name, as the option `what` of a command does.
///
/// # Errors
/// - there is no such choice
pub fn choice<T: clap::ValueEnum>(what: &str, name: &str) -> Result<T> {
    let found = T::from_str(name, false);
    Ok(found.map_err(|_| {
        Failure::usage(format!("`{name}` is no {what}")).hint(format!("give {}", names_of::<T>()))
    })?)
}

/// Reads a device: `auto`, `cpu`, `cuda:0`, `metal:0`.
///
/// # Errors
/// - it is none
pub fn device(name: &str) -> Result<DeviceChoice> {
    let device: std::result::Result<DeviceChoice, String> = name.parse();
    Ok(device.map_err(Failure::usage)?)
}

/// What is asked for.
#[derive(Debug, Clone)]
pub struct AnswerOptions {
    /// Most tokens.
    pub max_tokens: usize,
    /// 0: the most likely token always.
    pub temperature: f64,
    /// Keep only so many of the most likely tokens.
    pub top_k: Option<usize>,
    /// Keep the most likely tokens until their mass reaches this.
    pub top_p: f64,
    /// Keep tokens at least this likely, relative to the most likely one.
    pub min_p: f64,
    /// Key of all random draws.
    pub seed: u64,
    /// Texts that end the answer, left out of it.
    pub stop: Vec<String>,
    /// Tokens that end it, written out or their ids.
    pub stop_tokens: Vec<String>,
    /// Go on after tokens that end a text.
    pub ignore_eos: bool,
    /// Variables of the chat template for this turn. They win over those of the session, variable by variable.
    pub chat_template_kwargs: Map<String, Value>,
}

impl Default for AnswerOptions {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            chat_template_kwargs: Map::new(),
        }
    }
}
