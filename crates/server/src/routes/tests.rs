//! Requests with tools through their path, answered by a decoder that says what it is told to.

use std::thread::{self, JoinHandle};

use longdraft_decode::EndReason;
use longdraft_decode::acceptance::AcceptanceMetrics;
use tokio::runtime::Runtime;

use super::*;
use crate::Inbox;
use crate::answer::tests::{model, settings};
use crate::drafts::Work;
use crate::events::{Ending, Event, Piece};
use crate::request::tests::tokenizer_with;

/// Writes tools and messages, and has the marks of a syntax.
const HERMES: &str = "{{ tools | length if tools else 'none' }}\
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}\
<tool_call>{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}</tool_call>\
{% endfor %}{% endfor %}";
const PLAIN: &str = "{% for m in messages %}{{ m.content }}{% endfor %}";
/// Pieces of an answer that calls a function.
const CALL: [&str; 3] = ["<tool_", "call>{\"name\": \"now\", \"arguments\": ", "{}}</tool_call>"];

/// A decoder's side. It ends with the application, and tells which answers had a form.
fn decoder(
    inbox: Inbox,
    texts: &'static [&'static str],
) -> (crate::drafts::Line, JoinHandle<Vec<bool>>) {
    let Inbox { line, mut receiver } = inbox;
    let work = thread::spawn(move || {
        let mut formed = Vec::new();
        while let Some(work) = receiver.blocking_recv() {
            let Work::Answer(task) = work else { continue };
            formed.push(task.form.is_some());
            for text in texts {
                let piece = Piece { text: (*text).to_owned(), ..Piece::default() };
                task.events.send((task.choice, Event::Piece(piece))).expect("heard");
            }
            let (reason, metrics) = (EndReason::StopToken, AcceptanceMetrics::default());
            let ending = Ending { reason, tokens: 1, reused: 0, metrics, _share: None };
            task.events.send((task.choice, Event::End(ending))).expect("heard");
        }
        formed
    });
    (line, work)
}

/// Bodies of what requests are answered, one after the other, and which answers had a form.
fn answered(
    template: &str,
    texts: &'static [&'static str],
    requests: &[Value],
) -> (Vec<std::result::Result<String, Value>>, Vec<bool>) {
    let tokenizer = tokenizer_with(template);
    let mut settings = settings();
    settings.model = model(tokenizer.vocabulary());
    let (line, work) = decoder(crate::channel().1, texts);
    let app = App::new(settings, tokenizer, (1, None, line));
    let runtime = Runtime::new().expect("runtime");
    let replies = requests.iter().map(|request| {
        let body = request.to_string().into();
        let entry = Entry { body, place: app.enter().expect("a place") };
        runtime.block_on(async {
            let response = chat(State(Arc::clone(&app)), entry).await;
            let response = response.map_err(|error| error.to_json()["error"].take())?;
            let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.expect("a body");
            Ok::<_, Value>(String::from_utf8(body.to_vec()).expect("UTF-8"))
        })
    });
    let replies = replies.collect();
    drop(runtime);
    drop(app);
    (replies, work.join().expect("a decoder"))
}

fn request(more: &Value) -> Value {
    let tools = json!([{ "type": "function", "function": { "name": "now" } }]);
    let mut request = json!({ "messages": [{ "role": "user", "content": "a" }], "tools": tools });
    for (key, value) in more.as_object().expect("an object") {
        request[key] = value.clone();
    }
    request
}

/// The one choice of an answer that is told whole.
fn choice(reply: &std::result::Result<String, Value>) -> Value {
    let body = reply.as_ref().expect("an answer");
    serde_json::from_str::<Value>(body).expect("JSON")["choices"][0].take()
}

#[test]
fn a_request_with_tools_is_answered_with_calls() {
    let named = json!({ "type": "function", "function": { "name": "now" } });
    let requests = [
        request(&json!({})),
        request(&json!({ "stream": true })),
        request(&json!({ "tool_choice": "required", "parallel_tool_calls": false })),
        request(&json!({ "tool_choice": named })),
    ];
    let (replies, formed) = answered(HERMES, &CALL, &requests);
    assert_eq!(formed, [false, false, true, true]);
    for (place, reply) in replies.iter().enumerate().filter(|(place, _)| *place != 1) {
        let choice = choice(reply);
        assert_eq!(choice["finish_reason"], "tool_calls", "{place}");
        assert!(choice["message"]["content"].is_null(), "{place}");
        let function = &choice["message"]["tool_calls"][0]["function"];
        assert_eq!(*function, json!({ "name": "now", "arguments": "{}" }), "{place}");
    }
    let stream = replies[1].as_ref().expect("a stream");
    assert_eq!(stream.matches("\"tool_calls\":[{").count(), 1, "{stream}");
    assert!(stream.contains("\"finish_reason\":\"tool_calls\"") && !stream.contains("<tool"));
}

#[test]
fn what_looks_like_a_call_is_text_where_none_may_be_made() {
    let requests = [
        request(&json!({ "tool_choice": "none" })),
        request(&json!({ "tools": [] })),
        request(&json!({ "tools": null })),
        request(&json!({ "tools": [{ "type": "function", "function": { "name": "other" } }] })),
        // An answer has the form that is asked for.
        request(&json!({ "response_format": { "type": "json_object" } })),
    ];
    for (template, requests) in [(HERMES, &requests[..]), (PLAIN, &[request(&json!({}))][..])] {
        let (replies, _) = answered(template, &CALL, requests);
        for reply in &replies {
            let choice = choice(reply);
            assert_eq!(choice["message"]["content"], CALL.concat());
            assert_eq!(choice["finish_reason"], "stop");
            assert!(choice["message"].get("tool_calls").is_none());
        }
    }
}

#[test]
fn calls_that_cannot_be_forced_are_refused_in_openais_shape() {
    let other = json!({ "type": "function", "function": { "name": "other" } });
    let format = json!({ "type": "json_object" });
    let requests = [
        (request(&json!({ "tool_choice": "sometimes" })), "tool_choice"),
        (request(&json!({ "tool_choice": other })), "tool_choice"),
        (request(&json!({ "tool_choice": "required", "tools": [] })), "tool_choice"),
        (request(&json!({ "parallel_tool_calls": "no" })), "parallel_tool_calls"),
        (
            request(&json!({ "tool_choice": "required", "response_format": format })),
            "response_format",
        ),
    ];
    let (asked, params): (Vec<Value>, Vec<&str>) = requests.into_iter().unzip();
    let (replies, _) = answered(HERMES, &CALL, &asked);
    for (reply, param) in replies.into_iter().zip(params) {
        let error = reply.expect_err("refused");
        assert_eq!(
            (&error["param"], &error["type"]),
            (&json!(param), &json!("invalid_request_error"))
        );
    }
    let required = request(&json!({ "tool_choice": "required" }));
    let (replies, _) = answered(PLAIN, &CALL, &[required]);
    assert_eq!(replies[0].as_ref().expect_err("refused")["param"], "tool_choice");
}

/// What was answered goes back into the template when the conversation goes on.
#[test]
fn a_conversation_goes_on_after_a_call() {
    let (replies, _) = answered(HERMES, &CALL, &[request(&json!({}))]);
    let message = choice(&replies[0])["message"].take();
    let id = message["tool_calls"][0]["id"].clone();
    let result = json!({ "role": "tool", "tool_call_id": id, "content": "noon" });
    let user = json!({ "role": "user", "content": "a" });
    let next = request(&json!({ "messages": [user, message, result] }));
    let (replies, _) = answered(HERMES, &["It is noon."], &[next]);
    assert_eq!(choice(&replies[0])["message"]["content"], "It is noon.");
}

#[test]
fn an_origin_is_what_browsers_send() {
    let read = |origin: &str| read_origins(&[origin.to_owned()]);
    for (origin, sent) in [
        ("http://localhost:3000", "http://localhost:3000"),
        ("HTTPS://Page.Example", "https://page.example"),
        ("chrome-extension://abc", "chrome-extension://abc"),
        ("null", "null"),
        ("*", "*"),
    ] {
        assert_eq!(read(origin).expect("an origin"), [sent], "{origin}");
    }
    for wrong in ["", "page.example", "http://", "http://page.example/", "https://*.example"] {
        let told = read(wrong).expect_err("no origin").to_string();
        assert!(told.contains("http://localhost:3000"), "{told}");
    }
}

#[test]
fn the_name_that_a_server_was_told_to_listen_at_is_a_host_too() {
    let named = |host: &'static str, given| {
        let headers = HeaderMap::from_iter([(header::HOST, HeaderValue::from_static(host))]);
        names_this_machine(&headers, given)
    };
    assert!(named("desk.home:8080", Some("desk.home")) && named("DESK.home", Some("desk.home")));
    assert!(named("localhost:1", Some("desk.home")) && named("127.0.1.1:80", None));
    assert!(!named("desk.home", None) && !named("desk.home.example", Some("desk.home")));
}
