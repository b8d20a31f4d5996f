//! GLIDE: the draft's own window of keys, and the target's last-layer cache.
//!
//! The row of level `d` stands at token index `n + d − 1` (n: the root's index) and sees the
//! target's keys `0..n`, so its delay is exactly `d`, as in training. Its own keys depend on token
//! and position only: those of accepted tokens are made anew when the next round begins.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::attention::KeyRanges;
use longdraft_kernels::rope::RopeTable;
use longdraft_models::draft::glide::GlideDraft;
use longdraft_models::draft::{Seen, VocabularyMap};
use longdraft_models::target_model::{KeyValues, Target};

use super::held::{AnyDraft, Held};
use super::model::{Readings, turns_of};
use super::reduced_head::head_logits;
use super::window::DraftWindow;
use super::{
    Asked, Beside, DraftContext, DraftModel, DraftState, Drafter, Forecast, ModelDrafter,
    ReducedHead, Shared, Turn,
};
use crate::error::{DecodeError, Result};

/// A drafter, if this is a GLIDE layer.
pub(super) fn drafter<'a>(
    draft: &AnyDraft<'a>,
    target: &Target,
    head: Option<&Arc<ReducedHead>>,
) -> Result<Option<Box<dyn Drafter + 'a>>> {
    let Some(draft) = draft.of_kind() else { return Ok(None) };
    let model = GlideModel::new(draft, target)?;
    let model = match head {
        Some(head) => model.with_head(Arc::clone(head)),
        None => model,
    };
    Ok(Some(Box::new(ModelDrafter::new(model))))
}

/// A GLIDE layer at decoding.
pub struct GlideModel<'a> {
    draft: Held<'a, GlideDraft>,
    head: Option<Arc<ReducedHead>>,
    own: Own,
}

/// What one request has of its own.
struct Own {
    window: DraftWindow,
    readings: Readings,
    /// The window's keys, oldest first, then those of this round's readings.
    buffer: Option<KeyValues>,
}

impl<'a> GlideModel<'a> {
    /// A model for one request at a time, with a head over the whole vocabulary.
    ///
    /// # Errors
    /// - the device has no memory for the window
    pub fn new(draft: impl Into<Held<'a, GlideDraft>>, target: &Target) -> Result<Self> {
        let draft = draft.into();
        let config = draft.config();
        let window = DraftWindow::new(
            config.self_window + 1,
            config.num_key_value_heads,
            config.head_dim,
            target.device(),
        )?;
        let own = Own { window, readings: Readings::default(), buffer: None };
        Ok(Self { draft, head: None, own })
    }

    /// Proposes only the tokens of a reduced head.
    #[must_use]
    pub fn with_head(mut self, head: Arc<ReducedHead>) -> Self {
        self.head = Some(head);
        self
    }
}

impl Own {
    /// Which tokens the window lacks of a text.
    fn lacks(&mut self, known: usize) -> Range<usize> {
        let oldest = known.saturating_sub(self.window.slots());
        if self.window.held().end < oldest {
            self.window.restart_at(oldest);
        }
        self.window.held().end..known
    }

    /// Index of the tokens of a level.
    fn position(&self, depth: usize) -> u32 {
        (self.window.held().end - 1 + depth) as u32
    }

    /// What tokens of a level see of the draft's own keys: the visible part of the window, and of the readings their
    /// `paths`.
    fn seen(&self, depth: usize, paths: Vec<Vec<u32>>) -> Result<Seen> {
        let unread = || DecodeError::Shape("a level was asked for before the root".to_owned());
        let keys = self.buffer.clone().ok_or_else(unread)?;
        let held = self.window.held();
        // The oldest token that a query of this level still sees.
        let oldest = (held.end + depth).saturating_sub(self.window.slots()).max(held.start);
        let visible = (oldest.min(held.end) - held.start)..held.len();
        let skipped = oldest.saturating_sub(held.end);
        let ranges = KeyRanges::shared(&visible, paths.len());
        let ranges = ranges.with_singles(paths.into_iter().map(|path| {
            path[skipped.min(path.len())..].iter().map(|i| i + held.len() as u32).collect()
        }));
        Ok(Seen { keys, ranges: Arc::new(ranges) })
    }
}

/// Tokens of one request in a pass.
struct Tokens<'t> {
    context: DraftContext<'t>,
    ids: Vec<u32>,
    positions: Vec<u32>,
}

/// Embeddings `[T, H]` and angles of the tokens of several requests, one request after the other.
fn inputs(requests: &[Tokens<'_>]) -> Result<(Tensor, RopeTable)> {
    let none = || DecodeError::Shape("a pass without requests".to_owned());
    let target = requests.first().ok_or_else(none)?.context.target;
    let ids: Vec<u32> = requests.iter().flat_map(|tokens| tokens.ids.clone()).collect();
    let table = |tokens: &Tokens<'_>| {
        target.rope_for(tokens.context.cache).table(&tokens.positions, target.device())
    };
    let tables = requests.iter().map(table).collect::<candle_core::Result<Vec<_>>>()?;
    Ok((target.hold_ends()?.embed(&ids)?, RopeTable::concatenated(&tables)?))
}

/// What all requests read.
#[derive(Clone, Copy)]
struct Network<'n> {
    draft: &'n GlideDraft,
    head: Option<&'n ReducedHead>,
}

impl Network<'_> {
    /// Brings the windows of several requests up to their roots.
    fn catch_up(self, turns: &mut [(&mut Own, Turn<'_>)]) -> Result<()> {
        let (mut windows, mut requests) = (Vec::new(), Vec::new());
        for (own, turn) in turns.iter_mut() {
            let (context, lacks) = (turn.context, own.lacks(turn.context.tokens.len()));
            if lacks.is_empty() {
                continue;
            }
            let ids = context.tokens[lacks.clone()].iter().map(|token| token.0).collect();
            let positions = (lacks.start as u32..lacks.end as u32).collect();
            requests.push(Tokens { context, ids, positions });
            windows.push((&mut own.window, lacks.len()));
        }
        if requests.is_empty() {
            return Ok(());
        }
        let (embeddings, table) = inputs(&requests)?;
        let keys = self.draft.self_kv(&embeddings, &table)?;
        let mut first = 0;
        for (window, count) in windows {
            window.push(&rows(&keys, first..first + count)?)?;
            first += count;
        }
        Ok(())
    }

    /// What follows the roots of several requests.
    fn read_roots(self, turns: &mut [(&mut Own, Turn<'_>)]) -> Result<Vec<Vec<Forecast>>> {
        self.catch_up(turns)?;
        let (mut requests, mut paths) = (Vec::new(), Vec::new());
        for (own, turn) in turns.iter_mut() {
            let room = if let Asked::Root { room, .. } = turn.asked { room } else { 0 };
            own.readings.clear();
            own.buffer = Some(own.window.unrolled(room)?);
            let context = turn.context;
            let ids = vec![context.tokens[context.tokens.len() - 1].0];
            requests.push(Tokens { context, ids, positions: vec![own.position(0)] });
            paths.push(vec![Vec::new()]);
        }
        self.forecasts(turns, &inputs(&requests)?, paths)
    }

    /// What follows the tokens of a level of several requests.
    fn read_levels(self, turns: &mut [(&mut Own, Turn<'_>)]) -> Result<Vec<Vec<Forecast>>> {
        let (mut requests, mut places, mut paths) = (Vec::new(), Vec::new(), Vec::new());
        for (own, turn) in turns.iter_mut() {
            let (context, level) = (turn.context, turn.readings());
            let (first, of_level) = own.readings.add(level);
            let depth = of_level.first().map_or(0, Vec::len);
            let ids = level.iter().map(|reading| reading.token.0).collect();
            requests.push(Tokens {
                context,
                ids,
                positions: vec![own.position(depth); level.len()],
            });
            places.push(own.window.held().len() + first);
            paths.push(of_level);
        }
        let (embeddings, table) = inputs(&requests)?;
        let keys = self.draft.self_kv(&embeddings, &table)?;
        let mut first = 0;
        for (((own, _), place), paths) in turns.iter().zip(places).zip(&paths) {
            if let Some(buffer) = &own.buffer {
                put(buffer, place, &rows(&keys, first..first + paths.len())?)?;
            }
            first += paths.len();
        }
        self.forecasts(turns, &(embeddings, table), paths)
    }

    /// What follows tokens of several requests, of which `paths` are the readings that each of them sees.
    fn forecasts(
        self,
        turns: &[(&mut Own, Turn<'_>)],
        (embeddings, table): &(Tensor, RopeTable),
        paths: Vec<Vec<Vec<u32>>>,
    ) -> Result<Vec<Vec<Forecast>>> {
        let Some((_, first)) = turns.first() else { return Ok(Vec::new()) };
        let target = first.context.target;
        let counts: Vec<usize> = paths.iter().map(Vec::len).collect();
        let (mut seen, mut of_target) = (Vec::new(), Vec::new());
        for ((own, turn), paths) in turns.iter().zip(paths) {
            let (k, v) = turn.context.cache.last_layer()?;
            let verified = KeyRanges::shared(&(0..k.dim(0)?), paths.len());
            of_target.push(Seen { keys: KeyValues { k, v }, ranges: Arc::new(verified) });
            seen.push(own.seen(paths.first().map_or(0, Vec::len), paths)?);
        }
        let hidden = self.draft.forward_each(embeddings, table, (&seen, &of_target))?;
        let logits = head_logits(self.head, target, &hidden)?.to_vec2::<f32>()?;
        let mut forecasts = logits.into_iter().map(Forecast::from);
        Ok(counts.into_iter().map(|count| forecasts.by_ref().take(count).collect()).collect())
    }
}

fn rows(keys: &KeyValues, rows: Range<usize>) -> Result<KeyValues> {
    let of = |tensor: &Tensor| tensor.narrow(0, rows.start, rows.len());
    Ok(KeyValues { k: of(&keys.k)?, v: of(&keys.v)? })
}

/// Writes keys and values into a buffer at row `at`.
fn put(buffer: &KeyValues, at: usize, new: &KeyValues) -> Result<()> {
    let set = |buffer: &Tensor, new: &Tensor| buffer.slice_set(&new.contiguous()?, 0, at);
    set(&buffer.k, &new.k)?;
    set(&buffer.v, &new.v)?;
    Ok(())
}

impl DraftModel for GlideModel<'_> {
    fn reads_last_layer(&self) -> bool {
        true
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        self.head.as_ref().map(|head| head.vocabulary())
    }

    fn begin(&mut self, _kept: usize) -> Result<()> {
        // The window is cheap to fill again, and may hold tokens that were taken back.
        self.own.window.restart_at(0);
        Ok(())
    }

    fn state(&self) -> DraftState<'_> {
        DraftState::Nothing
    }

    fn shared(&mut self) -> Option<Shared<'_>> {
        Some(Shared::new(&*self.draft, self.head.as_ref(), &mut self.own))
    }

    fn read(&mut self, turn: Turn<'_>, beside: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        let Self { draft, head, own } = self;
        let network = Network { draft, head: head.as_deref() };
        let mut turns = turns_of(own, turn, beside)?;
        match turn.asked {
            Asked::Root { .. } => network.read_roots(&mut turns),
            Asked::After { .. } => network.read_levels(&mut turns),
        }
    }
}
