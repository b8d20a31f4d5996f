//! What is wrong is told in OpenAI's shape, and leaves the server as it was.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::json;

use super::Server;
use crate::decoding::Shelf;
use crate::support::{fail, fail_with, finished, longdraft, require_words, told_by, with};

#[test]
fn wrong_requests_are_told_what_is_wrong() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &["--max-body", "64", "--lookup"]);
    let user = json!([{ "role": "user", "content": "a" }]);
    let (chat, text) = ("/v1/chat/completions", "/v1/completions");
    let long = "a".repeat(600);
    let deep = "[".repeat(5000);
    let stops = vec!["a"; 17];
    let templated = json!({ "messages": user, "add_generation_prompt": false });
    let refused = |path: &str, body: &str, status: u16, param: Option<&str>| {
        let reply = server.send(path, "application/json", body.as_bytes());
        let shown = &body[..body.len().min(100)];
        assert_eq!(reply.status, status, "{path} {shown}: {}", reply.body);
        let error = reply.error();
        match param {
            Some(param) => assert_eq!(error["param"], param, "{path} {shown}: {}", reply.body),
            None => assert!(error["param"].is_null(), "{path} {shown}: {}", reply.body),
        }
    };
    for body in ["{\"messages\": [", &deep, "\u{FFFD}", "[]", "{}"] {
        refused(chat, body, 400, None);
    }
    for (messages, param) in [
        (json!(7), "messages"),
        (json!([]), "messages"),
        (json!(["a"]), "messages[0]"),
        (json!([{ "role": "x" }]), "messages[0].role"),
    ] {
        refused(chat, &json!({ "messages": messages }).to_string(), 400, Some(param));
    }
    // Beside messages that are right.
    for (keys, status, param) in [
        (json!({ "n": 0 }), 400, Some("n")),
        (json!({ "n": 10_000 }), 400, Some("n")),
        (json!({ "n": -1 }), 400, Some("n")),
        (json!({ "temperature": "hot" }), 400, Some("temperature")),
        (json!({ "temperature": 9 }), 400, Some("temperature")),
        (json!({ "top_p": 1.5 }), 400, Some("top_p")),
        (json!({ "max_tokens": 0 }), 400, Some("max_tokens")),
        (
            json!({ "max_completion_tokens": 0, "max_tokens": 1 }),
            400,
            Some("max_completion_tokens"),
        ),
        (json!({ "stop": stops }), 400, Some("stop")),
        (json!({ "top_logprobs": 3 }), 400, Some("top_logprobs")),
        (json!({ "logit_bias": { "x": 1 } }), 400, Some("logit_bias")),
        (json!({ "logit_bias": { "258": 1 } }), 400, Some("logit_bias")),
        (json!({ "presence_penalty": 3 }), 400, Some("presence_penalty")),
        (json!({ "stream_options": {} }), 400, Some("stream_options")),
        (json!({ "response_format": { "type": "xml" } }), 400, Some("response_format.type")),
        (json!({ "model": "other" }), 404, None),
        (json!({ "tools": vec![1; 200] }), 400, Some("tools")),
    ] {
        let body = with(keys, json!({ "messages": user }));
        refused(chat, &body.to_string(), status, param);
    }
    for (path, body, status, param) in [
        (text, json!({}), 400, Some("prompt")),
        (text, json!({ "prompt": [] }), 400, Some("prompt")),
        (text, json!({ "prompt": [999] }), 400, Some("prompt")),
        (text, json!({ "prompt": "" }), 400, Some("prompt")),
        (text, json!({ "prompt": ["a", ""] }), 400, Some("prompt")),
        (text, json!({ "prompt": [[]] }), 400, Some("prompt")),
        (text, json!({ "prompt": "a", "max_tokens": 0 }), 400, Some("max_tokens")),
        (text, json!({ "prompt": "a", "echo": true }), 400, Some("echo")),
        (text, json!({ "prompt": "a", "best_of": 3 }), 400, Some("best_of")),
        (text, json!({ "prompt": long }), 400, None),
        // Refused before it is cut into tokens.
        (text, json!({ "prompt": "a".repeat(10_000) }), 400, None),
        (text, json!({ "prompt": "a".repeat(70_000) }), 413, None),
        ("/tokenize", json!({}), 400, Some("prompt")),
        ("/tokenize", templated, 400, Some("add_generation_prompt")),
        ("/detokenize", json!({ "tokens": "a" }), 400, Some("tokens")),
        ("/detokenize", json!({ "tokens": [999] }), 400, Some("tokens")),
        ("/v1/embeddings", json!({}), 404, None),
        ("/health", json!({}), 405, None),
    ] {
        refused(path, &body.to_string(), status, param);
    }
    let too_long = server.post(text, &json!({ "prompt": "a".repeat(600) }));
    assert_eq!(too_long.error()["code"], "context_length_exceeded");
    let no_type = server.send(text, "text/plain", json!({ "prompt": "a" }).to_string().as_bytes());
    assert_eq!(
        (no_type.status, no_type.error()["type"].as_str()),
        (415, Some("invalid_request_error"))
    );
    // What is unknown or harmless is left alone, and the server answers as before.
    let asked = json!({
        "prompt": "a", "max_tokens": 2, "user": "me", "store": false, "response_format": { "type": "text" },
        "seed": -5, "stop": null, "top_k": -1,
    });
    assert!(server.complete(&asked)["choices"][0]["text"].is_string());
}

#[test]
fn only_who_has_the_key_is_answered() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &["--api-key", "a-secret"]);
    let ask = |key: Option<&str>| {
        let url = format!("{}/v1/models", server.address);
        let request = server.agent.get(&url);
        let request = match key {
            Some(key) => request.header("authorization", key),
            None => request,
        };
        Server::read(request.call().expect("an answer"))
    };
    for wrong in
        [None, Some("a-secret"), Some("Bearer"), Some("Bearer a-secre"), Some("Bearer A-secret")]
    {
        let reply = ask(wrong);
        assert_eq!((reply.status, reply.error()["code"].as_str()), (401, Some("invalid_api_key")));
        assert_eq!(reply.headers["www-authenticate"], "Bearer");
    }
    assert_eq!(ask(Some("Bearer a-secret")).status, 200);
    assert_eq!(server.get("/metrics").status, 401);
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/").status, 200);
}

#[test]
fn a_name_that_was_made_to_lead_here_is_refused() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &[]);
    let address = server.address.strip_prefix("http://").expect("an address");
    let status = |host: &str| {
        let mut connection = TcpStream::connect(address).expect("a connection");
        let request =
            format!("GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        connection.write_all(request.as_bytes()).expect("sent");
        let mut answer = String::new();
        connection.read_to_string(&mut answer).expect("an answer");
        answer.split(' ').nth(1).map(str::to_owned).expect("a status")
    };
    for host in ["localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:99", "[::1]"] {
        assert_eq!(status(host), "200", "{host}");
    }
    for host in ["page.example", "page.example:8080", "127.0.0.1.example", "10.0.0.1", ""] {
        assert_eq!(status(host), "403", "{host}");
    }
}

#[test]
fn pages_of_other_origins_may_ask_only_where_they_are_let_in() {
    let shelf = Shelf::new();
    let origin = |server: &Server| {
        let url = format!("{}/v1/models", server.address);
        let request = server.agent.get(&url).header("origin", "http://page.example");
        let reply = Server::read(request.call().expect("an answer"));
        reply
            .headers
            .get("access-control-allow-origin")
            .map(|it| it.to_str().expect("text").to_owned())
    };
    assert_eq!(origin(&Server::start(&shelf, &[])), None);
    let open = Server::start(&shelf, &["--allow-origin", "http://page.example"]);
    assert_eq!(origin(&open).as_deref(), Some("http://page.example"));
    // Clients send headers of their own, and read when to come again.
    let url = format!("{}/v1/chat/completions", open.address);
    let asked = open.agent.options(&url).header("origin", "http://page.example");
    let asked = asked.header("access-control-request-method", "POST");
    let own = "authorization,content-type,x-stainless-os";
    let asked = asked.header("access-control-request-headers", own);
    let told = Server::read(asked.call().expect("an answer"));
    assert_eq!(told.status, 200, "{}", told.body);
    assert_eq!(told.headers["access-control-allow-headers"], own);
    let url = format!("{}/v1/models", open.address);
    let asked = open.agent.get(&url).header("origin", "http://page.example");
    let told = Server::read(asked.call().expect("an answer"));
    assert_eq!(told.headers["access-control-expose-headers"], "retry-after");
}

#[test]
fn a_server_that_cannot_begin_says_why() {
    let shelf = Shelf::new();
    let target = shelf.path("target");
    let server = Server::start(&shelf, &[]);
    let port = server.address.rsplit(':').next().expect("a port").to_owned();
    fail_with(&["serve", &target, "--port", &port], 2, &["hint: ", "--port"]);
    fail(&["serve", &target, "--port", "0", "--parallel", "0"], 2);
    fail(&["serve", &target, "--port", "0", "--temperature", "-1"], 2);
    fail(&["serve", &shelf.path("none"), "--port", "0"], 2);
    fail(&["serve", &target, "--port", "0", "--draft", &shelf.path("none")], 2);
    let host = fail(&["serve", &target, "--port", "0", "--host", "no where"], 2);
    assert!(host.contains("hint: give an IP address"), "{host}");
    // An address for documentation, which no machine has.
    let other = fail(&["serve", &target, "--port", "0", "--host", "192.0.2.1"], 2);
    assert!(other.contains("hint: this machine has no such address"), "{other}");
    let page = fail(&["serve", &target, "--port", "0", "--allow-origin", "http://a.example/"], 2);
    assert!(page.contains("is not an origin"), "{page}");
    fail_with(&["serve", &target, "--port", "0", "--name", ""], 2, &["--name is empty"]);
    let closed = fail(&["serve", &target, "--port", "0", "--max-body", "0"], 2);
    assert!(closed.contains("--max-body must be at least 1"), "{closed}");
    // Of a variable that is not set: without a key everybody would be let in.
    for key in ["", "  "] {
        fail_with(&["serve", &target, "--port", "0", "--api-key", key], 2, &["--api-key is empty"]);
    }
    let mut serve = longdraft(&["serve", &target, "--port", "0"]);
    let blank = finished(serve.env("LONGDRAFT_API_KEY", " "));
    require_words(&told_by(&blank, 2), &["LONGDRAFT_API_KEY is empty"]);
}

#[test]
fn a_server_answers_at_a_name_of_this_machine() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &["--host", "localhost"]);
    assert_eq!(server.get("/health").status, 200);
}
