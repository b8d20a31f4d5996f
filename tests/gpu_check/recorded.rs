//! What a record of a driver's calls shows to be wrong.

use std::path::Path;
use std::process::Command;

use super::machine::{python, root};

/// A run as it should be: one stream for all work, another for uploads from page-locked memory.
const RIGHT: &[&str] = &[
    "stream 0x10 1",
    "pool 4 18446744073709551615",
    "allocate 0x10 64",
    "launch 0x10 4 1 1 256 rms_norm",
    "product 0x10",
    "stream 0x20 1",
    "pinned 16777216",
    "upload 0x20 64",
    "synchronise 0x20",
    "fill 0x10 64",
    "launch 0x10 1 2 3 256 attention_forward",
];

/// What is found wrong with these calls.
fn found(calls: &[String]) -> String {
    let folder = tempfile::tempdir().expect("tempdir");
    let record = folder.path().join("calls");
    std::fs::write(&record, calls.join("\n")).expect("record");
    let program = "import pathlib, sys; from gpu import recorded; \
                   print('\\n'.join(recorded.problems(pathlib.Path(sys.argv[1]), True)))";
    let scripts: &Path = &root().join("scripts");
    let output = Command::new("python3")
        .args(["-c", program])
        .arg(&record)
        .env("PYTHONPATH", scripts)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .expect("python3 starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn every_wrong_way_to_call_a_driver_is_told() {
    if !python() {
        return;
    }
    let right: Vec<String> = RIGHT.iter().map(|line| (*line).to_owned()).collect();
    assert_eq!(found(&right).trim(), "");
    let with = |line: &str| [&right[..], &[line.to_owned()]].concat();
    let without = |start: &str| {
        right.iter().filter(|line| !line.starts_with(start)).cloned().collect::<Vec<_>>()
    };
    let events = [&right[..], &vec!["event 0x10".to_owned(); 9]].concat();
    let on_default = right.iter().map(|line| line.replace("0x10", "(nil)")).collect::<Vec<_>>();
    for (calls, says) in [
        (with("launch 0x30 1 1 1 256 swiglu"), "work on 2 streams: 0x10 0x30"),
        (on_default, "the stream that waits for all others"),
        (with("launch 0x10 0 1 1 256 select_rows"), "a grid of 0 x 1 x 1 blocks: select_rows"),
        (with("launch 0x10 1 65536 1 256 sums"), "a grid of 1 x 65536 x 1 blocks: sums"),
        (events, "9 events: tensors are tracked one by one"),
        (without("pool"), "freed memory goes back to the driver"),
        (without("upload"), "no values were sent on a stream of their own"),
        (without("pinned"), "memory that is not page-locked"),
    ] {
        let told = found(&calls);
        assert!(told.contains(says), "{says}: {told}");
    }
}
