//! How jobs of several ranks end: kills, signals, silence, errors; and how they are resumed.

use std::process::{Child, Output, Stdio};

use super::{draft_bytes, metrics, succeed_on};
use crate::support::files::read_json;
use crate::support::ranks::{self, assert_same_numbers, checkpoint, joined, signal_after_a_save};
use crate::support::{Workshop, last_json, mpirun, session_folder, stderr, stdout, told_by};

/// Waits for a job to end.
#[track_caller]
fn wait(child: Child) -> Output {
    let output = ranks::wait(child);
    let _ = std::fs::remove_dir(session_folder());
    output
}

/// Starts ranks and kills one of them with SIGKILL after the first save.
#[track_caller]
fn kill_a_rank(ranks: usize, rank: usize, run: &str, arguments: &[&str]) {
    let child = mpirun(ranks, arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("mpirun starts");
    signal_after_a_save(run, rank, "-9");
    let output = wait(child);
    assert!(!output.status.success(), "a job without a rank does not succeed");
}

#[test]
fn mpi_job_without_a_rank_ends_and_resumes_bit_for_bit() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let set = ["train.steps=80", "train.save_every=5", "parallel.zero=1"];
    let whole = shop.path("whole");
    let output = format!("output={whole}");
    succeed_on(2, &joined(&[&["train", &config, &output], &set]));
    for killed_rank in [0, 1] {
        let run = shop.path(&format!("killed-{killed_rank}"));
        let output = format!("output={run}");
        let arguments = joined(&[&["train", &config, &output], &set]);
        kill_a_rank(2, killed_rank, &run, &arguments);
        let resumed = succeed_on(2, &arguments);
        assert!(stderr(&resumed).contains("resumed after step "), "{}", stderr(&resumed));
        assert_eq!(metrics(&whole), metrics(&run));
        assert_eq!(draft_bytes(&whole), draft_bytes(&run));
    }
}

#[test]
fn mpi_rank_that_is_asked_to_stop_lets_all_save_first() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let run = shop.path("run");
    let child =
        mpirun(2, &["train", &config, "train.steps=100000", "train.save_every=7", "--json"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("mpirun starts");
    signal_after_a_save(&run, 1, "-TERM");
    let output = wait(child);
    // The signal of one rank ends all of them in order, with its code.
    assert_eq!(output.status.code(), Some(143));
    let out = last_json(&stdout(&output));
    let state = read_json(checkpoint(&run).join("state.json"));
    assert_eq!((&out["finished"], &out["steps"]), (&false.into(), &state["step"]));
}

#[test]
fn mpi_rank_that_answers_no_more_ends_the_job_after_the_timeout() {
    let shop = Workshop::of_four_layers();
    let (config, run) = (shop.config(), shop.path("run"));
    let set = ["train.steps=100000", "train.save_every=7", "parallel.timeout_seconds=8"];
    let child = mpirun(2, &joined(&[&["train", &config], &set]))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("mpirun starts");
    signal_after_a_save(&run, 1, "-STOP");
    let text = told_by(&wait(child), 1);
    assert!(text.contains("no answer of the other ranks for 8 s"), "{text}");
}

#[test]
fn zero_1_checkpoints_are_resumed_by_another_number_of_ranks() {
    resumes_on_other_ranks("parallel.zero=1", 60);
}

#[test]
fn zero_3_checkpoints_are_resumed_by_another_number_of_ranks() {
    resumes_on_other_ranks("parallel.zero=3", 30);
}

#[track_caller]
fn resumes_on_other_ranks(zero: &str, steps: usize) {
    let (shop, config) = Workshop::of_four_layers().with_config();
    let steps = format!("train.steps={steps}");
    let set = [steps.as_str(), "train.save_every=5", zero];
    let whole = shop.path("whole");
    let output = format!("output={whole}");
    succeed_on(1, &joined(&[&["train", &config, &output], &set]));
    let run = shop.path("killed");
    let output = format!("output={run}");
    let arguments = joined(&[&["train", &config, &output], &set]);
    kill_a_rank(4, 3, &run, &arguments);
    let resumed = succeed_on(2, &arguments);
    assert!(stderr(&resumed).contains("resumed after step "), "{}", stderr(&resumed));
    assert_same_numbers(&metrics(&whole), &metrics(&run));
    // A rank's damaged file is found like any other.
    let part = checkpoint(&run).join("optimizer-00002-of-00002.safetensors");
    let mut bytes = std::fs::read(&part).expect("part");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&part, bytes).expect("damage");
    let resumed = succeed_on(4, &arguments);
    let text = stderr(&resumed);
    assert!(text.contains("optimizer-00002-of-00002.safetensors: damaged"), "{text}");
    assert_same_numbers(&metrics(&whole), &metrics(&run));
}

#[test]
fn mpi_error_of_one_rank_ends_all_with_its_message_and_code() {
    let (shop, config) = Workshop::of_four_layers().with_config();
    // Only the second rank cannot write its log.
    std::fs::create_dir_all(shop.path("run/logs/rank-1.log")).expect("folder");
    let child = mpirun(3, &["train", &config])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("mpirun starts");
    let text = told_by(&wait(child), 1);
    assert!(text.contains("rank 1 of 3") && text.contains("rank-1.log"), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    // What all ranks meet is told once.
    let mut wrong = mpirun(3, &["train", &config, "train.rows_per_step=0"]);
    let text = told_by(&wrong.output().expect("mpirun starts"), 2);
    assert_eq!(text.matches("error: ").count(), 1, "{text}");
}
