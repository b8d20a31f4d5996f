//! Collectives by NCCL between processes that have a GPU each. Without GPUs `scripts/check-nccl` runs them over libraries that stand in for
//! the driver and NCCL; what goes wrong is tested there alone, since they are asked to fail.

#![allow(clippy::unwrap_used, reason = "a test says where")]

mod play;
mod start;

use start::{Ranks, can_fail};

/// What each rank is to say at the end: the same for all, or one for each.
fn run(ranks: &Ranks, expected: &[&[&str]]) {
    for (rank, said) in ranks.run().into_iter().enumerate() {
        for words in expected[rank.min(expected.len() - 1)] {
            assert!(said.contains(words), "rank {rank} does not say `{words}`:\n{said}");
        }
    }
}

/// A rank of the other tests.
#[test]
#[ignore = "the other tests start it"]
fn rank() {
    play::as_told();
}

#[test]
fn values_are_summed_and_gathered_in_their_types() {
    for size in [2, 3] {
        let Some(ranks) = Ranks::of(size, "values") else { return };
        run(&ranks, &[&["values are right"]]);
        run(&ranks.late(), &[&["values are right"]]);
    }
}

#[test]
fn a_gathering_goes_on_beside_other_work_and_may_be_dropped() {
    let Some(ranks) = Ranks::of(2, "ahead") else { return };
    run(&ranks, &[&["gathered"]]);
    run(&ranks.late(), &[&["gathered"]]);
}

#[test]
fn what_cannot_be_exchanged_leaves_the_others_at_work() {
    let Some(ranks) = Ranks::of(2, "refused") else { return };
    run(&ranks, &[&["one block of 2", "a tensor of U32", "a tensor of F32 on Cpu", "goes on"]]);
}

#[test]
fn a_collective_that_never_ends_is_named() {
    let (Some(ranks), true) = (Ranks::of(2, "fails"), can_fail()) else { return };
    let refused = "NCCL: an earlier collective failed";
    // The rank that hangs is told by its limit; the other hears that it left, or is told so too.
    let hung = ["ncclAllGather: no answer of the other ranks for 2 s", refused];
    run(&ranks.with("GPU_NCCL_HANG", "1:3"), &[&["ncclAllGather: ", refused], &hung]);
}

#[test]
fn an_error_in_the_background_is_told_though_the_collective_ends() {
    let (Some(ranks), true) = (Ranks::of(2, "fails"), can_fail()) else { return };
    let refused = "NCCL: an earlier collective failed";
    let failed = ["ncclAllGather: ncclSystemError", refused];
    run(
        &ranks.with("GPU_NCCL_ERROR", "1:3"),
        &[&["ncclAllGather: ncclRemoteError", refused], &failed],
    );
}

#[test]
fn a_start_that_is_refused_ends_the_common_work() {
    let (Some(ranks), true) = (Ranks::of(2, "fails"), can_fail()) else { return };
    let refused = "NCCL: an earlier collective failed";
    let failed = ["ncclGroupEnd: ncclSystemError", refused];
    run(
        &ranks.with("GPU_NCCL_REFUSE", "1:3"),
        &[&["ncclAllGather: ncclRemoteError", refused], &failed],
    );
}

#[test]
fn ranks_that_do_not_meet_say_so() {
    let (Some(ranks), true) = (Ranks::of(2, "values"), can_fail()) else { return };
    let ranks = ranks.with("GPU_NCCL_PATIENCE_S", "2");
    run(&ranks.with("GPU_NCCL_INIT", "1:fail"), &[&["ncclCommInitRank: ncclSystemError"]]);
}
