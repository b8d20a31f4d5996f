//! What stands in for streams and NCCL where `scripts/check-nccl` runs: processes that really exchange, and fail as asked.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::machine::python;
use crate::support::files::repository;

/// The library, in a folder of its own. `None` where there is no Python or no compiler; the test says so.
fn library() -> Option<(tempfile::TempDir, PathBuf)> {
    python()?;
    let folder = tempfile::tempdir().expect("tempdir");
    let path = folder.path().join("libnccl.so");
    let sources =
        ["streams.c", "nccl.c"].map(|name| repository("scripts/gpu/recording").join(name));
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", "-o"])
        .arg(&path)
        .args(sources)
        .status();
    let Ok(compiled) = compiled else {
        eprintln!("skipped: there is no cc");
        return None;
    };
    assert!(compiled.success(), "the library is not compiled");
    Some((folder, path))
}

/// What each rank comes to.
fn ranks(library: &Path, play: &str, size: usize, variables: &[(&str, &str)]) -> Vec<Value> {
    let start = |play: &str, rank: usize, id: &str| {
        let mut command = Command::new("python3");
        command.arg(repository("tests/gpu_check/exchange.py")).arg(library);
        command.args([play, &rank.to_string(), &size.to_string(), id]);
        command.envs(variables.iter().copied()).stdout(Stdio::piped());
        command.spawn().expect("python3 starts")
    };
    let said = |rank: std::process::Child| -> Value {
        let ended = rank.wait_with_output().expect("ended");
        assert!(ended.status.success(), "{play}: {:?}", ended.status);
        serde_json::from_slice(&ended.stdout).expect("JSON")
    };
    let id = said(start("id", 0, ""));
    let id = id.as_str().expect("a name");
    let started: Vec<_> = (0..size).map(|rank| start(play, rank, id)).collect();
    started.into_iter().map(said).collect()
}

#[test]
fn processes_sum_and_gather_in_the_types_of_tensors() {
    let Some((_folder, library)) = library() else { return };
    let summed = [6.0, 6.0, -1.5, 300.0, 3.0, 0.75];
    for (rank, came_to) in ranks(&library, "exchange", 3, &[]).into_iter().enumerate() {
        let part = &summed[2 * rank..2 * rank + 2];
        let own = json!([0, summed, part, [1.0, 0.0, 2.0, 2.0, 3.0, 4.0], [-1.0]]);
        for of_type in ["7", "6", "9"] {
            assert_eq!(came_to[of_type], own, "rank {rank}, type {of_type}");
        }
    }
    assert_eq!(ranks(&library, "halves", 1, &[]), [json!([])]);
}

#[test]
fn a_collective_takes_its_time_and_streams_wait_for_its_event_alone() {
    let Some((_folder, library)) = library() else { return };
    let variables = [("GPU_NCCL_DELAY_MS", "500")];
    for seen in ranks(&library, "order", 2, &variables) {
        let expected = json!({"hurries": [-1.0], "waits": [3.0], "is done": 0, "is done later": 1});
        assert_eq!(seen, expected);
    }
}

#[test]
fn what_is_to_fail_fails_and_an_abort_ends_what_is_under_way() {
    let Some((_folder, library)) = library() else { return };
    // The error that is told, whether the collective is over before and after the abort, and the answer to a later call.
    for (play, variable, first, other) in [
        ("hangs", ("GPU_NCCL_HANG", "1:2"), [6, 0, 1, 4], [0, 0, 1, 4]),
        ("errs", ("GPU_NCCL_ERROR", "1:2"), [6, 0, 1, 4], [2, 1, 1, 4]),
    ] {
        assert_eq!(ranks(&library, play, 2, &[variable]), [json!(first), json!(other)], "{play}");
    }
    assert_eq!(ranks(&library, "differ", 2, &[]), [5, 5]);
    let variables = [("GPU_NCCL_INIT", "1:fail"), ("GPU_NCCL_PATIENCE_S", "1")];
    assert_eq!(
        ranks(&library, "exchange", 2, &variables),
        [json!({"init": 2}), json!({"init": 2})]
    );
}
