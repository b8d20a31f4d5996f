//! `serve --learn`: answers are kept, the draft is trained with them, a better one proposes.

mod refused;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use serde_json::{Value, json};

use super::{Server, block_draft};
use crate::decoding::Shelf;
use crate::support::files::read_json;
use crate::support::processes::wait_until as until;
use crate::support::{fail, last_json, succeed};

/// Asks for many answers, three at a time; their texts.
fn ask(server: &Server, prompts: std::ops::Range<usize>) -> Vec<Value> {
    let ask = |number: usize| {
        let prompt = format!("the cat {number} sat on the mat and the");
        let asked = json!({ "prompt": prompt, "temperature": 0, "max_tokens": 60 });
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
    let drafting = ["--draft", draft, "--parallel", "3", "--pace", "fixed"];
    let learning = ["--learn", folder, "--learn-rows", rows, "--learn-minutes", "5"];
    [&drafting[..], &learning].concat()
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
    assert_eq!(last_json(&succeed(&["learn", "purge", &folder, "--json"]))["answers"], 210);
    let left: Vec<PathBuf> = files(Path::new(&folder));
    assert!(left.iter().all(|file| file.ends_with(".lock")), "{left:?}");
    assert!(fail(&["learn", "purge", &folder], 2).contains("nothing was learned there"));
}

/// Puts a draft where the first learned one lies, as learned of the draft with such a hash.
fn learned_of(folder: &str, base: &Value, draft: &str, rests: bool) {
    let place = Path::new(folder).join("drafts/1");
    let _ = std::fs::remove_dir_all(&place);
    std::fs::create_dir_all(&place).expect("folder");
    for file in files(Path::new(draft)) {
        std::fs::copy(&file, place.join(file.file_name().expect("name"))).expect("copied");
    }
    let mut state = state_of(folder);
    state["learned"] = json!([{ "base": base, "draft": 1, "rests": rests }]);
    std::fs::write(format!("{folder}/learning.json"), state.to_string()).expect("file");
}

fn state_of(folder: &str) -> Value {
    read_json(format!("{folder}/learning.json"))
}

/// Whichever of the two is better on the newest answers proposes, and no answer changes by it.
#[test]
fn a_learned_draft_rests_while_the_given_one_is_better() {
    let shelf = Shelf::new();
    let (weak, first, folder) = (shelf.path("glide"), shelf.path("first"), shelf.path("learned"));
    let server = Server::start(&shelf, &options(&weak, &first, "150"));
    let texts = ask(&server, 0..150);
    until("a training", || count(&server, "trainings") > 0);
    assert_eq!(count(&server, "replaced"), 1, "{}", learning(&server));
    drop(server);
    // The better one is given, and the other one stands for what was learned of it.
    let good = format!("{first}/drafts/1");
    drop(Server::start(&shelf, &options(&good, &folder, "1000")));
    learned_of(&folder, &state_of(&folder)["base"], &weak, false);
    let server = Server::start(&shelf, &options(&good, &folder, "1000"));
    assert_eq!(learning(&server)["learned_rests"], false);
    ask(&server, 150..220);
    until("a check", || count(&server, "checks") == 1);
    let told = learning(&server);
    assert_eq!((&told["learned_rests"], &told["failed"]), (&json!(true), &json!(0)), "{told}");
    let check = &told["last_check"];
    assert!(check["tau_given"].as_f64() > check["tau_learned"].as_f64(), "{told}");
    assert!((server.metric("learning_learned_rests") - 1.0).abs() < 1e-9);
    assert!(
        server.metric("learning_check_tau_given") > server.metric("learning_check_tau_learned")
    );
    assert_eq!(ask(&server, 0..30), texts[..30]);
    assert_eq!(server.post("/reload", &json!({})).ok()["draft"], "glide");
    drop(server);
    let server = Server::start(&shelf, &options(&good, &folder, "1000"));
    assert_eq!(learning(&server)["learned_rests"], true);
    drop(server);
    // The other way round: the better one rests, and what is kept shows it.
    learned_of(&folder, &state_of(&first)["base"], &good, true);
    let server = Server::start(&shelf, &options(&weak, &folder, "1000"));
    until("a check", || count(&server, "checks") == 1);
    assert_eq!(learning(&server)["learned_rests"], false, "{}", learning(&server));
    assert_eq!(ask(&server, 0..30), texts[..30]);
    assert_eq!(state_of(&folder)["trainings"], json!([]));
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
    // A signal takes a moment to stop it.
    let rests = |process: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        state.is_empty() || state.starts_with('T')
    };
    until("every process rests", || processes(&words).iter().all(rests));
    drop(events);
    until("a training", || count(&server, "trainings") > 0);
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

/// The command holds the only thread of the process's pool, and what is kept has to be ordered all the same.
#[test]
fn a_server_of_one_thread_keeps_any_number_of_answers_and_ends() {
    let shelf = Shelf::new();
    let folder = shelf.path("learned");
    // The binary of a test has one thread.
    let options = ["--parallel", "3", "--lookup", "--learn", &folder];
    let server = Server::start(&shelf, &options);
    // So many tokens that ordering them is split among threads.
    ask(&server, 0..300);
    until("all answers", || count(&server, "rows") == 300);
    assert!(count(&server, "datastore_tokens") > 8000, "{}", learning(&server));
    server.signal("-INT");
    assert_eq!(server.wait().code(), Some(130));
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
    assert!(wrong.contains("[possible values: glide, "), "{wrong}");
}

/// Both ways to a draft: the second training measures it as the first one left it.
#[test]
fn a_second_training_finds_the_draft_as_the_first_one_left_it() {
    let shelf = Shelf::new();
    let block = block_draft(&shelf);
    for begin in [["--learn-method", "glide"], ["--draft", &block]] {
        let folder = shelf.path(begin[0]);
        let options =
            ["--parallel", "3", "--pace", "fixed", "--learn", &folder, "--learn-rows", "90"];
        let server = Server::start(&shelf, &[&options[..], &begin].concat());
        let after = |trainings| {
            ask(&server, 0..90);
            until("a training", || {
                count(&server, "trainings") + count(&server, "failed") == trainings
            });
            let told = learning(&server);
            assert_eq!(told["failed"], 0, "{begin:?}: {told}");
            told["last"].clone()
        };
        let (first, second) = (after(1), after(2));
        let is = if first["replaced"] == true { "tau_after" } else { "tau_before" };
        let (left, found) = (first[is].as_f64(), second["tau_before"].as_f64());
        let difference = left.expect("a number") - found.expect("a number");
        assert!(difference.abs() < 1e-9, "{begin:?}: {first} {second}");
        assert_eq!(first["held_out"], second["held_out"]);
        assert!(begin[0] == "--draft" || first["replaced"] == true, "{first}");
    }
}

/// What a server left is judged before anything is made of it.
#[test]
fn a_start_lets_go_of_what_it_cannot_use() {
    let shelf = Shelf::new();
    let (glide, folder) = (shelf.path("glide"), shelf.path("learned"));
    let options = options(&glide, &folder, "1000");
    drop(Server::start(&shelf, &options));
    let state = format!("{folder}/learning.json");
    let read = || read_json(&state);
    let base = read()["base"].clone();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a time").as_secs();
    let job = |base: &Value, attempts: u32, began: u64| {
        let job = json!({
            "target": shelf.path("target"), "device": "cpu", "base": base, "draft": glide,
            "method": null, "minutes": 5.0, "number": 1, "began": began, "attempts": attempts,
        });
        std::fs::create_dir_all(format!("{folder}/training")).expect("folder");
        std::fs::write(format!("{folder}/training/job.json"), job.to_string()).expect("file");
    };
    let training = Path::new(&folder).join("training");
    // A training that ended three servers, or was ended three times.
    job(&base, 3, now);
    let server = Server::start(&shelf, &options);
    until("an end", || count(&server, "failed") == 1);
    assert!(!training.exists());
    drop(server);
    // One that goes on from another draft, and one whose texts are older than they may be (30 days).
    for (base, began) in [(json!("another"), now), (base.clone(), now - 31 * 24 * 60 * 60)] {
        job(&base, 1, began);
        let server = Server::start(&shelf, &options);
        assert!(!training.exists());
        assert_eq!((count(&server, "failed"), count(&server, "trainings")), (0, 0));
    }
    // A first state that a kill cut short.
    let cut = shelf.path("cut");
    std::fs::create_dir(&cut).expect("folder");
    std::fs::write(format!("{cut}/learning.json.0123abcd.7.tmp"), "{").expect("file");
    drop(Server::start(&shelf, &["--lookup", "--learn", &cut]));
    succeed(&["learn", "purge", &cut]);
    let left = files(Path::new(&cut));
    assert!(left.iter().all(|file| file.ends_with(".lock")), "{left:?}");
    // A learned draft that cannot be opened.
    let mut learned = read();
    learned["learned"] = json!([{ "base": base, "draft": 1 }, { "base": "another", "draft": 2 }]);
    std::fs::write(&state, learned.to_string()).expect("file");
    drop(Server::start(&shelf, &options));
    assert_eq!(read()["learned"], json!([{ "base": "another", "draft": 2 }]));
}
