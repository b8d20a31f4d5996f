//! Configuration of the ranks' common work.

use std::time::Duration;

use longdraft_rules::{Problem, Rules};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::watch::LONGEST_WAIT;
use super::{World, ZeroStage};

/// Ranks that share a row or a layer, as many as a plan takes.
const RANKS: usize = 1 << 16;

/// Seconds that a rank waits for others: a year.
const WAIT_SECONDS: u64 = 365 * 24 * 3600;

/// Order of sums over the ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// NCCL's where every rank has a GPU of its own, else the order of the ranks.
    #[default]
    Auto,
    /// The order of the ranks: a run can be repeated bit for bit with the same number of ranks.
    RankOrder,
    /// Whatever the library finds fastest: NCCL's as with `auto`, else MPI's. Over TCP it is the order of the ranks.
    Library,
}

/// Where the optimizer's state lies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StatePlace {
    /// Memory: that of a GPU on which one rank trains by AdamW, or several that each update all weights with sums that are
    /// made there, else that of the machine.
    #[default]
    Memory,
    /// A file without a name in the run directory, read and written tensor by tensor in every step.
    File,
}

/// How several processes share the work; one process alone has nothing to share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelConfig {
    /// What is spread over the ranks (ZeRO): 0 nothing, 1 the optimizer's state, 3 also draft and
    /// target, put together layer by layer for their use. Muon's work and state are always spread.
    pub zero: u8,
    /// Ranks that run each row together (sequence parallel), each a part of its tokens: for rows whose
    /// states one rank cannot hold. Divides the number of ranks.
    pub sequence: usize,
    /// Ranks that share the frozen target's layers (tensor parallel), each some heads and a part of the
    /// MLPs' inner width: for targets that one rank cannot hold. Divides the number of ranks, the
    /// target's heads, key-value heads and inner width.
    pub tensor: usize,
    /// Where a draft's optimizer keeps its state, or a rank its part of it.
    pub optimizer_state: StatePlace,
    /// Bytes of gradients or weights that are under way at once.
    pub bucket_bytes: usize,
    /// Order of sums over the ranks.
    pub reduction: Reduction,
    /// While gradients are summed over the ranks, each runs its whole target over the next step's first
    /// row; needs memory for the features of one more row.
    pub overlap: bool,
    /// Seconds without an answer of the other ranks after which a rank ends the job.
    pub timeout_seconds: u64,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        Self {
            zero: 0,
            sequence: 1,
            tensor: 1,
            optimizer_state: StatePlace::Memory,
            bucket_bytes: 64 << 20,
            reduction: Reduction::Auto,
            overlap: true,
            timeout_seconds: LONGEST_WAIT.as_secs(),
        }
    }
}

impl ParallelConfig {
    /// What is spread.
    pub fn zero_stage(&self) -> ZeroStage {
        ZeroStage::of(self.zero).unwrap_or_default()
    }

    /// Whether draft and target are spread over these ranks (ZeRO-3).
    pub fn spreads_weights(&self, world: &World) -> bool {
        self.zero_stage() == ZeroStage::Weights && world.size() > 1
    }

    /// Whether a rank runs the target without asking the others.
    pub fn runs_target_alone(&self, world: &World) -> bool {
        self.tensor <= 1 && self.sequence <= 1 && !self.spreads_weights(world)
    }

    /// Longest wait for other ranks.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_seconds)
    }

    /// Everything that makes no sense, by key of this section.
    pub fn problems(&self) -> Vec<Problem> {
        let mut rules = Rules::default();
        rules.require(ZeroStage::of(self.zero).is_some(), "zero", "is 0, 1 or 3");
        let ranks = 1..=RANKS;
        rules.require(ranks.contains(&self.sequence), "sequence", "must be in 1 to 65536 ranks");
        rules.require(ranks.contains(&self.tensor), "tensor", "must be in 1 to 65536 ranks");
        let (tensor, sequence) = (self.tensor, self.sequence);
        rules.require_with(
            tensor <= 1 || sequence <= 1,
            "tensor",
            &["sequence"],
            format!(
                "is {tensor}: its ranks run whole rows, and `parallel.sequence: {sequence}` cuts them into parts: \
                 set one of them to 1"
            ),
        );
        rules.require_with(
            tensor <= 1 || self.zero_stage() != ZeroStage::Weights,
            "tensor",
            &["zero"],
            format!(
                "is {tensor}, which with `parallel.zero: 3` would cut the target's weights twice: set \
                 `parallel.zero: 1`, or `parallel.tensor: 1`"
            ),
        );
        rules.require(
            (1024..=1 << 30).contains(&self.bucket_bytes),
            "bucket_bytes",
            "must be in 1024 to 1073741824 (1 GiB)",
        );
        rules.require(
            (1..=WAIT_SECONDS).contains(&self.timeout_seconds),
            "timeout_seconds",
            "must be above 0, and at most a year (31536000)",
        );
        rules.into_problems()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_checked_together() {
        assert!(ParallelConfig::default().problems().is_empty());
        let bad = ParallelConfig {
            zero: 2,
            sequence: 0,
            bucket_bytes: 0,
            timeout_seconds: 0,
            ..ParallelConfig::default()
        };
        assert_eq!(bad.problems().len(), 4);
        let tensor = |config: ParallelConfig| ParallelConfig { tensor: 2, ..config }.problems();
        assert!(tensor(ParallelConfig { zero: 1, ..ParallelConfig::default() }).is_empty());
        let twice = ParallelConfig { zero: 3, sequence: 4, ..ParallelConfig::default() };
        let problems = tensor(twice);
        assert!(problems[0].text.contains("`parallel.sequence: 4`"), "{problems:?}");
        assert!(problems[1].text.contains("set `parallel.zero: 1`"), "{problems:?}");
    }
}
