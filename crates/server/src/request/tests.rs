//! Whatever a client sends is read or refused.

use std::sync::LazyLock;

use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use proptest::prelude::*;
use serde_json::{Map, json};

use super::*;
use crate::Settings;
use crate::answer::tests as answer;

const TEMPLATE: &str =
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.name }}{% endfor %}{{ tools }}";

/// The tokenizer that ships, with a template.
pub(crate) fn tokenizer_with(template: &str) -> TextTokenizer {
    let folder = tempfile::tempdir().expect("a folder");
    Target::open_tokenizer(answer::TARGET).expect("tokenizer").save(folder.path()).expect("saved");
    let config = json!({ "chat_template": template }).to_string();
    std::fs::write(folder.path().join("tokenizer_config.json"), config).expect("written");
    TextTokenizer::from_folder(folder.path()).expect("tokenizer")
}

static TOKENIZER: LazyLock<TextTokenizer> = LazyLock::new(|| tokenizer_with(TEMPLATE));

fn settings() -> Settings {
    let mut settings = answer::settings();
    settings.model = answer::model(TOKENIZER.vocabulary());
    settings.limits.max_tokens = 100;
    settings
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-3_i64..300).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-2.5..2.5).prop_map(|x: f64| Value::from(x)),
        any::<String>().prop_map(Value::from),
        prop::sample::select(vec!["user", "assistant", "text", "json_schema", "auto", "7"])
            .prop_map(Value::from),
    ];
    let keys = prop::sample::select(vec!["role", "content", "type", "text", "include_usage", "5"]);
    leaf.prop_recursive(3, 24, 5, move |inner| {
        let pairs = prop::collection::vec((keys.clone(), inner.clone()), 0..4);
        let object = |pairs: Vec<(&str, Value)>| {
            let pairs = pairs.into_iter().map(|(key, value)| (key.to_owned(), value));
            Value::Object(pairs.collect::<Map<_, _>>())
        };
        prop_oneof![
            prop::collection::vec(inner, 0..5).prop_map(Value::from),
            pairs.prop_map(object),
        ]
    })
}

/// A request that would be answered, with fields that may be anything.
fn requests() -> impl Strategy<Value = Value> {
    let fields = vec![
        "messages",
        "prompt",
        "model",
        "stream",
        "stream_options",
        "n",
        "max_tokens",
        "seed",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "logprobs",
        "top_logprobs",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "tools",
        "echo",
        "response_format",
        "tool_choice",
        "parallel_tool_calls",
        "suffix",
        "best_of",
        "origins",
        "ignore_eos",
        "min_tokens",
        "stop_token_ids",
        "chat_template_kwargs",
        "other",
    ];
    let changes = prop::collection::vec((prop::sample::select(fields), values()), 0..4);
    changes.prop_map(|changes| {
        let messages = json!([{ "role": "user", "content": "What is gravity?" }]);
        let mut request = json!({ "messages": messages, "prompt": "Once" });
        changes.into_iter().for_each(|(field, value)| request[field] = value);
        request
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn any_request_is_read_or_refused_with_a_reason(request in requests()) {
        let settings = settings();
        for asked in [
            ChatRequest::asked(&request, &settings, &TOKENIZER),
            CompletionRequest::asked(&request, &settings, &TOKENIZER),
        ] {
            match asked {
                Ok(Asked { prompts, count, options, stops, .. }) => {
                    prop_assert!(!prompts.is_empty() && count >= 1 && stops.len() <= 16);
                    prop_assert!((1..=100).contains(&options.max_new_tokens), "{options:?}");
                    prop_assert!(options.sampling.check().is_ok(), "{options:?}");
                }
                Err(error) => {
                    let told = error.to_json();
                    prop_assert!(told["error"]["type"] == "invalid_request_error", "{told}");
                }
            }
        }
    }

    #[test]
    fn any_bytes_are_json_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let mut headers = HeaderMap::new();
        prop_assert!(body_of(&headers, Ok(bytes.clone().into())).is_err(), "no type is named");
        let kind = "application/JSON; charset=utf-8".parse().expect("a header");
        headers.insert(header::CONTENT_TYPE, kind);
        let read = body_of(&headers, Ok(bytes.clone().into())).and_then(|body| json_of(&body));
        prop_assert_eq!(read.ok(), serde_json::from_slice::<Value>(&bytes).ok());
    }
}

#[test]
fn a_mark_before_the_json_is_left_out_and_a_compressed_body_is_refused() {
    assert_eq!(json_of(b"\xef\xbb\xbf{\"n\": 1}"), Ok(json!({ "n": 1 })));
    assert!(json_of(b"\xef\xbb\xbf").is_err() && json_of(b"\xef\xbb{}").is_err());
    let read = |coding: &'static str| {
        let headers =
            [(header::CONTENT_TYPE, "application/json"), (header::CONTENT_ENCODING, coding)];
        let headers = headers.map(|(name, value)| (name, HeaderValue::from_static(value)));
        body_of(&HeaderMap::from_iter(headers), Ok("{}".into()))
    };
    assert!(read("identity").is_ok());
    for coding in ["gzip", "br", "identity, gzip"] {
        let told = read(coding).expect_err("refused").to_json()["error"]["message"].to_string();
        assert!(told.contains("Content-Encoding"), "{told}");
    }
}

/// Some languages have no integers, and write all numbers as floats.
#[test]
fn whole_numbers_may_be_written_as_floats() {
    let asked = |text: &str| {
        let value = json_of(text.as_bytes()).expect("JSON");
        CompletionRequest::asked(&value, &settings(), &TOKENIZER)
    };
    let asked_whole = asked(
        r#"{ "prompt": [3.0, 4], "n": 2.0, "best_of": 2e0, "max_tokens": 7.0, "top_k": 40.0, "seed": -1.0,
             "logprobs": 3.0, "min_tokens": 1.0, "stop_token_ids": [5.0], "temperature": 1.0 }"#,
    );
    let Asked { prompts, count, options, .. } = asked_whole.expect("asked");
    assert_eq!((prompts, count), (vec![vec![TargetTokenId(3), TargetTokenId(4)]], 2));
    assert_eq!((options.max_new_tokens, options.seed, options.log_probs), (7, u64::MAX, Some(3)));
    assert_eq!((options.sampling.top_k, options.late.after), (Some(40), 1));
    assert!(options.stop_tokens.contains(&TargetTokenId(5)));
    for (field, number) in [
        ("max_tokens", "2.5"),
        ("top_k", "0.5"),
        ("seed", "1e300"),
        ("seed", "9223372036854775808.0"),
        ("n", "-1.0"),
    ] {
        let refused = asked(&format!(r#"{{ "prompt": "a", "{field}": {number} }}"#));
        assert_eq!(refused.err().expect("refused").to_json()["error"]["param"], field, "{number}");
    }
    // A schema, an argument of a call: what the request only hands on.
    let text = r#"{"response_format":{"schema":{"multipleOf":2.0}},"messages":[{"content":1.0}]}"#;
    assert_eq!(json_of(text.as_bytes()).expect("JSON").to_string(), text);
}

#[test]
fn what_is_asked_for_reaches_the_decoder() {
    let request = json!({
        "messages": [{ "role": "user", "content": "a" }], "max_completion_tokens": 7, "seed": -1,
        "temperature": 0.5, "top_p": 0.0, "top_k": 5, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1, "logit_bias": { "3": 2.5 }, "stop": "x", "n": 2, "logprobs": true,
        "top_logprobs": 4, "stream": true, "stream_options": { "include_usage": true },
    });
    let asked = ChatRequest::asked(&request, &settings(), &TOKENIZER).expect("asked");
    let Asked { count, options, is_seeded, stops, telling, .. } = asked;
    let told = Telling {
        is_chat: true,
        streams: true,
        streams_usage: true,
        log_probs: true,
        origins: false,
    };
    assert_eq!((count, is_seeded, stops, telling), (2, true, vec!["x".to_owned()], told));
    assert_eq!((options.max_new_tokens, options.seed), (7, u64::MAX));
    assert_eq!(options.log_probs, Some(4));
    let sampling = options.sampling;
    assert_eq!((sampling.top_k, sampling.bias), (Some(5), [(TargetTokenId(3), 2.5)].into()));
    assert_eq!(sampling.top_p.to_bits(), f64::MIN_POSITIVE.to_bits());
    let rest = [
        (sampling.temperature, 0.5),
        (sampling.min_p, 0.1),
        (sampling.presence_penalty, 1.0),
        (sampling.frequency_penalty, -1.0),
    ];
    assert!(rest.iter().all(|(found, wanted)| (found - wanted).abs() < 1e-12), "{rest:?}");
}

#[test]
fn what_would_change_an_answer_and_cannot_be_followed_is_refused() {
    let asked = |field: &str, value: Value| {
        let messages = json!([{ "role": "user", "content": "a" }]);
        let mut request = json!({ "messages": messages, "prompt": "a" });
        request[field] = value;
        let chat = ChatRequest::asked(&request, &settings(), &TOKENIZER);
        let completion = CompletionRequest::asked(&request, &settings(), &TOKENIZER);
        [chat, completion].map(|asked| asked.err().map(|error| error.to_json()["error"].take()))
    };
    for (field, value) in [
        ("min_tokens", json!(5000)),
        ("repetition_penalty", json!(1.1)),
        ("stop_token_ids", json!([1 << 20])),
        ("stop_token_ids", json!(vec![3; 129])),
        ("continue_final_message", json!(true)),
        ("modalities", json!(["text", "audio"])),
        ("echo", json!(true)),
        ("function_call", json!({ "name": "f" })),
        ("truncate_prompt_tokens", json!(5)),
    ] {
        for error in asked(field, value) {
            assert_eq!(error.expect("refused")["param"], field);
        }
    }
    for (field, value) in [
        ("ignore_eos", json!(null)),
        ("ignore_eos", json!(true)),
        ("min_tokens", json!(0)),
        ("min_tokens", json!(16)),
        ("repetition_penalty", json!(1)),
        ("repetition_penalty", json!(1.0)),
        ("stop_token_ids", json!([])),
        ("stop_token_ids", json!([3])),
        ("chat_template_kwargs", json!({})),
        ("chat_template_kwargs", json!({ "enable_thinking": false })),
        ("modalities", json!(["text"])),
        ("suffix", json!("")),
        ("unknown", json!(true)),
    ] {
        assert_eq!(asked(field, value), [None, None], "{field}");
    }
}

#[test]
fn ends_are_the_model_s_and_those_that_are_named_and_may_come_late() {
    let ends = |more: Value| {
        let mut request = json!({ "prompt": "a", "max_tokens": 9 });
        more.as_object()
            .into_iter()
            .flatten()
            .for_each(|(key, value)| request[key] = value.clone());
        let asked = CompletionRequest::asked(&request, &settings(), &TOKENIZER).expect("asked");
        let ids = |tokens: &[TargetTokenId]| tokens.iter().map(|token| token.0).collect::<Vec<_>>();
        let DecodeOptions { stop_tokens, late, .. } = asked.options;
        (ids(&stop_tokens), ids(&late.tokens), late.after, asked.own_ends)
    };
    // The model's own end is 2.
    assert_eq!(ends(json!({})), (vec![2], vec![2], 0, true));
    assert_eq!(ends(json!({ "min_tokens": 9 })), (vec![2], vec![2], 9, false));
    assert_eq!(ends(json!({ "stop_token_ids": [5] })), (vec![2, 5], vec![2, 5], 0, false));
    let all = json!({ "stop_token_ids": [5], "ignore_eos": true, "min_tokens": 4 });
    assert_eq!(ends(all), (vec![5], vec![2, 5], 4, false));
}

#[test]
fn variables_reach_the_template_unless_it_has_them_itself() {
    let tokenizer = tokenizer_with("{% if think is false %}no{% endif %}{{ messages[0].content }}");
    let prompt = |variables: Value| {
        let messages = json!([{ "role": "user", "content": "a" }]);
        let request = json!({ "messages": messages, "chat_template_kwargs": variables });
        let asked = ChatRequest::asked(&request, &settings(), &tokenizer);
        asked.map(|asked| asked.prompts).map_err(|error| error.to_json()["error"].take())
    };
    let of = |text: &str| {
        let ids = tokenizer.encode(text).expect("tokens").ids;
        Ok(vec![ids.into_iter().map(TargetTokenId).collect::<Vec<_>>()])
    };
    assert_eq!(prompt(Value::Null), of("a"));
    assert_eq!(prompt(json!({ "think": false })), of("noa"));
    for wrong in [
        json!({ "messages": [] }),
        json!({ "add_generation_prompt": false }),
        json!({ "raise_exception": "a" }),
        json!({ "think": false, "strftime_now": "today" }),
        json!({ "namespace": 1 }),
        json!({ "think": "a".repeat(1 << 14) }),
        json!([1]),
    ] {
        assert_eq!(prompt(wrong).expect_err("refused")["param"], "chat_template_kwargs");
    }
}

#[test]
fn a_text_gets_no_start_token_where_the_request_wants_none() {
    let tokenizer = Target::open_tokenizer(answer::TARGET).expect("tokenizer");
    let settings = settings();
    let prompt = |asked: Value| {
        let asked = CompletionRequest::asked(&asked, &settings, &tokenizer).expect("asked");
        asked.prompts.into_iter().flatten().map(|token| token.0).collect::<Vec<_>>()
    };
    let start = tokenizer.start_token(settings.model.bos).expect("a start token");
    let bare = tokenizer.encode("Once").expect("tokens").ids;
    let whole = [vec![start], bare.clone()].concat();
    assert_eq!(prompt(json!({ "prompt": "Once" })), whole);
    assert_eq!(prompt(json!({ "prompt": "Once", "add_special_tokens": true })), whole);
    assert_eq!(prompt(json!({ "prompt": "Once", "add_special_tokens": false })), bare);
}

#[test]
fn a_tool_that_is_no_function_is_refused() {
    // A template that reads it would fail. One without tools would write no text.
    let template = "a{% for tool in tools %}{{ tool.function.name }}{% endfor %}";
    let tokenizer = tokenizer_with(template);
    let asked = |tool: Value| {
        let good = json!({ "type": "function", "function": { "name": "now" } });
        let messages = json!([{ "role": "user", "content": "a" }]);
        let request = json!({ "messages": messages, "tools": [good, tool] });
        ChatRequest::asked(&request, &settings(), &tokenizer)
    };
    assert!(asked(json!({ "type": "function", "function": { "name": "later" } })).is_ok());
    for wrong in [
        json!(1),
        json!({ "type": "web_search" }),
        // The shape of another interface.
        json!({ "type": "function", "name": "now" }),
        json!({ "type": "function", "function": { "name": "" } }),
    ] {
        let error = asked(wrong).err().expect("refused").to_json();
        assert_eq!(error["error"]["param"], "tools[1].function.name", "{error}");
    }
    let messages = json!([{ "role": "user", "content": "a" }]);
    let unused = json!({ "messages": messages, "tools": [1], "tool_choice": "none" });
    assert!(ChatRequest::asked(&unused, &settings(), &tokenizer).is_ok());
}

#[test]
fn what_is_wrong_is_told_without_names_of_rust() {
    let user = json!([{ "role": "user", "content": "a" }]);
    let whole = "expected a whole number, 0 or more";
    for (request, told) in [
        (json!(["x"]), "the body must be a JSON object"),
        (json!({ "messages": user, "max_tokens": -1 }), whole),
        (json!({ "messages": user, "max_tokens": 2.5 }), whole),
        (json!({ "messages": user, "seed": "a" }), "expected a whole number"),
        (json!({ "messages": user, "temperature": "hot" }), "expected a number"),
        (json!({ "messages": "a" }), "expected a list"),
        (json!({ "messages": user, "logit_bias": 1 }), "expected an object"),
        (json!({ "messages": user, "stream_options": 1 }), "expected an object"),
        (json!({ "messages": user, "stop": [1] }), "stop: a text or a list of texts is needed"),
        (json!({ "messages": user, "stream": "yes" }), "expected a boolean"),
        (
            json!({ "messages": user, "tool_choice": "required" }),
            "tool_choice: required needs a function in `tools`",
        ),
    ] {
        let asked = ChatRequest::asked(&request, &settings(), &TOKENIZER);
        let error = asked.err().expect("refused").to_json()["error"]["message"].take();
        let error = error.as_str().expect("a message");
        assert!(error.ends_with(told), "{request}: {error}");
    }
}

/// An id may be written in several ways, so all of these name tokens.
#[test]
fn a_bias_has_at_most_as_many_entries_as_there_are_tokens() {
    let most = settings().model.vocabulary;
    assert!(most >= 300);
    let mut bias: Map<String, Value> = (0..most).map(|id| (id.to_string(), json!(1))).collect();
    let asked = |bias: &Map<String, Value>| {
        let messages = json!([{ "role": "user", "content": "a" }]);
        let request = json!({ "messages": messages, "logit_bias": bias });
        ChatRequest::asked(&request, &settings(), &TOKENIZER)
    };
    assert!(asked(&bias).is_ok());
    bias.insert("+0".to_owned(), json!(1));
    let error = asked(&bias).err().expect("refused").to_json()["error"].take();
    assert_eq!(error["param"], "logit_bias", "{error}");
    let told = error["message"].as_str().expect("a message");
    assert!(told.contains(&format!("at most {most} tokens")), "{told}");
}

#[test]
fn a_text_that_no_tokens_could_fit_is_refused_before_it_is_cut() {
    let mut settings = settings();
    settings.model.context = 8;
    let most = 8 * TOKENIZER.longest_token();
    for (length, fits) in [(most / 2, true), (most + 1, false)] {
        let text = "a".repeat(length);
        let messages = json!([{ "role": "user", "content": text }]);
        let request = json!({ "messages": messages, "prompt": [text, "b"] });
        let chat = ChatRequest::asked(&request, &settings, &TOKENIZER);
        let completion = CompletionRequest::asked(&request, &settings, &TOKENIZER);
        for asked in [chat, completion] {
            let error = asked.err().map(|error| error.to_json()["error"].take());
            assert_eq!(error.is_none(), fits, "{error:?}");
            assert!(error.is_none_or(|error| error["code"] == "context_length_exceeded"));
        }
    }
}
