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
use longdraft_kernels::rope::RopeTable;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::eagle3::Eagle3Draft;
use longdraft_models::draft::{Draft, Seen, VocabularyMap};
use longdraft_models::target_model::{Features, KeyValues, KvCache, Tap, Target};

use super::held::{AnyDraft, Held};
use super::model::turns_of;
use super::pairs::Own;
use super::{
    Asked, Beside, DraftModel, DraftRows, DraftState, Drafter, Forecast, ModelDrafter, ReducedHead,
    Shared, Turn,
};
use crate::error::{DecodeError, Result};

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
    own: Own,
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
        Ok(Self { draft, own: Own::new(cache) })
    }
}

impl Own {
    /// Takes the waiting pairs whose token is known, if there are some.
    fn known(&mut self, tokens: &[TargetTokenId]) -> Result<Option<Known>> {
        let count = self.waiting.rows()?.min((tokens.len() - 1).saturating_sub(self.pairs));
        let Some(aux) = self.waiting.take(count)? else { return Ok(None) };
        let tokens = &tokens[self.pairs + 1..=self.pairs + count];
        let ids = tokens.iter().map(|token| token.0).collect();
        Ok(Some(Known { aux: aux.contiguous()?, ids }))
    }

    /// Appends some rows of a pass to the cache.
    fn append(&mut self, keys: &KeyValues, rows: Range<usize>) -> Result<()> {
        let of = |tensor: &Tensor| tensor.narrow(0, rows.start, rows.len());
        self.cache.reserve(rows.len())?;
        self.cache.append(0, &of(&keys.k)?, &of(&keys.v)?)?;
        self.cache.commit(rows.len());
        Ok(())
    }

    /// Committed pairs that the newest one and all that is drafted after it see.
    fn visible(&self, draft: &Eagle3Draft) -> Range<usize> {
        let newest = self.pairs - 1;
        let first = draft.config().attention_window.map_or(0, |w| newest.saturating_sub(w));
        first..self.pairs
    }

    /// What rows see of the committed pairs, and of readings by their numbers.
    fn seen(&self, draft: &Eagle3Draft, paths: Vec<Vec<u32>>) -> Result<Seen> {
        let own = |path: Vec<u32>| path.iter().map(|i| i + self.pairs as u32).collect();
        let ranges = KeyRanges::shared(&self.visible(draft), paths.len());
        let ranges = Arc::new(ranges.with_singles(paths.into_iter().map(own)));
        let (k, v) = self.cache.last_layer()?;
        Ok(Seen { keys: KeyValues { k, v }, ranges })
    }
}

/// Committed pairs to be read: features `[T, 3·Ht]` and tokens.
struct Known {
    aux: Tensor,
    ids: Vec<u32>,
}

/// Rows of several requests, one request after the other: states `[T, H]`, attention's input `[T, 2·H]`.
struct Rows {
    state: Tensor,
    input: Tensor,
}

/// Angles of rows at the positions of several requests.
fn angles(draft: &Eagle3Draft, positions: &[Vec<u32>]) -> Result<RopeTable> {
    let of_request = |positions: &Vec<u32>| -> Result<RopeTable> {
        let length = positions.iter().max().map_or(1, |last| last + 1);
        Ok(draft.rope_table(positions, &vec![length; positions.len()])?)
    };
    let tables = positions.iter().map(of_request).collect::<Result<Vec<_>>>()?;
    Ok(RopeTable::concatenated(&tables)?)
}

/// Reads committed pairs of several requests; the last one of each.
fn absorb(draft: &Eagle3Draft, requests: &mut [(&mut Own, Known)]) -> Result<Rows> {
    let aux: Vec<&Tensor> = requests.iter().map(|(_, known)| &known.aux).collect();
    let state = draft.fuse(&Tensor::cat(&aux, 0)?)?;
    let ids: Vec<u32> = requests.iter().flat_map(|(_, known)| known.ids.clone()).collect();
    let input = draft.attention_input(&draft.embed(&ids)?, &state)?;
    let positions = requests.iter().map(|(own, known)| -> Vec<u32> {
        (own.pairs as u32..(own.pairs + known.ids.len()) as u32).collect()
    });
    let table = angles(draft, &positions.collect::<Vec<_>>())?;
    let keys = draft.key_values(&input, &table)?;
    let (mut first, mut last) = (0, Vec::with_capacity(requests.len()));
    for (own, known) in requests {
        let rows = known.ids.len();
        own.cache.truncate(own.pairs);
        own.append(&keys, first..first + rows)?;
        own.pairs += rows;
        first += rows;
        last.push(first - 1);
    }
    let of_last = |tensor: &Tensor| -> Result<Tensor> {
        let rows = last.iter().map(|row| tensor.narrow(0, *row, 1));
        Ok(Tensor::cat(&rows.collect::<candle_core::Result<Vec<_>>>()?, 0)?)
    };
    Ok(Rows { state: of_last(&state)?, input: of_last(&input)? })
}

/// What follows the roots of several requests.
fn read_roots(
    draft: &Eagle3Draft,
    turns: &mut [(&mut Own, Turn<'_>)],
) -> Result<Vec<Vec<Forecast>>> {
    let mut known = Vec::with_capacity(turns.len());
    for (own, turn) in turns.iter_mut() {
        own.forget();
        let tokens = turn.context.tokens;
        let lacks = DecodeError::Features { seen: own.pairs, root: tokens.len() - 1 };
        let new = own.known(tokens)?.ok_or(lacks)?;
        known.push((&mut **own, new));
    }
    let newest = absorb(draft, &mut known)?;
    let (mut positions, mut seen) = (Vec::new(), Vec::with_capacity(turns.len()));
    for (own, turn) in turns.iter() {
        let root = turn.context.tokens.len() - 1;
        if own.pairs != root {
            return Err(DecodeError::Features { seen: own.pairs, root });
        }
        positions.push(vec![root as u32 - 1]);
        seen.push(own.seen(draft, vec![Vec::new()])?);
    }
    finish(draft, turns, (&newest, &angles(draft, &positions)?), &seen)
}

/// What follows the tokens of a level of several requests.
fn read_levels(
    draft: &Eagle3Draft,
    turns: &mut [(&mut Own, Turn<'_>)],
) -> Result<Vec<Vec<Forecast>>> {
    let (mut ids, mut states) = (Vec::new(), Vec::new());
    let (mut positions, mut paths) = (Vec::new(), Vec::new());
    for (own, turn) in turns.iter_mut() {
        let level = turn.readings();
        let (_, of_level) = own.readings.add(level);
        let depth = of_level.first().map_or(0, Vec::len);
        positions.push(vec![(own.pairs - 1 + depth) as u32; level.len()]);
        ids.extend(level.iter().map(|reading| reading.token.0));
        states.extend(level.iter().map(|reading| own.states[reading.parent].clone()));
        paths.push(of_level);
    }
    let state = Tensor::cat(&states, 0)?;
    let input = draft.attention_input(&draft.embed(&ids)?, &state)?;
    let table = angles(draft, &positions)?;
    let keys = draft.key_values(&input, &table)?;
    let (mut first, mut seen) = (0, Vec::with_capacity(turns.len()));
    for ((own, _), paths) in turns.iter_mut().zip(paths) {
        own.append(&keys, first..first + paths.len())?;
        first += paths.len();
        seen.push(own.seen(draft, paths)?);
    }
    finish(draft, turns, (&Rows { state, input }, &table), &seen)
}

/// The layer and the head over rows of several requests, which hand on their states.
fn finish(
    draft: &Eagle3Draft,
    turns: &mut [(&mut Own, Turn<'_>)],
    (rows, table): (&Rows, &RopeTable),
    seen: &[Seen],
) -> Result<Vec<Vec<Forecast>>> {
    let hidden = draft.layer(&rows.state, &rows.input, table, seen)?;
    let fed_back = draft.fed_back(&hidden)?;
    // Nothing trains here: a head of quantised blocks takes no input that carries a gradient.
    let input = draft.head_input(&hidden)?.detach();
    let logits = draft.head_matrix()?.linear(&input, None)?.to_vec2::<f32>()?;
    let (mut row, mut logits) = (0, logits.into_iter());
    let mut said = Vec::with_capacity(turns.len());
    for ((own, _), seen) in turns.iter_mut().zip(seen) {
        let count = seen.ranges.queries();
        for at in row..row + count {
            own.states.push(fed_back.narrow(0, at, 1)?);
        }
        row += count;
        said.push(logits.by_ref().take(count).map(Forecast::from).collect());
    }
    Ok(said)
}

impl DraftModel for Eagle3Model<'_> {
    fn taps(&self) -> Vec<Tap> {
        self.draft.taps()
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        Some(self.draft.vocabulary())
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.own.begin(kept)
    }

    fn state(&self) -> DraftState<'_> {
        self.own.state(&*self.draft)
    }

    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        self.own.take_over(rows, tokens)
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        let Self { draft, own } = self;
        if own.waiting.push(features.hidden_of(&draft.config().target_layers)?)? {
            own.states.clear();
            if let Some(known) = own.known(tokens)? {
                absorb(draft, &mut [(own, known)])?;
            }
        }
        Ok(())
    }

    fn shared(&mut self) -> Option<Shared<'_>> {
        Some(Shared::new(&*self.draft, None, &mut self.own))
    }

    fn read(&mut self, turn: Turn<'_>, beside: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        let Self { draft, own } = self;
        let mut turns = turns_of(own, turn, beside)?;
        match turn.asked {
            Asked::Root { .. } => read_roots(draft, &mut turns),
            Asked::After { .. } => read_levels(draft, &mut turns),
        }
    }
}
