//! `longdraft doctor` through the binary.

use std::io::{BufReader, Write};
use std::process::Output;
use std::sync::mpsc;

use crate::support::server::{Asked, serve};
use crate::support::{self, finished, last_json, longdraft, stderr, stdout, succeeded};
use serde_json::Value;

/// Runs the doctor where nothing outside this test is asked: an empty home, and a port that
/// nobody listens on instead of the hub.
fn doctor(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let home = tempfile::tempdir().expect("tempdir");
    let mut command = longdraft(&[&["doctor"], arguments].concat());
    for name in [
        "WANDB_API_KEY",
        "WANDB_MODE",
        "NETRC",
        "SWANLAB_API_KEY",
        "MLFLOW_TRACKING_URI",
        "XDG_CACHE_HOME",
        "HF_HOME",
        "http_proxy",
        "HTTP_PROXY",
        "ALL_PROXY",
        "all_proxy",
    ] {
        command.env_remove(name);
    }
    command.env("HOME", home.path()).env("HF_ENDPOINT", "http://127.0.0.1:9");
    command.current_dir(home.path()).envs(variables.iter().copied());
    command.output().expect("the binary starts")
}

fn finding<'a>(report: &'a Value, check: &str) -> &'a Value {
    let findings = report["findings"].as_array().expect("findings");
    findings.iter().find(|finding| finding["check"] == check).expect("the check was made")
}

#[test]
fn a_targets_weights_are_measured_by_type() {
    let target = tempfile::tempdir().expect("tempdir");
    support::write_target(target.path(), &support::tiny_config("llama"));
    let path = target.path().display().to_string();
    let output = succeeded(doctor(&["--target", &path, "--json"], &[]));
    let report = last_json(&stdout(&output));
    let findings = report["findings"].as_array().expect("findings");
    let facts: Vec<&str> = findings
        .iter()
        .filter(|finding| finding["check"] == "target")
        .filter_map(|finding| finding["fact"].as_str())
        .collect();
    assert_eq!(facts.len(), 2, "{facts:?}");
    assert!(facts[0].starts_with("F32: ") && facts[0].contains(" ms a token"), "{facts:?}");
    assert!(facts[1].starts_with("weights take "), "{facts:?}");
    let missing = doctor(&["--target", "nowhere.gguf"], &[]);
    assert!(!missing.status.success());
    assert!(
        stderr(&missing).contains("nowhere.gguf: no such file or folder"),
        "{}",
        stderr(&missing)
    );
    let on_hub = stderr(&doctor(&["--target", "org/name"], &[]));
    assert!(on_hub.contains("`longdraft fetch org/name` prints where"), "{on_hub}");
}

#[test]
fn every_finding_has_a_status_a_fact_and_a_remedy() {
    let output = doctor(&["--json"], &[("HF_TOKEN", "hf_s3cret"), ("WANDB_API_KEY", "s3cret")]);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(!text.contains("s3cret"), "{text}");
    let report = last_json(&text);
    assert_eq!(report["can_work"], true);
    for check in ["processor", "threads", "instruction set", "memory", "current directory", "gpu"] {
        finding(&report, check);
    }
    let findings = report["findings"].as_array().expect("findings");
    for finding in findings {
        let status = finding["status"].as_str().expect("status");
        assert!(["ok", "note", "problem"].contains(&status), "{finding}");
        assert!(!finding["fact"].as_str().expect("fact").is_empty(), "{finding}");
        assert_eq!(finding["remedy"].is_null(), status == "ok", "{finding}");
    }
    assert_eq!(finding(&report, "hub")["status"], "note");
    assert_eq!(finding(&report, "wandb")["status"], "ok");
    assert_eq!(finding(&report, "hub login")["status"], "ok");
    let counts = ["ok", "notes", "problems"].map(|name| report[name].as_u64().expect("count"));
    assert_eq!(counts.iter().sum::<u64>() as usize, findings.len());
}

#[test]
fn plain_lines_end_with_a_count() {
    let output = doctor(&[], &[]);
    let text = stdout(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.lines().any(|line| line.starts_with("ok       processor: ")), "{text}");
    assert!(text.lines().any(|line| line.starts_with("         -> ")), "{text}");
    assert!(text.trim_end().ends_with("problems"), "{text}");
}

#[test]
fn an_mlflow_server_is_asked_for_its_health() {
    let (asked, requests) = mpsc::channel();
    let address = serve("127.0.0.1", move |_, mut stream| -> std::io::Result<()> {
        let request = Asked::read(&mut BufReader::new(stream.try_clone()?))?;
        asked.send(request.line).expect("the test waits");
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nOK")
    });
    let alive = last_json(&stdout(&doctor(&["--json"], &[("MLFLOW_TRACKING_URI", &address)])));
    assert_eq!(finding(&alive, "mlflow")["status"], "ok", "{alive}");
    assert_eq!(requests.recv().expect("a request"), "GET /health");

    let dead = ("MLFLOW_TRACKING_URI", "http://user:s3cret@127.0.0.1:9");
    let output = doctor(&["--json"], &[dead]);
    assert!(output.status.success() && !stdout(&output).contains("s3cret"));
    let dead = last_json(&stdout(&output));
    assert_eq!(finding(&dead, "mlflow")["status"], "problem", "{dead}");
}

/// Neither the current directory nor the cache folder can be written: in `/proc` nobody can.
#[cfg(target_os = "linux")]
#[test]
fn no_writable_folder_makes_work_impossible() {
    let mut command = longdraft(&["doctor", "--json"]);
    command.env("HF_ENDPOINT", "http://127.0.0.1:9").env_remove("MLFLOW_TRACKING_URI");
    let output = finished(command.env("XDG_CACHE_HOME", "/proc/self").current_dir("/proc/self"));
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert_eq!(last_json(&stdout(&output))["can_work"], false);
    let text = stderr(&output);
    assert!(text.contains("no work is possible") && text.contains("hint: "), "{text}");
}
