//! Another draft while requests run.

use std::path::Path;

use serde_json::{Value, json};

use super::{Server, gathered, long};
use crate::decoding::Shelf;
use crate::support::files::change_json;

fn asked(tokens: usize) -> Value {
    json!({ "prompt": "the cat", "temperature": 0, "max_tokens": tokens })
}

/// Puts a copy of a draft in the place of another one, whole.
fn put(shelf: &Shelf, name: &str) {
    let place = shelf.path("current");
    let _ = std::fs::remove_dir_all(&place);
    std::fs::create_dir(&place).expect("folder");
    for entry in std::fs::read_dir(shelf.path(name)).expect("draft").flatten() {
        std::fs::copy(entry.path(), Path::new(&place).join(entry.file_name())).expect("copied");
    }
}

#[test]
fn a_draft_is_changed_while_requests_run_and_no_answer_with_it() {
    let shelf = Shelf::new();
    let plain = Server::start(&shelf, &[]);
    let wanted = plain.complete(&asked(60))["choices"].clone();
    let (long_wanted, _) = gathered(plain.stream("/v1/completions", &long(8, 200)), 8);
    put(&shelf, "glide");
    let current = shelf.path("current");
    let server =
        Server::start(&shelf, &["--draft", &current, "--parallel", "2", "--pace", "fixed"]);
    std::thread::scope(|scope| {
        let many = scope.spawn(|| gathered(server.stream("/v1/completions", &long(8, 200)), 8).0);
        for name in ["eagle3", "glide", "eagle3"] {
            put(&shelf, name);
            assert_eq!(server.post("/reload", &json!({})).ok()["draft"], name);
            assert_eq!(server.complete(&asked(60))["choices"], wanted);
        }
        assert_eq!(many.join().expect("answered"), long_wanted);
    });
    let before = server.metric("proposed_tokens_total");
    assert_eq!(server.complete(&asked(60))["choices"], wanted);
    assert!(server.metric("proposed_tokens_total") > before);
}

/// It is not asked through the head of the draft before it.
#[test]
fn a_draft_of_fewer_tokens_comes_with_its_own_head() {
    let shelf = Shelf::new();
    put(&shelf, "glide");
    let current = shelf.path("current");
    let server = Server::start(&shelf, &["--draft", &current, "--pace", "fixed"]);
    let wanted = server.complete(&asked(40))["choices"].clone();
    let config = Path::new(&current).join("config.json");
    change_json(&config, |narrow| narrow["draft_vocab_size"] = 2.into());
    let counts = Path::new(&current).join("token_counts.txt");
    let _ = std::fs::remove_file(&counts);
    let reply = server.post("/reload", &json!({}));
    assert_eq!(reply.status, 500, "{}", reply.body);
    assert!(reply.body.contains("no token counts are there"), "{}", reply.body);
    std::fs::write(&counts, "5 9\n7 3\n").expect("written");
    assert_eq!(server.post("/reload", &json!({})).ok()["draft"], "glide");
    assert_eq!(server.complete(&asked(40))["choices"], wanted);
}

#[test]
fn a_draft_that_cannot_be_opened_leaves_the_one_before() {
    let shelf = Shelf::new();
    put(&shelf, "glide");
    let current = shelf.path("current");
    let server = Server::start(&shelf, &["--draft", &current, "--pace", "fixed"]);
    let wanted = server.complete(&asked(40))["choices"].clone();
    let weights = Path::new(&current).join("draft_model_weights.safetensors");
    assert!(weights.is_file());
    let config = Path::new(&current).join("config.json");
    let damages: [&dyn Fn(); 3] = [
        &|| std::fs::write(&weights, "no weights").expect("written"),
        &|| std::fs::write(&config, "{").expect("written"),
        &|| std::fs::remove_dir_all(&current).expect("removed"),
    ];
    for damage in damages {
        damage();
        let reply = server.post("/reload", &json!({}));
        assert_eq!((reply.status, reply.error()["code"].as_str()), (500, Some("draft_not_opened")));
        assert!(reply.body.contains("the draft before it goes on"), "{}", reply.body);
        let before = server.metric("proposed_tokens_total");
        assert_eq!(server.complete(&asked(40))["choices"], wanted);
        assert!(server.metric("proposed_tokens_total") > before, "it still drafts");
    }
    let none = Server::start(&shelf, &["--lookup"]);
    assert_eq!(none.post("/reload", &json!({})).status, 400);
    // A page of another origin could send this without asking.
    assert_eq!(server.send("/reload", "text/plain", b"{}").status, 415);
    let guarded = Server::start(&shelf, &["--api-key", "a-secret"]);
    assert_eq!(guarded.post("/reload", &json!({})).status, 401);
}
