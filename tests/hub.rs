//! A hub model by `org/name`, from a hub that runs on this machine for the test.

mod support;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;

use support::{longdraft, stderr, stdout};

/// Files of the model that the hub serves, by name.
type Files = Arc<HashMap<String, Vec<u8>>>;

/// Answers the two kinds of request that a hub client makes: the list of files, and a file (first
/// its size by a range of one byte).
fn answer(mut stream: TcpStream, files: &Files) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut request = String::new();
    reader.read_line(&mut request)?;
    let mut range = false;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        if header.trim().is_empty() {
            break;
        }
        range |= header.to_ascii_lowercase().starts_with("range: bytes=0-0");
    }
    let path = request.split_whitespace().nth(1).unwrap_or("/").to_owned();
    let name = path.rsplit('/').next().unwrap_or_default();
    let (status, body) = if path.starts_with("/api/") {
        let siblings: Vec<_> =
            files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
        let info = serde_json::json!({ "siblings": siblings, "sha": "0123abc" });
        ("200 OK", info.to_string().into_bytes())
    } else {
        match files.get(name) {
            Some(bytes) if range => ("206 Partial Content", bytes[..1].to_vec()),
            Some(bytes) => ("200 OK", bytes.clone()),
            None => ("404 Not Found", Vec::new()),
        }
    };
    let size = files.get(name).map_or(0, Vec::len);
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nContent-Range: bytes 0-0/{size}\r\n\
         x-repo-commit: 0123abc\r\netag: \"{name}\"\r\nConnection: close\r\n\r\n",
        body.len()
    )?;
    stream.write_all(&body)
}

/// Serves until the test process ends; returns the endpoint.
fn serve(folder: &Path) -> String {
    let files: HashMap<String, Vec<u8>> = std::fs::read_dir(folder)
        .expect("folder")
        .map(|entry| {
            let path = entry.expect("entry").path();
            let name = path.file_name().expect("name").to_string_lossy().into_owned();
            (name, std::fs::read(&path).expect("file"))
        })
        .collect();
    let files: Files = Arc::new(files);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("address"));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = answer(stream, &files);
        }
    });
    endpoint
}

#[test]
fn a_hub_model_is_fetched_and_decodes_like_its_folder() {
    let dir = tempfile::tempdir().expect("tempdir");
    let folder = dir.path().join("model");
    support::write_target(&folder, &support::tiny_config("llama"));
    let endpoint = serve(&folder);
    let generate = |target: &str, endpoint: &str| {
        longdraft(&["generate", "--target", target, "--no-draft", "--prompt", "a", "--json"])
            .args(["--max-tokens", "12"])
            .env("HF_ENDPOINT", endpoint)
            .env("HF_HOME", dir.path().join("hub"))
            .output()
            .expect("the binary starts")
    };
    let tokens = |output: &std::process::Output| {
        assert!(output.status.success(), "{}", stderr(output));
        support::last_json(&stdout(output))["tokens"].clone()
    };
    let local = tokens(&generate(&folder.display().to_string(), "http://127.0.0.1:1"));
    assert_eq!(tokens(&generate("some-org/tiny", &endpoint)), local);

    let unreachable = generate("some-org/other", "http://127.0.0.1:1");
    assert_eq!(unreachable.status.code(), Some(1));
    let text = stderr(&unreachable);
    assert!(text.contains("hub model `some-org/other`") && text.contains("hint: "), "{text}");
}

#[test]
fn a_hub_data_set_reads_like_its_files_and_a_missing_file_names_what_there_is() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (target, data) = (dir.path().join("model"), dir.path().join("data"));
    support::write_target(&target, &support::tiny_config("llama"));
    std::fs::create_dir(&data).expect("folder");
    std::fs::write(data.join("README.md"), "no data").expect("write");
    std::fs::write(data.join("test.jsonl"), "{\"text\": \"held back\"}\n").expect("write");
    std::fs::write(data.join("train.jsonl"), "{\"text\": \"abc\"}\n").expect("write");
    let endpoint = serve(&data);
    let inspect = |address: &str| {
        longdraft(&["data", "inspect", address, "--target", &target.display().to_string()])
            .arg("--json")
            .env("HF_ENDPOINT", &endpoint)
            .env("HF_HOME", dir.path().join("hub"))
            .output()
            .expect("the binary starts")
    };
    let output = inspect("hf://some-org/text");
    assert!(output.status.success(), "{}", stderr(&output));
    let rows = &support::last_json(&stdout(&output))["rows"];
    assert_eq!(rows.as_array().map(Vec::len), Some(1), "the training file alone: {rows}");
    assert_eq!((&rows[0]["origin"], &rows[0]["tokens"]), (&"train.jsonl:1".into(), &4.into()));
    let output = inspect("hf://some-org/text/test.jsonl@v1");
    assert!(stdout(&output).contains("test.jsonl:1"), "{}", stderr(&output));
    let output = inspect("hf://some-org/text/none.jsonl");
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("no data file at none.jsonl") && text.contains("train.jsonl"), "{text}");
}

/// A check asks the hub for what is small; a run fetches the rest before its work.
#[test]
fn what_a_hub_does_not_have_is_told_before_any_work() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (served, home) = (dir.path().join("served"), dir.path().join("hub"));
    support::write_target(&served, &support::tiny_config("llama"));
    let rows: String = (0..40).map(|i| format!("{{\"text\": \"row {i} of forty\"}}\n")).collect();
    std::fs::write(served.join("train.jsonl"), rows).expect("rows");
    let endpoint = serve(&served);
    let config = dir.path().join("train.yaml");
    let text = format!(
        "target: some-org/tiny\noutput: {}\ndata:\n  train: [{{path: hf://some-org/text}}]\n  row_tokens: 64\n\
         train: {{steps: 2}}\n",
        dir.path().join("run").display()
    );
    std::fs::write(&config, text).expect("config");
    let config = config.display().to_string();
    let command = |arguments: &[&str], endpoint: &str| {
        longdraft(arguments)
            .env("HF_ENDPOINT", endpoint)
            .env("HF_HOME", &home)
            .output()
            .expect("the binary starts")
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
    let output = command(&check, &endpoint);
    assert!(output.status.success(), "{}", stderr(&output));
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
    let output = command(&["train", &config], &endpoint);
    assert!(output.status.success(), "{}", stderr(&output));
}
