//! EAGLE-3: a layer over the target's features and its own states.
//!
//! The pair at index `P` is token `P + 1` with the target's features of `P`, at position `P`. Pairs
//! of committed tokens are rows of the draft's cache; the newest one proposes what follows the
//! root. A drafted token reads the state of the node that it follows, stands one position after
//! it, and sees the committed pairs, its ancestors and itself: test-time steps, as in training. What
//! was drafted is forgotten, and accepted tokens are read again with the target's features.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::attention::KeyRanges;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::eagle3::Eagle3Draft;
use longdraft_models::draft::{Draft, VocabularyMap};
use longdraft_models::target_model::{Features, KeyValues, KvCache, Tap, Target};

use super::held::{AnyDraft, Held};
use super::model::Readings;
use super::{
    DraftContext, DraftModel, DraftRows, DraftState, Drafter, Forecast, ModelDrafter, Reading,
    ReducedHead,
};
use crate::error::{DecodeError, Result};

/// Pairs that wait for drafting at most; more are read at once, so that memory stays small.
const MOST_WAITING: usize = 128;

/// A drafter, if this is an EAGLE-3 draft. It has a head of its own.
pub(super) fn drafter<'a>(
    draft: &AnyDraft<'a>,
    target: &Target,
    _: Option<&Arc<ReducedHead>>,
) -> Result<Option<Box<dyn Drafter + 'a>>> {
    let Some(draft) = draft.of_kind() else { return Ok(None) };
    Ok(Some(Box::new(ModelDrafter::new(Eagle3Model::new(draft, target)?))))
}

/// An EAGLE-3 draft at decoding.
pub struct Eagle3Model<'a> {
    draft: Held<'a, Eagle3Draft>,
    /// Keys and values of committed pairs, then of this round's readings.
    cache: KvCache,
    /// Committed pairs in the cache.
    pairs: usize,
    /// Features `[T, 3·Ht]` of the tokens from `pairs` on.
    waiting: Vec<Tensor>,
    /// What the newest pair and the readings hand on, `[1, H]` each.
    states: Vec<Tensor>,
    readings: Readings,
}

impl<'a> Eagle3Model<'a> {
    /// A model for one request at a time.
    ///
    /// # Errors
    /// - the device has no memory for its cache
    pub fn new(draft: impl Into<Held<'a, Eagle3Draft>>, target: &Target) -> Result<Self> {
        let draft = draft.into();
        let config = draft.config();
        let cache = KvCache::new(1, config.num_key_value_heads, config.head_dim, target.device())?;
        Ok(Self {
            draft,
            cache,
            pairs: 0,
            waiting: Vec::new(),
            states: Vec::new(),
            readings: Readings::default(),
        })
    }

    fn waiting_rows(&self) -> Result<usize> {
        let rows = self.waiting.iter().map(|aux| aux.dim(0));
        Ok(rows.sum::<candle_core::Result<usize>>()?)
    }

    /// Reads the waiting pairs whose token is known; returns attention's input and states of the
    /// last one.
    fn absorb(&mut self, tokens: &[TargetTokenId]) -> Result<Option<Newest>> {
        let waiting = self.waiting_rows()?;
        let count = waiting.min((tokens.len() - 1).saturating_sub(self.pairs));
        if count == 0 {
            return Ok(None);
        }
        let aux = Tensor::cat(&self.waiting, 0)?;
        self.waiting.clear();
        if count < waiting {
            self.waiting.push(own_rows(&aux, count..waiting)?);
        }
        let ids: Vec<u32> =
            tokens[self.pairs + 1..=self.pairs + count].iter().map(|token| token.0).collect();
        let state = self.draft.fuse(&aux.narrow(0, 0, count)?.contiguous()?)?;
        let input = self.draft.attention_input(&self.draft.embed(&ids)?, &state)?;
        let positions = self.pairs as u32..(self.pairs + count) as u32;
        let table = self.table(&positions.collect::<Vec<_>>())?;
        self.cache.truncate(self.pairs);
        self.append(&self.draft.key_values(&input, &table)?)?;
        self.pairs += count;
        let last = |tensor: &Tensor| tensor.narrow(0, count - 1, 1)?.contiguous();
        Ok(Some(Newest { state: last(&state)?, input: last(&input)? }))
    }

    fn append(&mut self, new: &KeyValues) -> Result<()> {
        let rows = new.k.dim(0)?;
        self.cache.reserve(rows)?;
        self.cache.append(0, &new.k, &new.v)?;
        self.cache.commit(rows);
        Ok(())
    }

    fn keys(&self) -> Result<KeyValues> {
        let (k, v) = self.cache.last_layer()?;
        Ok(KeyValues { k, v })
    }

    fn table(&self, positions: &[u32]) -> Result<longdraft_kernels::rope::RopeTable> {
        let length = positions.iter().max().map_or(1, |last| last + 1);
        Ok(self.draft.rope_table(positions, &vec![length; positions.len()])?)
    }

    /// Committed pairs that the newest one and all that is drafted after it see.
    fn visible(&self) -> Range<usize> {
        let newest = self.pairs - 1;
        let first = self.draft.config().attention_window.map_or(0, |w| newest.saturating_sub(w));
        first..self.pairs
    }

    fn logits(&self, hidden: &Tensor) -> Result<Vec<Vec<f32>>> {
        // Nothing trains here: a head of quantised blocks takes no input that carries a gradient.
        let input = self.draft.head_input(hidden)?.detach();
        Ok(self.draft.head_matrix()?.linear(&input, None)?.to_vec2()?)
    }
}

/// Rows with memory of their own: a view would keep all others alive.
fn own_rows(tensor: &Tensor, rows: Range<usize>) -> Result<Tensor> {
    Ok(tensor.narrow(0, rows.start, rows.len())?.force_contiguous()?)
}

/// The newest committed pair: state `[1, H]`, attention's input `[1, 2·H]`.
struct Newest {
    state: Tensor,
    input: Tensor,
}

impl DraftModel for Eagle3Model<'_> {
    fn taps(&self) -> Vec<Tap> {
        self.draft.taps()
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        Some(self.draft.vocabulary())
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.states.clear();
        self.readings.clear();
        if kept <= self.pairs {
            self.pairs = kept;
            self.waiting.clear();
        } else if kept < self.pairs + self.waiting_rows()? {
            let aux = Tensor::cat(&self.waiting, 0)?;
            self.waiting = vec![own_rows(&aux, 0..kept - self.pairs)?];
        }
        self.cache.truncate(self.pairs);
        Ok(())
    }

    fn state(&self) -> DraftState<'_> {
        DraftState::Rows(DraftRows::new(&*self.draft, &self.cache, self.pairs, &self.waiting))
    }

    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        (self.pairs, self.waiting) = rows.copy_to(&mut self.cache, tokens)?;
        Ok(())
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        self.waiting.push(features.hidden_of(&self.draft.config().target_layers)?);
        if self.waiting_rows()? > MOST_WAITING {
            self.states.clear();
            self.absorb(tokens)?;
        }
        Ok(())
    }

    fn read_root(&mut self, context: DraftContext<'_>, _room: usize) -> Result<Forecast> {
        self.readings.clear();
        let newest = self.absorb(context.tokens)?;
        let root = context.tokens.len() - 1;
        let Some(newest) = newest.filter(|_| self.pairs == root) else {
            return Err(DecodeError::Features { seen: self.pairs, root });
        };
        let table = self.table(&[root as u32 - 1])?;
        let ranges = Arc::new(KeyRanges::shared(&self.visible(), 1));
        let Newest { state, input } = &newest;
        let hidden = self.draft.layer(state, input, &table, &self.keys()?, &ranges)?;
        self.states = vec![self.draft.fed_back(&hidden)?];
        Ok(self.logits(&hidden)?.pop().unwrap_or_default().into())
    }

    fn read(&mut self, _context: DraftContext<'_>, level: &[Reading]) -> Result<Vec<Forecast>> {
        let first = self.readings.len();
        level.iter().for_each(|reading| self.readings.push(*reading));
        let paths: Vec<Vec<u32>> =
            (first..first + level.len()).map(|reading| self.readings.path(reading)).collect();
        let depth = paths.first().map_or(0, Vec::len);
        let ids: Vec<u32> = level.iter().map(|reading| reading.token.0).collect();
        let states: Vec<&Tensor> = level.iter().map(|r| &self.states[r.parent]).collect();
        let state = Tensor::cat(&states, 0)?;
        let input = self.draft.attention_input(&self.draft.embed(&ids)?, &state)?;
        let position = (self.pairs - 1 + depth) as u32;
        let table = self.table(&vec![position; ids.len()])?;
        self.append(&self.draft.key_values(&input, &table)?)?;
        let own = |path: Vec<u32>| path.iter().map(|i| i + self.pairs as u32).collect();
        let ranges =
            KeyRanges::shared(&self.visible(), ids.len()).with_singles(paths.into_iter().map(own));
        let hidden = self.draft.layer(&state, &input, &table, &self.keys()?, &Arc::new(ranges))?;
        let fed_back = self.draft.fed_back(&hidden)?;
        for row in 0..ids.len() {
            self.states.push(fed_back.narrow(0, row, 1)?);
        }
        Ok(self.logits(&hidden)?.into_iter().map(Forecast::from).collect())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{CpuStorage, Device, Storage};

    use super::*;

    #[test]
    fn kept_rows_hold_no_others_in_memory() {
        let all = Tensor::arange(0.0_f32, 12.0, &Device::Cpu).and_then(|all| all.reshape((6, 2)));
        let rows = own_rows(&all.expect("tensor"), 1..3).expect("rows");
        assert_eq!(rows.to_vec2::<f32>().expect("values"), [[2.0, 3.0], [4.0, 5.0]]);
        let (storage, _) = rows.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(values)) = &*storage else { panic!("not on the CPU") };
        assert_eq!(values.len(), 4);
    }
}
