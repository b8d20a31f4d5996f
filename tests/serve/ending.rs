//! SIGTERM: what is written is finished, or handed back as it is when the time is over.

use serde_json::{Value, json};

use super::{Server, gathered, long};
use crate::decoding::Shelf;

#[test]
fn a_server_that_is_asked_to_end_finishes_what_runs() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &["--parallel", "2", "--grace", "600"]);
    let asked = long(20, 300);
    let (wanted, _) = gathered(server.stream("/v1/completions", &asked), 20);
    let mut events = server.stream("/v1/completions", &asked);
    events.next().expect("it begins");
    server.signal("-TERM");
    let first = wanted[0].0.chars().count();
    let (mut answers, _) = gathered(events, 20);
    // One event of one answer is read already.
    assert!(answers.iter().all(|(_, finish)| finish == "length"), "{answers:?}");
    answers.retain(|answer| *answer == wanted[0]);
    assert!(answers.len() >= 19 && first > 0, "{}", answers.len());
    assert_eq!(server.wait().code(), Some(143));
}

#[test]
fn when_the_time_is_over_answers_end_as_they_are() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &["--parallel", "1", "--queue", "50", "--grace", "0"]);
    let mut events = server.stream("/v1/completions", &long(40, 400));
    events.next().expect("it begins");
    server.signal("-TERM");
    let events: Vec<String> = events.collect();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    // Those that had not begun are told why they never will.
    let told: Value = serde_json::from_str(&events[events.len() - 2]).expect("JSON");
    assert_eq!(told["error"]["type"], "server_error", "{told}");
    assert_eq!(server.wait().code(), Some(143));
}

#[test]
fn a_server_without_work_ends_at_once() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &[]);
    assert!(server.complete(&json!({ "prompt": "a", "max_tokens": 1 }))["id"].is_string());
    server.signal("-INT");
    assert_eq!(server.wait().code(), Some(130));
}
