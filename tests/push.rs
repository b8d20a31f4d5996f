//! `push` against a hub that runs on this machine for the test.

use std::collections::HashMap;
use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Output;
use std::sync::{Arc, Mutex};

use crate::support::server::{self, Asked};
use crate::support::{
    self, Workshop, finished, last_json, longdraft, require_words, stderr, stdout, succeed,
    succeeded, told_by,
};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// A request: method and path, authorization, body.
type Request = (String, Option<String>, Vec<u8>);
type Log = Arc<Mutex<Vec<Request>>>;

/// What the stand-in does.
#[derive(Clone, Copy, PartialEq)]
enum Behaviour {
    /// Large files in one piece.
    Whole,
    /// Large files in pieces of 40,000 bytes.
    Parts,
    /// The large file is there already, and so is the repository.
    Known,
    /// The token may not write; the answer tells it, and moves the cursor.
    Forbidden,
    /// Everything is elsewhere.
    Moved,
}

fn answer(mut stream: TcpStream, base: &str, how: Behaviour, log: &Log) -> std::io::Result<()> {
    let asked = Asked::read(&mut BufReader::new(stream.try_clone()?))?;
    let parsed: Value = serde_json::from_slice(&asked.body).unwrap_or_default();
    let path = asked.path().to_owned();
    let (status, out) = match path.as_str() {
        _ if how == Behaviour::Forbidden => {
            let token = asked.header("authorization").unwrap_or_default();
            let said = format!("you may not write here\u{1b}[2J\r\n{token}");
            ("403 Forbidden", json!({ "error": said }))
        }
        _ if how == Behaviour::Moved => ("307 Temporary Redirect", json!({})),
        "/api/repos/create" if how == Behaviour::Known => {
            ("409 Conflict", json!({"error": "there"}))
        }
        "/api/repos/create" => ("200 OK", json!({"url": "x"})),
        "/api/models/org/draft/preupload/main" => {
            let files = parsed["files"].as_array().cloned().unwrap_or_default();
            let mode = |file: &Value| {
                let name = file["path"].as_str().unwrap_or_default();
                if name.ends_with("safetensors") { "lfs" } else { "regular" }
            };
            let files: Vec<Value> =
                files.iter().map(|f| json!({"path": f["path"], "uploadMode": mode(f)})).collect();
            ("200 OK", json!({ "files": files }))
        }
        "/org/draft.git/info/lfs/objects/batch" => {
            let object = &parsed["objects"][0];
            let size = object["size"].as_u64().unwrap_or(0);
            // The store is another host than the hub: it must not see the token.
            let store = base.replace("127.0.0.1", "localhost");
            let parts: serde_json::Map<String, Value> = (0..size.div_ceil(40_000))
                .map(|i| (format!("{:05}", i + 1), json!(format!("{store}/part/{}", i + 1))))
                .chain([("chunk_size".to_owned(), json!("40000"))])
                .collect();
            let upload = match how {
                Behaviour::Parts => json!({"href": format!("{store}/complete"), "header": parts}),
                _ => json!({"href": format!("{store}/whole")}),
            };
            let actions = json!({"upload": upload, "verify": {"href": format!("{base}/verify")}});
            let mut out = json!({"oid": object["oid"], "size": size});
            if how != Behaviour::Known {
                out["actions"] = actions;
            }
            ("200 OK", json!({ "objects": [out] }))
        }
        "/api/models/org/draft/commit/main" => ("200 OK", json!({"commitUrl": "hub/commit/1"})),
        _ => ("200 OK", json!({})),
    };
    let authorization = asked.header("authorization");
    log.lock().expect("log").push((asked.line, authorization, asked.body));
    let out = out.to_string();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nETag: tag{path}\r\nLocation: {base}/other\r\n\
         Connection: close\r\n\r\n{out}",
        out.len()
    )
}

fn serve(how: Behaviour) -> (String, Log) {
    let log = Log::default();
    let own = Arc::clone(&log);
    (server::serve("127.0.0.1", move |base, stream| answer(stream, base, how, &own)), log)
}

/// An exported draft with an evaluation beside its run.
fn exported(shop: &Workshop) -> PathBuf {
    let mut config = support::tiny_config("llama");
    config["num_hidden_layers"] = 8.into();
    support::write_target(&shop.target, &config);
    let train = ["train", &shop.config(), "draft.method=eagle3", "data.anchor.enabled=false"];
    succeed(&[&train[..], &["draft.draft_vocab_size=60", "train.steps=2"]].concat());
    let rows = "{\"prompt\": \"the cat\"}\n{\"prompt\": \"on the mat\"}\n";
    shop.write("prompts.jsonl", rows);
    let (run, target, folder) = (shop.path("run"), shop.target(), shop.path("export"));
    succeed(&["extract", &run]);
    let draft = shop.path("run/draft");
    let eval = ["eval", "decode", "--target", &target, "--draft", &draft, "--output", &run];
    let prompts = shop.path("prompts.jsonl");
    succeed(&[&eval[..], &["--prompts", &prompts, "--runs", "1", "--max-tokens", "8"]].concat());
    let export = ["export", &run, "--to", "vllm", "--output", &folder];
    succeed(&[&export[..], &["--target-name", "some-org/tiny"]].concat());
    PathBuf::from(folder)
}

fn push(shop: &Workshop, endpoint: &str, more: &[&str]) -> Output {
    let export = shop.path("export");
    let mut command = longdraft(&["push", &export, "org/draft", "--license", "apache-2.0"]);
    finished(command.args(more).env("HF_ENDPOINT", endpoint).env("HF_TOKEN", "hf_secret"))
}

#[test]
fn an_export_goes_up_in_one_commit_with_a_card() {
    let shop = Workshop::new();
    let folder = exported(&shop);
    let weights = std::fs::read(folder.join("model.safetensors")).expect("weights");
    for how in [Behaviour::Whole, Behaviour::Parts, Behaviour::Known] {
        let (endpoint, log) = serve(how);
        let output = succeeded(push(&shop, &endpoint, &["--json"]));
        let out = last_json(&stdout(&output));
        assert_eq!(out["commit"], "hub/commit/1");
        let log = log.lock().expect("log");
        let bodies = |prefix: &str| -> Vec<&Request> {
            log.iter().filter(|(line, ..)| line.starts_with(prefix)).collect()
        };
        let puts = bodies("PUT ");
        match how {
            Behaviour::Known => {
                assert_eq!((puts.len(), &out["known"]), (0, &json!(1)));
            }
            Behaviour::Whole => assert_eq!(puts[0].2, weights, "the file's own bytes"),
            _ => {
                assert!(puts.len() > 1, "several parts");
                let whole: Vec<u8> = puts.iter().flat_map(|(.., body)| body.clone()).collect();
                assert_eq!(whole, weights, "the parts in order");
                let done: Value =
                    serde_json::from_slice(&bodies("POST /complete")[0].2).expect("JSON");
                assert_eq!(done["parts"].as_array().map(Vec::len), Some(puts.len()));
                assert_eq!(done["parts"][1], json!({"partNumber": 2, "etag": "tag/part/2"}));
            }
        }
        assert!(
            puts.iter().all(|(_, token, _)| token.is_none()),
            "the store must not see the token"
        );
        assert!(
            bodies("POST /api")
                .iter()
                .all(|(_, token, _)| token.as_deref() == Some("Bearer hf_secret"))
        );
        let commit = bodies("POST /api/models/org/draft/commit");
        let text = String::from_utf8(commit[0].2.clone()).expect("UTF-8");
        let lines: Vec<Value> =
            text.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
        let of = |key: &str| lines.iter().filter(|line| line["key"] == key).count();
        assert_eq!((of("header"), of("lfsFile")), (1, 1));
        let names: Vec<&str> = lines.iter().filter_map(|l| l["value"]["path"].as_str()).collect();
        for name in [
            "README.md",
            "config.json",
            "longdraft-manifest.json",
            "model.safetensors",
            "tokenizer.json",
        ] {
            assert!(names.contains(&name), "{name} not in {names:?}");
        }
    }
}

#[test]
fn a_dry_run_shows_files_and_card_and_sends_nothing() {
    let shop = Workshop::new();
    exported(&shop);
    let (endpoint, log) = serve(Behaviour::Whole);
    let output = succeeded(push(&shop, &endpoint, &["--dry-run"]));
    let out = stdout(&output);
    for part in [
        "model.safetensors",
        "license: apache-2.0",
        "base_model: some-org/tiny",
        "output of layer 1, output of layer 3, output of layer 4",
        "rows.jsonl",
        "2 steps",
        "| chain 4 | 0 | 2 |",
        "vllm serve some-org/tiny",
    ] {
        assert!(out.contains(part), "{part} not in {out}");
    }
    assert!(
        !out.contains(&shop.folder.path().display().to_string()),
        "a card tells no paths: {out}"
    );
    assert!(log.lock().expect("log").is_empty(), "a dry run reaches nobody");
}

#[test]
fn refusals_say_why_and_broken_exports_stay() {
    let shop = Workshop::new();
    let folder = exported(&shop);
    let (endpoint, _) = serve(Behaviour::Forbidden);
    let text = told_by(&push(&shop, &endpoint, &[]), 1);
    require_words(&text, &["403: you may not write here", "write access"]);
    assert!(!text.contains("hf_secret") && !text.contains('\u{1b}'), "{text:?}");
    let (endpoint, log) = serve(Behaviour::Moved);
    let text = told_by(&push(&shop, &endpoint, &[]), 1);
    assert!(text.contains("307") && text.contains("renamed"), "{text}");
    assert_eq!(log.lock().expect("log").len(), 1, "redirects are not followed");
    let text = stderr(&push(&shop, "http://hub.example", &[]));
    assert!(text.contains("a token is sent over https only"), "{text}");
    let (endpoint, log) = serve(Behaviour::Whole);
    let login = endpoint.replace("http://", "http://localhost:s3cret@");
    let text = told_by(&push(&shop, &login, &[]), 2);
    assert!(text.contains("user or password is refused") && !text.contains("s3cret"), "{text}");
    assert!(log.lock().expect("log").is_empty());
    let (endpoint, log) = serve(Behaviour::Whole);
    let weights = folder.join("model.safetensors");
    let bytes = std::fs::read(&weights).expect("weights");
    std::fs::write(&weights, &bytes[..bytes.len() - 3]).expect("write");
    let output = push(&shop, &endpoint, &[]);
    let text = stderr(&output);
    assert!(text.contains("cut off") && text.contains("nothing was sent"), "{text}");
    assert!(log.lock().expect("log").is_empty());
    let text = support::fail(&["push", &shop.target(), "org/draft"], 2);
    assert!(text.contains("only folders written by `longdraft export`"), "{text}");
    support::fail(&["push", &shop.path("export"), "not a repository"], 2);
}

#[test]
fn stray_files_stay_here_and_the_dry_run_names_them() {
    let shop = Workshop::new();
    let folder = exported(&shop);
    for name in [".env", "config.json.99.tmp", ".export.99.writing", "notes.txt"] {
        std::fs::write(folder.join(name), "PASSWORD=s3cret").expect("write");
    }
    std::fs::create_dir(folder.join("more")).expect("folder");
    std::fs::write(folder.join("more/secret.txt"), "s3cret").expect("write");
    let stray = [
        (".env", "is hidden"),
        (".export.99.writing", "is hidden"),
        ("config.json.99.tmp", "is unfinished"),
        ("more", "is a folder"),
        ("notes.txt", "is not a part of the export"),
    ];
    #[cfg(unix)]
    std::os::unix::fs::symlink(shop.path("train.yaml"), folder.join("link.json")).expect("link");
    let (endpoint, log) = serve(Behaviour::Whole);
    let out = stdout(&push(&shop, &endpoint, &["--dry-run"]));
    let (sent, left) = out.split_once("left out:").expect("two lists");
    for (name, reason) in stray {
        assert!(left.contains(&format!("{name}: {reason}")), "{name} not in {left}");
        assert!(!sent.contains(&format!("{name}\n")), "{sent}");
    }
    let record = last_json(&stdout(&push(&shop, &endpoint, &["--dry-run", "--json"])));
    let listed = record["left_out"].as_array().expect("a list");
    #[cfg(unix)]
    assert!(listed.contains(&json!({"name": "link.json", "reason": "is a link"})), "{listed:?}");
    assert!(listed.len() >= stray.len() && log.lock().expect("log").is_empty());

    let output = succeeded(push(&shop, &endpoint, &[]));
    assert!(stderr(&output).contains("in the folder stayed here"), "{}", stderr(&output));
    for (line, _, body) in &*log.lock().expect("log") {
        let body = String::from_utf8_lossy(body);
        // What goes into the commit is base64.
        for secret in ["s3cret", "czNjcmV0", ".env", "notes.txt", "link.json"] {
            assert!(!body.contains(secret), "{secret} in {line}");
        }
    }
}

/// Without `--target-name` an export knows its target by a path, which is of use on this machine alone.
#[test]
fn no_path_of_this_machine_is_sent() {
    let shop = Workshop::new();
    let folder = exported(&shop);
    let kept = folder.join("longdraft-manifest.json");
    let export = ["export", &shop.path("run"), "--to", "vllm", "--output", &shop.path("export")];
    succeed(&export);
    let here = shop.folder.path().display().to_string();
    let text = std::fs::read_to_string(&kept).expect("manifest");
    assert!(text.contains(&format!("{here}/target")), "for commands on this machine");
    let (endpoint, log) = serve(Behaviour::Whole);
    let output = succeeded(push(&shop, &endpoint, &[]));
    let told = stderr(&output);
    assert!(told.contains("call the target `target`") && told.contains("--target-name"), "{told}");
    let sent = sent_files(&log);
    for (name, content) in &sent {
        assert!(!content.contains(&here), "{name}: {content}");
    }
    let manifest: Value = serde_json::from_str(&sent["longdraft-manifest.json"]).expect("JSON");
    assert_eq!(manifest["target"]["name"], "target");
    let evaluation = &manifest["provenance"]["evaluation"];
    assert_eq!(
        (&evaluation["target"], &evaluation["prompts"]),
        (&json!("target"), &json!("prompts.jsonl"))
    );
    let command = manifest["serve"]["vllm"].as_str().expect("a command");
    assert!(command.starts_with("vllm serve ORG/NAME --speculative-config"), "{command}");
    assert!(sent["README.md"].contains("# Draft model for target"), "{}", sent["README.md"]);
    assert_eq!(std::fs::read_to_string(&kept).expect("manifest"), text, "the folder's own stays");
    let dry = stdout(&push(&shop, &endpoint, &["--dry-run"]));
    assert!(dry.contains("longdraft-manifest.json (without paths of this machine)"), "{dry}");
}

/// Names and texts of the small files of a commit.
fn sent_files(log: &Log) -> HashMap<String, String> {
    let log = log.lock().expect("log");
    let commit = log.iter().find(|(line, ..)| line.contains("/commit/")).expect("a commit");
    let lines = commit.2.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let lines = lines.map(|line| serde_json::from_slice::<Value>(line).expect("JSON"));
    let file = |line: Value| {
        let value = (line["key"] == "file").then(|| line["value"].clone())?;
        let bytes = STANDARD.decode(value["content"].as_str()?).expect("base64");
        Some((value["path"].as_str()?.to_owned(), String::from_utf8(bytes).expect("UTF-8")))
    };
    lines.filter_map(file).collect()
}

#[test]
fn a_manifest_cannot_send_what_no_export_wrote() {
    let shop = Workshop::new();
    let folder = exported(&shop);
    let path = folder.join("longdraft-manifest.json");
    let text = std::fs::read_to_string(&path).expect("manifest");
    std::fs::write(folder.join(".env"), "s3cret").expect("write");
    let outside = shop.path("train.yaml");
    let mut cases = vec![("../train.yaml", "outside"), (".env", "hidden"), (&outside, "outside")];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&outside, folder.join("link.json")).expect("link");
        cases.push(("link.json", "is a link"));
    }
    for (name, problem) in cases {
        let mut manifest: Value = serde_json::from_str(&text).expect("JSON");
        manifest["files"][name] = "0".repeat(64).into();
        std::fs::write(&path, manifest.to_string()).expect("write");
        let (endpoint, log) = serve(Behaviour::Whole);
        for more in [&["--dry-run"][..], &[]] {
            let text = told_by(&push(&shop, &endpoint, more), 1);
            assert!(text.contains(name) && text.contains(problem), "{text}");
        }
        assert!(log.lock().expect("log").is_empty());
    }
}
