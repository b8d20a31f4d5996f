//! Files of runs, and runs that are killed.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Bytes of the draft in a run's newest checkpoint.
pub(crate) fn draft_bytes(run: &str) -> Vec<u8> {
    std::fs::read(format!("{run}/checkpoints/last/draft.safetensors")).expect("a checkpoint")
}

/// Every record of a run without what clocks and memory decide.
pub(crate) fn metrics(run: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(format!("{run}/metrics.jsonl")).expect("metrics");
    let mut records: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("whole lines")).collect();
    for record in &mut records {
        for clock in ["tokens_per_second", "memory_mib"] {
            record.as_object_mut().map(|record| record.remove(clock));
        }
    }
    records
}

/// Runs a command until it ends by itself, and kills it later and later before that, by `step` each
/// time: kills fall on loading, stepping and saving. `command` gets the number of kills so far.
pub(crate) fn run_with_kills(step: Duration, command: impl Fn(usize) -> Command) {
    for kills in 0..200 {
        let mut child = command(kills)
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let (started, delay) = (Instant::now(), step * (kills as u32 + 1));
        while started.elapsed() < delay {
            if let Some(status) = child.try_wait().expect("wait") {
                assert!(status.success(), "a resumed run failed");
                assert!(kills > 0, "nothing was interrupted");
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        child.kill().expect("kill");
        child.wait().expect("reap");
    }
    panic!("the run never ends");
}
