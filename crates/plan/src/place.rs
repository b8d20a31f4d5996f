//! Which memory a term lies in.

use longdraft_parallel::{Reduction, ZeroStage};
use serde::Serialize;

use crate::layout::Layout;

/// Code, runtime, thread stacks.
pub(crate) const PROGRAM: &str = "program";
/// Moments of the optimizer.
pub(crate) const STATE: &str = "optimizer state";
/// What summing gradients over ranks takes beside them.
pub(crate) const SUMS: &str = "buckets and sums";
/// What the update takes.
pub(crate) const UPDATE: &str = "gradients and new weights";
/// What writing a checkpoint takes.
pub(crate) const COPIES: &str = "copies of tensors";
/// Rows of a store between its files and the accelerator.
pub(crate) const ON_THEIR_WAY: &str = "rows on their way";
/// The running average of pretraining.
pub(crate) const AVERAGES: &str = "averaged weights";

/// Bytes of page-locked memory that rows of a store go through.
pub(crate) const PAGE_LOCKED: u64 = 16 << 20;

/// A memory of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// The machine's main memory.
    Host,
    /// The accelerator's own.
    Accelerator,
}

/// A term.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What.
    pub name: &'static str,
    /// How much.
    pub bytes: u64,
    /// Of which memory.
    pub place: Place,
}

/// How a run's terms are spread over its memories.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places {
    on_accelerator: bool,
    updates_on_host: bool,
}

impl Places {
    /// AdamW alone updates on an accelerator, with its state in memory: of one rank, or of several whose
    /// sums NCCL makes there.
    pub(crate) fn of(layout: &Layout, updates: Updates) -> Self {
        let by_nccl = match updates.reduction {
            Reduction::Library => true,
            // Of GPUs that may be elsewhere, only the build is known.
            Reduction::Auto => longdraft_parallel::SUMS_BY_NCCL,
            Reduction::RankOrder => false,
        };
        let one_or_nccl = layout.ranks == 1 || updates.zero == ZeroStage::Replicated && by_nccl;
        let on_accelerator = layout.is_accelerator();
        let stays = one_or_nccl && !updates.by_muon && !updates.state_in_file;
        Self { on_accelerator, updates_on_host: !stays }
    }

    /// Where models and activations lie, whose peak a plan is about.
    pub(crate) fn main(self) -> Place {
        if self.on_accelerator { Place::Accelerator } else { Place::Host }
    }

    /// Terms that are not nothing, with their places.
    pub(crate) fn items(self, terms: impl IntoIterator<Item = (&'static str, u64)>) -> Vec<Item> {
        let some = terms.into_iter().filter(|(_, bytes)| *bytes > 0);
        some.map(|(name, bytes)| Item { name, bytes, place: self.place_of(name) }).collect()
    }

    fn place_of(self, name: &str) -> Place {
        match name {
            PROGRAM | COPIES | ON_THEIR_WAY | AVERAGES => Place::Host,
            STATE | SUMS | UPDATE if self.updates_on_host => Place::Host,
            _ => self.main(),
        }
    }
}

/// How weights are updated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Updates {
    pub(crate) zero: ZeroStage,
    pub(crate) reduction: Reduction,
    pub(crate) by_muon: bool,
    pub(crate) state_in_file: bool,
}
