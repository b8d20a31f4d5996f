//! `eval decode --server`: stand-ins of four engines, well-behaved and not, and our own server.

mod engine;

use std::path::Path;
use std::process::{Child, Output};

use serde_json::{Value, json};

use self::engine::{Engine, KEY, TAU, Trouble};
use crate::support::files::{demonstration, read_json};
use crate::support::{last_json, longdraft, serving, stderr, stdout};

/// Prompts of one word each, in two categories.
fn prompts(folder: &Path, words: &[&str]) -> String {
    let row = |(index, word): (usize, &&str)| {
        let category = if index % 2 == 0 { "even" } else { "odd" };
        format!("{}\n", json!({ "prompt": word, "category": category }))
    };
    let path = folder.join("prompts.jsonl");
    std::fs::write(&path, words.iter().enumerate().map(row).collect::<String>()).expect("prompts");
    path.display().to_string()
}

fn measure(address: &str, prompts: &str, more: &[&str], key: Option<&str>) -> Output {
    let common = ["eval", "decode", "--server", address, "--prompts", prompts];
    let common = [&common[..], &["--max-tokens", "12", "--json"]].concat();
    let mut command = longdraft(&[&common[..], more].concat());
    command.env_remove("LONGDRAFT_API_KEY");
    if let Some(key) = key {
        command.env("LONGDRAFT_API_KEY", key);
    }
    command.output().expect("the binary starts")
}

#[track_caller]
fn measured(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    last_json(&stdout(output))
}

#[track_caller]
fn refusal(output: &Output, code: i32) -> String {
    let text = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains("error: ") && text.contains("hint: "), "{text}");
    assert!(
        !text.contains("panicked") && !text.contains('\u{1b}') && !text.contains(KEY),
        "{text}"
    );
    text
}

#[test]
fn every_engine_reveals_its_accept_length_in_its_own_way() {
    let folder = tempfile::tempdir().expect("tempdir");
    let prompts = prompts(folder.path(), &["one", "two", "three"]);
    for (owner, name, from) in [
        ("vllm", "vLLM", "vllm:spec_decode_num_drafts"),
        ("sglang", "SGLang", "sglang:spec_accept_length"),
        ("llamacpp", "llama.cpp", "timings.draft_n_accepted"),
        ("longdraft", "longdraft", "target_passes"),
    ] {
        let engine = Engine::new(owner, true);
        let address = engine.serve();
        let output = measure(&format!("{address}/v1/"), &prompts, &["--runs", "2"], None);
        let told = measured(&output);
        let cell = &told["cells"][0];
        assert_eq!(told["server"]["engine"], name);
        assert_eq!((&told["tau"], &cell["tau_missing"]), (&json!(TAU), &Value::Null), "{owner}");
        assert!(cell["tau_from"].as_str().is_some_and(|told| told.contains(from)), "{owner}");
        assert_eq!(cell["server"]["tokens"], 12 * 3 * 2);
        assert_eq!((&cell["prompts"], &cell["left_out"]), (&json!(3), &json!(0)));
        for times in ["first_token_ms", "between_tokens_ms", "between_events_ms"] {
            let times = &cell["server"][times];
            let (p50, p95) =
                (times["p50"].as_f64().expect("p50"), times["p95"].as_f64().expect("p95"));
            assert!(p50 >= 0.0 && p95 >= p50, "{times}");
        }
        assert!(told["tokens_per_second"].as_f64().is_some_and(|speed| speed > 0.0));
        if owner == "sglang" {
            assert_eq!(cell["tau_interval"], Value::Null);
        } else {
            assert_eq!(cell["tau_interval"], json!([TAU, TAU]), "{owner}");
            assert_eq!(cell["acceptance_rate"], json!(7.0 / 12.0), "{owner}");
        }
        let survival = if owner == "vllm" { json!([1.0, 0.75, 0.0]) } else { json!([]) };
        assert_eq!(cell["survival"], survival, "{owner}");
        assert!(stdout(&output).contains("tau 2.750"), "{}", stdout(&output));
        // What is asked: the model's name, greedy, as a stream with its usage.
        let seen = engine.seen.lock().expect("seen");
        assert_eq!(seen.requests.len(), 1 + 3 * 2, "a request that warms up, and all others");
        let (path, asked) = seen.requests.last().expect("a request");
        assert_eq!(path, "/v1/completions");
        assert_eq!(asked["prompt"], "three");
        assert_eq!((&asked["model"], &asked["max_tokens"]), (&json!("tiny"), &json!(12)));
        assert_eq!((&asked["temperature"], &asked["stream"]), (&json!(0.0), &json!(true)));
    }
}

#[test]
fn a_prompt_is_asked_with_its_own_variables_of_the_template() {
    let folder = tempfile::tempdir().expect("tempdir");
    let path = folder.path().join("prompts.jsonl");
    let own = json!({ "prompt": "two", "chat_template_kwargs": { "effort": "high", "b": null } });
    std::fs::write(&path, format!("{}\n{own}\n", json!({ "prompt": "one" }))).expect("prompts");
    let engine = Engine::new("vllm", true);
    let given = r#"{"effort": "low", "b": 1}"#;
    let more = ["--runs", "1", "--chat", "--chat-template-kwargs", given];
    let told = measured(&measure(&engine.serve(), &path.display().to_string(), &more, None));
    let low = json!({ "effort": "low", "b": 1 });
    assert_eq!(told["chat_template_kwargs"], low);
    let seen = engine.seen.lock().expect("seen");
    let asked = seen.requests.iter().map(|(_, asked)| asked["chat_template_kwargs"].clone());
    let high = json!({ "effort": "high", "b": 1 });
    assert_eq!(asked.collect::<Vec<_>>(), [low.clone(), low, high], "one warms up");
}

#[test]
fn where_nothing_reveals_it_that_is_said() {
    let folder = tempfile::tempdir().expect("tempdir");
    let prompts = prompts(folder.path(), &["one", "two"]);
    for (owner, says) in [
        ("vllm", "--speculative-config"),
        ("sglang", "--enable-metrics"),
        ("llamacpp", "--model-draft"),
        ("somebody", "neither its answers nor its /metrics"),
        ("counts nothing", "neither its answers nor its /metrics"),
    ] {
        let output = measure(&Engine::new(owner, false).serve(), &prompts, &["--runs", "1"], None);
        let told = measured(&output);
        let cell = &told["cells"][0];
        assert_eq!(cell["tau"], Value::Null, "{owner}");
        assert!(cell["tau_missing"].as_str().is_some_and(|told| told.contains(says)), "{cell}");
        assert!(stdout(&output).contains("tau unknown: "), "{}", stdout(&output));
        let counts_events = owner == "counts nothing";
        assert_eq!(cell["tokens_are_events"], counts_events);
        assert_eq!(cell["server"]["tokens"], if counts_events { 10 } else { 24 });
        assert_eq!(stdout(&output).contains("events are counted"), counts_events);
    }
    // Without a draft our own server needs a pass for every token.
    let told = measured(&measure(&Engine::new("longdraft", false).serve(), &prompts, &[], None));
    assert_eq!(told["tau"], 1.0);
}

#[test]
fn a_second_server_gives_a_speed_up_and_equal_answers_or_not() {
    let folder = tempfile::tempdir().expect("tempdir");
    let prompts = prompts(folder.path(), &["one", "two", "three", "four"]);
    let output = folder.path().join("figures").display().to_string();
    let (drafted, same) = (Engine::new("vllm", true), Engine::new("vllm", false));
    let other = Engine { word: "v", ..Engine::new("llamacpp", false) };
    for (plain, equal) in [(&same, 4), (&other, 0)] {
        let address = plain.serve();
        let more = ["--compare-server", &address, "--chat", "--runs", "2", "--output", &output];
        let ended = measure(&drafted.serve(), &prompts, &more, None);
        let told = measured(&ended);
        let cell = &told["cells"][0];
        assert_eq!((&cell["checked"], &told["equal"]), (&json!(4), &json!(equal)));
        let speed_up = told["speed_up"].as_f64().expect("a speed-up");
        let low = cell["speed_up_interval"][0].as_f64().expect("low");
        let high = cell["speed_up_interval"][1].as_f64().expect("high");
        assert!(low > 0.0 && low <= speed_up && speed_up <= high, "{low} {speed_up} {high}");
        assert_eq!(cell["speed_up_of_runs"].as_array().map(Vec::len), Some(2));
        assert_eq!(cell["tau"], TAU, "of the server with the draft");
        assert_eq!(cell["categories"].as_array().map(Vec::len), Some(2));
        let text = stdout(&ended);
        assert!(text.contains(&format!("answers equal: {equal} of 4")), "{text}");
        let kept = read_json(Path::new(&output).join("decode-server.json"));
        assert_eq!(kept["cells"], told["cells"]);
        let seen = plain.seen.lock().expect("seen");
        let (path, asked) = seen.requests.last().expect("a request");
        assert_eq!(path, "/v1/chat/completions");
        assert_eq!(asked["messages"][0]["role"], "user");
        // No page of counters is asked of the server that has no draft's.
        assert_eq!(seen.requests.len(), 1 + 4 * 2);
    }
    // At a temperature answers are drawn.
    let address = same.serve();
    let more = ["--compare-server", &address, "--temperature", "0.5", "--seed", "7", "--runs", "1"];
    let told = measured(&measure(&drafted.serve(), &prompts, &more, None));
    assert_eq!(told["cells"][0]["checked"], 0);
    let seen = same.seen.lock().expect("seen");
    let (_, asked) = seen.requests.last().expect("a request");
    assert_eq!((&asked["temperature"], &asked["seed"]), (&json!(0.5), &json!(7)));
}

#[test]
fn a_server_that_fails_gives_a_sentence() {
    let folder = tempfile::tempdir().expect("tempdir");
    let prompts = prompts(folder.path(), &["one", "two"]);
    for (trouble, says) in [
        (Trouble::Dies, "it stopped in the middle of an answer, after 3 events"),
        (Trouble::Rubbish, "no JSON: `{\"choices\": [[2J`"),
        (Trouble::Html, "no stream of events: `text/html`"),
        (Trouble::Whole, "no stream of events: `application/json`"),
        (Trouble::Error, "out of memory"),
        (Trouble::Silent, "--timeout waits longer"),
    ] {
        // What fails by itself may take its time on a busy machine.
        let seconds = if says.contains("--timeout") { "1" } else { "60" };
        let address = Engine::in_trouble(trouble).serve();
        let text = refusal(&measure(&address, &prompts, &["--timeout", seconds], None), 1);
        assert!(text.contains(says) && text.contains(&address), "{says} not in {text}");
    }
    let text = refusal(&measure("http://127.0.0.1:1", &prompts, &[], None), 1);
    assert!(text.contains("http://127.0.0.1:1") && text.contains("is the server ready?"), "{text}");
    assert!(!text.contains("--timeout"), "waiting helps nothing here: {text}");
    for address in ["127.0.0.1:80", "http://u:p@h", "ftp://h"] {
        refusal(&measure(address, &prompts, &[], None), 2);
    }
    let address = Engine::new("vllm", true).serve();
    let text = refusal(&measure(&address, &prompts, &["--server-model", "other"], None), 2);
    assert!(text.contains("it serves tiny"), "{text}");
    let refused = ["--draft-len", "3"];
    assert_eq!(measure(&address, &prompts, &refused, None).status.code(), Some(2));
    let text = refusal(&measure(&address, &prompts, &["--contexts", "64"], None), 2);
    assert!(text.contains("give --target, too"), "{text}");
}

#[test]
fn a_prompt_that_a_server_refuses_is_left_out() {
    let folder = tempfile::tempdir().expect("tempdir");
    let engine = Engine::in_trouble(Trouble::RefusesLong);
    let prompts_of = |words: &[&str]| prompts(folder.path(), words);
    let output = measure(&engine.serve(), &prompts_of(&["one", "a long one"]), &[], None);
    let told = measured(&output);
    let cell = &told["cells"][0];
    assert_eq!(
        (&cell["prompts"], &cell["left_out"], &told["tau"]),
        (&json!(1), &json!(1), &json!(TAU))
    );
    assert!(stderr(&output).contains("maximum context is 9 tokens"), "{}", stderr(&output));
    let text = refusal(&measure(&engine.serve(), &prompts_of(&["long"]), &[], None), 1);
    assert!(text.contains("maximum context is 9 tokens"), "{text}");
    // One that is answered in the first run alone is left out, too.
    let engine = Engine::in_trouble(Trouble::RefusesLater);
    let output = measure(&engine.serve(), &prompts_of(&["one", "later"]), &[], None);
    let cell = &measured(&output)["cells"][0];
    assert_eq!((&cell["prompts"], &cell["left_out"]), (&json!(1), &json!(1)));
}

#[test]
fn the_key_comes_from_the_environment_and_is_not_told() {
    let folder = tempfile::tempdir().expect("tempdir");
    let prompts = prompts(folder.path(), &["one"]);
    let address = Engine { wants_key: true, ..Engine::new("vllm", true) }.serve();
    let told = measured(&measure(&address, &prompts, &[], Some(KEY)));
    assert_eq!(told["tau"], TAU);
    let text = stderr(&measure(&address, &prompts, &[], Some("another")));
    assert!(text.contains("status 401") && text.contains("LONGDRAFT_API_KEY"), "{text}");
    // A server that repeats a key does not have it printed.
    let output = measure(&address, &prompts, &["--api-key-env", "NO_SUCH_VARIABLE"], Some(KEY));
    assert_eq!(output.status.code(), Some(1));
}

/// Our own server on the target that ships.
struct Own(Child, String);

impl Own {
    fn start(more: &[&str]) -> Self {
        let target = demonstration();
        let common = ["serve", &target, "--port", "0", "--json", "--pace", "fixed"];
        let (child, address) = serving(&[&common[..], more].concat());
        Self(child, address)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn our_own_server_is_measured_as_its_engine_is() {
    let folder = tempfile::tempdir().expect("tempdir");
    let prompts = prompts(folder.path(), &["1 2 3 1 2 3 1 2", "What is 2 plus 3?", "a b a b a b"]);
    let common = ["--runs", "1"];
    let (drafted, plain) = (Own::start(&["--lookup"]), Own::start(&[]));
    let more = [&common[..], &["--compare-server", &plain.1]].concat();
    let told = measured(&measure(&drafted.1, &prompts, &more, None));
    assert_eq!(told["server"]["engine"], "longdraft");
    assert_eq!((&told["cells"][0]["checked"], &told["equal"]), (&json!(3), &json!(3)));
    let here = ["eval", "decode", "--target", &demonstration(), "--prompts", &prompts, "--lookup"];
    let more = ["--max-tokens", "12", "--json"];
    let output = longdraft(&[&here[..], &common, &more].concat()).output().expect("starts");
    let local = measured(&output);
    let (served, local) = (told["tau"].as_f64().expect("tau"), local["tau"].as_f64().expect("tau"));
    assert!((served - local).abs() < 1e-9, "{served} over HTTP, {local} here");
    assert!(served > 1.0, "{served}");
    let told = measured(&measure(&plain.1, &prompts, &common, None));
    assert_eq!(told["tau"], 1.0);
}
