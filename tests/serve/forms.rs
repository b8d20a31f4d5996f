//! Answers of the form that a request asks for.

use std::thread;

use serde_json::{Value, json};

use super::{Server, gathered};
use crate::decoding::Shelf;

fn asked(seed: u64, temperature: f64) -> Value {
    let schema = json!({
        "type": "object", "required": ["sure", "size"], "additionalProperties": false,
        "properties": { "sure": { "type": "boolean" }, "size": { "enum": [1, "two", null] } },
    });
    json!({
        "prompt": format!("the cat {seed}"), "max_tokens": 60, "temperature": temperature, "seed": seed,
        "response_format": { "type": "json_schema", "json_schema": { "name": "a", "schema": schema } },
    })
}

#[track_caller]
fn check(text: &str) {
    let read: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("no JSON: {text}"));
    assert!(read["sure"].is_boolean() && read.as_object().map(serde_json::Map::len) == Some(2));
    assert!([json!(1), json!("two"), Value::Null].contains(&read["size"]), "{text}");
}

#[test]
fn answers_have_their_schema_with_a_draft_as_without() {
    let shelf = Shelf::new();
    let plain = Server::start(&shelf, &[]);
    let drafted = Server::start(&shelf, &["--draft", &shelf.path("glide"), "--parallel", "3"]);
    let looked_up = Server::start(&shelf, &["--lookup"]);
    for server in [&drafted, &looked_up] {
        thread::scope(|scope| {
            for seed in 0..6 {
                let plain = &plain;
                scope.spawn(move || {
                    // Free text beside it changes nothing.
                    if seed % 3 == 2 {
                        server.complete(&json!({ "prompt": "the", "max_tokens": 20 }));
                    }
                    let body = asked(seed, 0.0);
                    let (own, wanted) = (server.complete(&body), plain.complete(&body));
                    let text = own["choices"][0]["text"].as_str().expect("text");
                    check(text);
                    assert_eq!(own["choices"][0]["finish_reason"], "stop", "{own}");
                    assert_eq!(own["choices"][0], wanted["choices"][0]);
                    let sampled = server.complete(&asked(seed, 1.0));
                    check(sampled["choices"][0]["text"].as_str().expect("text"));
                });
            }
        });
    }
    let mut body = asked(1, 1.0);
    (body["stream"], body["n"]) = (true.into(), 2.into());
    let (texts, _) = gathered(drafted.stream("/v1/completions", &body), 2);
    texts.iter().for_each(|(text, _)| check(text));
}

#[test]
fn a_form_that_no_token_leads_on_is_refused_and_the_server_goes_on() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &[]);
    for (field, value) in [
        ("guided_regex", json!("(")),
        ("guided_json", json!({ "type": "integer", "minimum": 3, "maximum": 1 })),
        ("guided_grammar", json!("start: other")),
    ] {
        let reply = server.post("/v1/completions", &json!({ "prompt": "a", field: value }));
        assert_eq!((reply.status, reply.error()["param"].as_str()), (400, Some(field)));
    }
    // Where bias and form leave no token, the answer ends with an error of its own.
    let body = json!({ "prompt": "a", "guided_choice": ["b"], "logit_bias": all_banned() });
    assert!([200, 400].contains(&server.post("/v1/completions", &body).status));
    let chosen = server.complete(&json!({ "prompt": "a", "guided_choice": ["yes", "no"] }));
    let text = chosen["choices"][0]["text"].as_str().expect("text");
    assert!(["yes", "no"].contains(&text), "{text}");
}

/// A bias against every token that a choice could begin with.
fn all_banned() -> Value {
    (0..60).map(|id| (id.to_string(), json!(-100))).collect::<serde_json::Map<_, _>>().into()
}

#[test]
fn what_a_form_forces_is_proposed_without_a_draft_and_counted() {
    let shelf = Shelf::new();
    let plain = Server::start(&shelf, &[]);
    let drafted = Server::start(&shelf, &["--draft", &shelf.path("eagle3"), "--pace", "fixed"]);
    let text = "a long text that can only be written in one way, or in \"another\"";
    for temperature in [0.0, 1.0] {
        let asked = json!({
            "prompt": "the cat", "temperature": temperature, "seed": 3, "max_tokens": 90,
            "guided_choice": [text], "origins": true, "stream": true,
            "stream_options": { "include_usage": true },
        });
        for server in [&plain, &drafted] {
            let events: Vec<String> = server.stream("/v1/completions", &asked).collect();
            let of_grammar = events.iter().filter(|event| event.contains("\"origin\":\"grammar\""));
            let of_grammar = of_grammar.count() as u64;
            let (texts, usage) = gathered(server.stream("/v1/completions", &asked), 1);
            assert_eq!((texts[0].0.as_str(), &texts[0].1), (text, &json!("stop")));
            let by = &usage["completion_tokens_details"]["accepted_by_origin"];
            let counted = by["grammar"].as_u64().expect("a count");
            // The end of the text may be among them, which is no event.
            assert!(counted >= of_grammar && of_grammar > 50, "{counted} {of_grammar}");
        }
    }
    assert!(plain.metric("accepted_grammar_tokens_total") > 100.0);
    assert!(plain.metric("target_passes_total") < 40.0);
}
