//! Places and the queue: full ones are told, and what nobody waits for is free again.

use serde_json::json;

use super::{Server, gathered, long};
use crate::decoding::Shelf;
use crate::support::processes::wait_until as until;

#[test]
fn a_full_queue_is_told_and_a_client_that_goes_makes_room() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &["--parallel", "1", "--queue", "99"]);
    // More than all places are never free.
    for (field, asked) in
        [("n", json!({ "prompt": "a", "n": 101 })), ("prompt", json!({ "prompt": vec!["a"; 101] }))]
    {
        let refused = server.post("/v1/completions", &asked);
        assert_eq!((refused.status, &refused.error()["param"]), (400, &json!(field)));
    }
    let mut events = server.stream("/v1/completions", &long(100, 400));
    events.next().expect("it begins");
    // Some of the hundred may have ended; most have not.
    let many = json!({ "prompt": "a", "max_tokens": 1, "n": 60 });
    let refused = server.post("/v1/completions", &many);
    assert_eq!(
        (refused.status, refused.error()["code"].as_str()),
        (429, Some("rate_limit_exceeded"))
    );
    let seconds = refused.headers["retry-after"].to_str().expect("text").parse::<u64>();
    assert!(seconds.is_ok_and(|seconds| seconds >= 1));
    assert!(server.metric("waiting_answers") > 30.0);
    drop(events);
    // All places and the whole queue are free.
    until("room", || {
        let mut asked = long(100, 1);
        asked["stream"] = false.into();
        server.post("/v1/completions", &asked).status == 200
    });
    assert!(server.metric("cancelled_answers_total") > 1.0);
    assert!(server.metric("waiting_answers").abs() < 1e-9);
}

#[test]
fn a_long_prompt_and_many_answers_do_not_disturb_each_other() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &["--parallel", "4", "--draft", &shelf.path("glide")]);
    let prompt = "a long text that is read in parts. ".repeat(12);
    let alone = server.complete(&json!({ "prompt": prompt, "temperature": 0, "max_tokens": 20 }));
    std::thread::scope(|scope| {
        let many = scope.spawn(|| {
            let (answers, _) = gathered(server.stream("/v1/completions", &long(6, 120)), 6);
            assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
            assert_eq!(answers[0].1, "length");
        });
        for _ in 0..4 {
            let asked = json!({ "prompt": prompt, "temperature": 0, "max_tokens": 20 });
            assert_eq!(server.complete(&asked)["choices"], alone["choices"]);
        }
        many.join().expect("answered");
    });
}

#[test]
fn tokens_of_a_request_and_of_all_requests_are_limited() {
    let shelf = Shelf::new();
    let limits = ["--parallel", "1", "--max-request-tokens", "300", "--max-total-tokens", "500"];
    let server = Server::start(&shelf, &limits);
    let asked = |tokens: usize, count: usize| {
        json!({
            "prompt": "a", "max_tokens": tokens, "n": count, "temperature": 0,
            "logit_bias": { "257": -100 },
        })
    };
    // A prompt has a token; its answers count as often as they are asked for.
    for (tokens, count) in [(300, 1), (100, 3), (usize::MAX, 1)] {
        let refused = server.post("/v1/completions", &asked(tokens, count));
        let code = refused.error()["code"].clone();
        assert_eq!((refused.status, code.as_str()), (400, Some("too_many_tokens")));
    }
    server.complete(&asked(99, 3));
    let mut stream = asked(290, 1);
    stream["stream"] = true.into();
    let mut events = server.stream("/v1/completions", &stream);
    events.next().expect("it begins");
    let refused = server.post("/v1/completions", &asked(250, 1));
    // A fast machine may have answered already.
    if refused.status != 200 {
        let code = refused.error()["code"].clone();
        assert_eq!((refused.status, code.as_str()), (429, Some("rate_limit_exceeded")));
        assert!(refused.headers.contains_key("retry-after"));
    }
    drop(events);
    until("tokens", || server.post("/v1/completions", &asked(250, 1)).status == 200);
    // All are free again, however often answers end.
    for _ in 0..5 {
        until("tokens", || server.post("/v1/completions", &asked(290, 1)).status == 200);
    }
}

/// Without `max_tokens` a chat may fill the context, and with limits what these leave.
#[test]
fn chats_that_name_no_length_have_what_the_limits_leave() {
    let shelf = Shelf::new();
    let server =
        Server::start(&shelf, &["--max-request-tokens", "200", "--max-total-tokens", "500"]);
    for count in [1, 3] {
        let asked = json!({
            "messages": [{ "role": "user", "content": "a" }], "n": count, "temperature": 0,
            "logit_bias": { "257": -100 },
        });
        let told = server.post("/v1/chat/completions", &asked).ok();
        let prompt = told["usage"]["prompt_tokens"].as_u64().expect("a number");
        let each = (200 - count * prompt) / count;
        assert_eq!(told["usage"]["completion_tokens"], count * each, "{told}");
    }
    let long = json!({ "messages": [{ "role": "user", "content": "a".repeat(300) }] });
    let refused = server.post("/v1/chat/completions", &long);
    assert_eq!((refused.status, refused.error()["code"].as_str()), (400, Some("too_many_tokens")));
}
