//! Drafting measured on prompts, against plain decoding in the same engine.

use std::path::PathBuf;

use longdraft_data::source::Row;
use serde_json::{Map, Value};

use super::error::{Result, Stop};
use super::models::{Draft, Target};
use super::session::{SessionOptions, models};
use crate::cli::{DecodingArguments, EvalDecodeArguments, PaceChoice, ServerArguments};
use crate::commands::eval;

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
    match prompts {
        Prompts::Named(name) => measure((target, draft), name, None, options, stop),
        Prompts::Texts(texts) => {
            let row =
                |text: &String| Map::from_iter([(options.field.clone(), text.clone().into())]);
            evaluate_rows(target, draft, texts.iter().map(row).collect(), options, stop)
        }
    }
}

/// The same on rows, as a JSONL file would hold them: a prompt in the field that `options` names, its `category`, and
/// `chat_template_kwargs`, variables of its own for the chat template.
///
/// # Errors
/// - as [`evaluate`], or a row lacks the field or has variables that no template gets
pub fn evaluate_rows(
    target: &Target,
    draft: Option<&Draft>,
    rows: Vec<Map<String, Value>>,
    options: &EvaluationOptions,
    stop: &Stop,
) -> Result<Value> {
    let name = format!("{} texts", rows.len());
    let numbered = rows.into_iter().zip(1..);
    let row = |(fields, line)| Row { path: "prompts".into(), line, fields };
    measure((target, draft), &name, Some(numbered.map(row).collect()), options, stop)
}

/// Measures on a file or a set by its name, or on rows.
fn measure(
    (target, draft): (&Target, Option<&Draft>),
    name: &str,
    rows: Option<Vec<Row>>,
    options: &EvaluationOptions,
    stop: &Stop,
) -> Result<Value> {
    let arguments = arguments(target, draft, name, options);
    eval::check(&arguments)?;
    let _held = eval::take_output(&arguments)?;
    let models = models(target, draft, &arguments.decoding)?;
    let prompts = match rows {
        None => eval::read(&arguments, &models),
        Some(rows) => eval::of_rows(&arguments, rows, &models),
    }?;
    match eval::evaluate(&arguments, &models, &prompts, &stop.0, &mut |_| {})? {
        Some(record) => Ok(eval::to_json(&record)),
        None => Err(stop.0.failure().into()),
    }
}

/// As the command takes them.
fn arguments(
    target: &Target,
    draft: Option<&Draft>,
    prompts: &str,
    options: &EvaluationOptions,
) -> EvalDecodeArguments {
    let EvaluationOptions { top_k, top_p, min_p, seed, .. } = *options;
    let decoding = options.session.arguments(draft, target.options());
    EvalDecodeArguments {
        target: Some(target.name().to_owned()),
        prompts: prompts.to_owned(),
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
