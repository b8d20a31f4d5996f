//! Block drafts: one pass over the root and mask tokens proposes all tokens of a block. What DFlash2's
//! selector and DSpark's chain make of the tokens before a slot stands in files of their own.
//!
//! The draft's keys of the context come from the target's features alone, so they are made as soon as
//! the features are there, each once. The keys of a block are forgotten with its round. A block has as
//! many slots as in training, because slots see those after them, unless the draft is causal; how many of
//! its tokens are proposed is another matter.

use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::rows::select_rows;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::block::{Anchor, BlockDraft, Chain, Visible};
use longdraft_models::draft::{Draft, VocabularyMap};
use longdraft_models::target_model::{Features, KvCache, Tap, Target};

use super::chained::{Chained, confidences};
use super::selected::Selected;
use super::{BlockDrafter, BlockModel, Chosen};
use crate::drafter::held::{AnyDraft, Held};
use crate::drafter::reduced_head::{head_logits, head_products};
use crate::drafter::{DraftContext, DraftRows, DraftState, Drafter, Forecast, ReducedHead};
use crate::error::{DecodeError, Result};

/// A drafter, if this is a block draft.
pub(in crate::drafter) fn drafter<'a>(
    draft: &AnyDraft<'a>,
    target: &Target,
    head: Option<&Arc<ReducedHead>>,
) -> Result<Option<Box<dyn Drafter + 'a>>> {
    let Some(draft) = draft.of_kind() else { return Ok(None) };
    let model = BlockDraftModel::new(draft, target)?;
    let model = match head {
        Some(head) => model.with_head(Arc::clone(head))?,
        None => model,
    };
    Ok(Some(Box::new(BlockDrafter::new(model))))
}

/// A block draft at decoding.
pub struct BlockDraftModel<'a> {
    draft: Held<'a, BlockDraft>,
    /// Keys and values of committed tokens.
    cache: KvCache,
    head: Option<Arc<ReducedHead>>,
    /// The chain's output matrix for the tokens of a reduced head, `[Vd, r]`.
    reduced: Option<Tensor>,
    /// The round's slots, that of the first token after the root first.
    slots: Slots,
}

/// What a pass left for the slots that propose.
enum Slots {
    /// The same after whatever tokens.
    Independent(Vec<Forecast>),
    /// Candidates of a selector.
    Selected(Selected),
    /// Of a chain.
    Chained(Chained),
}

impl<'a> BlockDraftModel<'a> {
    /// A model for one request at a time, with a head over the whole vocabulary.
    ///
    /// # Errors
    /// - the device has no memory for its cache
    pub fn new(draft: impl Into<Held<'a, BlockDraft>>, target: &Target) -> Result<Self> {
        let draft = draft.into();
        let config = draft.config();
        let (layers, heads) = (config.layers.len(), config.num_key_value_heads);
        Ok(Self {
            cache: KvCache::new(layers, heads, config.head_dim, target.device())?,
            draft,
            head: None,
            reduced: None,
            slots: Slots::Independent(Vec::new()),
        })
    }

    /// Proposes only the tokens of a reduced head.
    ///
    /// # Errors
    /// - the head is of another vocabulary
    pub fn with_head(mut self, head: Arc<ReducedHead>) -> Result<Self> {
        if let Some(chain) = self.draft.chain().filter(Chain::is_sequential) {
            let kept: Vec<u32> = head.vocabulary().kept().iter().map(|token| token.0).collect();
            self.reduced = Some(select_rows(&chain.output()?.detach(), &kept)?);
        }
        self.head = Some(head);
        Ok(self)
    }

    /// What slots with these states, `[G, H]`, propose. All of them go through the head at once.
    fn slots(&self, target: &Target, states: Tensor) -> Result<Slots> {
        let head = self.head.as_deref();
        let sequential = self.draft.chain().is_some_and(|chain| chain.is_sequential());
        if sequential && self.draft.selector().is_none() {
            let products = head_products(head, target, &states)?.to_vec2()?;
            return Ok(Slots::Chained(Chained::new(states, products, target.bend())));
        }
        let logits = head_logits(head, target, &states)?;
        if let Some(selector) = self.draft.selector() {
            let kept = head.map(|head| head.vocabulary().kept());
            let selected = Selected::new(selector, (&states, &logits), kept)?;
            return Ok(Slots::Selected(selected));
        }
        let logits = logits.to_vec2()?;
        let confidence = match self.draft.chain() {
            Some(chain) => confidences(chain, &states, None)?,
            None => None,
        };
        let mut confidence = confidence.into_iter().flatten();
        let forecast =
            |logits| Forecast { confidence: confidence.next(), ..Forecast::from(logits) };
        Ok(Slots::Independent(logits.into_iter().map(forecast).collect()))
    }

    /// Hidden states `[G, H]` of the block that begins with a token at index `root`, at least of its
    /// first `needed` slots.
    fn block(&mut self, token: TargetTokenId, root: usize, needed: usize) -> Result<Tensor> {
        let config = self.draft.config();
        // What no slot before it sees need not run.
        let is_causal = config.layers.iter().all(|kind| config.is_causal_in(*kind));
        let slots = if is_causal { needed } else { config.block_size };
        let (mut ids, mut positions) = config.inputs(std::iter::once((token.0, root as u32)));
        ids.truncate(slots);
        positions.truncate(slots);
        let anchor = Anchor { index: root, document_start: 0 };
        let visible = Visible::new(config, &[anchor], slots, root);
        Ok(self.draft.blocks_cached(&ids, &positions, &mut self.cache, &visible)?)
    }
}

impl BlockModel for BlockDraftModel<'_> {
    fn taps(&self) -> Vec<Tap> {
        self.draft.taps()
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        self.head.as_ref().map(|head| head.vocabulary())
    }

    fn block_len(&self) -> usize {
        self.draft.config().proposals()
    }

    fn tells_confidence(&self) -> bool {
        self.draft.config().chain.is_some_and(|chain| chain.confidence.is_some())
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.slots = Slots::Independent(Vec::new());
        self.cache.truncate(kept);
        Ok(())
    }

    fn state(&self) -> DraftState<'_> {
        DraftState::Rows(DraftRows::new(&*self.draft, &self.cache, self.cache.len(), &[]))
    }

    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        rows.copy_to(&mut self.cache, tokens)?;
        Ok(())
    }

    fn observe(&mut self, _: &[TargetTokenId], features: &Features) -> Result<()> {
        let states = features.hidden_of(&self.draft.config().target_layers)?;
        let (first, rows) = (self.cache.len(), states.dim(0)?);
        let positions: Vec<u32> = (first as u32..(first + rows) as u32).collect();
        self.cache.reserve(rows)?;
        for (layer, new) in self.draft.context(&states, &positions)?.iter().enumerate() {
            self.cache.append(layer, &new.k, &new.v)?;
        }
        self.cache.commit(rows);
        Ok(())
    }

    fn run(&mut self, context: DraftContext<'_>, depth: usize) -> Result<()> {
        self.slots = Slots::Independent(Vec::new());
        let root = context.tokens.len() - 1;
        if self.cache.len() != root {
            return Err(DecodeError::Features { seen: self.cache.len(), root });
        }
        let depth = depth.min(self.block_len());
        // Without sequential heads slot 0 proposes nothing.
        let first = usize::from(self.draft.chain().is_none());
        let states = self.block(context.tokens[root], root, first + depth)?;
        let states = states.detach().narrow(0, first, depth)?.contiguous()?;
        self.slots = self.slots(context.target, states)?;
        Ok(())
    }

    fn forecasts(&mut self, slot: usize, before: &[Chosen]) -> Result<Vec<Forecast>> {
        let lost = || DecodeError::Shape("the slots are of another draft".to_owned());
        match &mut self.slots {
            Slots::Independent(slots) => {
                let forecast = slots.get(slot).ok_or_else(|| beyond(slot))?;
                Ok(vec![forecast.clone(); before.len()])
            }
            Slots::Selected(slots) => {
                slots.forecasts(self.draft.selector().ok_or_else(lost)?, slot, before)
            }
            Slots::Chained(slots) => {
                let chain = self.draft.chain().ok_or_else(lost)?;
                slots.forecasts((chain, self.reduced.as_ref()), slot, before)
            }
        }
    }
}

/// A slot that the pass does not have.
pub(super) fn beyond(slot: usize) -> DecodeError {
    DecodeError::Shape(format!("slot {slot} lies beyond the block"))
}

/// `count` times one row, `[G, N]` → `[count, N]`.
pub(super) fn repeated(rows: &Tensor, row: usize, count: usize) -> Result<Tensor> {
    let row = rows.narrow(0, row, 1)?;
    Ok(if count == 1 { row } else { row.repeat((count, 1))? })
}
