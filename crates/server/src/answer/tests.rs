use std::time::Duration;

use longdraft_decode::acceptance::{AcceptanceMetrics, RoundRecord};
use longdraft_decode::{DecodeOptions, EndReason, LogProbs};
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::Target;
use tokio::sync::mpsc::unbounded_channel;

use super::*;
use crate::drafts::{Line, OpenDraft};
use crate::request::tests::tokenizer_with;
use crate::tool_calls::Choice;
use crate::{Access, Limits, Model, Settings};

pub(crate) const TARGET: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/target/demonstration.gguf");

/// A model of so many tokens, of which the third ends answers.
pub(crate) fn model(vocabulary: usize) -> Model {
    let (name, stop_tokens) = ("small".to_owned(), vec![TargetTokenId(2)]);
    Model { name, context: 4096, vocabulary, bos: Some(1), stop_tokens }
}

/// Settings of a server with room for two answers.
pub(crate) fn settings() -> Settings {
    let model = Model { context: 64, bos: None, stop_tokens: Vec::new(), ..model(512) };
    let grace = Duration::from_secs(1);
    let limits = Limits {
        queue: 1,
        max_tokens: 64,
        request_tokens: None,
        total_tokens: None,
        body: 1024,
        grace,
    };
    let (defaults, access) = (DecodeOptions::default(), Access::default());
    Settings { model, defaults, limits, access, lessons: None, hides_lookup: false }
}

/// The HTTP side of it.
pub(crate) fn app_of(settings: Settings, open: Option<Arc<OpenDraft>>, line: Line) -> Arc<App> {
    let tokenizer = Target::open_tokenizer(TARGET).expect("the target that ships");
    App::new(settings, tokenizer, (1, open, line))
}

fn app() -> Arc<App> {
    app_of(settings(), None, crate::channel().1.line)
}

fn head(telling: Telling) -> Head {
    let id = if telling.is_chat { "chatcmpl-1-0" } else { "cmpl-1-0" };
    Head { id: id.to_owned(), created: 7, model: "small".to_owned(), telling, calls: None }
}

fn chat(streams_usage: bool) -> Telling {
    Telling { is_chat: true, streams: true, streams_usage, log_probs: false, origins: false }
}

/// One token with its text and where that begins, as the decoder says it.
fn piece(text: &str, token: u32, offset: usize) -> Event {
    let log_probs = LogProbs {
        own: -0.5,
        top: vec![(TargetTokenId(token), -0.5), (TargetTokenId(token + 1), -2.0)],
    };
    let (token, proposed_by) = (Some(TargetTokenId(token)), Some(Origin::Draft));
    let (text, log_probs) = (text.to_owned(), Some(log_probs));
    Event::Piece(Piece { text, token, offset, proposed_by, log_probs })
}

fn end(reason: EndReason) -> Event {
    let mut metrics = AcceptanceMetrics::default();
    let (depth, nodes, accepted, committed) = (4, 4, 3, 4);
    metrics.add_round(&RoundRecord { depth, nodes, accepted, committed, ..RoundRecord::default() });
    Event::End(Ending { reason, tokens: 5, reused: 2, metrics, _share: None })
}

fn submitted(answers: usize, events: Vec<(usize, Event)>) -> Submitted {
    let (sender, receiver) = unbounded_channel();
    for event in events {
        sender.send(event).expect("open");
    }
    Submitted { number: 0, prompt_tokens: 9, answers, count: answers, events: receiver }
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("runtime")
        .block_on(future)
}

fn streamed(telling: Telling, answers: usize, events: Vec<(usize, Event)>) -> String {
    streamed_of(head(telling), answers, events)
}

fn streamed_of(head: Head, answers: usize, events: Vec<(usize, Event)>) -> String {
    let app = app();
    wait(async {
        let chunks = Chunks::new(head, submitted(answers, events));
        let response = stream(chunks, app);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.expect("body");
        String::from_utf8(body.to_vec()).expect("UTF-8")
    })
}

#[test]
fn a_stream_has_the_bytes_that_clients_expect() {
    let two = vec![
        (0, piece("Hé", 5, 0)),
        (1, piece("", 6, 0)),
        (1, piece("a\n\"b\"", 7, 0)),
        (0, end(EndReason::StopString)),
        (1, piece(" c", 8, 5)),
        (1, end(EndReason::TokenLimit)),
    ];
    assert_eq!(streamed(chat(true), 2, two), include_str!("chat.sse"));
    let text = Telling { is_chat: false, log_probs: true, origins: true, ..chat(false) };
    let one = vec![(0, piece("Hé", 5, 0)), (0, piece("", 6, 2)), (0, end(EndReason::Interrupted))];
    assert_eq!(streamed(text, 1, one), include_str!("completion.sse"));
}

#[test]
fn an_error_ends_a_stream_in_its_own_shape() {
    let failed = ApiError::ending();
    let events = vec![(0, piece("a", 5, 0)), (0, Event::Failed(failed.clone()))];
    let text = streamed(chat(false), 1, events);
    let told = format!("data: {}\n\ndata: [DONE]\n\n", failed.to_json());
    assert!(text.ends_with(&told), "{text}");
    // A decoder that is gone is told as well.
    let text = streamed(chat(false), 1, vec![(0, piece("a", 5, 0))]);
    assert!(text.ends_with(&told), "{text}");
}

#[test]
fn a_whole_answer_is_what_its_stream_says() {
    let app = app();
    let events =
        || vec![(0, piece("one", 5, 0)), (0, piece(" two", 6, 3)), (0, end(EndReason::StopToken))];
    let telling = Telling { streams: false, log_probs: true, ..chat(false) };
    let told = wait(whole(&head(telling), submitted(1, events()), &app.tokenizer)).expect("whole");
    let choice = &told["choices"][0];
    assert_eq!(choice["message"]["content"], "one two");
    assert_eq!(choice["finish_reason"], "stop");
    let tokens = choice["logprobs"]["content"].as_array().expect("tokens");
    assert_eq!(tokens.len(), 2);
    assert_eq!(tokens[0]["logprob"], -0.5);
    assert_eq!(tokens[0]["top_logprobs"][1]["logprob"], -2.0);
    let usage = &told["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(9), &json!(5)));
    assert_eq!(usage["total_tokens"], 14);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 2);
    let details = &usage["completion_tokens_details"];
    assert_eq!(details["accepted_prediction_tokens"], 3);
    assert_eq!(details["rejected_prediction_tokens"], 1);
    let failed = vec![(0, Event::Failed(ApiError::ending()))];
    let error = wait(whole(&head(telling), submitted(1, failed), &app.tokenizer));
    assert_eq!(error.expect_err("failed"), ApiError::ending());
}

#[test]
fn log_probabilities_are_told_by_token_and_by_the_bytes_of_each() {
    let app = app();
    // The two halves of a character decode alike.
    let id = |token: &str| app.tokenizer.id(token).expect("a token");
    let (lead, rest) = (id("\u{c3}"), id("\u{a9}"));
    let mut tokens = TokenList::default();
    for (token, offset) in [(lead, 0), (rest, 0), (lead, 1)] {
        let top = [lead, rest].map(|top| (TargetTokenId(top), -1.0)).to_vec();
        let log_probs = Some(LogProbs { own: -1.0, top });
        let token = Some(TargetTokenId(token));
        tokens.add(&Piece { token, offset, log_probs, ..Piece::default() });
    }
    let telling = Telling { is_chat: false, log_probs: true, ..chat(false) };
    let told = tokens.to_json(&head(telling), &app.tokenizer);
    let (first, second) = ("bytes:\\xc3", "bytes:\\xa9");
    assert_eq!(told["tokens"], json!([first, second, first]));
    assert_eq!(told["top_logprobs"][0], json!({ first: -1.0, second: -1.0 }));
    assert_eq!(told["text_offset"], json!([0, 0, 1]));
    let told = tokens.to_json(&head(Telling { is_chat: true, ..telling }), &app.tokenizer);
    assert_eq!(told["content"][0]["bytes"], json!([0xC3]));
    assert_eq!(told["content"][1]["top_logprobs"][0]["bytes"], json!([0xC3]));
}

#[test]
fn answers_end_where_their_reader_goes_or_takes_nothing() {
    for goes in [true, false] {
        let (events, receiver) = unbounded_channel();
        // Where the reader goes, nothing is written yet.
        for _ in 0..if goes { 0 } else { 3 } {
            events.send((0, piece("a", 5, 0))).expect("open");
        }
        let submitted =
            Submitted { number: 0, prompt_tokens: 9, answers: 1, count: 1, events: receiver };
        let text = Telling { is_chat: false, ..chat(false) };
        let (sender, reader) = channel(1);
        let reader = Some(reader).filter(|_| !goes);
        let chunks = Chunks::new(head(text), submitted);
        let patience = Patience { event: Duration::from_millis(20), ..PATIENCE };
        wait(hand_over(chunks, app(), (sender, patience)));
        assert!(events.is_closed());
        drop(reader);
    }
}

/// Who takes an event now and then would else hold a whole answer for hours.
#[test]
fn what_is_left_of_an_answer_is_read_in_time_or_not_at_all() {
    let mut events = vec![(0, piece("a", 5, 0)); 400];
    events.push((0, end(EndReason::StopToken)));
    let text = Telling { is_chat: false, ..chat(false) };
    let chunks = Chunks::new(head(text), submitted(1, events));
    let (sender, mut reader) = channel(1);
    let patience = Patience { rest: Duration::from_millis(50), ..PATIENCE };
    let read = wait(async {
        let reading = tokio::spawn(async move {
            let mut count = 0;
            while reader.recv().await.is_some() {
                count += 1;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            count
        });
        hand_over(chunks, app(), (sender, patience)).await;
        reading.await.expect("no panic")
    });
    assert!((1..400).contains(&read), "{read}");
}

/// A head of answers that may call the function `now`, with markers that are texts.
fn calling(telling: Telling) -> Head {
    let tools = [json!({ "type": "function", "function": { "name": "now" } })];
    let tokenizer = tokenizer_with("{# <tool_call>{\"arguments\": }</tool_call> #}");
    let calls = Calls::of(&tools, &Choice::Auto, true, &tokenizer).expect("read");
    Head { calls: calls.map(Arc::new), ..head(telling) }
}

/// The events of a stream but the last, as JSON.
fn events_of(stream: &str) -> Vec<Value> {
    let data = stream.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    data.filter(|data| *data != DONE)
        .map(|data| serde_json::from_str(data).expect("JSON"))
        .collect()
}

/// Pieces of an answer with text, two calls and a marker that is cut.
fn two_calls(reason: EndReason) -> Vec<(usize, Event)> {
    let texts = [
        "Look.\n<tool",
        "_call>\n{\"name\": \"now\", \"argu",
        "ments\": {\"a\": 1}}\n</tool_call>",
        "\n<tool_call>{\"name\": \"now\"}",
        "</tool_",
    ];
    let mut events: Vec<_> = texts.iter().map(|text| (0, piece(text, 5, 0))).collect();
    events.push((0, end(reason)));
    events
}

#[test]
fn calls_are_told_whole_as_they_are_streamed() {
    let app = app();
    let telling = Telling { log_probs: true, ..chat(false) };
    let told = submitted(1, two_calls(EndReason::StopToken));
    let told = wait(whole(&calling(telling), told, &app.tokenizer)).expect("whole");
    let choice = &told["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["logprobs"]["content"].as_array().map(Vec::len), Some(5));
    let call = |id: &str, arguments: &str| {
        let function = json!({ "name": "now", "arguments": arguments });
        json!({ "id": id, "type": "function", "function": function })
    };
    let wanted = [call("call_1_0_0_0", "{\"a\": 1}"), call("call_1_0_0_1", "{}")];
    let message = json!({
        "role": "assistant", "content": "Look.", "refusal": null, "tool_calls": wanted,
    });
    assert_eq!(choice["message"], message);

    let events = events_of(&streamed_of(calling(telling), 1, two_calls(EndReason::StopToken)));
    let (mut text, mut calls, mut tokens) = (String::new(), Vec::new(), 0);
    for event in &events {
        let choice = &event["choices"][0];
        text += choice["delta"]["content"].as_str().unwrap_or_default();
        tokens += choice["logprobs"]["content"].as_array().map_or(0, Vec::len);
        calls.extend(choice["delta"]["tool_calls"].as_array().into_iter().flatten().cloned());
    }
    assert_eq!((text.as_str(), tokens), ("Look.", 5));
    let mut deltas = wanted.to_vec();
    deltas.iter_mut().enumerate().for_each(|(index, delta)| delta["index"] = index.into());
    assert_eq!(calls, deltas);
    let last = &events.last().expect("events")["choices"][0];
    assert_eq!((&last["finish_reason"], &last["delta"]), (&json!("tool_calls"), &json!({})));
}

#[test]
fn a_call_that_is_cut_is_text_and_one_before_it_stays_a_call() {
    let app = app();
    let answer = |texts: &[&str], reason: EndReason| {
        let mut events: Vec<_> = texts.iter().map(|text| (0, piece(text, 5, 0))).collect();
        events.push((0, end(reason)));
        let telling = chat(false);
        let told = wait(whole(&calling(telling), submitted(1, events.clone()), &app.tokenizer));
        let told = told.expect("whole")["choices"][0].take();
        let events = events_of(&streamed_of(calling(telling), 1, events));
        let text = |event: &Value| {
            event["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()
        };
        let streamed: String = events.iter().map(text).collect();
        assert_eq!(streamed, told["message"]["content"].as_str().unwrap_or_default());
        assert_eq!(
            events.last().expect("events")["choices"][0]["finish_reason"],
            told["finish_reason"]
        );
        (told["message"].clone(), told["finish_reason"].clone())
    };
    let cut = "<tool_call>{\"name\": \"now\", \"ar";
    let (message, finish) = answer(&["a ", cut], EndReason::TokenLimit);
    assert_eq!((&message["content"], finish), (&json!(format!("a {cut}")), json!("length")));
    assert!(message.get("tool_calls").is_none());
    // A stop string or the end of a turn within a call.
    let (message, finish) = answer(&[cut], EndReason::StopString);
    assert_eq!((&message["content"], finish), (&json!(cut), json!("stop")));
    let call = "<tool_call>{\"name\": \"now\"}</tool_call>";
    let (message, finish) = answer(&[call, cut], EndReason::TokenLimit);
    assert_eq!((&message["content"], finish), (&json!(cut), json!("length")));
    assert_eq!(message["tool_calls"].as_array().map(Vec::len), Some(1));
    let (message, finish) = answer(&[call], EndReason::StopToken);
    assert_eq!((&message["content"], finish), (&Value::Null, json!("tool_calls")));
}

#[test]
fn each_answer_to_a_request_makes_calls_of_its_own() {
    let app = app();
    let call = "<tool_call>{\"name\": \"now\"}</tool_call>";
    let events = vec![
        (1, piece("<tool_", 5, 0)),
        (0, piece(call, 5, 0)),
        (0, end(EndReason::StopToken)),
        (1, piece("no call", 5, 0)),
        (2, piece(call, 5, 0)),
        (1, end(EndReason::StopToken)),
        (2, end(EndReason::StopToken)),
    ];
    let told = wait(whole(&calling(chat(false)), submitted(3, events), &app.tokenizer));
    let choices = told.expect("whole")["choices"].take();
    let id = |choice: usize| choices[choice]["message"]["tool_calls"][0]["id"].clone();
    assert_eq!((id(0), id(2)), (json!("call_1_0_0_0"), json!("call_1_0_2_0")));
    assert_eq!(choices[1]["message"]["content"], "<tool_no call");
    let finish = |choice: usize| choices[choice]["finish_reason"].as_str();
    assert_eq!([0, 1, 2].map(finish), [Some("tool_calls"), Some("stop"), Some("tool_calls")]);
}
