//! Exported drafts, and what a hub answers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError};

use longdraft_models::hub::{Endpoint, Token};
use longdraft_serving::hub::{Client, Content, Package, Upload, card};
use longdraft_serving::verify::{VerifyOptions, verify};
use longdraft_serving::{
    ExportOptions, MANIFEST_FILE, Manifest, Profile, Provenance, TargetFacts, WeightType, export,
};
use serde_json::json;

use crate::fixtures;
use crate::scratch;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

/// The target that exports are checked against.
static FACTS: LazyLock<TargetFacts> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fixtures::write_target(folder.path());
    TargetFacts::open(&folder.path().to_string_lossy()).expect("a target")
});

fn write_export(folder: &Path, profile: Profile) {
    let options = ExportOptions {
        profile,
        dtype: Some(WeightType::F32),
        embedding: false,
        draft_len: 3,
        provenance: Provenance::default(),
    };
    let draft = fixtures::eagle3();
    export(&draft, &FACTS, &options, folder).expect("exported");
}

fn write_vllm(folder: &Path) {
    write_export(folder, Profile::Vllm);
}

fn check(folder: &Path) -> bool {
    let options = VerifyOptions { target: Some(&FACTS), ..VerifyOptions::default() };
    verify(folder, &options).is_ok_and(|report| report.is_clean(false))
}

/// Reads the manifest of an export, makes the model card and lists what would be sent.
pub(super) fn export_manifest(bytes: &[u8]) -> bool {
    let folder = scratch::folder_with("export-manifest", write_vllm, MANIFEST_FILE, bytes);
    let clean = check(&folder);
    let Ok(manifest) = serde_json::from_slice::<Manifest>(bytes) else { return false };
    let card = card::render(&manifest, "org/name", Some("mit"));
    let _ = Package::of(&folder, &manifest, &card);
    clean
}

pub(super) fn export_manifests() -> Vec<Vec<u8>> {
    vec![scratch::made(MANIFEST_FILE, write_vllm)]
}

/// Reads the configuration of an export, without a manifest that says what it is for.
pub(super) fn export_config(bytes: &[u8]) -> bool {
    let folder = scratch::folder_with(
        "export-config",
        |folder| {
            write_vllm(folder);
            std::fs::remove_file(folder.join(MANIFEST_FILE)).expect("removed");
        },
        CONFIG,
        bytes,
    );
    check(&folder)
}

pub(super) fn export_configs() -> Vec<Vec<u8>> {
    vec![scratch::made(CONFIG, write_vllm)]
}

/// Configurations that belong to other weights than those in the folder.
pub(crate) fn other_export_configs() -> [Vec<u8>; 2] {
    [Profile::Sglang, Profile::Speculators]
        .map(|profile| scratch::made(CONFIG, |folder| write_export(folder, profile)))
}

/// Reads the weights of an export.
pub(super) fn export_weights(bytes: &[u8]) -> bool {
    check(&scratch::folder_with("export-weights", write_vllm, WEIGHTS, bytes))
}

pub(super) fn export_weights_files() -> Vec<Vec<u8>> {
    vec![scratch::made(WEIGHTS, write_vllm)]
}

/// Between two answers of a hub.
const SEPARATOR: &[u8] = b"\n\0\n";

/// A hub that answers with what it is told, one answer a request.
struct Hub {
    base: String,
    answers: &'static Mutex<Vec<Vec<u8>>>,
}

static HUB: LazyLock<Hub> = LazyLock::new(|| {
    static ANSWERS: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let base = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || while let Ok(true) = answer(&stream, &ANSWERS) {});
        }
    });
    Hub { base, answers: &ANSWERS }
});

/// Reads a request and answers it; returns whether the connection stays open. An input that begins
/// like an HTTP answer is sent as it is, and ends the connection.
fn answer(mut stream: &TcpStream, answers: &Mutex<Vec<Vec<u8>>>) -> std::io::Result<bool> {
    let mut reader = BufReader::new(stream);
    let (mut length, mut header) = (0, String::new());
    while reader.read_line(&mut header)? > 2 {
        if let Some(value) = header.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        }
        header.clear();
    }
    reader.take(length).read_to_end(&mut Vec::new())?;
    let mut answers = answers.lock().unwrap_or_else(PoisonError::into_inner);
    let body = if answers.is_empty() { b"{}".to_vec() } else { answers.remove(0) };
    drop(answers);
    if body.starts_with(b"HTTP/1.1 ") {
        stream.write_all(&body)?;
        return Ok(false);
    }
    let mut out = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
    out.extend(body);
    stream.write_all(&out)?;
    Ok(true)
}

/// The client, which keeps its connections.
static CLIENT: LazyLock<Client> = LazyLock::new(|| {
    let endpoint = Endpoint::parse(&HUB.base).expect("an address");
    let token = Token::parse("token").expect("a token");
    Client::new(endpoint, token, "org/name").expect("this machine")
});

/// Sends a file to a hub that may answer anything.
pub(super) fn hub_answers(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    let mut answers = Vec::new();
    while let Some(at) = rest.windows(SEPARATOR.len()).position(|window| window == SEPARATOR) {
        answers.push(rest[..at].to_vec());
        rest = &rest[at + SEPARATOR.len()..];
    }
    answers.push(rest.to_vec());
    *HUB.answers.lock().unwrap_or_else(PoisonError::into_inner) = answers;
    let upload = |name: &str, sha256: &str| Upload {
        name: name.to_owned(),
        size: 10,
        sha256: sha256.to_owned(),
        content: Content::Bytes(b"0123456789".to_vec()),
    };
    let files = [upload("a.safetensors", "aa"), upload("README.md", "bb")];
    CLIENT.send(&files, "summary", false).is_ok()
}

pub(super) fn hub_conversations() -> Vec<Vec<u8>> {
    let large = json!({"files": [{"path": "a.safetensors", "uploadMode": "lfs"},
                                 {"path": "README.md", "uploadMode": "regular"}]});
    let known = json!({"objects": [{"oid": "aa", "size": 10}]});
    let commit = json!({"commitUrl": "https://hub/commit/1"});
    let join = |answers: &[String]| answers.join("\n\0\n").into_bytes();
    let create = json!({"url": "x"}).to_string();
    vec![
        join(&[create.clone(), large.to_string(), known.to_string(), commit.to_string()]),
        join(&[create, json!({"files": []}).to_string(), commit.to_string()]),
    ]
}
