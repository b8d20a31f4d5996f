//! GLIDE: the draft's own window of keys, and the target's last-layer cache.
//!
//! The row of level `d` stands at token index `n + d − 1` (n: the root's index) and sees the
//! target's keys `0..n`, so its delay is exactly `d`, as in training. Its own keys depend on token
//! and position only: those of accepted tokens are made anew when the next round begins.

use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::attention::KeyRanges;
use longdraft_models::draft::VocabularyMap;
use longdraft_models::draft::glide::{CrossContext, GlideDraft};
use longdraft_models::target_model::{KeyValues, Target};

use super::held::{AnyDraft, Held};
use super::model::Readings;
use super::reduced_head::head_logits;
use super::window::DraftWindow;
use super::{
    DraftContext, DraftModel, DraftState, Drafter, Forecast, ModelDrafter, Reading, ReducedHead,
};
use crate::error::Result;

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
    window: DraftWindow,
    head: Option<Arc<ReducedHead>>,
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
        Ok(Self { draft, window, head: None, readings: Readings::default(), buffer: None })
    }

    /// Proposes only the tokens of a reduced head.
    #[must_use]
    pub fn with_head(mut self, head: Arc<ReducedHead>) -> Self {
        self.head = Some(head);
        self
    }

    /// Keys and values of tokens at `positions`.
    fn self_kv(
        &self,
        context: DraftContext<'_>,
        ids: &[u32],
        positions: &[u32],
    ) -> Result<KeyValues> {
        let target = context.target;
        let table = target.rope_for(context.cache).table(positions, target.device())?;
        Ok(self.draft.self_kv(&target.hold_ends()?.embed(ids)?, &table)?)
    }

    /// Brings the window up to the root.
    fn catch_up(&mut self, context: DraftContext<'_>) -> Result<()> {
        let known = context.tokens.len();
        let oldest = known.saturating_sub(self.window.slots());
        if self.window.held().end < oldest {
            self.window.restart_at(oldest);
        }
        let first = self.window.held().end;
        if first < known {
            let ids: Vec<u32> = context.tokens[first..].iter().map(|token| token.0).collect();
            let positions: Vec<u32> = (first as u32..known as u32).collect();
            self.window.push(&self.self_kv(context, &ids, &positions)?)?;
        }
        Ok(())
    }

    /// Logits of tokens at `positions`, all at one level; `paths` are places of the buffer beside
    /// the visible part of the window.
    fn logits(
        &self,
        context: DraftContext<'_>,
        ids: &[u32],
        depth: usize,
        paths: Vec<Vec<u32>>,
    ) -> Result<Vec<Vec<f32>>> {
        let target = context.target;
        let Some(buffer) = &self.buffer else { return Ok(Vec::new()) };
        let (k, v) = context.cache.last_layer()?;
        let verified = k.dim(0)?;
        let last_kv = KeyValues { k, v };
        let cross = KeyRanges::shared(&(0..verified), ids.len());
        let cross = CrossContext { last_kv: &last_kv, ranges: Arc::new(cross) };
        let held = self.window.held();
        let newest = held.end - 1 + depth;
        // The oldest token that a query at `newest` still sees.
        let oldest = (newest + 1).saturating_sub(self.window.slots()).max(held.start);
        let visible = (oldest.min(held.end) - held.start)..held.len();
        let skipped = oldest.saturating_sub(held.end);
        let paths = paths.into_iter().map(|path| {
            path[skipped.min(path.len())..].iter().map(|i| i + held.len() as u32).collect()
        });
        let own = Arc::new(KeyRanges::shared(&visible, ids.len()).with_singles(paths));
        let position = newest as u32;
        let table =
            target.rope_for(context.cache).table(&vec![position; ids.len()], target.device())?;
        let embeddings = target.hold_ends()?.embed(ids)?;
        let hidden = self.draft.forward_cached(&embeddings, &table, buffer, &own, &cross)?;
        Ok(head_logits(self.head.as_deref(), target, &hidden)?.to_vec2()?)
    }
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
        self.window.restart_at(0);
        Ok(())
    }

    fn state(&self) -> DraftState<'_> {
        DraftState::Nothing
    }

    fn read_root(&mut self, context: DraftContext<'_>, room: usize) -> Result<Forecast> {
        self.catch_up(context)?;
        self.readings.clear();
        self.buffer = Some(self.window.unrolled(room)?);
        let root = context.tokens[context.tokens.len() - 1].0;
        let mut logits = self.logits(context, &[root], 0, vec![Vec::new()])?;
        Ok(logits.pop().unwrap_or_default().into())
    }

    fn read(&mut self, context: DraftContext<'_>, level: &[Reading]) -> Result<Vec<Forecast>> {
        let first = self.readings.len();
        level.iter().for_each(|reading| self.readings.push(*reading));
        let paths: Vec<Vec<u32>> =
            (first..first + level.len()).map(|reading| self.readings.path(reading)).collect();
        let depth = paths.first().map_or(0, Vec::len);
        let ids: Vec<u32> = level.iter().map(|reading| reading.token.0).collect();
        let held = self.window.held();
        let position = (held.end - 1 + depth) as u32;
        let kv = self.self_kv(context, &ids, &vec![position; ids.len()])?;
        if let Some(buffer) = &self.buffer {
            put(buffer, held.len() + first, &kv)?;
        }
        let logits = self.logits(context, &ids, depth, paths)?;
        Ok(logits.into_iter().map(Forecast::from).collect())
    }
}
