//! How jobs of several ranks end: kills, signals, silence, errors; and how they are resumed.

use std::process::Child;

use super::succeed_on;
use crate::support::processes::start_kept;
use crate::support::ranks::{
    self, assert_same_numbers, checkpoint, joined, signal_after_a_save, wait,
};
use crate::support::runs::metrics;
use crate::support::{Workshop, mpirun, session_folder, stderr};

/// Starts a job, its output kept.
fn started(ranks: usize, arguments: &[&str]) -> Child {
    start_kept(&mut mpirun(ranks, arguments))
}

/// Removes the place of jobs that have ended.
fn tidy() {
    let _ = std::fs::remove_dir(session_folder());
}

#[test]
fn mpi_job_without_a_rank_ends_and_resumes_bit_for_bit() {
    ranks::killed_ranks_lose_nothing(started, 2, [0, 1], |_, _, _| ());
    tidy();
}

#[test]
fn mpi_rank_that_is_asked_to_stop_lets_all_save_first() {
    ranks::all_save_where_one_is_asked_to_stop(started);
    tidy();
}

#[test]
fn mpi_rank_that_answers_no_more_ends_the_job_after_the_timeout() {
    let (text, _) = ranks::told_of_a_rank_that_hangs(started, 2);
    tidy();
    assert!(text.contains("no answer of the other ranks for 8 s"), "{text}");
}

#[test]
fn mpi_error_of_one_rank_ends_all_with_its_message_and_code() {
    ranks::an_error_ends_all(started);
    tidy();
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
    let child = started(4, &arguments);
    signal_after_a_save(&run, 3, "-9");
    assert!(!wait(child).status.success(), "a job without a rank does not succeed");
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
