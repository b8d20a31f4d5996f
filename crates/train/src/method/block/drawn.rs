//! A block draft with a loss at the slots of blocks that are drawn from a row.

use candle_core::Tensor;
use longdraft_data::Batch;
use longdraft_kernels::bend::Bend;
use longdraft_models::draft::block::BlockDraft;

use super::blocks::BlockDraws;

/// A block draft with its loss.
pub struct DrawnBlocks<L> {
    pub(in crate::method) draft: BlockDraft,
    /// The target's frozen head, `[V, H]`.
    pub(in crate::method) head: Tensor,
    /// What makes logits of its products.
    pub(in crate::method) bend: Bend,
    pub(in crate::method) loss: L,
    starts: Starts,
}

/// Where blocks begin.
type Starts = Box<dyn Fn(&Batch) -> Vec<usize>>;

impl<L> DrawnBlocks<L> {
    /// An objective over blocks as they are drawn; `head` is the target's, `[V, H]`.
    pub fn new(draft: BlockDraft, head: &Tensor, loss: L, draws: BlockDraws) -> Self {
        let starts: Starts = Box::new(move |batch| draws.of(batch));
        Self { draft, head: head.clone(), bend: Bend::default(), loss, starts }
    }

    /// The same with logits that are bent as the target's are.
    #[must_use]
    pub fn with_bend(self, bend: Bend) -> Self {
        Self { bend, ..self }
    }

    /// Begins blocks where `starts` says: ascending tokens of the row, for comparisons with others.
    #[must_use]
    pub fn with_starts(mut self, starts: impl Fn(&Batch) -> Vec<usize> + 'static) -> Self {
        self.starts = Box::new(starts);
        self
    }

    /// Where the blocks of a row begin that this rank learns.
    pub(in crate::method) fn starts(&self, batch: &Batch) -> Vec<usize> {
        let mut starts = (self.starts)(batch);
        starts.retain(|start| batch.owns(*start));
        starts
    }
}
