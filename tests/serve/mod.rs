//! `serve` through the binary: a tiny random target, asked over HTTP.

mod answers;
mod ending;
mod ends;
mod forms;
mod learning;
mod refused;
mod reload;
mod room;
mod trainings;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};

use longdraft_models::LayerId;
use longdraft_models::draft::block::{BlockConfig, BlockDraft};
use longdraft_models::target_model::{Target, TargetOptions};
use serde_json::{Value, json};
use ureq::http::HeaderMap;
use ureq::{Agent, Body};

use crate::decoding::Shelf;
use crate::support::serving;

/// An answer to a request.
struct Reply {
    status: u16,
    headers: HeaderMap,
    body: String,
}

impl Reply {
    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.body))
    }

    /// The answer, which must not be an error.
    #[track_caller]
    fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()
    }

    /// The error that it is, in OpenAI's shape.
    #[track_caller]
    fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{}", self.body);
        assert!(error["type"].is_string(), "{}", self.body);
        assert!(error.get("param").is_some() && error.get("code").is_some(), "{}", self.body);
        error
    }
}

/// A server that runs until it is dropped.
struct Server {
    child: Child,
    address: String,
    agent: Agent,
}

impl Server {
    /// Serves the target of a shelf at a free port.
    fn start(shelf: &Shelf, extra: &[&str]) -> Self {
        let target = shelf.path("target");
        let common = ["serve", &target, "--port", "0", "--json", "--name", "tiny"];
        let (child, address) = serving(&[&common[..], extra].concat());
        let agent = Agent::config_builder().http_status_as_error(false).build().into();
        Self { child, address, agent }
    }

    fn read(response: ureq::http::Response<Body>) -> Reply {
        let (parts, mut body) = response.into_parts();
        let body = body.read_to_string().expect("body");
        Reply { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    #[track_caller]
    fn get(&self, path: &str) -> Reply {
        let url = format!("{}{path}", self.address);
        Self::read(self.agent.get(&url).call().expect("an answer"))
    }

    /// Sends a body of the given type.
    #[track_caller]
    fn send(&self, path: &str, kind: &str, body: &[u8]) -> Reply {
        let url = format!("{}{path}", self.address);
        let request = self.agent.post(&url).header("content-type", kind);
        Self::read(request.send(body).expect("an answer"))
    }

    #[track_caller]
    fn post(&self, path: &str, body: &Value) -> Reply {
        self.send(path, "application/json", body.to_string().as_bytes())
    }

    #[track_caller]
    fn complete(&self, body: &Value) -> Value {
        self.post("/v1/completions", body).ok()
    }

    #[track_caller]
    fn stream(&self, path: &str, body: &Value) -> Events {
        let url = format!("{}{path}", self.address);
        let response = self.agent.post(&url).send_json(body).expect("an answer");
        assert_eq!(response.status().as_u16(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Events { reader: BufReader::new(Box::new(response.into_body().into_reader())) }
    }

    /// The value of a counter or gauge.
    #[track_caller]
    fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let line = text.lines().find(|line| line.starts_with(&format!("longdraft_{name} ")));
        let value = line.and_then(|line| line.split(' ').nth(1));
        value.unwrap_or_else(|| panic!("{name} in {text}")).parse().expect("a number")
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(sent.expect("kill").success());
    }

    fn wait(mut self) -> ExitStatus {
        self.child.wait().expect("the server ends")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a stream says, event by event.
struct Events {
    reader: BufReader<Box<dyn Read>>,
}

impl Iterator for Events {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.reader.read_line(&mut line).unwrap_or(0) == 0 {
                return None;
            }
            assert!(line.ends_with('\n'), "events are whole");
            match line.trim_end_matches('\n').strip_prefix("data: ") {
                Some(data) => return Some(data.to_owned()),
                // Between events, and comments that keep the connection.
                None => assert!(line == "\n" || line.starts_with(':'), "{line:?}"),
            }
        }
    }
}

/// Texts and reasons of the answers in a stream that is whole, and its last usage.
#[track_caller]
fn gathered(events: Events, answers: usize) -> (Vec<(String, Value)>, Value) {
    let events: Vec<String> = events.collect();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let mut found = vec![(String::new(), Value::Null); answers];
    let mut usage = Value::Null;
    for event in &events[..events.len() - 1] {
        let event: Value = serde_json::from_str(event).expect("JSON");
        for choice in event["choices"].as_array().expect("choices") {
            let (text, finish) = &mut found[choice["index"].as_u64().expect("index") as usize];
            let piece = choice.get("text").or_else(|| choice["delta"].get("content"));
            text.push_str(piece.and_then(Value::as_str).unwrap_or_default());
            *finish = choice["finish_reason"].clone();
        }
        usage = event["usage"].clone();
    }
    (found, usage)
}

/// A request whose answers take long: `count` of them, of so many tokens.
fn long(count: usize, tokens: usize) -> Value {
    // The end of a text is banned.
    json!({
        "prompt": "once", "n": count, "max_tokens": tokens, "temperature": 0,
        "logit_bias": { "257": -100 }, "stream": true,
    })
}

/// Adds a block draft to a shelf, whose sizes are no method's own: its folder.
fn block_draft(shelf: &Shelf) -> String {
    let target = Target::open(&shelf.path("target"), &TargetOptions::default()).expect("target");
    let sizes = BlockConfig::for_target(target.config(), 1, 4, 200);
    let sizes = BlockConfig { target_layers: vec![LayerId(1), LayerId(2)], ..sizes };
    let folder = shelf.path("block");
    std::fs::create_dir(&folder).expect("folder");
    let table = target.hold_ends().and_then(|ends| ends.embedding()).expect("table");
    BlockDraft::initialise(&sizes, &table, 1)
        .and_then(|draft| draft.save(Path::new(&folder), target.fingerprint()))
        .expect("draft");
    folder
}
