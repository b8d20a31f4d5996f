//! Calls that are forced: the target that ships makes them, though it was never taught to.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use longdraft_decode::{BatchEngine, DecodeOptions};
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{Target, TargetOptions};
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_server::{Access, Drafts, Limits, Model, Settings, channel, serve};
use serde_json::{Value, json};

const TARGET: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/target/demonstration.gguf");
/// Writes messages, and has the marks of a syntax of calls.
const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}{% endfor %}\
{# <tool_call>{\"name\": , \"arguments\": }</tool_call> #}";

/// Ends the server when it is dropped, whatever became of the client.
struct Ends(Arc<AtomicBool>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The tokenizer that ships, with a template.
fn tokenizer() -> TextTokenizer {
    let folder = tempfile::tempdir().expect("a folder");
    Target::open_tokenizer(TARGET).expect("tokenizer").save(folder.path()).expect("saved");
    let config = json!({ "chat_template": TEMPLATE }).to_string();
    std::fs::write(folder.path().join("tokenizer_config.json"), config).expect("written");
    TextTokenizer::from_folder(folder.path()).expect("tokenizer")
}

fn settings(target: &Target, tokenizer: &TextTokenizer) -> Settings {
    let config = target.config();
    let model = Model {
        name: "demonstration".to_owned(),
        context: 1024,
        vocabulary: tokenizer.vocabulary(),
        bos: config.bos_token_id,
        stop_tokens: config.eos_token_ids.iter().map(|id| TargetTokenId(*id)).collect(),
    };
    let limits = Limits {
        queue: 4,
        max_tokens: 400,
        request_tokens: None,
        total_tokens: None,
        body: 1 << 16,
        grace: Duration::from_secs(1),
    };
    let (defaults, access) = (DecodeOptions::default(), Access::default());
    Settings { model, defaults, limits, access, lessons: None, hides_lookup: false }
}

/// The body of the answer to a request.
fn ask(address: SocketAddr, body: &Value) -> String {
    let mut stream = TcpStream::connect(address).expect("a server");
    let body = body.to_string();
    // Without chunks, which this version has not.
    let head = "POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\n";
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).expect("sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("an answer");
    reply.split_once("\r\n\r\n").expect("a head").1.to_owned()
}

/// Bodies of the answers to requests.
fn answered(requests: Vec<Value>) -> Vec<String> {
    let target = Target::open(TARGET, &TargetOptions::default()).expect("target");
    let tokenizer = tokenizer();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let ends = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&ends);
    let client = thread::spawn(move || {
        let _ends = Ends(ends);
        requests.iter().map(|request| ask(address, request)).collect::<Vec<String>>()
    });
    let engine = BatchEngine::new(&target, vec![None, None]);
    let drafts = Drafts { open: None, make: Box::new(|_| Ok(None)) };
    let (_control, inbox) = channel();
    let asked = move || asked.load(Ordering::Relaxed);
    let settings = settings(&target, &tokenizer);
    serve(settings, listener, (engine, drafts, inbox), &tokenizer, asked).expect("served");
    client.join().expect("answers")
}

fn request(seed: u64, more: &Value) -> Value {
    let parameters = json!({
        "type": "object", "required": ["city", "days"], "additionalProperties": false,
        "properties": { "city": { "enum": ["Kiel", "Rom"] }, "days": { "enum": [1, 2, 3] } },
    });
    let tools = json!([
        { "type": "function", "function": { "name": "weather", "parameters": parameters } },
        { "type": "function", "function": { "name": "now" } },
    ]);
    let messages = json!([{ "role": "user", "content": "Once upon a time" }]);
    let mut request = json!({
        "messages": messages, "tools": tools, "seed": seed, "temperature": 0, "max_tokens": 400,
    });
    for (key, value) in more.as_object().expect("an object") {
        request[key] = value.clone();
    }
    request
}

/// Names of the functions that a choice calls; their arguments are as their schemas want them.
fn called(calls: &Value) -> Vec<String> {
    let name = |call: &Value| {
        let function = &call["function"];
        let name = function["name"].as_str().expect("a name");
        let arguments = function["arguments"].as_str().expect("arguments");
        let arguments: Value = serde_json::from_str(arguments).expect("JSON");
        match name {
            "weather" => {
                assert!(["Kiel", "Rom"].contains(&arguments["city"].as_str().expect("a city")));
                assert!((1..=3).contains(&arguments["days"].as_u64().expect("days")));
            }
            other => assert_eq!((other, arguments), ("now", json!({}))),
        }
        name.to_owned()
    };
    calls.as_array().expect("calls").iter().map(name).collect()
}

#[test]
fn a_target_that_knows_no_calls_makes_those_that_are_forced() {
    let weather = json!({ "type": "function", "function": { "name": "weather" } });
    let more = json!({ "tool_choice": weather, "n": 2, "logprobs": true });
    let named = request(1, &more);
    let single = json!({
        "tool_choice": "required", "parallel_tool_calls": false, "temperature": 1.5,
    });
    let mut streamed = request(1, &more);
    streamed["stream"] = true.into();
    let replies = answered(vec![named, request(2, &single), streamed]);

    let whole: Value = serde_json::from_str(&replies[0]).expect("JSON");
    let choices = whole["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), 2);
    for choice in choices {
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        assert!(choice["message"]["content"].is_null(), "{choice}");
        assert_eq!(called(&choice["message"]["tool_calls"]), ["weather"]);
        assert!(choice["logprobs"]["content"].as_array().is_some_and(|tokens| tokens.len() > 5));
    }
    let any: Value = serde_json::from_str(&replies[1]).expect("JSON");
    assert_eq!(any["choices"][0]["finish_reason"], "tool_calls", "{any}");
    assert_eq!(called(&any["choices"][0]["message"]["tool_calls"]).len(), 1);

    // The stream says the same.
    let events = replies[2].lines().filter_map(|line| line.strip_prefix("data: "));
    let mut tokens = [0, 0];
    for event in events.filter(|event| *event != "[DONE]") {
        let event: Value = serde_json::from_str(event).expect("JSON");
        let choice = &event["choices"][0];
        let place = choice["index"].as_u64().expect("a place") as usize;
        tokens[place] += choice["logprobs"]["content"].as_array().map_or(0, Vec::len);
        assert!(choice["delta"]["content"].as_str().unwrap_or_default().is_empty(), "{event}");
        if let Some(calls) = choice["delta"]["tool_calls"].as_array() {
            let wanted = &choices[place]["message"]["tool_calls"][0]["function"];
            assert_eq!((calls.len(), &calls[0]["function"]), (1, wanted));
        }
    }
    let wanted =
        |place: usize| choices[place]["logprobs"]["content"].as_array().map_or(0, Vec::len);
    assert_eq!(tokens, [wanted(0), wanted(1)]);
}
