//! Requests to a server of OpenAI's interface, and the times of what streams back.

use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use longdraft_models::hub::{Token, is_confidential, printable};
use serde_json::{Value, json};
use ureq::http::Response;
use ureq::{Agent, Body};
use url::Url;

use super::answer::Answer;
use super::counters::Counters;
use crate::failure::{Failure, Result};

/// To reach a server.
const CONNECT: Duration = Duration::from_secs(10);
/// Bytes of an answer, of a line of one, and of a page of counters.
const LONGEST_ANSWER: u64 = 256 << 20;
const LONGEST_LINE: u64 = 16 << 20;
const LONGEST_PAGE: u64 = 64 << 20;
/// Bytes that are read of a refusal.
const LONGEST_REFUSAL: u64 = 64 << 10;

/// Who answers, as far as it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Longdraft,
    Vllm,
    Sglang,
    LlamaCpp,
    Unknown,
}

impl Kind {
    fn of(owner: &str) -> Self {
        match owner {
            "longdraft" => Self::Longdraft,
            "vllm" => Self::Vllm,
            "sglang" => Self::Sglang,
            "llamacpp" => Self::LlamaCpp,
            _ => Self::Unknown,
        }
    }

    /// In words.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Longdraft => "longdraft",
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::LlamaCpp => "llama.cpp",
            Self::Unknown => "a server that does not say what it is",
        }
    }
}

/// What is sent.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Prompt {
    /// A text to continue.
    Text(String),
    /// A conversation, as its messages.
    Turns(Value),
}

/// Why there is no answer.
pub(super) enum Unanswered {
    /// The server refused this request, and may take others.
    Refused(String),
    /// Nothing more is to be had of it.
    Failed(Failure),
}

impl From<Unanswered> for Failure {
    fn from(unanswered: Unanswered) -> Self {
        match unanswered {
            Unanswered::Failed(failure) => failure,
            Unanswered::Refused(problem) => Self::work(problem)
                .hint("look at what the server itself prints, and at its limits of tokens"),
        }
    }
}

/// A server that answers.
pub(super) struct Server {
    agent: Agent,
    base: Url,
    key: Option<Token>,
    /// As requests name it.
    pub(super) model: Option<String>,
    pub(super) kind: Kind,
    silence: Duration,
}

impl Server {
    /// Asks a server what it is. `model` names one of several.
    /// It fails where this is no address of the web, nobody answers there, or it serves no such model.
    pub(super) fn open(
        address: &str,
        (key, model): (Option<&Token>, Option<&str>),
        silence: Duration,
    ) -> Result<Self> {
        let base = base(address)?;
        let mut config = Agent::config_builder()
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(silence))
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false);
        if is_confidential(&base) && base.scheme() == "http" {
            config = config.proxy(None);
        }
        if key.is_some() && !is_confidential(&base) {
            errln!("warning: the key goes to {base} where others can read it: use https://");
        }
        let agent = config.build().new_agent();
        let mut server =
            Self { agent, base, key: key.cloned(), model: None, kind: Kind::Unknown, silence };
        let told = server.models()?;
        let all = told["data"].as_array().map_or(&[][..], Vec::as_slice);
        let names: Vec<&str> = all.iter().filter_map(|entry| entry["id"].as_str()).collect();
        let at = match model {
            Some(wanted) => names.iter().position(|name| *name == wanted).ok_or_else(|| {
                let names = printable(&names.join(", "), &[]);
                Failure::usage(format!("{}: it serves no model `{wanted}`", server.address()))
                    .hint(format!("it serves {names}"))
            })?,
            None => 0,
        };
        server.model = names.get(at).map(|name| (*name).to_owned());
        server.kind = Kind::of(
            all.get(at).map_or("", |entry| entry["owned_by"].as_str().unwrap_or_default()),
        );
        if server.kind == Kind::Unknown {
            server.kind = server.counters().map_or(Kind::Unknown, |counters| counters.kind());
        }
        Ok(server)
    }

    /// Its address, as messages name it.
    pub(super) fn address(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// The list of models; empty where there is no such list.
    fn models(&self) -> Result<Value> {
        let mut response = self.send("v1/models", None).map_err(|error| self.unreached(&error))?;
        match response.status().as_u16() {
            200 => {}
            404 | 405 | 501 => return Ok(Value::Null),
            _ => return Err(self.refused(&mut response).into()),
        }
        let body = response.body_mut().with_config().limit(LONGEST_PAGE).lossy_utf8(true);
        let text = body.read_to_string().map_err(|error| self.unreached(&error))?;
        serde_json::from_str(&text).map_err(|_| {
            Failure::work(format!(
                "{}/v1/models: no JSON, but `{}`",
                self.address(),
                beginning(text.as_bytes())
            ))
            .hint("is this the address of a server of OpenAI's interface?")
        })
    }

    /// What it counts, if it tells.
    pub(super) fn counters(&self) -> Option<Counters> {
        let mut response = self.send("metrics", None).ok()?;
        if !response.status().is_success() {
            return None;
        }
        let body = response.body_mut().with_config().limit(LONGEST_PAGE).lossy_utf8(true);
        Some(Counters::read(&body.read_to_string().ok()?))
    }

    /// Has a prompt answered. `options` go into the request as they are.
    pub(super) fn ask(
        &self,
        prompt: &Prompt,
        options: &Value,
    ) -> std::result::Result<Answer, Unanswered> {
        let mut body = options.clone();
        body["stream"] = json!(true);
        body["stream_options"] = json!({ "include_usage": true });
        if let Some(model) = &self.model {
            body["model"] = json!(model);
        }
        let path = match prompt {
            Prompt::Text(text) => {
                body["prompt"] = json!(text);
                "v1/completions"
            }
            Prompt::Turns(messages) => {
                body["messages"] = messages.clone();
                "v1/chat/completions"
            }
        };
        let asked = Instant::now();
        let mut response = self
            .send(path, Some(&body))
            .map_err(|error| Unanswered::Failed(self.unreached(&error)))?;
        if !response.status().is_success() {
            return Err(self.refused(&mut response));
        }
        let kind = response.headers().get("content-type").and_then(|kind| kind.to_str().ok());
        if !kind.is_some_and(|kind| kind.starts_with("text/event-stream")) {
            return Err(self.rubbish("no stream of events", kind.unwrap_or_default().as_bytes()));
        }
        self.hear(response, asked)
    }

    /// Reads a stream to its end.
    fn hear(
        &self,
        response: Response<Body>,
        asked: Instant,
    ) -> std::result::Result<Answer, Unanswered> {
        let body = response.into_body().into_with_config().limit(LONGEST_ANSWER).reader();
        let mut reader = BufReader::new(body);
        let (mut answer, mut line, mut is_over) = (Answer::default(), Vec::new(), false);
        loop {
            line.clear();
            let read = (&mut reader).take(LONGEST_LINE).read_until(b'\n', &mut line);
            let now = asked.elapsed().as_secs_f64();
            match read {
                Err(error) => return Err(self.died(&answer, &error.to_string())),
                Ok(0) if is_over => return Ok(answer.finished(now)),
                Ok(0) => return Err(self.died(&answer, "the connection ended")),
                Ok(_) => {}
            }
            let Some(data) = line.trim_ascii().strip_prefix(b"data:") else { continue };
            let data = data.trim_ascii();
            if data == b"[DONE]" {
                return Ok(answer.finished(now));
            }
            let event: Value =
                serde_json::from_slice(data).map_err(|_| self.rubbish("no JSON", data))?;
            if event["error"].is_object() || event["error"].is_string() {
                return Err(Unanswered::Refused(self.told(&event, "")));
            }
            if !event.is_object() {
                return Err(self.rubbish("no event", data));
            }
            is_over |= answer.take(&event, now);
        }
    }

    fn send(
        &self,
        path: &str,
        body: Option<&Value>,
    ) -> std::result::Result<Response<Body>, ureq::Error> {
        let address = format!("{}/{path}", self.address());
        let key = self.key.as_ref().map(Token::authorization);
        match body {
            None => {
                let request = self.agent.get(&address);
                match key {
                    Some(key) => request.header("authorization", key).call(),
                    None => request.call(),
                }
            }
            Some(body) => {
                let request = self.agent.post(&address);
                match key {
                    Some(key) => request.header("authorization", key).send_json(body),
                    None => request.send_json(body),
                }
            }
        }
    }

    fn unreached(&self, error: &ureq::Error) -> Failure {
        let (reason, further) = match error {
            ureq::Error::Timeout(ureq::Timeout::Connect) => {
                (format!("no connection within {} s", CONNECT.as_secs()), "")
            }
            ureq::Error::Timeout(_) => {
                let reason = format!("no answer within {} s", self.silence.as_secs());
                (reason, "; --timeout waits longer")
            }
            other => (printable(&other.to_string(), &[self.secret()]), ""),
        };
        Failure::work(format!("{}: {reason}", self.address())).hint(format!(
            "is the server ready? Give the address that it prints, http://HOST:PORT{further}"
        ))
    }

    fn refused(&self, response: &mut Response<Body>) -> Unanswered {
        let status = response.status();
        let body = response.body_mut().with_config().limit(LONGEST_REFUSAL).lossy_utf8(true);
        let text = body.read_to_string().unwrap_or_default();
        let told = self.told(&serde_json::from_str(&text).unwrap_or_default(), &text);
        let problem = format!("{told} (status {})", status.as_u16());
        let hint = match status.as_u16() {
            401 | 403 => {
                "the variable that --api-key-env names (LONGDRAFT_API_KEY) has to hold the server's key"
            }
            404 | 405 => "the address is that of the server without a path: http://HOST:PORT",
            300..400 => "give the address that it sends on to",
            400..500 => return Unanswered::Refused(problem),
            _ => "look at what the server itself prints",
        };
        Unanswered::Failed(Failure::work(problem).hint(hint))
    }

    /// What the server says of an error.
    fn told(&self, error: &Value, text: &str) -> String {
        let message =
            [&error["error"]["message"], &error["message"], &error["detail"], &error["error"]];
        let said = message.iter().find_map(|message| message.as_str()).unwrap_or(text);
        let said = printable(said, &[self.secret()]);
        let said = if said.is_empty() { "it refused".to_owned() } else { said };
        format!("{}: {said}", self.address())
    }

    fn died(&self, answer: &Answer, reason: &str) -> Unanswered {
        let reason = printable(reason, &[self.secret()]);
        let heard = answer.events;
        let problem = format!(
            "{}: it stopped in the middle of an answer, after {heard} events: {reason}",
            self.address()
        );
        Unanswered::Failed(Failure::work(problem).hint(
            "look at what the server itself prints; where it only was slow, --timeout waits longer",
        ))
    }

    fn rubbish(&self, what: &str, data: &[u8]) -> Unanswered {
        let problem = format!("{}: {what}: `{}`", self.address(), beginning(data));
        Unanswered::Failed(Failure::work(problem).hint(
            "the server has to stream its answers as OpenAI's interface does; is something else at this address?",
        ))
    }

    fn secret(&self) -> &str {
        self.key.as_ref().map_or("", Token::secret)
    }
}

/// The address without a slash at its end, and without the interface's version.
fn base(address: &str) -> Result<Url> {
    let refuse = || {
        Failure::usage("--server and --compare-server take an address like http://127.0.0.1:8000")
            .hint("without a user, a password, `?` and `#`; a key goes into the variable LONGDRAFT_API_KEY")
    };
    let mut url = Url::parse(address.trim()).map_err(|_| refuse())?;
    let is_plain = matches!(url.scheme(), "http" | "https")
        && url.host().is_some()
        && url.username().is_empty()
        && url.password().is_none()
        && url.query().is_none()
        && url.fragment().is_none()
        && !address.contains('@');
    if !is_plain {
        return Err(refuse());
    }
    let path = url.path().trim_end_matches('/');
    let path = path.strip_suffix("/v1").unwrap_or(path).to_owned();
    url.set_path(&path);
    Ok(url)
}

/// The beginning of what a server sent, fit for a terminal.
fn beginning(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(400)]);
    printable(&text, &[]).chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lose_their_version_and_logins_are_refused() {
        for (address, want) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000/"),
            ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/"),
            ("https://host.example/llm/v1", "https://host.example/llm"),
        ] {
            assert_eq!(base(address).expect("an address").as_str(), want);
        }
        for address in ["127.0.0.1:8000", "ftp://x", "http://u:s3cret@x", "http://x?k=s3cret", ""] {
            let failure = base(address).expect_err("refused");
            assert!(!failure.message().contains("s3cret"), "{address}");
        }
    }
}
