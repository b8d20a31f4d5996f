//! Answers in OpenAI's shape: whole, or as the events of a stream.

mod log_probs;
mod speech;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::future::{Either, select};
use futures_util::stream::unfold;
use longdraft_decode::Origin;
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::{Sender, channel};
use tokio::time::timeout;

use crate::app::{App, Submitted};
use crate::error::{ApiError, Result};
use crate::events::{Ending, Event, Piece};
use crate::request::Telling;
use crate::tool_calls::{Calls, Said};
use log_probs::TokenList;
use speech::Speech;

/// What ends a stream.
const DONE: &str = "[DONE]";
/// Events that wait for who reads a stream.
const WAITING: usize = 64;
/// How long they may wait before the answers end.
const PATIENCE: Patience = Patience { event: Duration::from_mins(1), rest: Duration::from_mins(5) };

/// Time of who reads a stream.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// For each event.
    event: Duration,
    /// For all that is left when the answers are written: until then they keep their share of the server.
    rest: Duration,
}

/// What all parts of an answer begin with.
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) telling: Telling,
    /// The calls that answers may make.
    pub(crate) calls: Option<Arc<Calls>>,
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

/// Where a token comes from.
fn origin(piece: &Piece) -> Value {
    Value::from(match piece.proposed_by {
        Some(Origin::Draft) => "draft",
        Some(Origin::Lookup) => "lookup",
        Some(Origin::Grammar) => "grammar",
        None => "target",
    })
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
struct Whole {
    speech: Speech,
    said: Said,
    tokens: TokenList,
    finish: Option<&'static str>,
}

impl Whole {
    fn new(head: &Head) -> Self {
        let (speech, said) = (Speech::new(head), Said::default());
        Self { speech, said, tokens: TokenList::default(), finish: None }
    }

    fn add(&mut self, Said { text, calls }: Said) {
        self.said.text += &text;
        self.said.calls.extend(calls);
    }
}

/// Waits for all answers and puts them into one object.
pub(crate) async fn whole(
    head: &Head,
    mut submitted: Submitted,
    tokenizer: &TextTokenizer,
) -> Result<Value> {
    let mut usage = Usage::of(&submitted);
    let mut answers: Vec<Whole> = Vec::new();
    answers.resize_with(submitted.answers, || Whole::new(head));
    while answers.iter().any(|answer| answer.finish.is_none()) {
        let (choice, event) = submitted.events.recv().await.ok_or_else(ApiError::ending)?;
        let Some(answer) = answers.get_mut(choice) else { continue };
        match event {
            Event::Piece(piece) => {
                answer.tokens.add(&piece);
                let said = answer.speech.hear(piece);
                answer.add(said);
            }
            Event::End(ending) => {
                usage.add(&ending);
                let rest = answer.speech.finish();
                answer.add(rest);
                answer.finish = Some(answer.speech.finish_reason(ending.reason));
            }
            Event::Failed(error) => return Err(error),
        }
    }
    let choices = answers.iter().enumerate().map(|(index, answer)| {
        let log_probs = answer.tokens.to_json(head, tokenizer);
        let Whole { said, finish, .. } = answer;
        if head.telling.is_chat {
            json!({
                "index": index, "message": head.message(index, said), "logprobs": log_probs,
                "finish_reason": finish,
            })
        } else {
            json!({
                "text": said.text, "index": index, "logprobs": log_probs, "finish_reason": finish,
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
    speeches: Vec<Speech>,
    /// Which answers have not ended.
    open: Vec<bool>,
    ready: VecDeque<String>,
    is_done: bool,
}

impl Chunks {
    pub(crate) fn new(head: Head, submitted: Submitted) -> Self {
        let usage = Usage::of(&submitted);
        let open = vec![true; submitted.answers];
        let speeches = open.iter().map(|_| Speech::new(&head)).collect();
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
        Self { head, submitted, usage, speeches, open, ready, is_done: false }
    }

    /// The data of the next event; none after the last one.
    pub(crate) async fn next(&mut self, tokenizer: &TextTokenizer) -> Option<String> {
        while self.ready.is_empty() && !self.is_done {
            match self.submitted.events.recv().await {
                Some((choice, event)) => self.take(choice, event, tokenizer),
                None => self.fail(&ApiError::ending()),
            }
            if !self.is_done && !self.open.contains(&true) {
                if self.head.telling.streams_usage {
                    self.ready.push_back(self.head.chunk(json!([]), Some(&self.usage)));
                }
                self.end();
            }
        }
        self.ready.pop_front()
    }

    /// Whether nothing more is written.
    fn is_written(&self) -> bool {
        self.submitted.events.is_closed()
    }

    fn take(&mut self, index: usize, event: Event, tokenizer: &TextTokenizer) {
        if self.open.get(index) != Some(&true) {
            return;
        }
        match event {
            Event::Piece(piece) => {
                let mut tokens = TokenList::default();
                if self.head.telling.log_probs {
                    tokens.add(&piece);
                }
                let log_probs = if tokens.is_empty() {
                    Value::Null
                } else {
                    tokens.to_json(&self.head, tokenizer)
                };
                let origin = self.head.telling.origins.then(|| origin(&piece));
                let said = self.speeches[index].hear(piece);
                self.tell(index, &said, (log_probs, origin));
            }
            Event::End(ending) => {
                self.open[index] = false;
                self.usage.add(&ending);
                let rest = self.speeches[index].finish();
                self.tell(index, &rest, (Value::Null, None));
                let finish = Some(self.speeches[index].finish_reason(ending.reason));
                let choice = self.head.choice(index, "", &Value::Null, finish);
                self.ready.push_back(self.head.chunk(choice, None));
            }
            Event::Failed(error) => self.fail(&error),
        }
    }

    /// Adds events with what is certain, and with a token's log-probability though its text may be held back.
    fn tell(&mut self, index: usize, said: &Said, (log_probs, origin): (Value, Option<Value>)) {
        let Said { text, calls } = said;
        let mut choices = Vec::new();
        if !text.is_empty() || (calls.is_empty() && !log_probs.is_null()) {
            choices.push(self.head.choice(index, text, &log_probs, None));
        }
        if !calls.is_empty() {
            let log_probs = if choices.is_empty() { log_probs } else { Value::Null };
            let delta = self.head.calls_delta(index, calls);
            choices.push(json!([{
                "index": index, "delta": delta, "logprobs": log_probs, "finish_reason": null,
            }]));
        }
        for mut choice in choices {
            if let Some(origin) = &origin {
                choice[0]["origin"] = origin.clone();
            }
            self.ready.push_back(self.head.chunk(choice, None));
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
    let (sender, receiver) = channel(WAITING);
    tokio::spawn(hand_over(chunks, app, (sender, PATIENCE)));
    let events = unfold(receiver, |mut receiver| async move {
        let data = receiver.recv().await?;
        Some((Ok::<_, Infallible>(SseEvent::default().data(data)), receiver))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

/// Hands events to who reads them, until all are read. Where nobody is there, or takes too long, the answers end.
async fn hand_over(
    mut chunks: Chunks,
    app: Arc<App>,
    (sender, patience): (Sender<String>, Patience),
) {
    while !chunks.is_written() {
        if !hand_one(&mut chunks, &app, (&sender, patience.event)).await {
            return;
        }
    }
    let rest = async { while hand_one(&mut chunks, &app, (&sender, patience.event)).await {} };
    // What is not read by then is dropped with its stream.
    let _ = timeout(patience.rest, rest).await;
}

/// Hands over the next event; false where there is none, or nobody takes it in time.
async fn hand_one(
    chunks: &mut Chunks,
    app: &App,
    (sender, patience): (&Sender<String>, Duration),
) -> bool {
    let data = {
        let (next, gone) = (pin!(chunks.next(&app.tokenizer)), pin!(sender.closed()));
        match select(next, gone).await {
            Either::Left((Some(data), _)) => data,
            _ => return false,
        }
    };
    matches!(timeout(patience, sender.send(data)).await, Ok(Ok(())))
}

#[cfg(test)]
pub(crate) mod tests;
