//! `/v1/chat/completions`.

use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::sampling::refuse_unsupported;
use super::{Asked, SamplingRequest, Telling, fields, refuse};
use crate::Settings;
use crate::error::{ApiError, Result};

/// Most turns of a conversation: templates of others run over them.
const MOST_MESSAGES: usize = 1024;
/// Most tokens whose log-probabilities are told beside the own one.
const MOST_TOP: usize = 20;

/// A conversation to be answered.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ChatRequest {
    messages: Vec<Map<String, Value>>,
    tools: Option<Vec<Value>>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
}

impl ChatRequest {
    /// Reads a request's fields and makes them into what is asked for.
    pub(crate) fn asked(
        value: &Value,
        settings: &Settings,
        tokenizer: &TextTokenizer,
    ) -> Result<Asked> {
        let common: SamplingRequest = fields(value)?;
        let chat: Self = fields(value)?;
        refuse_unsupported(value)?;
        refuse(value, "functions", |_| false)?;
        refuse(value, "tool_choice", |choice| choice == "auto" || choice == "none")?;
        refuse(value, "audio", |_| false)?;
        let (streams, streams_usage) = common.streams()?;
        let prompt = chat.prompt(tokenizer)?;
        let room = settings.model.context.saturating_sub(prompt.len());
        let most = (room, settings.limits.max_tokens);
        let mut options = common.options(&settings.model, &settings.defaults, most)?;
        options.log_probs = chat.log_probs()?;
        // As conversations of `generate` do, so that the same seed gives the same answer.
        options.request = vec![chat.messages.len() as u64];
        let log_probs = options.log_probs.is_some();
        let origins = common.origins.unwrap_or(false);
        let telling = Telling { is_chat: true, streams, streams_usage, log_probs, origins };
        let (count, stops) = (common.count()?, common.stops()?);
        let (prompts, is_seeded) = (vec![prompt], common.seed.is_some());
        Ok(Asked { prompts, count, options, is_seeded, stops, form: None, telling })
    }

    fn log_probs(&self) -> Result<Option<usize>> {
        match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (false, None | Some(0)) => Ok(None),
            (true, top) if top.unwrap_or(0) <= MOST_TOP => Ok(Some(top.unwrap_or(0))),
            (true, _) => {
                Err(ApiError::field("top_logprobs", format!("top_logprobs is 0 to {MOST_TOP}")))
            }
            (false, _) => {
                Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs to be true"))
            }
        }
    }

    /// Tokens of the conversation up to where the answer begins.
    pub(crate) fn prompt(&self, tokenizer: &TextTokenizer) -> Result<Vec<TargetTokenId>> {
        let Some(template) = tokenizer.chat_template() else {
            let message = "this model has no chat template: ask /v1/completions";
            return Err(ApiError::new(axum::http::StatusCode::BAD_REQUEST, message));
        };
        if self.messages.is_empty() || self.messages.len() > MOST_MESSAGES {
            let message = format!("messages: 1 to {MOST_MESSAGES} are needed");
            return Err(ApiError::field("messages", message));
        }
        let messages = self.messages.iter().enumerate();
        let messages = messages.map(|(place, message)| plain(place, message));
        let messages = messages.collect::<Result<Vec<_>>>()?;
        let tools = self.tools.as_ref().filter(|tools| !tools.is_empty());
        let tools = tools.map(|tools| Value::Array(tools.clone()));
        let text = template.render_messages(&messages, tools.as_ref(), true)?;
        let ids = tokenizer.encode(&text)?.ids;
        Ok(ids.into_iter().map(TargetTokenId).collect())
    }
}

/// A message as templates read it: its text as one string, `developer` as `system`.
fn plain(place: usize, message: &Map<String, Value>) -> Result<Map<String, Value>> {
    let wrong = |field: &str, problem: &str| {
        let param = format!("messages[{place}].{field}");
        ApiError::field(&param, format!("{param}: {problem}"))
    };
    let mut plain = message.clone();
    let role = match message.get("role").and_then(Value::as_str) {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant" | "tool" | "function")) => role,
        _ => return Err(wrong("role", "system, developer, user, assistant or tool is needed")),
    };
    let content = match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let text = |part: &Value| {
                let is_text = part["type"] == "text";
                part["text"].as_str().filter(|_| is_text).map(str::to_owned)
            };
            let texts: Option<Vec<String>> = parts.iter().map(text).collect();
            texts.ok_or_else(|| wrong("content", "only parts of text are read"))?.concat()
        }
        // An assistant that called tools has said nothing.
        None | Some(Value::Null) if role == "assistant" => String::new(),
        _ => return Err(wrong("content", "a text is needed")),
    };
    plain.insert("role".to_owned(), Value::from(role));
    plain.insert("content".to_owned(), Value::from(content));
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(message: Value) -> std::result::Result<Value, Value> {
        let Value::Object(message) = message else { panic!("an object") };
        plain(3, &message).map(Value::Object).map_err(|error| error.to_json()["error"].take())
    }

    #[test]
    fn messages_become_what_templates_read() {
        let parts = json!([{ "type": "text", "text": "a " }, { "type": "text", "text": "b" }]);
        let found = read(json!({ "role": "developer", "content": parts, "name": "x" }));
        assert_eq!(found, Ok(json!({ "role": "system", "content": "a b", "name": "x" })));
        let called = json!({ "role": "assistant", "content": null, "tool_calls": [1] });
        let found = read(called).expect("read");
        assert_eq!((&found["content"], &found["tool_calls"]), (&json!(""), &json!([1])));
        for (wrong, param) in [
            (json!({ "role": "robot", "content": "a" }), "messages[3].role"),
            (json!({ "content": "a" }), "messages[3].role"),
            (json!({ "role": "user" }), "messages[3].content"),
            (json!({ "role": "user", "content": 7 }), "messages[3].content"),
            (
                json!({ "role": "user", "content": [{ "type": "image_url" }] }),
                "messages[3].content",
            ),
        ] {
            assert_eq!(read(wrong).expect_err("refused")["param"], param);
        }
    }
}
