//! `fetch`, and targets by the hub's names of GGUF files, from a hub that runs on this machine.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::PathBuf;
use std::process::{Command, Output};

use candle_core::Device;
use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::{Content, Value, write};
use serde_json::{Value as Json, json};

use crate::support::files::demonstration;
use crate::support::hub::{COMMIT, Hub, Log, at_hub};
use crate::support::{self, last_json, stderr, stdout, succeeded, told_by};

/// Nobody answers there.
const NOWHERE: &str = "http://127.0.0.1:1";
const WHOLE: &str = "tiny-Q8_0.gguf";
const PARTS: [&str; 2] =
    ["BF16/tiny-bf16-00001-of-00002.gguf", "BF16/tiny-bf16-00002-of-00002.gguf"];

/// The demonstration target in two files, as llama.cpp splits models.
fn parts() -> [Vec<u8>; 2] {
    let mut file = Cursor::new(std::fs::read(demonstration()).expect("the target"));
    let content = Content::read(&mut file).expect("GGUF");
    let mut names: Vec<&String> = content.tensor_infos.keys().collect();
    names.sort();
    let half = names.len() / 2;
    [(0_u16, &names[..half]), (1, &names[half..])].map(|(number, names_of_part)| {
        let own = [
            ("split.no", Value::U16(number)),
            ("split.count", Value::U16(2)),
            ("split.tensors.count", Value::I32(names.len() as i32)),
        ];
        let keys = content.metadata.iter().filter(|_| number == 0);
        let keys: Vec<(&str, &Value)> = keys
            .map(|(key, value)| (key.as_str(), value))
            .chain(own.iter().map(|(key, value)| (*key, value)))
            .collect();
        let tensors: Vec<(&str, QTensor)> = names_of_part
            .iter()
            .map(|name| {
                let tensor = content.tensor(&mut file, name, &Device::Cpu).expect("a tensor");
                (name.as_str(), tensor)
            })
            .collect();
        let tensors: Vec<(&str, &QTensor)> =
            tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
        let mut out = Cursor::new(Vec::new());
        write(&mut out, &keys, &tensors).expect("GGUF");
        out.into_inner()
    })
}

fn hub(files: &[(&str, Vec<u8>)]) -> Hub {
    let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone()));
    Hub::of(files.collect::<BTreeMap<_, _>>())
}

/// A repository with the demonstration target, whole and in parts, and other files.
fn repository() -> Hub {
    let [first, second] = parts();
    hub(&[
        ("README.md", b"a card".to_vec()),
        ("mmproj-tiny-f16.gguf", b"no model".to_vec()),
        (WHOLE, std::fs::read(demonstration()).expect("the target")),
        (PARTS[0], first),
        (PARTS[1], second),
    ])
}

struct User {
    folder: tempfile::TempDir,
}

impl User {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("tempdir") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The cache of `some-org/tiny`.
    fn cache(&self, name: &str) -> PathBuf {
        self.path("home/hub/models--some-org--tiny").join(name)
    }

    fn command(&self, arguments: &[&str], endpoint: &str) -> Command {
        at_hub(arguments, endpoint, &self.path("home"))
    }

    fn run(&self, arguments: &[&str], endpoint: &str) -> Output {
        self.command(arguments, endpoint).output().expect("the binary starts")
    }

    fn fetch(&self, model: &str, endpoint: &str) -> Output {
        self.run(&["fetch", model], endpoint)
    }

    #[track_caller]
    fn tokens(&self, target: &str, endpoint: &str) -> Json {
        let say = ["generate", "--target", target, "--no-draft", "--prompt", "a", "--json"];
        let output = succeeded(self.run(&[&say[..], &["--max-tokens", "12"]].concat(), endpoint));
        last_json(&stdout(&output))["tokens"].clone()
    }
}

fn contents(log: &Log) -> Vec<String> {
    let log = log.lock().expect("log");
    let lines = log.iter().map(|(line, ..)| line.clone());
    lines.filter(|line| line.starts_with("GET ") && line.contains("/resolve/")).collect()
}

#[track_caller]
fn refusal(output: &Output, code: i32) -> String {
    let text = told_by(output, code);
    assert!(text.contains("error: ") && text.contains("hint: "), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    text
}

#[test]
fn a_gguf_file_is_fetched_by_its_quantisation_and_decodes_wherever_a_target_is_taken() {
    let user = User::new();
    let (endpoint, log) = repository().serve();
    let output = succeeded(user.fetch("some-org/tiny:q8_0", &endpoint));
    let path = user.cache("snapshots").join(COMMIT).join(WHOLE);
    assert_eq!(stdout(&output), format!("{}\n", path.display()), "the path alone");
    let next = "next: longdraft generate --target some-org/tiny:q8_0 --";
    assert!(stderr(&output).contains(next), "{}", stderr(&output));
    assert_eq!(contents(&log), [format!("GET /some-org/tiny/resolve/{COMMIT}/{WHOLE}")]);
    let bytes = std::fs::read(&path).expect("content");
    assert!(bytes == std::fs::read(demonstration()).expect("the target"));

    // The same model in parts; what is fetched is not asked for again, nor is a hub needed.
    let local = user.tokens(&demonstration(), NOWHERE);
    assert_eq!(user.tokens("some-org/tiny:BF16", &endpoint), local);
    let output = user.run(&["fetch", "some-org/tiny:bf16", "--json"], &endpoint);
    let told = last_json(&stdout(&output));
    let folder = user.cache("snapshots").join(COMMIT);
    assert_eq!(told["files"], json!(PARTS.map(|name| folder.join(name))));
    assert_eq!(told["path"], told["files"][0]);
    assert_eq!(contents(&log).len(), 3, "{:?}", contents(&log));
    for name in ["some-org/tiny:BF16", "some-org/tiny:tiny-q8_0.gguf"] {
        assert_eq!(user.tokens(name, NOWHERE), local, "{name}");
    }
    // A folder of the parts is the model, too.
    assert_eq!(user.tokens(&folder.join("BF16").display().to_string(), NOWHERE), local);
    let second = folder.join(PARTS[1]).display().to_string();
    let say = ["generate", "--target", &second, "--prompt", "a"];
    let text = stderr(&user.run(&say, NOWHERE));
    assert!(text.contains("part 2 of 2 of a model: name ") && text.contains(PARTS[0]), "{text}");

    // What was not fetched needs the hub.
    let text = refusal(&user.fetch("some-org/tiny:Q4_K_M", NOWHERE), 1);
    assert!(text.contains("127.0.0.1") && text.contains("HF_ENDPOINT"), "{text}");
}

#[test]
fn a_run_trains_for_a_quantisation_and_a_check_fetches_its_beginning_alone() {
    let user = User::new();
    let mut whole = std::fs::read(demonstration()).expect("the target");
    whole.resize(9 << 20, 0);
    let (endpoint, log) = hub(&[(WHOLE, whole.clone())]).serve();
    let rows: String = (0..40).map(|i| format!("{{\"text\": \"row {i} of forty\"}}\n")).collect();
    std::fs::write(user.path("rows.jsonl"), rows).expect("rows");
    let config = user.path("train.yaml").display().to_string();
    let text = format!(
        "target: some-org/tiny:Q8_0\noutput: {}\ndata:\n  train: [{{path: {}}}]\n  row_tokens: 64\n\
         train: {{steps: 1}}\n",
        user.path("run").display(),
        user.path("rows.jsonl").display()
    );
    std::fs::write(&config, text).expect("config");
    succeeded(user.run(&["config", "check", &config], &endpoint));
    let part = user.cache(&format!("blobs/tag-{WHOLE}.part"));
    assert_eq!(part.metadata().expect("a part").len(), 8 << 20);
    let output = user.fetch("some-org/tiny:Q8_0", &endpoint);
    let told = format!("fetching {WHOLE} (9 MiB), going on after 8 MiB");
    assert!(stderr(&output).contains(&told), "{}", stderr(&output));
    succeeded(user.run(&["train", &config], NOWHERE));
    let ranges: Vec<_> = log.lock().expect("log").iter().filter_map(|r| r.2.clone()).collect();
    assert_eq!(ranges, [format!("bytes={}-", 8 << 20)], "the rest alone");
    assert!(std::fs::read(user.cache(&format!("blobs/tag-{WHOLE}"))).expect("content") == whole);
}

#[test]
fn what_a_repository_holds_is_listed_with_how_to_say_it() {
    let user = User::new();
    let bytes = || b"GGUF".to_vec();
    let (quants, _) = hub(&[
        ("m-Q4_K_M.gguf", bytes()),
        ("m-Q8_0.gguf", bytes()),
        ("old/m-Q8_0.gguf", bytes()),
        ("m-F16-00001-of-00002.gguf", bytes()),
        ("config.json", b"{}".to_vec()),
    ])
    .serve();
    let (folder, _) = hub(&[("config.json", bytes()), ("model.safetensors", bytes())]).serve();
    let (neither, _) = hub(&[("pytorch_model.bin", bytes()), ("config.json", bytes())]).serve();
    let (empty, _) = hub(&[]).serve();
    for (endpoint, model, says) in [
        (&quants, "some-org/tiny", "it holds GGUF files only: F16, Q4_K_M, Q8_0"),
        (&quants, "some-org/tiny", "hint: name one of them: some-org/tiny:Q4_K_M"),
        (&quants, "some-org/tiny:Q5_K", "no GGUF file of it is `Q5_K`; it has F16, Q4_K_M, Q8_0"),
        (&quants, "some-org/tiny:Q4_K", "name one of them: some-org/tiny:Q4_K_M"),
        (&quants, "some-org/tiny:q8_0", "`q8_0` names several: m-Q8_0, old/m-Q8_0"),
        (&quants, "some-org/tiny:q8_0", "write out more of the name: some-org/tiny:m-Q8_0"),
        (&quants, "some-org/tiny:f16", "of 2 parts of m-F16 the hub lists no m-F16-00002-of-00002"),
        (&folder, "some-org/tiny:Q4_K_M", "it holds no GGUF file, so no `Q4_K_M`"),
        (&folder, "some-org/tiny:Q4_K_M", "its safetensors are called some-org/tiny"),
        (&neither, "some-org/tiny", "no config.json with safetensors weights"),
        (&neither, "some-org/tiny", "pytorch_model.bin"),
        (&empty, "some-org/tiny", "(it is empty)"),
        (&empty, "some-org/tiny:Q4_K_M", "it holds no GGUF file"),
        (&quants, "nothing", "`nothing` names no model"),
        (&quants, "some-org/tiny:../x", "names no model"),
    ] {
        let text = refusal(&user.fetch(model, endpoint), 2);
        assert!(text.contains(says), "{model}: {says} not in {text}");
    }
    let text = refusal(&user.run(&["fetch", "some-org/tiny:Q8_0", "folder"], &quants), 2);
    assert!(text.contains("HF_HOME"), "{text}");
    assert!(!user.path("home/hub").exists(), "nothing was fetched");
    // A name that is written out is chosen among several.
    let output = succeeded(user.fetch("some-org/tiny:m-Q8_0", &quants));
    assert!(stderr(&output).contains("warning: longdraft cannot run this model"));
    let output = user.fetch("some-org/tiny:old/m-q8_0.gguf", &quants);
    assert!(stdout(&output).trim_end().ends_with("old/m-Q8_0.gguf"), "{}", stderr(&output));
}

#[test]
fn of_a_folder_the_weights_that_its_index_names_are_fetched() {
    let user = User::new();
    support::write_target(&user.path("model"), &support::tiny_config("llama"));
    let mut files = support::files(&user.path("model").display().to_string());
    let weights = files.remove("model.safetensors").expect("weights");
    let shard = "model-00001-of-00001.safetensors";
    let names: Vec<String> = {
        let length = u64::from_le_bytes(weights[..8].try_into().expect("8 bytes")) as usize;
        let header: Json = serde_json::from_slice(&weights[8..8 + length]).expect("a header");
        let names = header.as_object().expect("tensors").keys().cloned();
        names.filter(|name| name != "__metadata__").collect()
    };
    let map: serde_json::Map<String, Json> =
        names.into_iter().map(|name| (name, json!(shard))).collect();
    let index = json!({ "weight_map": map }).to_string().into_bytes();
    files.insert("model.safetensors.index.json".into(), index);
    files.insert(shard.into(), weights);
    files.insert("consolidated.safetensors".into(), b"the same again".to_vec());
    files.insert("chat_template.json".into(), br#"{"chat_template": "{{ messages }}"}"#.to_vec());
    files.insert("tiny-Q8_0.gguf".into(), b"another form".to_vec());
    let (endpoint, log) = Hub::of(files.clone()).serve();
    let output = succeeded(user.fetch("some-org/tiny", &endpoint));
    assert_eq!(
        stdout(&output).trim_end(),
        user.cache("snapshots").join(COMMIT).display().to_string()
    );
    assert!(stderr(&output).contains("next: longdraft generate --target some-org/tiny --"));
    let fetched = contents(&log);
    assert!(!fetched.iter().any(|line| line.contains("consolidated") || line.contains("Q8_0")));
    assert!(fetched.iter().any(|line| line.contains("chat_template.json")), "{fetched:?}");
    let local = user.tokens(&user.path("model").display().to_string(), NOWHERE);
    assert_eq!(user.tokens("some-org/tiny", NOWHERE), local, "{fetched:?}");

    files.remove(shard);
    let text = refusal(&User::new().fetch("some-org/tiny", &Hub::of(files).serve().0), 2);
    assert!(text.contains(&format!("names `{shard}`, which the hub does not list")), "{text}");
}

#[test]
fn refusals_say_what_to_do() {
    let user = User::new();
    for (status, says) in [
        ("401 Unauthorized", "accept its terms at http://127.0.0.1:"),
        ("401 Unauthorized", "some-org/tiny and set HF_TOKEN"),
        ("403 Forbidden", "set HF_TOKEN"),
        ("404 Not Found", "check the name at "),
        ("429 Too Many Requests", "wait, and give the same command"),
        ("503 Service Unavailable", "wait, and give the same command"),
    ] {
        let mut refused = repository();
        refused.refusal = Some((status, json!({ "error": "no access" }).to_string()));
        let text = refusal(&user.fetch("some-org/tiny:Q8_0", &refused.serve().0), 1);
        assert!(text.contains(&status[..3]) && text.contains("no access"), "{text}");
        assert!(text.contains(says), "{says} not in {text}");
    }
    let mut hostile = repository();
    for name in ["../../../x-Q8_0.gguf", "/etc/x-Q8_0.gguf", "a\\..\\x-Q8_0.gguf"] {
        hostile.files = BTreeMap::new();
        hostile.listed = vec![name.to_owned()];
        let text = refusal(&user.fetch("some-org/tiny:Q8_0", &hostile.clone().serve().0), 1);
        assert!(text.contains("impossible name"), "{text}");
    }
    assert!(!user.path("home").exists(), "nothing was written");
}

#[test]
fn a_file_that_is_too_short_is_told_and_goes_on() {
    let user = User::new();
    let mut short = repository();
    short.cut = Some(100_000);
    let text = refusal(&user.fetch("some-org/tiny:Q8_0", &short.serve().0), 1);
    assert!(text.contains(WHOLE) && text.contains("goes on from what has arrived"), "{text}");
    let part = user.cache(&format!("blobs/tag-{WHOLE}.part"));
    assert_eq!(part.metadata().expect("a part").len(), 100_000);
    assert!(!user.cache("snapshots").exists());
    let (endpoint, log) = repository().serve();
    succeeded(user.fetch("some-org/tiny:Q8_0", &endpoint));
    let ranges: Vec<_> = log.lock().expect("log").iter().filter_map(|r| r.2.clone()).collect();
    assert_eq!(ranges, ["bytes=100000-"]);
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_told_with_where_to_go() {
    let user = User::new();
    let (endpoint, _) = repository().serve();
    // Files may not grow beyond so many blocks, as on a full disk.
    let mut command = Command::new("bash");
    command
        .args(["-c", "trap '' XFSZ; ulimit -f 64; exec \"$@\"", "bash"])
        .args([env!("CARGO_BIN_EXE_longdraft"), "fetch", "some-org/tiny:Q8_0"])
        .env("HF_ENDPOINT", &endpoint)
        .env("HF_HOME", user.path("home"))
        .env_remove("HF_TOKEN");
    let text = refusal(&command.output().expect("bash"), 1);
    assert!(text.contains(&format!("{WHOLE}: no room in ")), "{text}");
    assert!(text.contains("set HF_HOME to a folder on another disk"), "{text}");
    succeeded(user.fetch("some-org/tiny:Q8_0", &endpoint));
}
