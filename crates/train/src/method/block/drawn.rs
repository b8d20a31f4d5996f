//! A block draft with a loss at the slots of blocks that are drawn from a row.

use std::sync::OnceLock;

use longdraft_data::Batch;
use longdraft_kernels::bend::Bend;
use longdraft_kernels::matrix::Matrix;
use longdraft_models::draft::block::BlockDraft;

use super::blocks::{BlockDraws, BlockStarts};

/// A block draft with its loss.
pub struct DrawnBlocks<L> {
    pub(in crate::method) draft: BlockDraft,
    /// The target's frozen head, `[V, H]`.
    pub(in crate::method) head: Matrix,
    /// Its rows of the tokens that a head of the draft's own proposes, `[Vd, H]`, once they were needed.
    pub(super) kept_head: OnceLock<Matrix>,
    /// What makes logits of its products.
    pub(in crate::method) bend: Bend,
    pub(in crate::method) loss: L,
    /// The optimizer step that comes, from 1, and of how many, where somebody says so.
    pub(in crate::method) step: Option<(u64, u64)>,
    starts: Starts,
}

/// Where blocks begin.
type Starts = Box<dyn Fn(&Batch) -> Vec<usize>>;

impl<L> DrawnBlocks<L> {
    /// An objective over blocks as they are drawn; `head` is the target's, `[V, H]`, a tensor or blocks, which gets no
    /// gradient.
    pub fn new(draft: BlockDraft, head: impl Into<Matrix>, loss: L, draws: BlockDraws) -> Self {
        let starts: Starts = Box::new(move |batch| draws.of(batch));
        let head = match head.into() {
            Matrix::Dense(head) => Matrix::Dense(head.detach()),
            blocks => blocks,
        };
        let bend = Bend::default();
        Self { draft, head, kept_head: OnceLock::new(), bend, loss, step: None, starts }
    }

    /// The same with blocks that are drawn among the tokens of another rule.
    #[must_use]
    pub fn with_rule(self, rule: BlockStarts, draws: BlockDraws) -> Self {
        let slots = self.draft.config().block_size;
        self.with_starts(move |batch| draws.among(batch, (rule, slots)))
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
