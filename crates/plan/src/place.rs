//! Which memory a term lies in.

use longdraft_parallel::Reduction;
use serde::Serialize;

use crate::layout::Layout;

/// Code, runtime, thread stacks.
pub(crate) const PROGRAM: &str = "program";
/// What a rank holds of the target's weights whole.
pub(crate) const TARGET: &str = "target weights";
/// Its part of those that are spread over the ranks.
pub(crate) const SPREAD_TARGET: &str = "spread target weights";
/// What it holds of the draft's.
pub(crate) const DRAFT: &str = "draft weights";
/// What it gathers of the target's.
pub(crate) const GATHERED_TARGET: &str = "gathered target weights";
/// What it gathers of the draft's.
pub(crate) const GATHERED_DRAFT: &str = "gathered draft weights";
pub(crate) const STATE: &str = "optimizer state";
/// What summing gradients over ranks takes beside them.
pub(crate) const SUMS: &str = "buckets and sums";
/// What the update takes.
pub(crate) const UPDATE: &str = "gradients and new weights";
/// What ranks that update different weights gather of each other.
pub(crate) const NEW_WEIGHTS: &str = "gathered new weights";
/// What writing a checkpoint takes.
pub(crate) const COPIES: &str = "copies of tensors";
/// Rows of a store between its files and the accelerator.
pub(crate) const ON_THEIR_WAY: &str = "rows on their way";
/// Weights of the draft as products of 16 bits take them.
pub(crate) const FACTORS: &str = "weights as products take them";
/// The running average of pretraining.
pub(crate) const AVERAGES: &str = "averaged weights";

/// Bytes of page-locked memory that rows of a store go through: two buffers.
pub(crate) const PAGE_LOCKED: u64 = 2 * (16 << 20);

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

impl Item {
    /// Whether it is weights that models compute with, held or gathered.
    pub fn is_weights(&self) -> bool {
        matches!(self.name, TARGET | SPREAD_TARGET | DRAFT | GATHERED_TARGET | GATHERED_DRAFT)
    }
}

/// How a run's terms are spread over its memories.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places {
    /// Where models and activations lie.
    main: Place,
    updates_on_host: bool,
    /// Whether ranks exchange gradients and new weights through main memory.
    exchanges_on_host: bool,
    /// Whether a spread target is gathered from main memory.
    gathers_on_host: bool,
}

impl Places {
    /// AdamW alone updates on an accelerator, with its state in memory: of one rank, or of several whose sums NCCL makes
    /// there. Otherwise a rank updates its part in main memory, though NCCL brings sums and new weights. A spread target
    /// lies where it is gathered; that sums nothing.
    pub(crate) fn of(layout: &Layout, updates: Updates) -> Self {
        // Of GPUs that may be elsewhere, only the build is known.
        let has_nccl = longdraft_parallel::SUMS_BY_NCCL || updates.reduction == Reduction::Library;
        let by_nccl = has_nccl && updates.reduction != Reduction::RankOrder;
        let main = if layout.is_accelerator() { Place::Accelerator } else { Place::Host };
        let stays = (layout.ranks == 1 || by_nccl) && !updates.by_muon && !updates.state_in_file;
        let (updates_on_host, exchanges_on_host) = (!stays, !stays && !by_nccl);
        Self { main, updates_on_host, exchanges_on_host, gathers_on_host: !has_nccl }
    }

    /// Where models and activations lie, whose peak a plan is about.
    pub(crate) fn main(self) -> Place {
        self.main
    }

    /// Whether the optimizer works where models lie, and that is an accelerator.
    pub(crate) fn updates_on_accelerator(self) -> bool {
        self.main == Place::Accelerator && !self.updates_on_host
    }

    /// Whether ranks exchange gradients and new weights through main memory.
    pub(crate) fn exchanges_on_host(self) -> bool {
        self.exchanges_on_host
    }

    /// Terms that are not nothing, with their places.
    pub(crate) fn items(self, terms: impl IntoIterator<Item = (&'static str, u64)>) -> Vec<Item> {
        let some = terms.into_iter().filter(|(_, bytes)| *bytes > 0);
        some.map(|(name, bytes)| Item { name, bytes, place: self.place_of(name) }).collect()
    }

    fn place_of(self, name: &str) -> Place {
        match name {
            PROGRAM | COPIES | ON_THEIR_WAY | AVERAGES => Place::Host,
            STATE | UPDATE if self.updates_on_host => Place::Host,
            SUMS | NEW_WEIGHTS if self.exchanges_on_host => Place::Host,
            SPREAD_TARGET if self.gathers_on_host => Place::Host,
            _ => self.main(),
        }
    }
}

/// How weights are updated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Updates {
    pub(crate) reduction: Reduction,
    pub(crate) by_muon: bool,
    pub(crate) state_in_file: bool,
}

#[cfg(test)]
mod tests {
    use longdraft_parallel::SUMS_BY_NCCL;
    use serde_json::json;

    use super::{GATHERED_TARGET, Place, SPREAD_TARGET};
    use crate::Layout;
    use crate::sample::workload;

    #[test]
    fn phases_hold_the_same_weights_but_for_what_is_gathered() {
        for (zero, gathers) in [(1, false), (3, true)] {
            let given = json!({ "parallel": { "zero": zero } });
            let estimate = workload("glide", &given, Layout::of(4, 1)).estimate();
            let weights = |name: &str| -> u64 {
                let phase = estimate.phases.iter().find(|phase| phase.name == name);
                let items = phase.expect("a phase of this name").items.iter();
                items.filter(|item| item.is_weights()).map(|item| item.bytes).sum()
            };
            let held = weights("checkpoint");
            // The update's own term has a name that ends in `weights`, too.
            assert!(held > 0 && weights("update") == held, "ZeRO {zero}");
            assert_eq!(weights("backward") > held, gathers, "ZeRO {zero}");
        }
    }

    #[test]
    fn a_spread_target_lies_where_it_is_gathered() {
        for (reduction, by_nccl) in [("auto", SUMS_BY_NCCL), ("library", true)] {
            let given = json!({ "parallel": { "zero": 3, "reduction": reduction } });
            let layout = Layout { target_value_bytes: 2, ..Layout::of(8, 0) };
            let phases = workload("glide", &given, layout).estimate().phases;
            let item =
                |name: &str| phases[0].items.iter().find(|item| item.name == name).expect("a term");
            let (part, layers) = (item(SPREAD_TARGET), item(GATHERED_TARGET));
            let place = if by_nccl { Place::Accelerator } else { Place::Host };
            assert_eq!((part.place, layers.place), (place, Place::Accelerator), "{reduction}");
            // An eighth of 16 GB.
            assert!((1_800_000_000..2_200_000_000).contains(&part.bytes), "{}", part.bytes);
        }
    }
}
