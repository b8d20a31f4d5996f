//! What one request has of a draft that reads pairs: a token with what the target says of the token before it.

use candle_core::Tensor;
use longdraft_models::target_model::KvCache;

use super::model::Readings;
use super::waiting::Waiting;
use super::{DraftRows, DraftState};
use crate::error::Result;

/// The pairs of one request.
pub(super) struct Own {
    /// Keys and values of committed pairs, then of this round's readings.
    pub(super) cache: KvCache,
    /// Committed pairs in the cache.
    pub(super) pairs: usize,
    /// The target's features or states `[T, ...]` of the tokens from `pairs` on.
    pub(super) waiting: Waiting,
    /// What the newest pair and the readings hand on, `[1, H]` each.
    pub(super) states: Vec<Tensor>,
    pub(super) readings: Readings,
}

impl Own {
    /// No pairs, in an empty cache.
    pub(super) fn new(cache: KvCache) -> Self {
        let (waiting, readings) = (Waiting::default(), Readings::default());
        Self { cache, pairs: 0, waiting, states: Vec::new(), readings }
    }

    /// Forgets what was read in a round.
    pub(super) fn forget(&mut self) {
        self.states.clear();
        self.readings.clear();
    }

    /// As [`super::Drafter::begin`].
    pub(super) fn begin(&mut self, kept: usize) -> Result<()> {
        self.forget();
        self.pairs = self.pairs.min(kept);
        self.waiting.keep(kept - self.pairs)?;
        self.cache.truncate(self.pairs);
        Ok(())
    }

    /// As [`super::Drafter::state`], of what `draft` read.
    pub(super) fn state<D>(&self, draft: &D) -> DraftState<'_> {
        let waiting = self.waiting.features();
        DraftState::Rows(DraftRows::new(draft, &self.cache, self.pairs, waiting))
    }

    /// As [`super::Drafter::take_over`].
    pub(super) fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        let (pairs, waiting) = rows.copy_to(&mut self.cache, tokens)?;
        (self.pairs, self.waiting) = (pairs, waiting.into());
        Ok(())
    }
}
