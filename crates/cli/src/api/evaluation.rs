//! Drafting measured on prompts, against plain decoding in the same engine.

use std::path::PathBuf;

use longdraft_decode::evaluate::Prompt;
use longdraft_models::tokenizer::Message;
use serde_json::Value;

use super::error::{Result, Stop};
use super::models::{Draft, Target};
use super::session::{SessionOptions, models};
use crate::cli::{DecodingArguments, EvalDecodeArguments, PaceChoice, ServerArguments};
use crate::commands::eval;
use crate::decoding::{Models, encode_chat, encode_text};
use crate::failure::Failure;

/// What is answered.
#[derive(Debug, Clone)]
pub enum Prompts {
    /// A published set by name, or a JSONL file.
    Named(String),
    /// Texts.
    Texts(Vec<String>),
}

/// How it is measured.
#[derive(Debug, Clone)]
pub struct EvaluationOptions {
    /// How proposals are made and tested. What decides how much is drafted is `Fixed` by default.
    pub session: SessionOptions,
    /// Most tokens of an answer.
    pub max_tokens: usize,
    /// Temperatures to measure at.
    pub temperatures: Vec<f64>,
    /// Keep only so many of the most likely tokens.
    pub top_k: Option<usize>,
    /// Keep the most likely tokens until their mass reaches this.
    pub top_p: f64,
    /// Keep tokens at least this likely, relative to the most likely one.
    pub min_p: f64,
    /// Key of all random draws.
    pub seed: u64,
    /// Timing runs over all prompts.
    pub runs: usize,
    /// Prompts of a file, at most; of a named set, of each category.
    pub limit: Option<usize>,
    /// Field of a file's rows that holds the prompt.
    pub field: String,
    /// Whether texts and a file's prompts are a user's turn.
    pub chat: bool,
    /// Folder for `decode.json`, where reports find it; a later call goes on from what it holds.
    pub output: Option<PathBuf>,
}

impl Default for EvaluationOptions {
    fn default() -> Self {
        Self {
            session: SessionOptions { pace: PaceChoice::Fixed, ..SessionOptions::default() },
            max_tokens: 128,
            temperatures: vec![0.0],
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            runs: 3,
            limit: None,
            field: "prompt".to_owned(),
            chat: false,
            output: None,
        }
    }
}

/// What was measured, as `eval decode --json` prints it: `tau`, `speed_up`, `lossless`, tokens per second,
/// and under `record` everything that `decode.json` holds.
///
/// # Errors
/// - there are no prompts, the draft does not fit, the options make no sense, or `stop` was asked
pub fn evaluate(
    target: &Target,
    draft: Option<&Draft>,
    prompts: &Prompts,
    options: &EvaluationOptions,
    stop: &Stop,
) -> Result<Value> {
    let arguments = arguments(target, draft, prompts, options);
    eval::check(&arguments)?;
    let _held = eval::take_output(&arguments)?;
    let models = models(target, draft, &arguments.decoding)?;
    let prompts = read(prompts, &arguments, &models)?;
    match eval::evaluate(&arguments, &models, &prompts, &stop.0, &mut |_| {})? {
        Some(record) => Ok(eval::to_json(&record)),
        None => Err(stop.0.failure().into()),
    }
}

/// As the command takes them.
fn arguments(
    target: &Target,
    draft: Option<&Draft>,
    prompts: &Prompts,
    options: &EvaluationOptions,
) -> EvalDecodeArguments {
    let EvaluationOptions { top_k, top_p, min_p, seed, .. } = *options;
    let decoding = options.session.arguments(draft, target.options());
    EvalDecodeArguments {
        target: Some(target.name().to_owned()),
        prompts: match prompts {
            Prompts::Named(name) => name.clone(),
            Prompts::Texts(texts) => format!("{} texts", texts.len()),
        },
        field: options.field.clone(),
        chat: options.chat,
        limit: options.limit,
        contexts: Vec::new(),
        max_tokens: options.max_tokens,
        temperature: options.temperatures.clone(),
        runs: options.runs,
        output: options.output.clone(),
        server: ServerArguments::default(),
        decoding: DecodingArguments { top_k, top_p, min_p, seed, ..decoding },
    }
}

/// The prompts as tokens.
fn read(
    prompts: &Prompts,
    arguments: &EvalDecodeArguments,
    models: &Models,
) -> Result<Vec<Prompt>> {
    let texts = match prompts {
        Prompts::Named(_) => return Ok(eval::read(arguments, models)?),
        Prompts::Texts(texts) => texts,
    };
    if texts.is_empty() {
        return Err(Failure::usage("there are no prompts").into());
    }
    let prompt = |text: &String| {
        let tokens = if arguments.chat {
            encode_chat(&[Message::new("user", text)], &models.tokenizer)?
        } else {
            encode_text(text, &models.tokenizer, &models.target)?
        };
        Ok(Prompt { category: "all".to_owned(), tokens })
    };
    texts.iter().take(arguments.limit.unwrap_or(usize::MAX)).map(prompt).collect()
}
