//! The target's own block for prediction of several tokens.
//!
//! The pair at index `P` is token `P + 1` with the target's final state of `P`, at position `P`. Pairs of committed
//! tokens are rows of the block's cache; the newest one proposes what follows the root. A drafted token reads what
//! the block handed on at the node that it follows, stands one position after it, and sees the committed pairs, its
//! ancestors and itself. What was drafted is forgotten, and accepted tokens are read again with the target's states.

use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::attention::KeyRanges;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::target_model::{Features, KvCache, MtpBlock, Pairs, Tap, Target};

use super::model::Readings;
use super::reduced_head::head_logits;
use super::{DraftContext, DraftModel, DraftRows, DraftState, Forecast, Reading, ReducedHead};
use crate::error::{DecodeError, Result};

/// Pairs that wait for drafting at most; more are read at once, so that memory stays small.
const MOST_WAITING: usize = 128;

/// A block at decoding, for one request at a time.
pub struct MtpModel<'a> {
    block: &'a MtpBlock,
    target: &'a Target,
    head: Option<Arc<ReducedHead>>,
    /// Keys and values of committed pairs, then of this round's readings.
    cache: KvCache,
    /// Committed pairs in the cache.
    pairs: usize,
    /// Final states `[T, H]` of the tokens from `pairs` on.
    waiting: Vec<Tensor>,
    /// What the newest pair and the readings hand on, `[1, H]` each.
    states: Vec<Tensor>,
    readings: Readings,
}

impl<'a> MtpModel<'a> {
    /// A model that proposes every token of the vocabulary, or those of a reduced head.
    ///
    /// # Errors
    /// - the device has no memory for its cache
    pub fn new(
        block: &'a MtpBlock,
        target: &'a Target,
        head: Option<&Arc<ReducedHead>>,
    ) -> Result<Self> {
        Ok(Self {
            block,
            target,
            head: head.map(Arc::clone),
            cache: block.new_cache(target)?,
            pairs: 0,
            waiting: Vec::new(),
            states: Vec::new(),
            readings: Readings::default(),
        })
    }

    fn waiting_rows(&self) -> Result<usize> {
        let rows = self.waiting.iter().map(|states| states.dim(0));
        Ok(rows.sum::<candle_core::Result<usize>>()?)
    }

    /// Reads the waiting pairs whose token is known, but for the last `left` of them; the state of the next one,
    /// `[1, H]`, if one is left.
    fn absorb(&mut self, tokens: &[TargetTokenId], left: usize) -> Result<Option<Tensor>> {
        self.cache.truncate(self.pairs);
        let waiting = self.waiting_rows()?;
        let known = waiting.min((tokens.len() - 1).saturating_sub(self.pairs));
        let count = known.saturating_sub(left);
        if waiting == 0 {
            return Ok(None);
        }
        let states = Tensor::cat(&self.waiting, 0)?;
        if count > 0 {
            let ids = ids(&tokens[self.pairs + 1..=self.pairs + count]);
            let position_ids: Vec<u32> = (self.pairs as u32..(self.pairs + count) as u32).collect();
            let read = states.narrow(0, 0, count)?;
            let pairs = Pairs { ids: &ids, states: &read, position_ids: &position_ids };
            self.block.read(self.target, pairs, &mut self.cache)?;
            self.pairs += count;
        }
        self.waiting.clear();
        if count < waiting {
            // A copy: a view would keep the whole chunk alive.
            self.waiting.push(states.narrow(0, count, waiting - count)?.force_contiguous()?);
        }
        Ok(if count < known { Some(states.narrow(0, count, 1)?.force_contiguous()?) } else { None })
    }

    /// Runs pairs at one position that see the cache and their own `paths` of readings.
    fn step(
        &mut self,
        (ids, states): (&[u32], &Tensor),
        position: usize,
        paths: impl IntoIterator<Item = Vec<u32>>,
    ) -> Result<Vec<Forecast>> {
        let own = |path: Vec<u32>| path.iter().map(|i| i + self.pairs as u32).collect();
        let ranges = KeyRanges::shared(&(0..self.pairs), ids.len());
        let ranges = ranges.with_singles(paths.into_iter().map(own));
        let pairs = Pairs { ids, states, position_ids: &vec![position as u32; ids.len()] };
        let stepped = self.block.step(self.target, pairs, ranges, &mut self.cache)?;
        for row in 0..ids.len() {
            self.states.push(stepped.handed_on.narrow(0, row, 1)?);
        }
        let logits = head_logits(self.head.as_deref(), self.target, &stepped.head_input)?;
        Ok(logits.to_vec2::<f32>()?.into_iter().map(Forecast::from).collect())
    }
}

fn ids(tokens: &[TargetTokenId]) -> Vec<u32> {
    tokens.iter().map(|token| token.0).collect()
}

impl DraftModel for MtpModel<'_> {
    fn taps(&self) -> Vec<Tap> {
        vec![Tap::FinalHidden]
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        self.head.as_ref().map(|head| head.vocabulary())
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.states.clear();
        self.readings.clear();
        if kept <= self.pairs {
            self.pairs = kept;
            self.waiting.clear();
        } else if kept < self.pairs + self.waiting_rows()? {
            let states = Tensor::cat(&self.waiting, 0)?;
            self.waiting = vec![states.narrow(0, 0, kept - self.pairs)?.force_contiguous()?];
        }
        self.cache.truncate(self.pairs);
        Ok(())
    }

    fn state(&self) -> DraftState<'_> {
        DraftState::Rows(DraftRows::new(self.block, &self.cache, self.pairs, &self.waiting))
    }

    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        (self.pairs, self.waiting) = rows.copy_to(&mut self.cache, tokens)?;
        Ok(())
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        self.waiting.push(features.final_hidden()?.clone());
        if self.waiting_rows()? > MOST_WAITING {
            self.states.clear();
            self.absorb(tokens, 1)?;
        }
        Ok(())
    }

    fn read_root(&mut self, context: DraftContext<'_>, _room: usize) -> Result<Forecast> {
        self.readings.clear();
        self.states.clear();
        let newest = self.absorb(context.tokens, 1)?;
        let root = context.tokens.len() - 1;
        let Some(newest) = newest.filter(|_| self.pairs + 1 == root) else {
            return Err(DecodeError::Features { seen: self.pairs, root });
        };
        self.waiting.clear();
        let ids = [context.tokens[root].0];
        let mut forecast = self.step((&ids, &newest), root - 1, [vec![0]])?;
        self.pairs += 1;
        Ok(forecast.pop().unwrap_or_else(|| Vec::new().into()))
    }

    fn read(&mut self, _context: DraftContext<'_>, level: &[Reading]) -> Result<Vec<Forecast>> {
        let first = self.readings.len();
        level.iter().for_each(|reading| self.readings.push(*reading));
        let paths: Vec<Vec<u32>> =
            (first..first + level.len()).map(|reading| self.readings.path(reading)).collect();
        let depth = paths.first().map_or(0, Vec::len);
        let ids: Vec<u32> = level.iter().map(|reading| reading.token.0).collect();
        let states: Vec<&Tensor> = level.iter().map(|r| &self.states[r.parent]).collect();
        let states = Tensor::cat(&states, 0)?;
        self.step((&ids, &states), self.pairs - 1 + depth, paths)
    }
}
