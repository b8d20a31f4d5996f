//! DFlash2's selector: the token before a slot chooses among the slot's candidates.
//!
//! ```text
//! U      = W h                                      logits of the target's head
//! C      = ids of the K largest U
//! S(p→b) = U[b] + ⟨A[p] ⊙ W_h h, B[b]⟩              b ∈ C; p stands in the slot before
//! ```

use candle_core::Tensor;
use longdraft_kernels::chosen_products::chosen_products;
use longdraft_kernels::rows::select_rows;

use super::config::SelectorSizes;
use super::model::BlockDraft;
use crate::draft::DraftWeights;
use crate::error::Result;

/// `A`, `[V, r]`.
pub(super) const PREDECESSORS: &str = "candidate_selector.predecessor_codebook";
/// `B`, `[V, r]`.
pub(super) const SUCCESSORS: &str = "candidate_selector.successor_codebook";
/// The module of `W_h`, `[r, H]`.
pub(super) const HIDDEN_PROJECTION: &str = "candidate_selector.hidden_projection";

/// The selector of a draft.
#[derive(Clone, Copy)]
pub struct Selector<'a> {
    weights: &'a DraftWeights,
    sizes: SelectorSizes,
}

impl BlockDraft {
    /// The draft's selector, if it has one.
    pub fn selector(&self) -> Option<Selector<'_>> {
        Some(Selector { weights: &self.weights, sizes: self.config.selector? })
    }
}

impl Selector<'_> {
    /// Sizes.
    pub fn sizes(&self) -> SelectorSizes {
        self.sizes
    }

    /// `W_h h` of slots.
    ///
    /// # Shapes
    /// - `states`: `[R, H]` → `[R, r]`
    ///
    /// # Errors
    /// - shapes do not fit
    pub fn project(&self, states: &Tensor) -> Result<Tensor> {
        self.weights.project(states, HIDDEN_PROJECTION)
    }

    /// `⟨A[p] ⊙ W_h h, B[b]⟩`, what is added to a candidate's logit.
    ///
    /// # Shapes
    /// - `projected`: `[R, r]` of [`Self::project`]; `before`: `[R]`, the tokens before the slots;
    ///   `candidates`: `R·K`, those of a slot side by side → `[R, K]`
    ///
    /// # Errors
    /// - shapes do not fit, or an id lies outside of the vocabulary
    pub fn preferences(
        &self,
        projected: &Tensor,
        before: &[u32],
        candidates: &[u32],
    ) -> Result<Tensor> {
        let predecessors = select_rows(self.weights.tensor(PREDECESSORS)?, before)?;
        let queries = (predecessors * projected)?;
        Ok(chosen_products(&queries, self.weights.tensor(SUCCESSORS)?, candidates)?)
    }
}
