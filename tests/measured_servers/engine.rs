//! A stand-in of an engine that serves completions, well-behaved or not.

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};

use crate::support::server::{self, Asked};
use serde_json::{Value, json};

pub(super) const KEY: &str = "s3cret-key";
/// Tokens of a round, each as a text: of 12 tokens the first comes of the prompt's pass, and four passes of
/// three proposals accept 7 of 12.
const ROUNDS: [usize; 5] = [1, 3, 3, 3, 2];
/// 11 tokens in 4 passes.
pub(super) const TAU: f64 = 2.75;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    Dies,
    Rubbish,
    Html,
    Whole,
    Silent,
    RefusesLong,
    RefusesLater,
    Error,
}

#[derive(Clone)]
pub(super) struct Engine {
    /// As its list of models says.
    pub(super) owner: &'static str,
    pub(super) drafts: bool,
    pub(super) trouble: Option<Trouble>,
    pub(super) wants_key: bool,
    /// What each answer begins with.
    pub(super) word: &'static str,
    pub(super) seen: Arc<Mutex<Seen>>,
}

/// What it was asked, and what it counted.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) requests: Vec<(String, Value)>,
    answers: usize,
}

impl Engine {
    pub(super) fn new(owner: &'static str, drafts: bool) -> Self {
        let seen = Arc::default();
        Self { owner, drafts, trouble: None, wants_key: false, word: "w", seen }
    }

    pub(super) fn in_trouble(trouble: Trouble) -> Self {
        Self { trouble: Some(trouble), ..Self::new("vllm", true) }
    }

    /// Serves until the test process ends; returns the address.
    pub(super) fn serve(&self) -> String {
        let engine = self.clone();
        server::serve("127.0.0.1", move |_, stream| {
            let engine = engine.clone();
            std::thread::spawn(move || engine.answer(stream))
        })
    }

    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let asked = Asked::read(&mut BufReader::new(stream.try_clone()?))?;
        if self.wants_key && asked.header("authorization") != Some(format!("Bearer {KEY}")) {
            let body = json!({ "error": { "message": format!("no key, not even {KEY}") } });
            return plain(&mut stream, "401 Unauthorized", "application/json", &body.to_string());
        }
        match asked.path() {
            "/v1/models" => {
                let models = json!({ "data": [{ "id": "tiny", "owned_by": self.owner }] });
                plain(&mut stream, "200 OK", "application/json", &models.to_string())
            }
            "/metrics" => match self.metrics() {
                Some(page) => plain(&mut stream, "200 OK", "text/plain", &page),
                None => plain(&mut stream, "404 Not Found", "text/plain", "none"),
            },
            path => {
                let wanted: Value = serde_json::from_slice(&asked.body).unwrap_or_default();
                self.write_answer(&mut stream, path, wanted)
            }
        }
    }

    /// The page of counters, after so many answers.
    fn metrics(&self) -> Option<String> {
        let answers = self.seen.lock().expect("seen").answers;
        let of = |count: usize| answers * count;
        match (self.owner, self.drafts) {
            ("vllm", true) => Some(format!(
                "# TYPE vllm:spec_decode_num_drafts_total counter\n\
                 vllm:spec_decode_num_drafts_total{{engine=\"0\",model_name=\"tiny\"}} {}.0\n\
                 vllm:spec_decode_num_draft_tokens_total{{engine=\"0\"}} {}.0\n\
                 vllm:spec_decode_num_accepted_tokens_total{{engine=\"0\"}} {}.0\n\
                 vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine=\"0\",position=\"0\"}} {}\n\
                 vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine=\"0\",position=\"1\"}} {}\n\
                 vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine=\"0\",position=\"2\"}} 0\n\
                 vllm:generation_tokens_total{{engine=\"0\"}} {}.0\n",
                of(4),
                of(12),
                of(7),
                of(4),
                of(3),
                of(12)
            )),
            ("vllm", false) => {
                Some(format!("vllm:generation_tokens_total{{engine=\"0\"}} {}\n", of(12)))
            }
            ("sglang", true) if answers > 0 => {
                Some(format!("sglang:spec_accept_length{{tp_rank=\"0\"}} {TAU}\n"))
            }
            ("sglang", _) => Some("sglang:spec_accept_length{tp_rank=\"0\"} 0.0\n".to_owned()),
            _ => None,
        }
    }

    /// Whether it refuses a request that it has seen: a long prompt, or one that it answered before.
    fn refuses(&self, prompt: &str) -> bool {
        let seen = self.seen.lock().expect("seen");
        let asks_later = |(_, asked): &&(String, Value)| asked.to_string().contains("later");
        match self.trouble {
            Some(Trouble::RefusesLong) => prompt.contains("long"),
            _ => prompt.contains("later") && seen.requests.iter().filter(asks_later).count() > 1,
        }
    }

    fn write_answer(
        &self,
        stream: &mut TcpStream,
        path: &str,
        asked: Value,
    ) -> std::io::Result<()> {
        let prompt = asked.to_string();
        self.seen.lock().expect("seen").requests.push((path.to_owned(), asked));
        match self.trouble {
            Some(Trouble::Html) => {
                return plain(stream, "200 OK", "text/html", "<html>a page\u{1b}[2J</html>");
            }
            Some(Trouble::Whole) => {
                return plain(stream, "200 OK", "application/json", "{\"choices\": []}");
            }
            Some(Trouble::RefusesLong | Trouble::RefusesLater) if self.refuses(&prompt) => {
                let error =
                    json!({ "error": { "message": "this model's maximum context is 9 tokens" } });
                return plain(stream, "400 Bad Request", "application/json", &error.to_string());
            }
            Some(Trouble::Silent) => {
                // Until the client goes.
                return stream.read_to_end(&mut Vec::new()).map(|_| ());
            }
            _ => {}
        }
        let begin =
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";
        stream.write_all(begin.as_bytes())?;
        let is_chat = path.ends_with("/chat/completions");
        let mut token = 0;
        for (round, tokens) in ROUNDS.into_iter().enumerate() {
            match self.trouble {
                Some(Trouble::Dies) if round == 3 => return Ok(()),
                Some(Trouble::Rubbish) if round == 2 => {
                    return stream.write_all(b"data: {\"choices\": [\x1b[2J\n\n");
                }
                Some(Trouble::Error) if round == 1 => {
                    let error = json!({ "error": { "message": "out of memory", "code": 500 } });
                    return stream.write_all(format!("data: {error}\n\n").as_bytes());
                }
                _ => {}
            }
            let text: String =
                (token..token + tokens).map(|number| format!("{}{number} ", self.word)).collect();
            token += tokens;
            let choice = if is_chat {
                json!({ "index": 0, "delta": { "content": text }, "finish_reason": null })
            } else {
                json!({ "index": 0, "text": text, "finish_reason": null })
            };
            event(stream, &json!({ "choices": [choice] }))?;
        }
        let mut end =
            json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": "length" }] });
        if self.owner == "llamacpp" {
            end["timings"] = json!({ "predicted_n": 12, "predicted_ms": 3.5 });
            if self.drafts {
                end["timings"]["draft_n"] = json!(12);
                end["timings"]["draft_n_accepted"] = json!(7);
            }
        }
        event(stream, &end)?;
        let mut usage = json!({ "prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17 });
        if self.owner == "longdraft" {
            let (accepted, passes) = if self.drafts { (7, 4) } else { (0, 11) };
            usage["completion_tokens_details"] = json!({
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": if self.drafts { 5 } else { 0 },
                "target_passes": passes,
            });
        }
        if self.owner != "counts nothing" {
            event(stream, &json!({ "choices": [], "usage": usage }))?;
        }
        self.seen.lock().expect("seen").answers += 1;
        stream.write_all(b"data: [DONE]\n\n")
    }
}

fn plain(stream: &mut TcpStream, status: &str, kind: &str, body: &str) -> std::io::Result<()> {
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(format!("{head}{body}").as_bytes())
}

fn event(stream: &mut TcpStream, data: &Value) -> std::io::Result<()> {
    stream.write_all(format!(": a comment\ndata: {data}\n\n").as_bytes())
}
