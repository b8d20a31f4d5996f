//! Models and data sets of a hub, from a hub that runs on this machine for the test.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::hub::{COMMIT, Hub, Log, at_hub};
use crate::support::processes::wait_until;
use crate::support::{self, finished, longdraft, stderr, stdout, succeeded, told_by};
use serde_json::json;

const TOKEN: &str = "hf_secret";

/// Requests without their authorization.
fn lines(log: &Log) -> Vec<String> {
    log.lock().expect("log").iter().map(|(line, ..)| line.clone()).collect()
}

/// A user with a home for the hub's files and a small target.
struct User {
    folder: tempfile::TempDir,
}

impl User {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("tempdir");
        support::write_target(&folder.path().join("model"), &support::tiny_config("llama"));
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The cache of the data set `some-org/text`.
    fn cache(&self, name: &str) -> PathBuf {
        self.path("home/hub/datasets--some-org--text").join(name)
    }

    fn command(&self, arguments: &[&str], endpoint: &str) -> Command {
        at_hub(arguments, endpoint, &self.path("home"))
    }

    fn inspect_command(&self, address: &str, endpoint: &str) -> Command {
        let target = self.path("model").display().to_string();
        self.command(&["data", "inspect", address, "--target", &target, "--json"], endpoint)
    }

    fn inspect(&self, endpoint: &str) -> Output {
        finished(&mut self.inspect_command("hf://some-org/text", endpoint))
    }

    /// Everything on disk but the model, links and folders included.
    fn tree(&self) -> Vec<String> {
        fn walk(folder: &Path, out: &mut Vec<String>) {
            for entry in std::fs::read_dir(folder).expect("folder").flatten() {
                out.push(entry.path().display().to_string());
                if entry.file_type().expect("type").is_dir() {
                    walk(&entry.path(), out);
                }
            }
        }
        let mut all = Vec::new();
        walk(self.folder.path(), &mut all);
        all.retain(|path| !path.starts_with(&self.path("model").display().to_string()));
        all.sort();
        all
    }
}

/// Origins of the rows that were read.
#[track_caller]
fn origins(output: &Output) -> Vec<String> {
    assert!(output.status.success(), "{}", stderr(output));
    let rows = support::last_json(&stdout(output))["rows"].clone();
    let rows = rows.as_array().expect("rows");
    rows.iter().map(|row| row["origin"].as_str().expect("text").to_owned()).collect()
}

/// What a refusal says: no panic, nothing that moves the cursor, no secret.
#[track_caller]
fn refusal(output: &Output) -> String {
    let text = told_by(output, 1);
    assert!(text.contains("error: ") && text.contains("hint: "), "{text}");
    assert!(!text.contains("panicked") && !text.contains(TOKEN), "{text}");
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    text
}

#[test]
fn a_hub_model_is_fetched_once_and_decodes_like_its_folder() {
    let user = User::new();
    let folder = user.path("model");
    let (endpoint, log) = Hub::of_folder(&folder).serve();
    let generate = |target: &str, endpoint: &str| {
        let arguments = ["generate", "--target", target, "--no-draft", "--prompt", "a", "--json"];
        finished(user.command(&arguments, endpoint).args(["--max-tokens", "12"]))
    };
    let tokens = |output: &Output| {
        assert!(output.status.success(), "{}", stderr(output));
        support::last_json(&stdout(output))["tokens"].clone()
    };
    let local = tokens(&generate(&folder.display().to_string(), "http://127.0.0.1:1"));
    assert_eq!(tokens(&generate("some-org/tiny", &endpoint)), local);
    let own = user.path("home/hub/models--some-org--tiny");
    assert_eq!(std::fs::read_to_string(own.join("refs/main")).expect("branch"), COMMIT);
    let link = own.join("snapshots").join(COMMIT).join("config.json");
    let content = own.join("blobs/tag-config.json");
    assert_eq!(link.canonicalize().expect("link"), content.canonicalize().expect("content"));

    log.lock().expect("log").clear();
    assert_eq!(tokens(&generate("some-org/tiny", &endpoint)), local);
    let lists = "GET /api/models/some-org/tiny/revision/main";
    assert!(lines(&log).iter().all(|line| line == lists), "{:?}", lines(&log));

    let text = refusal(&generate("some-org/other", "http://127.0.0.1:1"));
    assert!(text.contains("hub model `some-org/other`"), "{text}");
}

#[test]
fn a_hub_data_set_reads_like_its_files_and_a_missing_file_names_what_there_is() {
    let user = User::new();
    let data = [
        ("README.md", "no data"),
        ("test 1.jsonl", "{\"text\": \"held back\"}\n"),
        ("train.jsonl", "{\"text\": \"abc\"}\n"),
    ];
    let files = data.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec()));
    let (endpoint, log) = Hub::of(BTreeMap::from(files)).serve();
    let output = user.inspect(&endpoint);
    assert_eq!(origins(&output), ["train.jsonl:1"], "the training file alone");
    assert_eq!(support::last_json(&stdout(&output))["rows"][0]["tokens"], 4);
    let inspect = |address: &str| finished(&mut user.inspect_command(address, &endpoint));
    let output = inspect("hf://some-org/text/test 1.jsonl@v1");
    assert_eq!(origins(&output), ["test 1.jsonl:1"]);
    let file = "GET /datasets/some-org/text/resolve/0123abc/test%201.jsonl";
    assert!(lines(&log).contains(&file.to_owned()), "{:?}", lines(&log));
    let text = refusal(&inspect("hf://some-org/text/none.jsonl"));
    assert!(text.contains("no data file at none.jsonl") && text.contains("train.jsonl"), "{text}");
    assert!(text.contains("hub data set `some-org/text`"), "{text}");
}

#[test]
fn what_other_clients_fetched_is_used() {
    let user = User::new();
    // A hub that has newer files, but of the same names.
    let mut hub = Hub::of_text("new text");
    hub.commit = "fedcba9876543210".into();
    let (endpoint, log) = hub.serve();
    let snapshot = user.cache("snapshots").join(COMMIT);
    for folder in [user.cache("blobs"), user.cache("refs"), snapshot.clone()] {
        std::fs::create_dir_all(folder).expect("folder");
    }
    std::fs::write(user.cache("refs/main"), COMMIT).expect("branch");
    std::fs::write(user.cache("blobs/d00d"), "{\"text\": \"abc\"}\n{\"text\": \"d\"}\n")
        .expect("content");
    std::fs::copy(user.cache("blobs/d00d"), snapshot.join("train.jsonl")).expect("file");
    assert_eq!(origins(&user.inspect(&endpoint)), ["train.jsonl:1", "train.jsonl:2"]);
    assert_eq!(lines(&log).len(), 1, "the list alone: {:?}", lines(&log));
}

#[test]
fn names_that_leave_the_cache_are_refused_before_anything_is_written() {
    let user = User::new();
    let outside = user.path("outside/train.jsonl").display().to_string();
    let before = user.tree();
    for name in [
        "../../../../../outside/train.jsonl",
        "x/../../train.jsonl",
        &outside,
        "..\\..\\train.jsonl",
        "x\\train.jsonl",
        "train\0.jsonl",
        "\u{1b}[2Jtrain.jsonl",
        "x//train.jsonl",
    ] {
        let mut hub = Hub::of_text("abc");
        hub.listed = vec![name.to_owned()];
        let (endpoint, log) = hub.serve();
        let text = refusal(&user.inspect(&endpoint));
        assert!(text.contains("impossible name"), "{name:?}: {text}");
        assert_eq!(lines(&log).len(), 1, "no file is asked for: {:?}", lines(&log));
        assert_eq!(user.tree(), before, "{name:?}");
    }
}

#[test]
fn commits_and_tags_that_leave_the_cache_are_refused() {
    let user = User::new();
    let outside = user.path("outside").display().to_string();
    for key in ["../../../../outside", &outside, "..", "a/b", "a\\b", ""] {
        let mut commit = Hub::of_text("abc");
        commit.commit = key.into();
        let mut tag = Hub::of_text("abc");
        tag.tag = Some(key.into());
        let mut linked = tag.clone();
        linked.is_linked = true;
        for (hub, word) in [(commit, "commit"), (tag, "entity tag"), (linked, "entity tag")] {
            let before = user.tree();
            let text = refusal(&user.inspect(&hub.serve().0));
            assert!(text.contains("impossible") && text.contains(word), "{key:?}: {text}");
            assert_eq!(user.tree(), before, "{key:?}");
        }
    }
    let mut wrong = user.inspect_command("hf://some-org/text@../../../x", "http://127.0.0.1:1");
    let output = finished(&mut wrong);
    assert!(
        !output.status.success() && stderr(&output).contains("hf://org/name[/path][@revision]")
    );
}

#[test]
fn the_token_goes_to_the_endpoint_alone() {
    // Another host, where the system has one.
    let other = match TcpListener::bind("127.0.0.2:0") {
        Ok(_) => "127.0.0.2",
        Err(_) => "localhost",
    };
    for redirects_all in [false, true] {
        let user = User::new();
        let (store, stored) = Hub::of_text("abc").serve_at(other);
        let mut hub = Hub::of_text("abc");
        hub.redirect = Some((store, redirects_all));
        let (endpoint, log) = hub.serve();
        let output =
            finished(user.inspect_command("hf://some-org/text", &endpoint).env("HF_TOKEN", TOKEN));
        assert_eq!(origins(&output), ["train.jsonl:1"]);
        let seen = stored.lock().expect("log");
        assert!(!seen.is_empty(), "the other host was asked: {}", stderr(&output));
        assert!(seen.iter().all(|(_, token, _)| token.is_none()), "{seen:?}");
        let own = log.lock().expect("log");
        let bearer = format!("Bearer {TOKEN}");
        assert!(!own.is_empty() && own.iter().all(|(_, token, _)| *token == Some(bearer.clone())));
    }
}

#[test]
fn the_token_is_read_from_the_environment_and_the_file() {
    let user = User::new();
    let tokens = |variables: &[(&str, &str)]| {
        let (endpoint, log) = Hub::of_text("abc").serve();
        let _ = std::fs::remove_dir_all(user.path("home/hub"));
        let mut command = user.inspect_command("hf://some-org/text", &endpoint);
        let output = finished(command.envs(variables.iter().copied()));
        assert_eq!(origins(&output), ["train.jsonl:1"]);
        let mut tokens: Vec<_> = log.lock().expect("log").iter().map(|r| r.1.clone()).collect();
        tokens.dedup();
        tokens
    };
    assert_eq!(tokens(&[]), [None]);
    std::fs::create_dir_all(user.path("home")).expect("folder");
    std::fs::write(user.path("home/token"), "hf_file\n").expect("token");
    assert_eq!(tokens(&[]), [Some("Bearer hf_file".to_owned())]);
    assert_eq!(tokens(&[("HF_TOKEN", "hf_own")]), [Some("Bearer hf_own".to_owned())]);
}

#[test]
fn the_token_is_not_sent_in_the_clear() {
    let user = User::new();
    // A host elsewhere, which a proxy of this machine stands for.
    let (proxy, log) = Hub::of_text("abc").serve();
    let elsewhere = "http://hub.example";
    let mut command = user.inspect_command("hf://some-org/text", elsewhere);
    command.env("HF_TOKEN", TOKEN).env("http_proxy", &proxy).env("HTTP_PROXY", &proxy);
    let output = finished(&mut command);
    assert_eq!(origins(&output), ["train.jsonl:1"]);
    let seen = log.lock().expect("log");
    assert!(!seen.is_empty() && seen.iter().all(|(_, token, _)| token.is_none()), "{seen:?}");
    drop(seen);

    let mut refused = Hub::of_text("abc");
    refused.refusal = Some(("401 Unauthorized", json!({"error": "log in"}).to_string()));
    let (proxy, _) = refused.serve();
    let mut command = user.inspect_command("hf://some-org/other", elsewhere);
    command.env("HF_TOKEN", TOKEN).env("http_proxy", &proxy).env("HTTP_PROXY", &proxy);
    let text = refusal(&finished(&mut command));
    assert!(text.contains("401") && text.contains("https only"), "{text}");
}

#[test]
fn an_endpoint_with_a_login_is_refused_untold() {
    let user = User::new();
    let (endpoint, log) = Hub::of_text("abc").serve();
    let host = endpoint.trim_start_matches("http://");
    for login in ["localhost:s3cret", "user", ""] {
        let text = refusal(&user.inspect(&format!("http://{login}@{host}")));
        assert!(text.contains("HF_ENDPOINT") && !text.contains("s3cret"), "{text}");
    }
    assert!(log.lock().expect("log").is_empty());
}

#[test]
fn words_of_a_server_are_cleaned() {
    let user = User::new();
    let said = format!("\u{1b}[2J\u{1b}]0;x\u{7}bad {TOKEN}\r\n\u{9b}31mno \u{202e}access");
    for body in [said.clone(), json!({ "error": said }).to_string()] {
        let mut hub = Hub::of_text("abc");
        hub.refusal = Some(("403 Forbidden", body));
        let (endpoint, _) = hub.serve();
        let mut command = user.inspect_command("hf://some-org/text", &endpoint);
        let text = refusal(&finished(command.env("HF_TOKEN", TOKEN)));
        assert!(text.contains("403") && text.contains("***") && text.contains("access"), "{text}");
        assert!(!text.contains('\u{202e}'));
    }
}

#[test]
fn a_download_that_was_cut_off_goes_on() {
    for knows_ranges in [true, false] {
        let user = User::new();
        let mut hub = Hub::of_text(&"abc ".repeat(500));
        hub.knows_ranges = knows_ranges;
        let mut cut = hub.clone();
        cut.cut = Some(700);
        let text = refusal(&user.inspect(&cut.serve().0));
        assert!(text.contains("train.jsonl"), "{text}");
        let part = user.cache("blobs/tag-train.jsonl.part");
        assert_eq!(part.metadata().expect("a part").len(), 700);
        assert!(!user.cache("blobs/tag-train.jsonl").exists());
        let (endpoint, log) = hub.clone().serve();
        assert_eq!(origins(&user.inspect(&endpoint)), ["train.jsonl:1"]);
        let ranges: Vec<_> = log.lock().expect("log").iter().filter_map(|r| r.2.clone()).collect();
        assert_eq!(ranges, ["bytes=700-"]);
        let bytes = std::fs::read(user.cache("blobs/tag-train.jsonl")).expect("content");
        assert!(bytes == hub.files["train.jsonl"] && !part.exists());
    }
}

#[test]
fn a_large_file_of_another_sum_is_refused() {
    let user = User::new();
    let mut hub = Hub::of_text("abc");
    hub.tag = Some("0".repeat(64));
    hub.is_linked = true;
    let text = refusal(&user.inspect(&hub.serve().0));
    assert!(text.contains("SHA-256"), "{text}");
    assert!(!user.cache("blobs").join("0".repeat(64)).exists());
    assert!(!user.cache("snapshots").exists() && !user.cache("refs").exists());
}

#[test]
fn a_content_that_another_process_fetches_is_waited_for() {
    let user = User::new();
    std::fs::create_dir_all(user.cache("blobs")).expect("folder");
    let lock = user.cache("blobs/tag-train.jsonl.lock");
    let held = std::fs::File::create(lock).expect("lock");
    held.lock().expect("held");
    let (endpoint, log) = Hub::of_text("abc").serve();
    let mut child = user.inspect_command("hf://some-org/text", &endpoint).spawn().expect("starts");
    // The other process ends with the content in its place.
    wait_until("two requests", || lines(&log).len() >= 2);
    std::fs::write(user.cache("blobs/tag-train.jsonl"), "{\"text\": \"d\"}\n").expect("content");
    drop(held);
    assert!(child.wait().expect("ends").success());
    assert!(lines(&log).iter().all(|line| !line.starts_with("GET /datasets")), "{:?}", lines(&log));
}

/// A check asks the hub for what is small; a run fetches the rest before its work.
#[test]
fn what_a_hub_does_not_have_is_told_before_any_work() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (served, home) = (dir.path().join("served"), dir.path().join("hub"));
    support::write_target(&served, &support::tiny_config("llama"));
    let rows: String = (0..40).map(|i| format!("{{\"text\": \"row {i} of forty\"}}\n")).collect();
    std::fs::write(served.join("train.jsonl"), rows).expect("rows");
    let (endpoint, _log) = Hub::of_folder(&served).serve();
    let config = dir.path().join("train.yaml");
    let text = format!(
        "target: some-org/tiny\noutput: {}\ndata:\n  train: [{{path: hf://some-org/text}}]\n  row_tokens: 64\n\
         train: {{steps: 2}}\n",
        dir.path().join("run").display()
    );
    std::fs::write(&config, text).expect("config");
    let config = config.display().to_string();
    let command = |arguments: &[&str], endpoint: &str| {
        finished(longdraft(arguments).env("HF_ENDPOINT", endpoint).env("HF_HOME", &home))
    };
    let check = ["config", "check", &config];
    let output = command(&check, "http://127.0.0.1:1");
    assert_eq!(output.status.code(), Some(2));
    let text = stderr(&output);
    for part in [
        "train.yaml:1: `target`: ",
        "some-org/tiny",
        "train.yaml:4: `data.train.0.path`: ",
        "some-org/text",
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
    succeeded(command(&check, &endpoint));
    let names = |folder: &Path| -> Vec<String> {
        let mut folders = vec![folder.to_path_buf()];
        let mut names = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                names.push(entry.file_name().to_string_lossy().into_owned());
                if entry.path().is_dir() {
                    folders.push(entry.path());
                }
            }
        }
        names
    };
    let fetched = names(&home);
    assert!(fetched.contains(&"tokenizer.json".to_owned()), "{fetched:?}");
    assert!(!fetched.iter().any(|name| name == "model.safetensors" || name == "train.jsonl"));
    let missing = [&check[..], &["data.train=[{path: hf://some-org/text/none.jsonl}]"]].concat();
    let text = stderr(&command(&missing, &endpoint));
    assert!(text.contains("no data file at none.jsonl"), "{text}");
    succeeded(command(&["train", &config], &endpoint));
}
