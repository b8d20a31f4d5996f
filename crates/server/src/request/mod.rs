//! Requests as clients send them: read, checked, made into what the decoder is asked for.
//!
//! Fields that are not known are left alone, as other servers do; known ones that would change the
//! answer and cannot be followed are refused.

mod chat;
mod completion;
mod sampling;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use longdraft_decode::DecodeOptions;
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::Model;
use crate::error::{ApiError, Result};
use crate::grammar::FormState;
use crate::tool_calls::Calls;

pub(crate) use chat::ChatRequest;
pub(crate) use completion::{CompletionRequest, Prompt, require_ids};
pub(crate) use sampling::SamplingRequest;

pub(crate) struct Asked {
    pub(crate) prompts: Vec<Vec<TargetTokenId>>,
    /// Answers to each prompt.
    pub(crate) count: usize,
    pub(crate) options: DecodeOptions,
    /// Whether the draws are to be those of a seed.
    pub(crate) is_seeded: bool,
    /// Whether the request says how long answers may be.
    pub(crate) names_limit: bool,
    pub(crate) stops: Vec<String>,
    /// Whether tokens end answers as the model has it: at its own ends, none other, wherever they come.
    pub(crate) own_ends: bool,
    pub(crate) form: Option<FormState>,
    /// What calls of tools they may make.
    pub(crate) calls: Option<Calls>,
    /// How the answers are told.
    pub(crate) telling: Telling,
}

/// How answers are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "a field of the request each")]
pub(crate) struct Telling {
    pub(crate) is_chat: bool,
    /// While they are written.
    pub(crate) streams: bool,
    /// With the usage at the end of a stream.
    pub(crate) streams_usage: bool,
    pub(crate) log_probs: bool,
    /// Events say where their token comes from.
    pub(crate) origins: bool,
}

/// What becomes of a stream.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
}

/// One value or several.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "a text or a list of texts is needed")]
pub(crate) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> OneOrMany<T> {
    pub(crate) fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(value) => vec![value],
            Self::Many(values) => values,
        }
    }
}

/// The bytes of a body of JSON.
///
/// The type must be named: a page of another origin cannot send it without asking, and it is told no.
pub(crate) fn body_of(
    headers: &HeaderMap,
    body: std::result::Result<Bytes, BytesRejection>,
) -> Result<Bytes> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next()).unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        let message = "the content type must be application/json";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let is_packed = |coding: &HeaderValue| !coding.as_bytes().eq_ignore_ascii_case(b"identity");
    if headers.get_all(header::CONTENT_ENCODING).iter().any(is_packed) {
        let message = "a compressed body is not read: send it without Content-Encoding";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    body.map_err(|rejection| match rejection.status() {
        status @ StatusCode::PAYLOAD_TOO_LARGE => {
            ApiError::new(status, "the body is larger than --max-body of the server allows")
        }
        status => ApiError::new(status, rejection.body_text()),
    })
}

/// What some editors and shells put before a text in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The JSON of a body. It may take many times the room of the bytes. Fields that are whole numbers are integers,
/// however they are written, as vLLM has it: some languages write `2.0` for 2.
pub(crate) fn json_of(body: &[u8]) -> Result<Value> {
    let body = body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body);
    let mut value: Value = serde_json::from_slice(body).map_err(|error| {
        let message = format!("the body is no JSON: {error}");
        ApiError::new(StatusCode::BAD_REQUEST, message)
    })?;
    value.as_object_mut().into_iter().flat_map(Map::values_mut).for_each(make_integer);
    Ok(value)
}

/// Makes a float that is whole an integer, also in lists, as of token ids. What stands in objects (schemas,
/// messages) stays as it was written.
fn make_integer(value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(make_integer),
        Value::Number(number) if number.is_f64() => {
            // −2⁶³: its opposite is the first that is too large.
            let least = i64::MIN as f64;
            let fits = |x: &f64| x.fract() == 0.0 && (least..-least).contains(x);
            if let Some(whole) = number.as_f64().filter(fits) {
                *number = (whole as i64).into();
            }
        }
        _ => {}
    }
}

/// The fields of a request that a type knows.
pub(crate) fn fields<T: DeserializeOwned>(value: &Value) -> Result<T> {
    // serde would take a list for the fields in their order.
    if !value.is_object() {
        return Err(ApiError::new(StatusCode::BAD_REQUEST, "the body must be a JSON object"));
    }
    serde_path_to_error::deserialize(value).map_err(|error| {
        let (path, problem) = (error.path().to_string(), in_plain_words(error.inner()));
        match path.as_str() {
            "." => ApiError::new(StatusCode::BAD_REQUEST, problem),
            path => ApiError::field(path, format!("{path}: {problem}")),
        }
    })
}

/// What is wrong with a value, without names of Rust's types.
fn in_plain_words(error: &serde_json::Error) -> String {
    let problem = error.to_string();
    let Some((found, expected)) = problem.rsplit_once(", expected ") else { return problem };
    let expected = match expected {
        "usize" | "u32" => "a whole number, 0 or more",
        "i64" => "a whole number",
        "f64" | "f32" => "a number",
        "a sequence" => "a list",
        "a map" => "an object",
        other if other.starts_with("struct ") => "an object",
        other => other,
    };
    format!("{found}, expected {expected}")
}

/// Refuses a text that fills the context however it is cut into tokens, before that work is done. What a tokenizer
/// leaves out of a text (spaces in a row, say) counts here.
fn require_short(text: &str, model: &Model, tokenizer: &TextTokenizer) -> Result<()> {
    let (length, context) = (text.len(), model.context);
    if length <= context.saturating_mul(tokenizer.longest_token()) {
        return Ok(());
    }
    let message =
        format!("the prompt of {length} bytes leaves no room in the context of {context} tokens");
    Err(ApiError::new(StatusCode::BAD_REQUEST, message).code("context_length_exceeded"))
}

/// Fields of OpenAI's interface and of vLLM's that would change the answer and cannot be followed, each with the JSON
/// that asks for nothing.
const UNSUPPORTED: &[(&str, &[&str])] = &[
    ("add_generation_prompt", &["true"]),
    ("allowed_token_ids", &[]),
    ("audio", &[]),
    ("bad_words", &["[]"]),
    ("chat_template", &[]),
    ("continue_final_message", &["false"]),
    ("documents", &["[]"]),
    ("echo", &["false"]),
    ("function_call", &["\"auto\"", "\"none\""]),
    ("functions", &["[]"]),
    ("grammar", &[]),
    ("include_stop_str_in_output", &["false"]),
    ("logits_processors", &["[]"]),
    ("modalities", &["[\"text\"]"]),
    ("prompt_logprobs", &[]),
    ("repetition_penalty", &["1", "1.0"]),
    ("skip_special_tokens", &["true"]),
    ("suffix", &["\"\""]),
    ("truncate_prompt_tokens", &[]),
    ("use_beam_search", &["false"]),
];

/// Refuses fields that would change the answer, where they ask for something.
pub(crate) fn refuse_unsupported(value: &Value) -> Result<()> {
    let asks = |(field, harmless): &&(&str, &[&str])| {
        let asked = value.get(*field).filter(|asked| !asked.is_null());
        asked.is_some_and(|asked| !harmless.contains(&asked.to_string().as_str()))
    };
    match UNSUPPORTED.iter().find(asks) {
        Some((field, _)) => {
            Err(ApiError::field(field, format!("{field} is not supported with this value")))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
pub(crate) mod tests;
