//! Runs of several ranks: what they came to, and how they are ended.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::processes::wait_until;
use super::stderr;

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
