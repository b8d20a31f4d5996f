//! Block drafts: one pass over the root and mask tokens proposes all tokens of a block. What DFlash2's
//! selector and DSpark's chain make of the tokens before a slot stands in files of their own.
//!
//! The draft's keys of the context come from the target's features alone. They are made each once, before the
//! next block. The keys of a block are forgotten with its round. A block has as
//! many slots as in training, because slots see those after them, unless the draft is causal; how many of
//! its tokens are proposed is another matter.

use std::sync::Arc;

use candle_core::Tensor;
use longdraft_kernels::rows::select_rows;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::block::{Anchor, BlockDraft, Chain, Visible};
use longdraft_models::draft::{Draft, VocabularyMap};
use longdraft_models::target_model::{Features, KvCache, Tap, Target};

use super::Chosen;
use super::chained::{Chained, confidences};
use super::selected::Selected;
use crate::drafter::held::{AnyDraft, Held};
use crate::drafter::model::turns_of;
use crate::drafter::reduced_head::head_products;
use crate::drafter::waiting::Waiting;
use crate::drafter::{
    Asked, Beside, DraftModel, DraftRows, DraftState, Drafter, Forecast, ModelDrafter, ReducedHead,
    Shared, Turn,
};
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
    Ok(Some(Box::new(ModelDrafter::new(model))))
}

/// A block draft at decoding.
pub struct BlockDraftModel<'a> {
    draft: Held<'a, BlockDraft>,
    head: Option<Arc<ReducedHead>>,
    /// The chain's output matrix for the tokens of a reduced head, `[Vd, r]`.
    reduced: Option<Tensor>,
    own: Own,
}

/// What one request has of its own.
struct Own {
    /// Keys and values of committed tokens.
    cache: KvCache,
    /// Features `[T, A·H]` of the tokens after those.
    waiting: Waiting,
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

/// What all requests read.
#[derive(Clone, Copy)]
struct Network<'n> {
    draft: &'n BlockDraft,
    head: Option<&'n ReducedHead>,
    reduced: Option<&'n Tensor>,
}

impl<'a> BlockDraftModel<'a> {
    /// A model for one request at a time, with the draft's own head or the target's.
    ///
    /// # Errors
    /// - the device has no memory for its cache
    pub fn new(draft: impl Into<Held<'a, BlockDraft>>, target: &Target) -> Result<Self> {
        let draft = draft.into();
        let config = draft.config();
        let (layers, heads) = (config.layers.len(), config.num_key_value_heads);
        let cache = KvCache::new(layers, heads, config.head_dim, target.device())?;
        let slots = Slots::Independent(Vec::new());
        let own = Own { cache, waiting: Waiting::default(), slots };
        Ok(Self { draft, head: None, reduced: None, own })
    }

    /// Proposes only the tokens of a reduced head. A draft with a head of its own keeps that.
    ///
    /// # Errors
    /// - the head is of another vocabulary
    pub fn with_head(mut self, head: Arc<ReducedHead>) -> Result<Self> {
        if self.draft.vocabulary().is_some() {
            return Ok(self);
        }
        if let Some(chain) = self.draft.chain().filter(Chain::is_sequential) {
            let kept: Vec<u32> = head.vocabulary().kept().iter().map(|token| token.0).collect();
            self.reduced = Some(select_rows(&chain.output()?.detach(), &kept)?);
        }
        self.head = Some(head);
        Ok(self)
    }

    fn parts(&mut self) -> (Network<'_>, &mut Own) {
        let Self { draft, head, reduced, own } = self;
        let network = Network { draft, head: head.as_deref(), reduced: reduced.as_ref() };
        (network, own)
    }
}

impl Network<'_> {
    /// Makes the keys and values of the tokens that wait, of several requests.
    fn absorb<'o>(self, requests: impl Iterator<Item = &'o mut Own>) -> Result<()> {
        let (mut features, mut positions, mut caches) = (Vec::new(), Vec::new(), Vec::new());
        for Own { cache, waiting, .. } in requests {
            let (first, rows) = (cache.len(), waiting.rows()?);
            let Some(new) = waiting.take(rows)? else { continue };
            cache.reserve(rows)?;
            features.push(new);
            positions.extend(first as u32..(first + rows) as u32);
            caches.push((cache, rows));
        }
        if features.is_empty() {
            return Ok(());
        }
        let layers = self.draft.context(&Tensor::cat(&features, 0)?, &positions)?;
        let mut first = 0;
        for (cache, rows) in caches {
            for (layer, new) in layers.iter().enumerate() {
                let of = |tensor: &Tensor| tensor.narrow(0, first, rows);
                cache.append(layer, &of(&new.k)?, &of(&new.v)?)?;
            }
            cache.commit(rows);
            first += rows;
        }
        Ok(())
    }

    /// Runs a pass over one block of each request.
    fn run(self, turns: &mut [(&mut Own, Turn<'_>)]) -> Result<()> {
        self.absorb(turns.iter_mut().map(|(own, _)| &mut **own))?;
        let config = self.draft.config();
        // Without sequential heads slot 0 proposes nothing.
        let first = usize::from(self.draft.chain().is_none());
        let depth_of = |turn: &Turn<'_>| match turn.asked {
            Asked::Root { depth, .. } => depth.min(config.proposals()),
            Asked::After { .. } => 0,
        };
        let depths: Vec<usize> = turns.iter().map(|(_, turn)| depth_of(turn)).collect();
        // What no slot before it sees need not run.
        let is_causal = config.layers.iter().all(|kind| config.is_causal_in(*kind));
        let needed = first + depths.iter().max().copied().unwrap_or(0);
        let slots = if is_causal { needed } else { config.block_size };
        let (mut ids, mut positions, mut sequences) = (Vec::new(), Vec::new(), Vec::new());
        for (own, turn) in turns.iter_mut() {
            own.slots = Slots::Independent(Vec::new());
            let root = turn.context.tokens.len() - 1;
            if own.cache.len() != root {
                return Err(DecodeError::Features { seen: own.cache.len(), root });
            }
            let token = turn.context.tokens[root].0;
            let block = config.inputs(std::iter::once((token, root as u32)));
            ids.extend(block.0.into_iter().take(slots));
            positions.extend(block.1.into_iter().take(slots));
            let anchor = Anchor { index: root, document_start: 0 };
            sequences.push((&mut own.cache, Visible::new(config, &[anchor], slots, root)));
        }
        let of_block = |(block, depth): (usize, &usize)| {
            let at = (block * slots + first) as u32;
            at..at + *depth as u32
        };
        let asked: Vec<u32> = depths.iter().enumerate().flat_map(of_block).collect();
        let states =
            self.draft.blocks_each(&ids, &positions, &mut sequences, Some(&asked))?.detach();
        let mut from = 0;
        let of_request = |depth: &usize| {
            from += depth;
            states.narrow(0, from - depth, *depth)
        };
        let states = depths.iter().map(of_request).collect::<candle_core::Result<Vec<_>>>()?;
        let Some(target) = turns.first().map(|(_, turn)| turn.context.target) else {
            return Ok(());
        };
        for ((own, _), slots) in turns.iter_mut().zip(self.slots(target, &states)?) {
            own.slots = slots;
        }
        Ok(())
    }

    /// Products of states with the head that the draft proposes through, `[R, H]` → `[R, Vd]`.
    fn products(self, target: &Target, states: &Tensor) -> Result<Tensor> {
        match self.draft.own_head_matrix()? {
            Some(own) => Ok(own.linear(&states.detach(), None)?.detach()),
            None => head_products(self.head, target, states),
        }
    }

    /// What slots with these states, `[G, H]` of each request, propose. All of them go through the head at once.
    fn slots(self, target: &Target, states: &[Tensor]) -> Result<Vec<Slots>> {
        let all = Tensor::cat(states, 0)?;
        let sequential = self.draft.chain().is_some_and(|chain| chain.is_sequential());
        if sequential && self.draft.selector().is_none() {
            let products = self.products(target, &all)?.to_vec2::<f32>()?;
            let mut products = products.into_iter();
            let chained = |states: &Tensor| -> Result<Slots> {
                let products = products.by_ref().take(states.dim(0)?).collect();
                Ok(Slots::Chained(Chained::new(states.clone(), products, target.bend())))
            };
            return states.iter().map(chained).collect();
        }
        let logits = target.bend().of(self.products(target, &all)?)?;
        if let Some(selector) = self.draft.selector() {
            let kept = self.head.map(|head| head.vocabulary().kept());
            let mut first = 0;
            let selected = |states: &Tensor| -> Result<Slots> {
                let rows = states.dim(0)?;
                let logits = logits.narrow(0, first, rows)?;
                first += rows;
                Ok(Slots::Selected(Selected::new(selector, (states, &logits), kept)?))
            };
            return states.iter().map(selected).collect();
        }
        let mut logits = logits.to_vec2::<f32>()?.into_iter();
        let confidence = match self.draft.chain() {
            Some(chain) => confidences(chain, &all, None)?,
            None => None,
        };
        let mut confidence = confidence.into_iter().flatten();
        let independent = |states: &Tensor| -> Result<Slots> {
            let of_slots = logits.by_ref().take(states.dim(0)?);
            let forecast =
                |logits| Forecast { confidence: confidence.next(), ..Forecast::from(logits) };
            Ok(Slots::Independent(of_slots.map(forecast).collect()))
        };
        states.iter().map(independent).collect()
    }

    /// What a slot of each request says after some tokens.
    fn forecasts(
        self,
        slot: usize,
        requests: &mut [(&mut Slots, Vec<Chosen>)],
    ) -> Result<Vec<Vec<Forecast>>> {
        let chained = requests.iter_mut().map(|(slots, before)| match slots {
            Slots::Chained(slots) => Some((slots, before.as_slice())),
            _ => None,
        });
        let chained: Option<Vec<_>> = chained.collect();
        if let (Some(chain), Some(mut chained)) = (self.draft.chain(), chained) {
            return Chained::forecasts(&mut chained, slot, (chain, self.reduced));
        }
        let lost = || DecodeError::Shape("the slots are of another draft".to_owned());
        let mut said = Vec::with_capacity(requests.len());
        for (slots, before) in requests {
            said.push(match slots {
                Slots::Independent(slots) => {
                    let forecast = slots.get(slot).ok_or_else(|| beyond(slot))?;
                    vec![forecast.clone(); before.len()]
                }
                Slots::Selected(slots) => {
                    slots.forecasts(self.draft.selector().ok_or_else(lost)?, slot, before)?
                }
                Slots::Chained(_) => return Err(lost()),
            });
        }
        Ok(said)
    }
}

impl DraftModel for BlockDraftModel<'_> {
    fn taps(&self) -> Vec<Tap> {
        self.draft.taps()
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        self.draft.vocabulary().or_else(|| self.head.as_ref().map(|head| head.vocabulary()))
    }

    fn block_len(&self) -> Option<usize> {
        Some(self.draft.config().proposals())
    }

    fn tells_confidence(&self) -> bool {
        self.draft.config().chain.is_some_and(|chain| chain.confidence.is_some())
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        let own = &mut self.own;
        own.slots = Slots::Independent(Vec::new());
        own.cache.truncate(kept);
        own.waiting.keep(kept - own.cache.len())
    }

    fn state(&self) -> DraftState<'_> {
        let Own { cache, waiting, .. } = &self.own;
        DraftState::Rows(DraftRows::new(&*self.draft, cache, cache.len(), waiting.features()))
    }

    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        self.own.waiting = rows.copy_to(&mut self.own.cache, tokens)?.1.into();
        Ok(())
    }

    fn observe(&mut self, _: &[TargetTokenId], features: &Features) -> Result<()> {
        let (network, own) = self.parts();
        let states = features.hidden_of(&network.draft.config().target_layers)?;
        if own.waiting.push(states)? { network.absorb(std::iter::once(own)) } else { Ok(()) }
    }

    fn shared(&mut self) -> Option<Shared<'_>> {
        Some(Shared::new(&*self.draft, self.head.as_ref(), &mut self.own))
    }

    fn read(&mut self, turn: Turn<'_>, beside: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        let (network, own) = self.parts();
        let mut turns = turns_of(own, turn, beside)?;
        let slot = turn.asked.level();
        if slot == 0 {
            network.run(&mut turns)?;
        }
        let asked = turns.into_iter().map(|(own, turn)| (&mut own.slots, turn.chosen()));
        network.forecasts(slot, &mut asked.collect::<Vec<_>>())
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
