//! Where answers end, and variables of the template: fields of vLLM and SGLang.

use serde_json::{Value, json};

use super::{Server, gathered};
use crate::decoding::Shelf;

/// What a completion says: text, reason and tokens.
#[track_caller]
fn told(server: &Server, more: &Value) -> (Value, Value, Value) {
    let mut asked = json!({ "prompt": "the cat", "temperature": 0, "max_tokens": 12 });
    more.as_object().into_iter().flatten().for_each(|(key, value)| asked[key] = value.clone());
    let whole = server.complete(&asked);
    let choice = &whole["choices"][0];
    // A stream says the same.
    asked["stream"] = true.into();
    let (texts, _) = gathered(server.stream("/v1/completions", &asked), 1);
    let of_stream = (Value::from(texts[0].0.as_str()), texts[0].1.clone());
    assert_eq!(of_stream, (choice["text"].clone(), choice["finish_reason"].clone()));
    (of_stream.0, of_stream.1, whole["usage"]["completion_tokens"].clone())
}

/// Tokens are bytes: 97 is `a`, and 257 ends a text.
#[test]
fn answers_end_where_they_are_asked_to() {
    let shelf = Shelf::new();
    let (glide, eagle3) = (shelf.path("glide"), shelf.path("eagle3"));
    let plain = Server::start(&shelf, &[]);
    let ways = [
        vec!["--draft", glide.as_str(), "--pace", "fixed"],
        vec!["--draft", eagle3.as_str(), "--lookup=switch", "--tree", "dynamic:3,4,12"],
    ];
    let (end, a) = (json!({ "257": 100 }), json!({ "97": 100 }));
    for server in [Server::start(&shelf, &ways[0]), Server::start(&shelf, &ways[1])] {
        for (more, wanted) in [
            (json!({ "logit_bias": end }), json!(["", "stop", 1])),
            (json!({ "logit_bias": end, "ignore_eos": true }), json!(["", "length", 12])),
            (json!({ "logit_bias": a, "stop_token_ids": [97] }), json!(["", "stop", 1])),
            (
                json!({ "logit_bias": a, "ignore_eos": true, "stop_token_ids": [3, 97] }),
                json!(["", "stop", 1]),
            ),
            // All of the text before the stop string stays.
            (json!({ "logit_bias": a, "stop": "a", "min_tokens": 3 }), json!(["aaa", "stop", 4])),
            (
                json!({ "logit_bias": a, "stop": "a", "min_tokens": 12 }),
                json!(["aaaaaaaaaaaa", "length", 12]),
            ),
            // A character that never gets whole is text only at the end, where it completes the stop string.
            (
                json!({ "logit_bias": { "195": 100 }, "stop": "\u{FFFD}", "max_tokens": 1 }),
                json!(["", "stop", 1]),
            ),
        ] {
            let (text, reason, tokens) = told(&server, &more);
            assert_eq!(json!([text, reason, tokens]), wanted, "{more}");
        }
        for (more, tokens) in [
            (json!({ "logit_bias": end, "min_tokens": 6 }), 7),
            (json!({ "logit_bias": a, "stop_token_ids": [97], "min_tokens": 4 }), 5),
            // Ends that are ignored may not come early either.
            (json!({ "logit_bias": end, "ignore_eos": true, "min_tokens": 5 }), 12),
        ] {
            let own = told(&server, &more);
            assert_eq!(own.2, tokens, "{more}");
            assert_eq!(own, told(&plain, &more), "{more}");
        }
        // Each of several drawn answers has as many, also where the prompt is kept from before.
        let drawn = json!({
            "prompt": "the cat", "temperature": 1, "seed": 3, "n": 3, "max_tokens": 12, "logprobs": 1,
            "logit_bias": end, "min_tokens": 6,
        });
        for _ in 0..2 {
            let whole = server.complete(&drawn);
            assert_eq!(whole["usage"]["completion_tokens"], 21);
            for choice in whole["choices"].as_array().expect("choices") {
                let told = choice["logprobs"]["tokens"].as_array().expect("tokens");
                assert_eq!((told.len(), &choice["finish_reason"]), (6, &json!("stop")));
            }
        }
        let form = json!({ "prompt": "a", "guided_choice": ["yes", "no"], "min_tokens": 2 });
        let refused = server.post("/v1/completions", &form);
        assert_eq!((refused.status, &refused.error()["param"]), (400, &json!("min_tokens")));
    }
}

/// A request's variables go over those of the server, one by one.
#[test]
fn templates_have_the_variables_of_the_server_by_default() {
    let shelf = Shelf::new();
    let template =
        "{{ messages[0].content }}{% if enable_thinking is false %}<no>{% endif %}{{ mark }}";
    let config = json!({ "chat_template": template, "eos_token": "</s>" }).to_string();
    std::fs::write(shelf.path("target/tokenizer_config.json"), config).expect("file");
    let given = r#"{"enable_thinking": false, "mark": "!"}"#;
    let server = Server::start(&shelf, &["--chat-template-kwargs", given]);
    let mut asked = json!({ "messages": [{ "role": "user", "content": "a" }] });
    for (variables, prompt) in [
        (Value::Null, "a<no>!"),
        (json!({}), "a<no>!"),
        (json!({ "enable_thinking": true }), "a!"),
        (json!({ "mark": "?" }), "a<no>?"),
    ] {
        asked["chat_template_kwargs"] = variables;
        let tokens = server.post("/tokenize", &asked).ok();
        let text = server.post("/detokenize", &tokens).ok();
        assert_eq!(text["content"], prompt);
    }
}

#[test]
fn templates_have_the_variables_of_a_request() {
    let shelf = Shelf::new();
    let template = "{{ messages[0].content }}{% if enable_thinking is false %}<no>{% endif %}";
    let config = json!({ "chat_template": template, "eos_token": "</s>" }).to_string();
    shelf.write("target/tokenizer_config.json", config);
    let server = Server::start(&shelf, &[]);
    let mut asked = json!({
        "messages": [{ "role": "user", "content": "a" }], "temperature": 0, "max_tokens": 6,
    });
    for (variables, prompt) in [
        (Value::Null, "a"),
        (json!({ "enable_thinking": true }), "a"),
        (json!({ "enable_thinking": false }), "a<no>"),
    ] {
        asked["chat_template_kwargs"] = variables;
        let tokens = server.post("/tokenize", &asked).ok();
        let text = server.post("/detokenize", &tokens).ok();
        assert_eq!(text["content"], prompt);
        let chat = server.post("/v1/chat/completions", &asked).ok();
        assert_eq!(chat["usage"]["prompt_tokens"], tokens["count"]);
    }
    for wrong in [json!({ "messages": [] }), json!({ "raise_exception": "a" })] {
        asked["chat_template_kwargs"] = wrong;
        for path in ["/tokenize", "/v1/chat/completions"] {
            let refused = server.post(path, &asked);
            let told = (refused.status, refused.error()["param"].clone());
            assert_eq!(told, (400, json!("chat_template_kwargs")), "{path}");
        }
    }
}
