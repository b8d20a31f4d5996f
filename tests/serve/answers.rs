//! What is answered: the same as `generate` says.

use serde_json::{Value, json};

use super::{Server, block_draft, gathered};
use crate::decoding::Shelf;
use crate::support::byte_tokenizer;

fn ways(shelf: &Shelf) -> [Vec<String>; 4] {
    let own = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let (glide, eagle3) = (shelf.path("glide"), shelf.path("eagle3"));
    [
        own(&["--draft", &glide, "--pace", "fixed"]),
        own(&["--lookup"]),
        own(&["--mtp", "--draft-len", "2", "--pace", "fixed"]),
        own(&["--draft", &eagle3, "--lookup=switch", "--tree", "dynamic:3,4,12"]),
    ]
}

const PROMPTS: [&str; 8] = [
    "the cat",
    "once upon a time there was a king",
    "a",
    "1 2 3 1 2 3 1 2",
    "äöü – ß",
    "the cat sat on the mat and the cat sat on the mat and the cat",
    "zzzz",
    "\n\nTitle\n",
];

#[test]
fn greedy_answers_are_those_of_generate_for_one_client_and_for_eight() {
    let shelf = Shelf::new();
    let alone: Vec<(Value, Value)> = PROMPTS
        .iter()
        .map(|prompt| {
            let text = shelf.generate(&["--prompt", prompt])["text"].clone();
            let chat = shelf.generate(&["--chat", "--prompt", prompt])["text"].clone();
            (text, chat)
        })
        .collect();
    for way in ways(&shelf) {
        let way: Vec<&str> = way.iter().map(String::as_str).collect();
        let server = Server::start(&shelf, &[&["--parallel", "3"], &way[..]].concat());
        let ask = |place: usize| {
            let prompt = PROMPTS[place];
            let common = json!({ "model": "tiny", "temperature": 0, "max_tokens": 40 });
            let (mut text, mut chat) = (common.clone(), common);
            text["prompt"] = prompt.into();
            chat["messages"] = json!([{ "role": "user", "content": prompt }]);
            let told = server.complete(&text);
            assert_eq!(told["choices"][0]["text"], alone[place].0, "{way:?} {prompt:?}");
            let told = server.post("/v1/chat/completions", &chat).ok();
            let message = &told["choices"][0]["message"];
            assert_eq!(message["content"], alone[place].1, "{way:?} {prompt:?}");
            assert_eq!(message["role"], "assistant");
        };
        ask(0);
        std::thread::scope(|scope| {
            for place in 0..PROMPTS.len() {
                scope.spawn(move || ask(place));
            }
        });
        // A block of random weights proposes, and seldom what the target would say.
        let counted = if way[0] == "--mtp" { "proposed" } else { "accepted" };
        assert!(server.metric(&format!("{counted}_tokens_total")) > 0.0, "{way:?}");
    }
}

#[test]
fn sampled_answers_are_those_of_generate_for_the_same_seed() {
    let shelf = Shelf::new();
    let glide = shelf.path("glide");
    let drafting = ["--draft", glide.as_str(), "--verify", "match", "--top-k", "20"];
    let server = Server::start(&shelf, &drafting);
    for seed in ["1", "2"] {
        let sampled = ["--temperature", "0.9", "--seed", seed];
        let alone = shelf.generate(&[&drafting[..], &sampled, &["--prompt", "the cat"]].concat());
        let seed: u64 = seed.parse().expect("number");
        let asked = json!({
            "prompt": "the cat", "temperature": 0.9, "seed": seed, "max_tokens": 40, "n": 3,
        });
        let told = server.complete(&asked);
        assert_eq!(told["choices"][0]["text"], alone["text"]);
        let texts: Vec<&Value> = (0..3).map(|index| &told["choices"][index]["text"]).collect();
        assert!(texts[0] != texts[1] && texts[1] != texts[2], "{texts:?}");
        assert_eq!(server.complete(&asked)["choices"], told["choices"]);
    }
    let asked = json!({ "prompt": "the cat", "temperature": 0.9, "max_tokens": 40 });
    let texts = [0; 2].map(|_| server.complete(&asked)["choices"][0]["text"].clone());
    assert_ne!(texts[0], texts[1], "without a seed every answer is another one");
}

#[test]
fn a_stream_says_what_the_whole_answer_says() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &["--draft", &shelf.path("eagle3"), "--pace", "fixed"]);
    for (path, key, prompt) in [
        ("/v1/completions", "prompt", json!(["the cat", "zzzz"])),
        ("/v1/completions", "prompt", json!([116, 104, 101])),
        ("/v1/chat/completions", "messages", json!([{ "role": "user", "content": "the cat" }])),
    ] {
        let mut asked = json!({ "n": 2, "seed": 4, "temperature": 1, "max_tokens": 30 });
        asked[key] = prompt;
        let whole = server.post(path, &asked).ok();
        asked["stream"] = true.into();
        asked["stream_options"] = json!({ "include_usage": true });
        let choices = whole["choices"].as_array().expect("choices");
        let (texts, usage) = gathered(server.stream(path, &asked), choices.len());
        for (choice, (text, finish)) in choices.iter().zip(texts) {
            let whole = choice.get("text").unwrap_or(&choice["message"]["content"]);
            assert_eq!((whole, &choice["finish_reason"]), (&Value::from(text), &finish));
        }
        // What of a prompt was kept from before differs.
        for field in ["prompt_tokens", "completion_tokens", "completion_tokens_details"] {
            assert_eq!(usage[field], whole["usage"][field], "{field}");
        }
        let details = &usage["completion_tokens_details"];
        assert!(details["rejected_prediction_tokens"].as_u64() > Some(0), "{usage}");
    }
}

#[test]
fn options_of_sampling_do_what_they_say() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &["--draft", &shelf.path("glide")]);
    let greedy = |more: Value| {
        let mut asked = json!({ "prompt": "the cat", "temperature": 0, "max_tokens": 24 });
        for (key, value) in more.as_object().expect("an object") {
            asked[key] = value.clone();
        }
        server.complete(&asked)["choices"][0].clone()
    };
    let plain = greedy(json!({ "logprobs": 2 }));
    let first = &plain["logprobs"]["top_logprobs"][0];
    assert_eq!(first.as_object().map(serde_json::Map::len), Some(2));
    let own = plain["logprobs"]["token_logprobs"].as_array().expect("numbers");
    assert!(own.len() >= 20 && own.iter().all(|own| own.as_f64() < Some(0.0)), "{plain}");
    let top = shelf.generate(&["--prompt", "the cat"]);
    let banned = top["tokens"][0].to_string();
    let other = greedy(json!({ "logit_bias": { banned: -100 }, "logprobs": 0 }));
    assert_ne!(other["logprobs"]["tokens"][0], plain["logprobs"]["tokens"][0]);
    // A penalty at its largest leaves few repetitions.
    let repeats = |choice: &Value| {
        let tokens = choice["logprobs"]["tokens"].as_array().expect("tokens");
        let mut seen: Vec<&Value> = tokens.iter().collect();
        seen.sort_by_key(ToString::to_string);
        seen.dedup();
        tokens.len() - seen.len()
    };
    let always = greedy(json!({ "logit_bias": { "65": 4 }, "logprobs": 0 }));
    let penalised = json!({
        "logit_bias": { "65": 4 }, "logprobs": 0, "frequency_penalty": 2, "presence_penalty": 2,
    });
    assert!(repeats(&greedy(penalised)) <= repeats(&always), "{always}");
    let text = plain["text"].as_str().expect("text").to_owned();
    let middle: String = text.chars().skip(3).take(2).collect();
    let stopped = greedy(json!({ "stop": ["never", middle] }));
    assert_eq!(stopped["finish_reason"], "stop");
    let (before, _) = text.split_once(&middle).expect("a part of it");
    assert_eq!(stopped["text"], before);
    for narrow in [json!({ "top_k": 1 }), json!({ "top_p": 0 }), json!({ "min_p": 1 })] {
        let mut asked = narrow;
        asked["temperature"] = 1.into();
        assert_eq!(greedy(asked)["text"], plain["text"]);
    }
}

/// Where a tokenizer leaves out the first space of a text, that of a continuation is not the first one.
#[test]
fn a_text_goes_on_with_its_space() {
    let shelf = Shelf::new();
    let mut tokenizer = byte_tokenizer();
    let steps = tokenizer["decoder"]["decoders"].as_array_mut().expect("steps");
    steps.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    shelf.write("target/tokenizer.json", tokenizer.to_string());
    let server = Server::start(&shelf, &[]);
    // Every token is a space.
    let mut asked = json!({ "max_tokens": 3, "temperature": 0, "logit_bias": { "32": 100 } });
    asked["prompt"] = json!("Hello");
    asked["logprobs"] = json!(0);
    let told = server.complete(&asked)["choices"][0].clone();
    assert_eq!((&told["text"], &told["logprobs"]["tokens"][0]), (&json!("   "), &json!(" ")));
    asked["logprobs"] = Value::Null;
    asked["messages"] = json!([{ "role": "user", "content": "Hello" }]);
    let told = server.post("/v1/chat/completions", &asked).ok();
    assert_eq!(told["choices"][0]["message"]["content"], "  ");
}

#[test]
fn tokens_begin_where_their_text_does_also_while_a_stop_string_may_begin() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &[]);
    let mut asked = json!({
        "prompt": "x", "max_tokens": 5, "temperature": 0, "logit_bias": { "97": 100 }, "stop": "aab",
        "logprobs": 2,
    });
    let logprobs = server.complete(&asked)["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs["tokens"], json!(["a", "a", "a", "a", "a"]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3, 4]));
    // Bytes that are no character by themselves are told apart.
    asked["logit_bias"] = json!({ "195": 100 });
    let logprobs = server.complete(&asked)["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs["tokens"][0], "bytes:\\xc3");
    let top = logprobs["top_logprobs"].as_array().expect("tops");
    assert!(top.iter().all(|top| top.as_object().is_some_and(|top| top.len() >= 2)), "{logprobs}");
}

#[test]
fn the_model_its_tokens_and_its_meters_are_told() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &[]);
    assert_eq!(server.get("/health").ok()["status"], "ok");
    let page = server.get("/");
    assert_eq!(page.headers["content-type"], "text/html; charset=utf-8");
    // Nothing comes from elsewhere.
    assert!(page.body.contains("<title>") && !page.body.contains("http"), "{}", page.body);
    let models = server.get("/v1/models").ok();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(server.get("/v1/models/tiny").ok(), models["data"][0]);
    assert_eq!(server.get("/v1/models/org/other").error()["code"], "model_not_found");
    let tokens = server.post("/tokenize", &json!({ "prompt": "aä" })).ok();
    assert_eq!(tokens["tokens"], json!([97, 195, 164]));
    let back = server.post("/detokenize", &json!({ "tokens": tokens["tokens"] })).ok();
    assert_eq!(back["content"], "aä");
    let chat = json!({ "messages": [{ "role": "user", "content": "a" }] });
    let chat = server.post("/tokenize", &chat).ok();
    let text = server.post("/detokenize", &json!({ "tokens": chat["tokens"] })).ok();
    assert_eq!(text["content"], "[user]a\n[answer]");
    let told = server.complete(&json!({ "prompt": "abc", "max_tokens": 5, "temperature": 0 }));
    let usage = &told["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(3), &json!(5)));
    assert!((server.metric("generated_tokens_total") - 5.0).abs() < 1e-9);
    assert!((server.metric("prompt_tokens_total") - 3.0).abs() < 1e-9);
    assert!(server.metric("running_answers").abs() < 1e-9);
}

#[test]
fn a_conversation_keeps_what_was_said() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &["--lookup", "--parallel", "2"]);
    let mut messages = vec![json!({ "role": "user", "content": "a question that is not short" })];
    let ask = |messages: &[Value]| {
        let asked = json!({
            "messages": messages, "temperature": 0, "max_completion_tokens": 8,
            "logit_bias": { "257": -100 },
        });
        server.post("/v1/chat/completions", &asked).ok()
    };
    let first = ask(&messages);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({ "role": "user", "content": [{ "type": "text", "text": "and now?" }] }));
    let second = ask(&messages);
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert!(cached > Some(30), "{second}");
}

#[test]
fn what_prompts_begin_with_alike_is_read_once() {
    let shelf = Shelf::new();
    let begins = "Say what it is, and nothing of yourself. ".repeat(5);
    let prompts = ["one", "two", "six"].map(|word| format!("{begins}{word}"));
    let (glide, block) = (shelf.path("glide"), block_draft(&shelf));
    for draft in [glide, block] {
        let way = ["--draft", &draft, "--pace", "fixed", "--parallel", "3"];
        let server = Server::start(&shelf, &way);
        let told =
            server.complete(&json!({ "prompt": prompts, "temperature": 0, "max_tokens": 40 }));
        for (place, prompt) in prompts.iter().enumerate() {
            let alone = shelf.generate(&["--prompt", prompt]);
            assert_eq!(told["choices"][place]["text"], alone["text"], "{draft} {place}");
        }
        // Of what they share the last token is read at every place.
        let shared = begins.len() - 1;
        assert!((server.metric("reused_prompt_tokens_total") - 2.0 * shared as f64).abs() < 1e-9);
        let cached = &told["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert!(*cached == json!(2 * shared), "{told}");
    }
}
