//! `serve --learn`: answers are kept, the draft is trained with them, a better one proposes.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::Server;
use super::room::until;
use crate::decoding::Shelf;
use crate::support::{fail, succeed};

/// Asks for many answers, three at a time; their texts.
fn ask(server: &Server, prompts: std::ops::Range<usize>) -> Vec<Value> {
    let ask = |number: usize| {
        let prompt = format!("the cat {number} sat on the mat and the");
        let asked = json!({
            "prompt": prompt, "temperature": 0, "max_tokens": 60, "logit_bias": { "257": -100 },
        });
        server.complete(&asked)["choices"][0]["text"].clone()
    };
    let numbers: Vec<usize> = prompts.collect();
    std::thread::scope(|scope| {
        let parts = numbers.chunks(numbers.len().div_ceil(3));
        let parts: Vec<_> = parts
            .map(|part| scope.spawn(move || part.iter().map(|n| ask(*n)).collect::<Vec<_>>()))
            .collect();
        parts.into_iter().flat_map(|part| part.join().expect("answered")).collect()
    })
}

fn learning(server: &Server) -> Value {
    server.get("/learning").ok()
}

fn count(server: &Server, field: &str) -> u64 {
    learning(server)[field].as_u64().unwrap_or_else(|| panic!("{field}"))
}

/// Options of a server that learns in a folder.
fn options<'a>(draft: &'a str, folder: &'a str, rows: &'a str) -> Vec<&'a str> {
    vec![
        "--draft",
        draft,
        "--parallel",
        "3",
        "--pace",
        "fixed",
        "--learn",
        folder,
        "--learn-rows",
        rows,
        "--learn-minutes",
        "5",
    ]
}

/// Processes whose command line has all of these words.
fn processes(words: &[&str]) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_it = |id: &u32| {
        let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        words.iter().all(|word| line.contains(word))
    };
    ids.filter(is_it).collect()
}

/// All files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.path() {
            path if path.is_dir() => found.extend(files(&path)),
            path => found.push(path),
        }
    }
    found
}

#[cfg(unix)]
#[test]
fn a_draft_learns_from_what_is_answered_and_no_answer_changes() {
    use std::os::unix::fs::PermissionsExt;
    let shelf = Shelf::new();
    let (draft, folder) = (shelf.path("glide"), shelf.path("learned"));
    let server = Server::start(&shelf, &options(&draft, &folder, "150"));
    assert_eq!(learning(&server)["doing"], "waiting");
    let texts = ask(&server, 0..150);
    until("a training", || count(&server, "trainings") > 0);
    let told = learning(&server);
    let last = &told["last"];
    assert_eq!(
        (&told["rows"], &told["dropped"], &told["failed"]),
        (&json!(150), &json!(0), &json!(0))
    );
    assert_eq!(told["replaced"], 1, "{told}");
    assert!(last["tau_after"].as_f64() > last["tau_before"].as_f64(), "{told}");
    assert!((server.metric("learning_rows") - 150.0).abs() < 1e-9);
    assert!(server.metric("learning_tau_after") > server.metric("learning_tau_before"));
    // The better draft proposes: the same answers take fewer passes.
    let passes = |server: &Server| {
        let before = server.metric("target_passes_total");
        assert_eq!(ask(server, 0..30), texts[..30]);
        server.metric("target_passes_total") - before
    };
    let learned = passes(&server);
    let given =
        passes(&Server::start(&shelf, &["--draft", &draft, "--pace", "fixed", "--parallel", "3"]));
    assert!(learned < given, "{learned} {given}");
    // Nobody else may look.
    let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode() & 0o077;
    assert_eq!(mode(Path::new(&folder)), 0);
    for file in files(&Path::new(&folder).join("rows")) {
        assert_eq!(mode(&file), 0, "{}", file.display());
    }
    // What is running is not removed; what was learned is there at the next start.
    assert!(fail(&["learn", "purge", &folder], 1).contains("end it first"));
    server.signal("-TERM");
    assert_eq!(server.wait().code(), Some(143));
    let server = Server::start(&shelf, &options(&draft, &folder, "1000"));
    assert_eq!((count(&server, "trainings"), count(&server, "replaced")), (1, 1));
    let again = passes(&server);
    assert!(again < given, "{again} {given}");
    assert_eq!(server.post("/reload", &json!({})).ok()["draft"], "glide");
    until("all answers", || count(&server, "rows") == 210);
    drop(server);
    assert!(succeed(&["learn", "purge", &folder]).contains("removed 210 answers"));
    let left: Vec<PathBuf> = files(Path::new(&folder));
    assert!(left.iter().all(|file| file.ends_with(".lock")), "{left:?}");
    assert!(fail(&["learn", "purge", &folder], 2).contains("nothing was learned there"));
}

/// Whoever is killed, server or training, at whatever moment: the rest goes on.
#[cfg(target_os = "linux")]
#[test]
fn a_training_survives_every_kill() {
    let shelf = Shelf::new();
    let (draft, folder) = (shelf.path("glide"), shelf.path("learned"));
    let words = ["learn", "train", folder.as_str()];
    let options = options(&draft, &folder, "90");
    let server = Server::start(&shelf, &options);
    let texts = ask(&server, 0..90);
    until("a process", || !processes(&words).is_empty());
    // The server is killed while its training runs or rests: no process stays.
    server.signal("-KILL");
    server.wait();
    until("its end", || processes(&words).is_empty());
    let server = Server::start(&shelf, &options);
    assert_eq!(count(&server, "rows"), 90);
    // The training goes on by itself, and is killed: the server answers, and begins it again.
    until("a process", || !processes(&words).is_empty() || count(&server, "trainings") > 0);
    for process in processes(&words) {
        let _ = Command::new("kill").args(["-9", &process.to_string()]).status();
    }
    assert_eq!(ask(&server, 0..10), texts[..10]);
    until("a training", || count(&server, "trainings") > 0);
    assert_eq!(count(&server, "failed"), 0, "{}", learning(&server));
    assert_eq!(ask(&server, 0..10), texts[..10]);
}

/// While answers are written the training rests, so that they have the processors.
#[cfg(target_os = "linux")]
#[test]
fn training_rests_while_answers_are_written() {
    let shelf = Shelf::new();
    let (draft, folder) = (shelf.path("glide"), shelf.path("learned"));
    let words = ["learn", "train", folder.as_str()];
    let server = Server::start(&shelf, &options(&draft, &folder, "60"));
    ask(&server, 0..60);
    until("a process", || !processes(&words).is_empty());
    let mut events = server.stream("/v1/completions", &super::long(60, 400));
    events.next().expect("it begins");
    until("a rest", || learning(&server)["doing"] == "paused" || count(&server, "trainings") > 0);
    for process in processes(&words) {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        assert!(state.is_empty() || state.starts_with('T'), "{stat}");
    }
    drop(events);
    until("a training", || count(&server, "trainings") > 0);
}

#[cfg(unix)]
#[test]
fn what_must_not_be_kept_is_not_kept() {
    use std::os::unix::fs::PermissionsExt;
    let shelf = Shelf::new();
    let folder = shelf.path("learned");
    let filter = shelf.path("filter");
    std::fs::write(&filter, "#!/bin/sh\nsed -e /never/d -e s/secret/######/g\n").expect("script");
    std::fs::set_permissions(&filter, PermissionsExt::from_mode(0o700)).expect("mode");
    let options = ["--lookup", "--learn", &folder, "--learn-redact", &filter];
    let server = Server::start(&shelf, &options);
    for prompt in ["my secret is out", "never keep this", "plain"] {
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
    assert!(kept.contains("my ###### is out") && kept.contains("plain"), "{kept}");
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

/// What was answered once is found at once.
#[test]
fn lookup_finds_earlier_answers() {
    let shelf = Shelf::new();
    let folder = shelf.path("learned");
    let options = ["--lookup", "--learn", &folder, "--pace", "fixed", "--draft-len", "6"];
    let asked = json!({ "prompt": "the cat", "temperature": 0, "max_tokens": 40 });
    let server = Server::start(&shelf, &options);
    let passes = |server: &Server| {
        let before = server.metric("target_passes_total");
        let text = server.complete(&asked)["choices"][0]["text"].clone();
        (text, server.metric("target_passes_total") - before)
    };
    let (text, first) = passes(&server);
    until("it is kept", || count(&server, "rows") == 1);
    let (again, second) = passes(&server);
    assert_eq!(again, text);
    assert!(second < first && second <= 9.0, "{first} {second}");
    drop(server);
    // Also after a new start.
    let (again, third) = passes(&Server::start(&shelf, &options));
    assert_eq!(again, text);
    assert!(third <= 9.0, "{third}");
}

#[test]
fn learning_that_cannot_be_is_refused() {
    let shelf = Shelf::new();
    let (target, folder) = (shelf.path("target"), shelf.path("learned"));
    let serve =
        |more: &[&str], code| fail(&[&["serve", &target, "--port", "0"], more].concat(), code);
    assert!(serve(&["--learn", &folder], 2).contains("nothing that could learn"));
    serve(&["--lookup", "--learn", &folder, "--learn-rows", "0"], 2);
    serve(&["--lookup", "--learn-rows", "5"], 2);
    let file = shelf.path("file");
    std::fs::write(&file, "").expect("file");
    serve(&["--lookup", "--learn", &file], 1);
    let server = Server::start(&shelf, &["--lookup", "--learn", &folder]);
    assert!(serve(&["--lookup", "--learn", &folder], 1).contains("end it first"));
    assert_eq!(server.get("/learning").ok()["rows"], 0);
    let off = Server::start(&shelf, &[]);
    assert_eq!(off.get("/learning").ok()["doing"], "off");
    assert!(
        fail(&["learn", "purge", &shelf.path("none")], 2).contains("nothing was learned there")
    );
}

/// From no draft: the first one is made of what was answered.
#[test]
fn a_first_draft_is_made_of_the_answers() {
    let shelf = Shelf::new();
    let folder = shelf.path("learned");
    let options = ["--parallel", "3", "--pace", "fixed", "--learn", &folder];
    let more = ["--learn-method", "glide", "--learn-rows", "60"];
    let server = Server::start(&shelf, &[&options[..], &more].concat());
    assert_eq!(server.post("/reload", &json!({})).error()["code"], "draft_not_opened");
    let texts = ask(&server, 0..60);
    assert!(server.metric("proposed_tokens_total").abs() < 1e-9);
    until("a training", || count(&server, "trainings") > 0);
    let told = learning(&server);
    assert_eq!(
        (&told["replaced"], &told["last"]["tau_before"]),
        (&json!(1), &json!(1.0)),
        "{told}"
    );
    assert_eq!(ask(&server, 0..20), texts[..20]);
    assert!(server.metric("accepted_tokens_total") > 0.0);
    let serve = ["serve", &shelf.path("target"), "--port", "0", "--learn", &shelf.path("other")];
    let wrong = fail(&[&serve[..], &["--learn-method", "none"]].concat(), 2);
    assert!(wrong.contains("`none` is not a method"), "{wrong}");
}
