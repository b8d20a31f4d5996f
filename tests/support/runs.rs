//! Files of runs, and runs that are killed.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::ranks::metrics_with_clocks;
use super::{Workshop, last_json, succeed};

/// Bytes of the draft in a run's newest checkpoint.
pub(crate) fn draft_bytes(run: &str) -> Vec<u8> {
    std::fs::read(format!("{run}/checkpoints/last/draft.safetensors")).expect("a checkpoint")
}

/// Trains, captures, and trains on what was captured: both runs end with the same draft. Extracts it and
/// returns its folder.
pub(crate) fn trained_alike_from_a_store(shop: &Workshop, options: &[&str]) -> String {
    let config = shop.config();
    let of = |verb: &str, more: &[&str]| {
        let common = [options, &["capture.dtype=f32"]].concat();
        last_json(&succeed(&[&[verb, &config, "--json"], &common[..], more].concat()))
    };
    assert_eq!(of("train", &[])["finished"], true);
    let features = format!("train.features={}", shop.path("features"));
    of("capture", &[&features]);
    let output = format!("output={}", shop.path("offline"));
    of("train", &[&features, &output]);
    assert_eq!(draft_bytes(&shop.path("run")), draft_bytes(&shop.path("offline")), "{options:?}");
    succeed(&["extract", &shop.path("run")]);
    shop.path("run/draft")
}

/// Every record of a run without what clocks and memory decide.
pub(crate) fn metrics(run: &str) -> Vec<Value> {
    let mut records = metrics_with_clocks(run);
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
