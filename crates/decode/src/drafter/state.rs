//! What a drafter holds of the text at its place, for drafters of the same draft at other places.

use candle_core::Tensor;
use longdraft_models::target_model::KvCache;

use crate::error::Result;

/// What a drafter holds of the text at its place.
#[derive(Clone, Copy)]
pub enum DraftState<'d> {
    /// What nobody else can go on from: another place reads the text itself.
    Private,
    /// Nothing that it would not find in the text or in the target's cache.
    Nothing,
    /// Rows that its draft computed.
    Rows(DraftRows<'d>),
}

impl DraftState<'_> {
    /// Whether a drafter that holds this can go on from what another one holds of another text.
    pub(crate) fn goes_on_from(&self, other: &DraftState<'_>) -> bool {
        match (self, other) {
            (Self::Nothing, _) => true,
            (Self::Rows(own), DraftState::Rows(theirs)) => own.draft == theirs.draft,
            (Self::Private | Self::Rows(_), _) => false,
        }
    }

    /// Tokens of the text that it knows; all of them where it holds no rows.
    pub(crate) fn tokens(&self) -> usize {
        match self {
            Self::Private | Self::Nothing => usize::MAX,
            Self::Rows(rows) => rows.tokens(),
        }
    }
}

/// Rows that a draft computed of the first tokens of a text.
#[derive(Clone, Copy)]
pub struct DraftRows<'d> {
    /// Where the draft lies, which tells it from others.
    draft: usize,
    cache: &'d KvCache,
    read: usize,
    waiting: &'d [Tensor],
}

impl<'d> DraftRows<'d> {
    /// Keys and values of the first `read` tokens, which `draft` computed, and the target's features `[T, ...]` of the
    /// tokens after them, which it has yet to read.
    pub fn new<D>(draft: &D, cache: &'d KvCache, read: usize, waiting: &'d [Tensor]) -> Self {
        Self { draft: std::ptr::from_ref(draft).addr(), cache, read, waiting }
    }

    fn tokens(&self) -> usize {
        let rows = |features: &Tensor| features.dims().first().copied().unwrap_or(0);
        self.read + self.waiting.iter().map(rows).sum::<usize>()
    }

    /// Copies those of the first `tokens` tokens into a cache of the same draft: how many it holds then, and the
    /// features of all tokens after them.
    ///
    /// # Errors
    /// - the cache is of another draft, or the device has no memory for the rows
    pub fn copy_to(&self, cache: &mut KvCache, tokens: usize) -> Result<(usize, Vec<Tensor>)> {
        cache.copy_prefix(self.cache, tokens.min(self.read))?;
        let goes_beyond = tokens > self.read && cache.len() == self.read;
        let waiting = if goes_beyond { self.waiting.to_vec() } else { Vec::new() };
        Ok((cache.len(), waiting))
    }
}
