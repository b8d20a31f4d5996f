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
use longdraft_models::target_model::{Features, MtpBlock, Pairs, Tap, Target};

use super::model::turns_of;
use super::pairs::Own;
use super::reduced_head::head_logits;
use super::{
    Asked, Beside, DraftModel, DraftRows, DraftState, Forecast, ReducedHead, Shared, Turn,
};
use crate::error::{DecodeError, Result};

/// A block at decoding, for one request at a time.
pub struct MtpModel<'a> {
    block: &'a MtpBlock,
    target: &'a Target,
    head: Option<Arc<ReducedHead>>,
    own: Own,
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
        let own = Own::new(block.new_cache(target)?);
        Ok(Self { block, target, head: head.map(Arc::clone), own })
    }

    fn parts(&mut self) -> (Network<'_>, &mut Own) {
        let Self { block, target, head, own } = self;
        (Network { block, target, head: head.as_deref() }, own)
    }
}

/// Pairs of one request in a pass.
struct Level {
    ids: Vec<u32>,
    states: Tensor,
    positions: Vec<u32>,
    /// The readings that each sees.
    paths: Vec<Vec<u32>>,
}

impl Own {
    /// Takes the waiting pairs whose token is known, but for the last of them, which waits on: these, if there are
    /// some, and the state of that one, `[1, H]`.
    fn all_but_last_known(
        &mut self,
        tokens: &[TargetTokenId],
    ) -> Result<(Option<Level>, Option<Tensor>)> {
        self.cache.truncate(self.pairs);
        let known = self.waiting.rows()?.min((tokens.len() - 1).saturating_sub(self.pairs));
        let Some(count) = known.checked_sub(1) else { return Ok((None, None)) };
        let states = self.waiting.take(count)?;
        let newest = Tensor::cat(self.waiting.features(), 0)?.narrow(0, 0, 1)?;
        let ids = tokens[self.pairs + 1..=self.pairs + count].iter().map(|token| token.0);
        let read = states.map(|states| Level {
            ids: ids.collect(),
            states,
            positions: (self.pairs as u32..(self.pairs + count) as u32).collect(),
            paths: Vec::new(),
        });
        Ok((read, Some(newest.force_contiguous()?)))
    }
}

/// What all requests read.
#[derive(Clone, Copy)]
struct Network<'n> {
    block: &'n MtpBlock,
    target: &'n Target,
    head: Option<&'n ReducedHead>,
}

impl Network<'_> {
    /// Runs `pass` over the pairs of several requests, one request after the other.
    fn with_pairs<R>(
        levels: &[&Level],
        pass: impl FnOnce(Pairs<'_>) -> longdraft_models::Result<R>,
    ) -> Result<R> {
        let ids: Vec<u32> = levels.iter().flat_map(|level| level.ids.clone()).collect();
        let position_ids: Vec<u32> =
            levels.iter().flat_map(|level| level.positions.clone()).collect();
        let states: Vec<&Tensor> = levels.iter().map(|level| &level.states).collect();
        let states = &Tensor::cat(&states, 0)?;
        Ok(pass(Pairs { ids: &ids, states, position_ids: &position_ids })?)
    }

    /// Reads committed pairs of several requests.
    fn absorb(self, requests: &mut [(&mut Own, Level)]) -> Result<()> {
        if requests.is_empty() {
            return Ok(());
        }
        let (mut levels, mut sequences) = (Vec::new(), Vec::new());
        for (own, level) in requests {
            own.pairs += level.ids.len();
            levels.push(&*level);
            sequences.push((level.ids.len(), &mut own.cache));
        }
        Self::with_pairs(&levels, |pairs| self.block.read_each(self.target, pairs, &mut sequences))
    }

    /// What follows the roots of several requests.
    fn read_roots(self, turns: &mut [(&mut Own, Turn<'_>)]) -> Result<Vec<Vec<Forecast>>> {
        let (mut read, mut newest) = (Vec::new(), Vec::with_capacity(turns.len()));
        for (own, turn) in turns.iter_mut() {
            own.forget();
            let (tokens, pairs) = (turn.context.tokens, own.pairs);
            let root = tokens.len() - 1;
            let (level, state) = own.all_but_last_known(tokens)?;
            let count = level.as_ref().map_or(0, |level| level.ids.len());
            let Some(states) = state.filter(|_| pairs + count + 1 == root) else {
                return Err(DecodeError::Features { seen: pairs + count, root });
            };
            own.waiting.keep(0)?;
            let (ids, positions) = (vec![tokens[root].0], vec![root as u32 - 1]);
            newest.push(Level { ids, states, positions, paths: vec![vec![0]] });
            if let Some(level) = level {
                read.push((&mut **own, level));
            }
        }
        self.absorb(&mut read)?;
        let said = self.step(turns, &newest)?;
        turns.iter_mut().for_each(|(own, _)| own.pairs += 1);
        Ok(said)
    }

    /// What follows the tokens of a level of several requests.
    fn read_levels(self, turns: &mut [(&mut Own, Turn<'_>)]) -> Result<Vec<Vec<Forecast>>> {
        let mut levels = Vec::with_capacity(turns.len());
        for (own, turn) in turns.iter_mut() {
            let level = turn.readings();
            let (_, paths) = own.readings.add(level);
            let position = own.pairs - 1 + paths.first().map_or(0, Vec::len);
            let ids: Vec<u32> = level.iter().map(|reading| reading.token.0).collect();
            let states: Vec<&Tensor> = level.iter().map(|r| &own.states[r.parent]).collect();
            let states = Tensor::cat(&states, 0)?;
            levels.push(Level { positions: vec![position as u32; ids.len()], ids, states, paths });
        }
        self.step(turns, &levels)
    }

    /// Runs pairs of several requests that see their caches and their own paths of readings.
    fn step(
        self,
        turns: &mut [(&mut Own, Turn<'_>)],
        levels: &[Level],
    ) -> Result<Vec<Vec<Forecast>>> {
        let mut sequences = Vec::with_capacity(turns.len());
        for ((own, _), level) in turns.iter_mut().zip(levels) {
            let pairs = own.pairs as u32;
            let path = |path: &Vec<u32>| path.iter().map(|i| i + pairs).collect();
            let ranges = KeyRanges::shared(&(0..own.pairs), level.ids.len());
            let ranges = ranges.with_singles(level.paths.iter().map(path));
            sequences.push((ranges, &mut own.cache));
        }
        let stepped = Self::with_pairs(&levels.iter().collect::<Vec<_>>(), |pairs| {
            self.block.step_each(self.target, pairs, &mut sequences)
        })?;
        let logits = head_logits(self.head, self.target, &stepped.head_input)?;
        let mut forecasts = logits.to_vec2::<f32>()?.into_iter().map(Forecast::from);
        let (mut row, mut said) = (0, Vec::with_capacity(turns.len()));
        for ((own, _), level) in turns.iter_mut().zip(levels) {
            for at in row..row + level.ids.len() {
                own.states.push(stepped.handed_on.narrow(0, at, 1)?);
            }
            row += level.ids.len();
            said.push(forecasts.by_ref().take(level.ids.len()).collect());
        }
        Ok(said)
    }
}

impl DraftModel for MtpModel<'_> {
    fn taps(&self) -> Vec<Tap> {
        vec![Tap::FinalHidden]
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        self.head.as_ref().map(|head| head.vocabulary())
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.own.begin(kept)
    }

    fn state(&self) -> DraftState<'_> {
        self.own.state(self.block)
    }

    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        self.own.take_over(rows, tokens)
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        let (network, own) = self.parts();
        if own.waiting.push(features.final_hidden()?.clone())? {
            own.states.clear();
            if let (Some(level), _) = own.all_but_last_known(tokens)? {
                network.absorb(&mut [(own, level)])?;
            }
        }
        Ok(())
    }

    fn shared(&mut self) -> Option<Shared<'_>> {
        Some(Shared::new(self.block, self.head.as_ref(), &mut self.own))
    }

    fn read(&mut self, turn: Turn<'_>, beside: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        let (network, own) = self.parts();
        let mut turns = turns_of(own, turn, beside)?;
        match turn.asked {
            Asked::Root { .. } => network.read_roots(&mut turns),
            Asked::After { .. } => network.read_levels(&mut turns),
        }
    }
}
