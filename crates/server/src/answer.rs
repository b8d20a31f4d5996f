//! Answers in OpenAI's shape: whole, or as the events of a stream.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use longdraft_decode::{EndReason, LogProbs, Origin};
use longdraft_models::TargetTokenId;
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::{Map, Value, json};

use crate::app::{App, Submitted};
use crate::error::{ApiError, Result};
use crate::events::{Ending, Event, Piece};
use crate::request::Telling;

/// What ends a stream.
const DONE: &str = "[DONE]";

/// What all parts of an answer begin with.
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) telling: Telling,
}

/// Tokens that answers to one request took.
#[derive(Debug, Default)]
struct Usage {
    /// Answers to each prompt.
    count: usize,
    prompt: usize,
    answer: usize,
    reused: usize,
    accepted: usize,
    rejected: usize,
    /// Passes of the target, after those that read the prompts.
    passes: usize,
    /// Of the accepted ones, those of lookup, and those that the form forced.
    from_lookup: usize,
    from_grammar: usize,
}

impl Usage {
    fn of(submitted: &Submitted) -> Self {
        let Submitted { count, prompt_tokens: prompt, .. } = *submitted;
        Self { count, prompt, ..Self::default() }
    }

    fn add(&mut self, ending: &Ending) {
        self.answer += ending.tokens;
        self.reused += ending.reused;
        self.accepted += ending.metrics.accepted;
        self.rejected += ending.metrics.nodes - ending.metrics.accepted;
        self.passes += ending.metrics.rounds;
        self.from_lookup += ending.metrics.from_lookup;
        self.from_grammar += ending.metrics.from_grammar;
    }

    fn to_json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            // A prompt counts once, whatever the number of its answers.
            "prompt_tokens_details": { "cached_tokens": self.reused / self.count.max(1) },
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.rejected,
                "target_passes": self.passes,
                "accepted_by_origin": {
                    "draft": self.accepted.saturating_sub(self.from_lookup + self.from_grammar),
                    "lookup": self.from_lookup, "grammar": self.from_grammar,
                },
            },
        })
    }
}

/// Why an answer ended, in OpenAI's words. An answer that the server's end cut short has not its full
/// length.
fn finish_reason(reason: EndReason) -> &'static str {
    match reason {
        EndReason::StopToken | EndReason::StopString => "stop",
        EndReason::TokenLimit | EndReason::ContextLimit | EndReason::Interrupted => "length",
    }
}

/// Log-probabilities of an answer's tokens.
#[derive(Debug, Default)]
struct TokenList {
    tokens: Vec<(TargetTokenId, LogProbs)>,
    /// Where in the text each begins, in characters.
    offsets: Vec<usize>,
}

impl TokenList {
    fn add(&mut self, piece: &Piece, offset: usize) {
        if let (Some(token), Some(log_probs)) = (piece.token, &piece.log_probs) {
            self.tokens.push((token, log_probs.clone()));
            self.offsets.push(offset);
        }
    }

    fn to_json(&self, head: &Head, tokenizer: &TextTokenizer) -> Value {
        if !head.telling.log_probs {
            return Value::Null;
        }
        let written =
            |token: TargetTokenId| tokenizer.decode(&[token.0], false).unwrap_or_default();
        let entry = |token: TargetTokenId, log_prob: f32| {
            let text = written(token);
            // A part of a character has no text of its own.
            let bytes = (!text.contains('\u{FFFD}')).then(|| text.as_bytes().to_vec());
            json!({ "token": text, "logprob": finite(log_prob), "bytes": bytes })
        };
        if head.telling.is_chat {
            let content = self.tokens.iter().map(|(token, log_probs)| {
                let top = log_probs.top.iter().map(|(token, own)| entry(*token, *own));
                let mut own = entry(*token, log_probs.own);
                own["top_logprobs"] = top.collect();
                own
            });
            return json!({ "content": content.collect::<Value>(), "refusal": null });
        }
        let top = self.tokens.iter().map(|(token, log_probs)| {
            let all = log_probs.top.iter().copied().chain([(*token, log_probs.own)]);
            Value::Object(all.map(|(token, own)| (written(token), finite(own))).collect())
        });
        let own = self.tokens.iter().map(|(_, log_probs)| finite(log_probs.own));
        json!({
            "tokens": self.tokens.iter().map(|(token, _)| written(*token)).collect::<Vec<_>>(),
            "token_logprobs": own.collect::<Value>(),
            "top_logprobs": top.collect::<Value>(),
            "text_offset": self.offsets,
        })
    }
}

/// Where a token comes from.
fn origin(piece: &Piece) -> Value {
    Value::from(match piece.proposed_by {
        Some(Origin::Draft) => "draft",
        Some(Origin::Lookup) => "lookup",
        Some(Origin::Grammar) => "grammar",
        None => "target",
    })
}

/// JSON has no infinity.
fn finite(log_prob: f32) -> Value {
    Value::from(f64::from(log_prob.max(-9999.0)))
}

impl Head {
    /// An object with `choices` in it.
    fn object(&self, kind: &str, choices: Value) -> Map<String, Value> {
        let mut object = Map::new();
        object.insert("id".to_owned(), Value::from(self.id.as_str()));
        object.insert("object".to_owned(), Value::from(kind));
        object.insert("created".to_owned(), Value::from(self.created));
        object.insert("model".to_owned(), Value::from(self.model.as_str()));
        object.insert("choices".to_owned(), choices);
        object
    }

    /// An event with one choice, or with none for the usage.
    fn chunk(&self, choices: Value, usage: Option<&Usage>) -> String {
        let kind = if self.telling.is_chat { "chat.completion.chunk" } else { "text_completion" };
        let mut object = self.object(kind, choices);
        if self.telling.streams_usage {
            object.insert("usage".to_owned(), usage.map_or(Value::Null, Usage::to_json));
        }
        Value::Object(object).to_string()
    }

    fn choice(&self, index: usize, text: &str, log_probs: &Value, finish: Option<&str>) -> Value {
        if !self.telling.is_chat {
            return json!([{
                "text": text, "index": index, "logprobs": log_probs, "finish_reason": finish,
            }]);
        }
        let delta = if finish.is_some() { json!({}) } else { json!({ "content": text }) };
        json!([{ "index": index, "delta": delta, "logprobs": log_probs, "finish_reason": finish }])
    }
}

/// An answer that is told whole.
#[derive(Default)]
struct Whole {
    text: String,
    /// Characters of it.
    length: usize,
    tokens: TokenList,
    finish: Option<&'static str>,
}

/// Waits for all answers and puts them into one object.
///
/// # Errors
/// - an answer failed
pub(crate) async fn whole(
    head: &Head,
    mut submitted: Submitted,
    tokenizer: &TextTokenizer,
) -> Result<Value> {
    let mut usage = Usage::of(&submitted);
    let mut answers: Vec<Whole> = Vec::new();
    answers.resize_with(submitted.answers, Whole::default);
    while answers.iter().any(|answer| answer.finish.is_none()) {
        let (choice, event) = submitted.events.recv().await.ok_or_else(ApiError::ending)?;
        let Some(answer) = answers.get_mut(choice) else { continue };
        match event {
            Event::Piece(piece) => {
                answer.tokens.add(&piece, answer.length);
                answer.length += piece.text.chars().count();
                answer.text.push_str(&piece.text);
            }
            Event::End(ending) => {
                usage.add(&ending);
                answer.finish = Some(finish_reason(ending.reason));
            }
            Event::Failed(error) => return Err(error),
        }
    }
    let choices = answers.iter().enumerate().map(|(index, answer)| {
        let log_probs = answer.tokens.to_json(head, tokenizer);
        let Whole { text, finish, .. } = answer;
        if head.telling.is_chat {
            let message = json!({ "role": "assistant", "content": text, "refusal": null });
            json!({
                "index": index, "message": message, "logprobs": log_probs,
                "finish_reason": finish,
            })
        } else {
            json!({
                "text": text, "index": index, "logprobs": log_probs, "finish_reason": finish,
            })
        }
    });
    let kind = if head.telling.is_chat { "chat.completion" } else { "text_completion" };
    let mut object = head.object(kind, choices.collect());
    object.insert("usage".to_owned(), usage.to_json());
    Ok(Value::Object(object))
}

/// The events of a stream, in order.
pub(crate) struct Chunks {
    head: Head,
    submitted: Submitted,
    usage: Usage,
    /// Characters of each answer's text; none once it ended.
    open: Vec<Option<usize>>,
    ready: VecDeque<String>,
    is_done: bool,
}

impl Chunks {
    pub(crate) fn new(head: Head, submitted: Submitted) -> Self {
        let usage = Usage::of(&submitted);
        let open = vec![Some(0); submitted.answers];
        let mut ready = VecDeque::new();
        if head.telling.is_chat {
            for index in 0..submitted.answers {
                let delta = json!({ "role": "assistant", "content": "", "refusal": null });
                let choice = json!([{
                    "index": index, "delta": delta, "logprobs": null, "finish_reason": null,
                }]);
                ready.push_back(head.chunk(choice, None));
            }
        }
        Self { head, submitted, usage, open, ready, is_done: false }
    }

    /// The data of the next event; none after the last one.
    pub(crate) async fn next(&mut self, tokenizer: &TextTokenizer) -> Option<String> {
        while self.ready.is_empty() && !self.is_done {
            match self.submitted.events.recv().await {
                Some((choice, event)) => self.take(choice, event, tokenizer),
                None => self.fail(&ApiError::ending()),
            }
            if !self.is_done && self.open.iter().all(Option::is_none) {
                if self.head.telling.streams_usage {
                    self.ready.push_back(self.head.chunk(json!([]), Some(&self.usage)));
                }
                self.end();
            }
        }
        self.ready.pop_front()
    }

    fn take(&mut self, index: usize, event: Event, tokenizer: &TextTokenizer) {
        let Some(Some(length)) = self.open.get_mut(index) else { return };
        match event {
            Event::Piece(piece) => {
                let mut tokens = TokenList::default();
                if self.head.telling.log_probs {
                    tokens.add(&piece, *length);
                }
                *length += piece.text.chars().count();
                if piece.text.is_empty() && tokens.tokens.is_empty() {
                    return;
                }
                let log_probs = if tokens.tokens.is_empty() {
                    Value::Null
                } else {
                    tokens.to_json(&self.head, tokenizer)
                };
                let mut choice = self.head.choice(index, &piece.text, &log_probs, None);
                if self.head.telling.origins {
                    choice[0]["origin"] = origin(&piece);
                }
                self.ready.push_back(self.head.chunk(choice, None));
            }
            Event::End(ending) => {
                self.open[index] = None;
                self.usage.add(&ending);
                let finish = Some(finish_reason(ending.reason));
                let choice = self.head.choice(index, "", &Value::Null, finish);
                self.ready.push_back(self.head.chunk(choice, None));
            }
            Event::Failed(error) => self.fail(&error),
        }
    }

    fn fail(&mut self, error: &ApiError) {
        self.ready.push_back(error.to_json().to_string());
        self.end();
    }

    fn end(&mut self) {
        self.ready.push_back(DONE.to_owned());
        self.is_done = true;
    }
}

/// Server-sent events while an answer is written.
pub(crate) fn stream(chunks: Chunks, app: Arc<App>) -> Response {
    let events = unfold((chunks, app), |(mut chunks, app)| async move {
        let data = chunks.next(&app.tokenizer).await?;
        Some((Ok::<_, Infallible>(SseEvent::default().data(data)), (chunks, app)))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

#[cfg(test)]
mod tests;
