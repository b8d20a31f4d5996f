//! What is not learned, not kept, not told, or refused.

use super::*;
use crate::support::{fail_with, finished, longdraft, require_words, told_by};

/// A filter that works line by line sees every line as it is.
#[cfg(target_os = "linux")]
#[test]
fn what_must_not_be_kept_is_not_kept() {
    use std::os::unix::fs::PermissionsExt;
    let shelf = Shelf::new();
    let folder = shelf.path("learned");
    let filter = shelf.write("filter", "#!/bin/sh\nsed -e /^never/Q1 -e s/^secret/######/\n");
    std::fs::set_permissions(&filter, PermissionsExt::from_mode(0o700)).expect("mode");
    let options = ["--lookup", "--learn", &folder, "--learn-redact", &filter];
    let server = Server::start(&shelf, &options);
    for prompt in ["my\nsecret is out", "first\nnever keep this", "plain"] {
        server.complete(&json!({ "prompt": prompt, "max_tokens": 4 }));
    }
    until("the filter", || count(&server, "rows") + count(&server, "dropped") == 3);
    assert_eq!((count(&server, "rows"), count(&server, "dropped")), (2, 1));
    // Tokens are bytes.
    let kept: String = files(&Path::new(&folder).join("rows"))
        .iter()
        .flat_map(|file| {
            std::fs::read_to_string(file)
                .expect("rows")
                .lines()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .map(|line| {
            let row: Value = serde_json::from_str(&line).expect("a row");
            let ids = row["input_ids"].as_array().expect("ids").iter();
            ids.map(|id| char::from(id.as_u64().expect("id").min(127) as u8)).collect::<String>()
        })
        .collect();
    assert!(kept.contains("my\n###### is out") && kept.contains("plain"), "{kept}");
    assert!(!kept.contains("secret") && !kept.contains("never"), "{kept}");
    assert!(count(&server, "datastore_tokens") > 0);
    // Where nothing can be kept the server answers all the same.
    std::fs::remove_dir_all(Path::new(&folder).join("rows")).expect("removed");
    drop(server);
    let server = Server::start(&shelf, &["--lookup", "--learn", &folder]);
    std::fs::remove_dir_all(Path::new(&folder).join("rows")).expect("removed");
    std::fs::write(Path::new(&folder).join("rows"), "in the way").expect("file");
    for prompt in ["a", "b"] {
        server.complete(&json!({ "prompt": prompt, "max_tokens": 2 }));
    }
    until("two answers that are not kept", || count(&server, "dropped") == 2);
}

#[test]
fn learning_that_cannot_be_is_refused() {
    let shelf = Shelf::new();
    let (target, folder) = (shelf.path("target"), shelf.path("learned"));
    let serve =
        |more: &[&str], code| fail(&[&["serve", &target, "--port", "0"], more].concat(), code);
    assert!(serve(&["--learn", &folder], 2).contains("nothing that could learn"));
    // Rows of no day would go at once, and a training of endless minutes could not be written down.
    for (option, value) in
        [("--learn-rows", "0"), ("--learn-days", "0"), ("--learn-minutes", "inf")]
    {
        let told = serve(&["--lookup", "--learn", &folder, option, value], 2);
        assert!(told.contains("must be numbers above 0"), "{told}");
    }
    serve(&["--lookup", "--learn-rows", "5"], 2);
    // A filter that is not there would let nothing through: it is told before anything is opened.
    let (none, filter) = (shelf.path("none"), shelf.path("nope"));
    let refused = ["serve", &none, "--lookup", "--learn", &folder, "--learn-redact", &filter];
    fail_with(&refused, 2, &["nope: cannot be run", "hint: "]);
    assert!(!Path::new(&folder).exists());
    let file = shelf.write("file", "");
    serve(&["--lookup", "--learn", &file], 2);
    // Another one's folder is left as it is.
    assert!(serve(&["--lookup", "--learn", &shelf.path("glide")], 2).contains("lies there"));
    fail(&["learn", "purge", &shelf.path("glide")], 2);
    assert!(Path::new(&shelf.path("glide/config.json")).is_file());
    let missing = ["--draft", &shelf.path("nothing"), "--learn", &shelf.path("other")];
    serve(&missing, 2);
    assert!(!Path::new(&shelf.path("other")).exists());
    let server = Server::start(&shelf, &["--lookup", "--learn", &folder]);
    assert!(serve(&["--lookup", "--learn", &folder], 1).contains("end it first"));
    assert_eq!(server.get("/learning").ok()["rows"], 0);
    let off = Server::start(&shelf, &[]);
    assert_eq!(off.get("/learning").ok()["doing"], "off");
    assert!(
        fail(&["learn", "purge", &shelf.path("none")], 2).contains("nothing was learned there")
    );
}

/// The configuration of a training is text, and names the folder.
#[cfg(target_os = "linux")]
#[test]
fn a_folder_whose_name_is_no_text_is_refused_at_the_start() {
    use std::os::unix::ffi::OsStrExt;
    let shelf = Shelf::new();
    let odd = PathBuf::from(shelf.path("")).join(std::ffi::OsStr::from_bytes(b"odd-\xff"));
    let mut serve = longdraft(&["serve", &shelf.path("target"), "--port", "0"]);
    serve.args(["--learn-method", "glide", "--learn"]).arg(&odd);
    let text = told_by(&finished(&mut serve), 2);
    require_words(&text, &["this name is not UTF-8", "hint: give a folder"]);
    assert!(!odd.exists());
}

/// An answer that was forced says nothing of the target.
#[test]
fn forced_answers_are_not_learned() {
    let shelf = Shelf::new();
    let server = Server::start(&shelf, &["--lookup", "--learn", &shelf.path("learned")]);
    for more in [
        json!({ "logit_bias": { "257": -100 } }),
        json!({ "guided_choice": ["one", "two"] }),
        json!({ "ignore_eos": true }),
        json!({ "stop_token_ids": [3] }),
        json!({ "min_tokens": 2 }),
        json!({}),
    ] {
        let mut asked = json!({ "prompt": "the cat", "temperature": 0, "max_tokens": 5 });
        more.as_object().into_iter().flatten().for_each(|(key, value)| asked[key] = value.clone());
        server.complete(&asked);
    }
    until("the last answer", || count(&server, "rows") > 0);
    assert_eq!((count(&server, "rows"), count(&server, "dropped")), (1, 0));
}

/// What lookup finds in answers to others is not told from what a draft proposes.
#[test]
fn nobody_is_told_what_stands_in_answers_to_others() {
    let shelf = Shelf::new();
    let folder = shelf.path("learned");
    // With log-probabilities every token is an event of its own.
    let told = |server: &Server| {
        let asked = json!({
            "prompt": "the cat", "temperature": 0, "max_tokens": 40, "origins": true, "logprobs": 1,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        let events = server.stream("/v1/completions", &asked).filter(|event| event != "[DONE]");
        let events: Vec<Value> =
            events.map(|event| serde_json::from_str(&event).expect("JSON")).collect();
        let of = |name: &str| events.iter().any(|event| event["choices"][0]["origin"] == name);
        let usage = &events.last().expect("usage")["usage"]["completion_tokens_details"];
        let from_lookup = usage["accepted_by_origin"]["lookup"].as_u64().expect("a number");
        (of("lookup"), of("draft"), from_lookup > 0)
    };
    let common = ["--lookup", "--pace", "fixed", "--draft-len", "6"];
    let with = |more: [&str; 2]| Server::start(&shelf, &[&common[..], &more].concat());
    let server = with(["--learn", &folder]);
    assert_eq!(told(&server), (false, false, false));
    until("it is kept", || count(&server, "rows") == 1);
    assert_eq!(told(&server), (false, true, false));
    // What the server's owner gave is told as what it is.
    let plain = shelf.generate(&["--prompt", "the cat", "--temperature", "0", "--no-draft"]);
    let store = shelf.write("store.jsonl", json!({ "input_ids": plain["tokens"] }).to_string());
    assert_eq!(told(&with(["--datastore", &store])), (true, false, true));
    assert!(server.metric("accepted_lookup_tokens_total") > 0.0);
}

/// Where nothing can be compared nothing is trained, and that is told.
#[test]
fn too_few_answers_are_told() {
    let shelf = Shelf::new();
    let (draft, folder) = (shelf.path("glide"), shelf.path("learned"));
    let server = Server::start(&shelf, &options(&draft, &folder, "6"));
    ask(&server, 0..6);
    until("an end", || count(&server, "trainings") == 1);
    let told = learning(&server);
    assert_eq!((&told["failed"], &told["replaced"]), (&json!(0), &json!(0)), "{told}");
    assert_eq!(told["last"]["too_few_held_out"], true, "{told}");
}
