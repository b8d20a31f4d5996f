//! What a record of a driver's calls shows to be wrong.

use std::process::Command;

use super::machine::python;
use crate::support::files::repository;

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

/// What is found wrong with these calls of a program that sends values ahead.
fn found(calls: &[String]) -> String {
    found_of("uploads=True", calls)
}

/// The same, where it is known what else the program was to do.
fn found_of(about: &str, calls: &[String]) -> String {
    let folder = tempfile::tempdir().expect("tempdir");
    let record = folder.path().join("calls");
    std::fs::write(&record, calls.join("\n")).expect("record");
    let program = format!(
        "import pathlib, sys; from gpu import recorded; \
         print('\\n'.join(recorded.problems(pathlib.Path(sys.argv[1]), {about})))"
    );
    let output = Command::new("python3")
        .args(["-c", &program])
        .arg(&record)
        .env("PYTHONPATH", repository("scripts"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .expect("python3 starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn every_wrong_way_to_call_a_driver_is_told() {
    let Some(()) = python() else { return };
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
        (with("mark 0x10"), "1 timed events without a trace"),
        (events, "9 events: tensors are tracked one by one"),
        (without("pool"), "freed memory goes back to the driver"),
        (without("upload"), "no values were sent on a stream of their own"),
        (without("pinned"), "memory that is not page-locked"),
    ] {
        let told = found(&calls);
        assert!(told.contains(says), "{says}: {told}");
    }
}

#[test]
fn a_trace_takes_the_time_before_and_after_every_start() {
    let Some(()) = python() else { return };
    let about = "uploads=True, traced=True";
    let right: Vec<String> = RIGHT
        .iter()
        .flat_map(|line| {
            let is_start = line.starts_with("launch") || line.starts_with("product");
            let mark = is_start.then_some("mark 0x10");
            [mark, Some(*line), mark].into_iter().flatten().map(str::to_owned)
        })
        .collect();
    assert_eq!(found_of(about, &right).trim(), "");
    let untraced: Vec<String> = RIGHT.iter().map(|line| (*line).to_owned()).collect();
    assert!(found_of(about, &untraced).contains("a trace without timed events"));
    let first = right.iter().position(|line| line.starts_with("mark")).expect("a mark");
    let open = [&right[..first], &right[first + 1..]].concat();
    assert!(found_of(about, &open).contains("0 starts between two events of a trace"));
    let elsewhere: Vec<String> =
        right.iter().map(|line| line.replace("mark 0x10", "mark 0x20")).collect();
    assert!(found_of(about, &elsewhere).contains("work on 2 streams"));
}

#[test]
fn features_come_down_through_page_locked_memory() {
    let Some(()) = python() else { return };
    let about = "uploads=True, captures=True";
    let right: Vec<String> = RIGHT.iter().map(|line| (*line).to_owned()).collect();
    let with = |lines: &[&str]| {
        let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
        found_of(about, &[&right[..], &lines].concat())
    };
    let pinned = "download 0x10 1048576 pinned";
    assert_eq!(with(&[pinned, "download 0x10 64 pageable"]).trim(), "");
    assert!(with(&[]).contains("no features came down through page-locked memory"));
    let told = with(&[pinned, "download 0x10 4194304 pageable"]);
    assert!(told.contains("features come down into memory that is not page-locked"), "{told}");
}

#[test]
fn collectives_begin_after_what_they_are_made_of_and_are_waited_for() {
    let Some(()) = python() else { return };
    // Two of them: of one the host waits for the end, of the other the device.
    let one = ["event 0x10", "wait 0x30 0x10", "group 0x30 1", "event 0x30"];
    let right = [RIGHT, &one, &["seen 0x30"], &one, &["wait 0x10 0x30"]].concat();
    let told = |calls: &[&str]| {
        let calls: Vec<String> = calls.iter().map(|line| (*line).to_owned()).collect();
        found(&calls)
    };
    assert_eq!(told(&right).trim(), "");
    let without =
        |skipped: &str| right.iter().filter(|line| **line != skipped).copied().collect::<Vec<_>>();
    let early = "a collective begins before what it is made of is there";
    assert!(told(&without("wait 0x30 0x10")).contains(early));
    let unnoticed = "a collective follows one whose end nobody waits for";
    assert!(told(&without("seen 0x30")).contains(unnoticed));
    assert!(told(&without("wait 0x10 0x30")).contains("the end of the last collective"));
    assert_eq!(told(&[&without("wait 0x10 0x30")[..], &["abort 0"]].concat()).trim(), "");
    for (line, says) in [
        ("free 0x30 64", "free on a stream of collectives"),
        ("fill 0x30 64", "work on 2 streams"),
        ("failed 4 no memory", "NCCL refuses a call: 4 no memory"),
    ] {
        let calls = [&right[..], &[line]].concat();
        assert!(told(&calls).contains(says), "{says}: {}", told(&calls));
    }
}
