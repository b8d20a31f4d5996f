//! Runs of several ranks: what they came to, and how they are ended.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::files::read_json;
use super::processes::wait_until;
use super::runs::{draft_bytes, metrics};
use super::{Workshop, last_json, stderr, stdout, succeeded, told_by};

/// Words of a command.
pub(crate) fn joined<'a>(parts: &[&[&'a str]]) -> Vec<&'a str> {
    parts.concat()
}

/// The runs saw the same rows in the same order and came to the same numbers.
#[track_caller]
pub(crate) fn assert_same_numbers(one: &[Value], other: &[Value]) {
    assert_eq!(one.len(), other.len());
    for (a, b) in one.iter().zip(other) {
        for key in ["step", "epoch", "tokens", "rows", "learned_share"] {
            assert_eq!(a[key], b[key], "{key}: {a} {b}");
        }
        for key in ["loss", "grad_norm", "learning_rate"] {
            let (Some(x), Some(y)) = (a[key].as_f64(), b[key].as_f64()) else { continue };
            assert!((x - y).abs() <= 1e-5 * x.abs().max(1.0), "{key}: {x} {y}");
        }
    }
}

/// A run's newest checkpoint.
pub(crate) fn checkpoint(run: &str) -> PathBuf {
    Path::new(run).join("checkpoints/last")
}

/// Longest time in which a job must have noticed that a rank is gone.
pub(crate) const SOON: Duration = Duration::from_mins(2);

/// Process of a rank, as its log tells.
pub(crate) fn process_of(run: &str, rank: usize) -> Option<String> {
    let log = std::fs::read_to_string(format!("{run}/logs/rank-{rank}.log")).ok()?;
    let (_, rest) = log.rsplit_once(", process ")?;
    rest.split(',').next().map(str::to_owned)
}

/// Waits for a job to end; kills it and fails where it does not.
#[track_caller]
pub(crate) fn wait(mut child: Child) -> Output {
    let started = Instant::now();
    while child.try_wait().expect("wait").is_none() {
        if started.elapsed() > SOON {
            child.kill().expect("kill");
            panic!("the job goes on: {}", stderr(&child.wait_with_output().expect("output")));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().expect("output")
}

/// Sends a rank a signal as soon as the job has saved.
#[track_caller]
pub(crate) fn signal_after_a_save(run: &str, rank: usize, signal: &str) {
    wait_until("a save", || checkpoint(run).join("manifest.json").is_file());
    let process = process_of(run, rank).expect("the rank's log");
    let sent = Command::new("kill").args([signal, &process]).status().expect("kill");
    assert!(sent.success(), "the run ended before it could be reached");
}

/// Starts a job of so many ranks, its output kept.
pub(crate) type Start = fn(usize, &[&str]) -> Child;

/// A job without a rank ends, and comes to the bits of an undisturbed one when it goes on. `told` gets the run, the rank
/// that was killed, and what was told.
#[track_caller]
pub(crate) fn killed_ranks_lose_nothing(
    start: Start,
    ranks: usize,
    killed: [usize; 2],
    told: impl Fn(&str, usize, &str),
) {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let job = |run: &str| {
        let set = ["train.steps=80", "train.save_every=5", "parallel.zero=1"];
        start(ranks, &joined(&[&["train", &config, &format!("output={run}")], &set]))
    };
    let whole = shop.path("whole");
    succeeded(wait(job(&whole)));
    for rank in killed {
        let run = shop.path(&format!("killed-{rank}"));
        let child = job(&run);
        signal_after_a_save(&run, rank, "-9");
        let output = wait(child);
        assert!(!output.status.success(), "a job without a rank does not succeed");
        told(&run, rank, &stderr(&output));
        let resumed = stderr(&succeeded(wait(job(&run))));
        assert!(resumed.contains("resumed after step "), "{resumed}");
        assert_eq!(metrics(&whole), metrics(&run));
        assert_eq!(draft_bytes(&whole), draft_bytes(&run));
    }
}

/// A signal to one rank ends all of them in order, with its code, once they have saved.
#[track_caller]
pub(crate) fn all_save_where_one_is_asked_to_stop(start: Start) {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let run = shop.path("run");
    let set = ["train.steps=100000", "train.save_every=7", "--json"];
    let child = start(2, &joined(&[&["train", &config], &set]));
    signal_after_a_save(&run, 1, "-TERM");
    let output = wait(child);
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    let out = last_json(&stdout(&output));
    let state = read_json(checkpoint(&run).join("state.json"));
    assert_eq!((&out["finished"], &out["steps"]), (&false.into(), &state["step"]));
}

/// What a job tells whose last rank is stopped: it waits for 8 s. Also the process of that rank.
#[track_caller]
pub(crate) fn told_of_a_rank_that_hangs(start: Start, ranks: usize) -> (String, String) {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let run = shop.path("run");
    let set = ["train.steps=100000", "train.save_every=7", "parallel.timeout_seconds=8"];
    let child = start(ranks, &joined(&[&["train", &config], &set]));
    signal_after_a_save(&run, ranks - 1, "-STOP");
    let told = told_by(&wait(child), 1);
    (told, process_of(&run, ranks - 1).expect("a log a rank"))
}

/// An error of one rank ends all with its message and code. What all meet is told once.
#[track_caller]
pub(crate) fn an_error_ends_all(start: Start) {
    let (shop, config) = Workshop::of_four_layers().with_config();
    // Only the second rank cannot write its log.
    std::fs::create_dir_all(shop.path("run/logs/rank-1.log")).expect("folder");
    let text = told_by(&wait(start(3, &["train", &config])), 1);
    assert!(text.contains("rank 1 of 3") && text.contains("rank-1.log"), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    let text = told_by(&wait(start(3, &["train", &config, "train.rows_per_step=0"])), 2);
    assert_eq!(text.matches("error: ").count(), 1, "{text}");
}
