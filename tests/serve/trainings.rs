//! `learn train` on folders that a server could have left: rows of every kind.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::block_draft;
use crate::decoding::Shelf;
use crate::support::files::{change_json, read_json};
use crate::support::longdraft;

/// A folder with rows of somebody's own, and a training of it.
struct Prepared {
    folder: String,
}

impl Prepared {
    /// A training of `minutes` that goes on from a draft, of prompts and answers.
    fn new(shelf: &Shelf, draft: &str, rows: &[(Vec<u32>, Vec<u32>)], minutes: f64) -> Self {
        let folder = shelf.path("prepared");
        let _ = std::fs::remove_dir_all(&folder);
        let line = |(prompt, answer): &(Vec<u32>, Vec<u32>)| {
            let mask = [vec![0; prompt.len()], vec![1; answer.len()]].concat();
            let ids = [&prompt[..], answer].concat();
            json!({ "at": 1, "input_ids": ids, "loss_mask": mask, "own": 1 }).to_string() + "\n"
        };
        let job = json!({
            "target": shelf.path("target"), "device": "cpu", "base": "", "draft": shelf.path(draft),
            "method": null, "minutes": minutes, "number": 1, "began": 1, "attempts": 1,
        });
        for (file, text) in [
            ("rows/00000001.jsonl", rows.iter().map(line).collect()),
            ("training/job.json", job.to_string()),
        ] {
            let path = Path::new(&folder).join(file);
            std::fs::create_dir_all(path.parent().expect("folder")).expect("folder");
            std::fs::write(path, text).expect("file");
        }
        Self { folder }
    }

    fn start(&self) -> Child {
        let mut command = longdraft(&["learn", "train", &self.folder]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().expect("the binary starts")
    }

    /// What a training came to that ran until its end.
    fn outcome(&self, mut child: Child) -> Value {
        // It ends when this closes.
        let stdin = child.stdin.take();
        let output = child.wait_with_output().expect("it ends");
        drop(stdin);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        read_json(Path::new(&self.folder).join("training/outcome.json"))
    }

    fn run(&self) -> Value {
        self.outcome(self.start())
    }
}

/// Prompts of so many tokens, each another one, with so many tokens of answer.
fn texts(prompt: usize, answer: usize) -> Vec<(Vec<u32>, Vec<u32>)> {
    let letters = |seed: u32, count: usize| -> Vec<u32> {
        (0..count as u32).map(|place| 97 + (seed * 7 + place * (seed % 5 + 1)) % 26).collect()
    };
    let number = |number: u32| [48 + number / 10 % 10, 48 + number % 10, 48 + number / 100];
    let row = |seed: u32| {
        let prompt = [letters(seed, prompt - 3), number(seed).to_vec()].concat();
        (prompt, letters(seed + 1, answer))
    };
    (0..90).map(row).collect()
}

/// Rows without anything to learn are no reason to fail: prompts longer than a row, answers of a token.
#[test]
fn no_row_ends_a_training() {
    let shelf = Shelf::new();
    block_draft(&shelf);
    for (draft, prompt, answer) in [
        ("glide", 700, 5),
        ("eagle3", 512, 40),
        ("block", 600, 5),
        ("glide", 4, 1),
        ("eagle3", 4, 1),
        ("block", 4, 1),
        ("glide", 9, 900),
    ] {
        let told = Prepared::new(&shelf, draft, &texts(prompt, answer), 0.4).run();
        let held_out = told["held_out"].as_u64().expect("a number");
        assert!((8..30).contains(&held_out), "{draft} {prompt} {answer}: {told}");
        assert!(told["rows"].as_u64() > Some(50), "{draft} {prompt} {answer}: {told}");
    }
}

/// Copies of a prompt are one answer that is set aside, and few of these decide nothing.
#[test]
fn copies_of_a_prompt_are_no_evidence() {
    let shelf = Shelf::new();
    let copies: Vec<_> = texts(9, 40).into_iter().take(24).flat_map(|row| vec![row; 30]).collect();
    let told = Prepared::new(&shelf, "glide", &copies, 0.2).run();
    assert!(told["held_out"].as_u64() < Some(8), "{told}");
    assert_eq!((&told["rows"], &told["draft"]), (&json!(0), &Value::Null), "{told}");
}

/// Without time for a step the candidate is the draft that was there, and is measured as such.
#[test]
fn a_draft_that_did_not_change_is_not_taken() {
    let shelf = Shelf::new();
    let told = Prepared::new(&shelf, "glide", &texts(20, 60), 0.0).run();
    assert_eq!(
        (&told["before"], &told["interval"]),
        (&told["after"], &json!([0.0, 0.0])),
        "{told}"
    );
    assert_eq!(told["draft"], Value::Null);
}

/// A check trains nothing; in doubt, and with too little to compare on, the draft that proposes goes on.
#[test]
fn a_check_of_equal_drafts_changes_nothing() {
    let shelf = Shelf::new();
    for (since, answers) in [(0, 64), (1, 0)] {
        let prepared = Prepared::new(&shelf, "glide", &texts(20, 60), 5.0);
        let place = Path::new(&prepared.folder).join("training/job.json");
        let check = json!({ "draft": shelf.path("glide"), "origin": "given", "since": since });
        change_json(&place, |job| job["check"] = check);
        let told = prepared.run();
        assert_eq!((&told["held_out"], &told["rows"]), (&json!(answers), &json!(0)), "{told}");
        assert_eq!((&told["before"], &told["interval"]), (&told["after"], &json!([0.0, 0.0])));
        assert_eq!(told["before"].as_f64() >= Some(1.0), answers > 0, "{told}");
        assert_eq!((&told["rested"], &told["draft"]), (&json!("given"), &Value::Null));
    }
}

/// Time in which it rests is none of its own.
#[cfg(target_os = "linux")]
#[test]
fn a_training_that_rests_has_its_time_left() {
    let shelf = Shelf::new();
    let prepared = Prepared::new(&shelf, "glide", &texts(20, 60), 5.0);
    let started = Instant::now();
    let child = prepared.start();
    let signal = |name: &str| {
        let sent = Command::new("kill").args([name, &child.id().to_string()]).status();
        assert!(sent.expect("kill").success());
    };
    signal("-STOP");
    let rest = Duration::from_secs(5);
    std::thread::sleep(rest);
    signal("-CONT");
    let worked = prepared.outcome(child)["seconds"].as_f64().expect("a number");
    // A moment passes until it has stopped, and one counts when it goes on.
    let most = started.elapsed().as_secs_f64() - rest.as_secs_f64() + 2.0;
    assert!(worked <= most, "{worked} {most}");
}

/// Whatever lies in a training's folder: a row that holds a part of a prompt alone is passed over.
#[test]
fn a_row_without_labels_is_passed_over() {
    let shelf = Shelf::new();
    let prepared = Prepared::new(&shelf, "glide", &[], 0.2);
    let lines = |texts: Vec<(Vec<u32>, Vec<u32>)>| -> String {
        let line = |(prompt, answer): (Vec<u32>, Vec<u32>)| {
            let mask = [vec![0; prompt.len()], vec![1; answer.len()]].concat();
            let ids = [prompt, answer].concat();
            json!({ "input_ids": ids, "loss_mask": mask, "at": 0 }).to_string() + "\n"
        };
        texts.into_iter().map(line).collect()
    };
    let place = Path::new(&prepared.folder).join("training");
    // Each in two rows, the first one without labels.
    let long = texts(600, 5).into_iter().take(4).collect();
    std::fs::write(place.join("train.jsonl"), lines(long)).expect("file");
    let held_out = texts(20, 60).into_iter().take(9).collect();
    std::fs::write(place.join("held_out.jsonl"), lines(held_out)).expect("file");
    let told = prepared.run();
    assert_eq!((&told["rows"], &told["held_out"]), (&json!(4), &json!(9)), "{told}");
}
