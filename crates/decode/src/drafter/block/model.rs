//! DFlash, DFlash2 and DSpark: one pass over the root and mask tokens proposes all tokens of a block. DFlash2's
//! selector chooses among the candidates of a slot by the token before it, and proposes no other. DSpark's
//! chain adds to a slot's logits what the tokens before it say.
//!
//! The draft's keys of the context come from the target's features alone, so they are made as soon as
//! the features are there, each once. The keys of a block are forgotten with its round. A block always
//! has as many slots as in training, because slots see those after them; how many of its tokens are
//! proposed is another matter.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use longdraft_kernels::linear::linear;
use longdraft_kernels::rows::select_rows;
use longdraft_kernels::top_k::row_top_k;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::block::{Anchor, BlockDraft, Chain, Visible};
use longdraft_models::draft::{Draft, VocabularyMap};
use longdraft_models::target::{Features, KvCache, Tap, Target};

use super::{BlockDrafter, BlockModel};
use crate::drafter::reduced_head::head_logits;
use crate::drafter::{DraftContext, Drafter, ReducedHead};
use crate::error::{DecodeError, Result};

/// A drafter, if this is a block draft.
pub(in crate::drafter) fn drafter<'a>(
    draft: &'a dyn Draft,
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
    draft: &'a BlockDraft,
    /// Keys and values of committed tokens.
    cache: KvCache,
    head: Option<Arc<ReducedHead>>,
    /// Logits of the round's block, of the first token after the root first.
    logits: Vec<Vec<f32>>,
    /// What a selector chooses among.
    candidates: Option<Candidates>,
    /// States of the slots that propose, `[G, H]`, where a chain reads them.
    states: Option<Tensor>,
    /// The chain's output matrix for the tokens of a reduced head, `[Vd, r]`.
    reduced: Option<Tensor>,
}

/// The candidates of a round's slots.
struct Candidates {
    /// Columns of the logits, `K` a slot, most likely first.
    columns: Vec<u32>,
    /// `K`, fewer than the selector's with a smaller head.
    each: usize,
    /// The same as tokens of the target.
    ids: Vec<u32>,
    /// `W_h h` of the slots, `[G, r]`.
    projected: Tensor,
}

impl<'a> BlockDraftModel<'a> {
    /// A model for one request at a time, with a head over the whole vocabulary.
    ///
    /// # Errors
    /// - the device has no memory for its cache
    pub fn new(draft: &'a BlockDraft, target: &Target) -> Result<Self> {
        let config = draft.config();
        let (layers, heads) = (config.layers.len(), config.num_key_value_heads);
        Ok(Self {
            draft,
            cache: KvCache::new(layers, heads, config.head_dim, target.device())?,
            head: None,
            logits: Vec::new(),
            candidates: None,
            states: None,
            reduced: None,
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

    /// A slot's logits, to which the chain adds what a path says.
    fn chained(
        &self,
        chain: Chain<'_>,
        logits: &[f32],
        path: &[TargetTokenId],
    ) -> Result<Vec<f32>> {
        let none = || DecodeError::Shape("no pass comes before the chain".to_owned());
        let states = self.states.as_ref().ok_or_else(none)?;
        // Only a state of the chain's own reads more than the last token.
        let first = if chain.is_recurrent() { 0 } else { path.len() - 1 };
        let (mut state, mut mixed) = (None, None);
        for (slot, token) in path.iter().enumerate().skip(first) {
            let Some(embedded) = chain.embed(&[token.0])? else { break };
            let step =
                chain.step(state.as_ref(), &states.narrow(0, slot, 1)?, &embedded.detach())?;
            (state, mixed) = (step.state, Some(step.mixed));
        }
        let mixed = mixed.ok_or_else(none)?.detach();
        let added = match &self.reduced {
            Some(output) => linear(&mixed, output, None)?,
            None => chain.logits(&mixed)?,
        };
        let added: Vec<f32> = added.detach().squeeze(0)?.to_vec1()?;
        Ok(logits.iter().zip(added).map(|(logit, added)| logit + added).collect())
    }

    /// What a selector chooses among at slots with these states, `[G, H]`; `None` without a selector.
    fn candidates_of(&self, states: &Tensor) -> Result<Option<Candidates>> {
        let Some(selector) = self.draft.selector() else { return Ok(None) };
        let width = self.logits.first().map_or(0, Vec::len);
        let logits: Vec<f32> = self.logits.concat();
        let logits = Tensor::from_vec(logits, (self.logits.len(), width), &Device::Cpu)?;
        let columns = row_top_k(&logits, selector.sizes().top_k)?.ids;
        let kept = self.head.as_ref().map(|head| head.vocabulary().kept());
        let ids = columns.iter().map(|column| match kept {
            Some(kept) => kept[*column as usize].0,
            None => *column,
        });
        let ids = ids.collect();
        let projected = selector.project(&states.detach())?.detach();
        let each = columns.len() / self.logits.len().max(1);
        Ok(Some(Candidates { columns, each, ids, projected }))
    }

    /// Hidden states `[G, H]` of the block that begins with a token at index `root`.
    fn block(&mut self, token: TargetTokenId, root: usize) -> Result<Tensor> {
        let config = self.draft.config();
        let slots = config.block_size;
        let (ids, positions) = config.inputs(std::iter::once((token.0, root as u32)));
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

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.logits.clear();
        self.cache.truncate(kept);
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
        self.logits.clear();
        let root = context.tokens.len() - 1;
        if self.cache.len() != root {
            return Err(DecodeError::Features { seen: self.cache.len(), root });
        }
        let states = self.block(context.tokens[root], root)?;
        let depth = depth.min(self.block_len());
        // Without sequential heads slot 0 proposes nothing.
        let first = usize::from(self.draft.chain().is_none());
        let states = states.narrow(0, first, depth)?.contiguous()?;
        self.logits = head_logits(self.head.as_deref(), context.target, &states)?;
        self.candidates = self.candidates_of(&states)?;
        self.states = self.draft.chain().map(|_| states.detach());
        Ok(())
    }

    fn logits(&self, path: &[TargetTokenId]) -> Result<Vec<f32>> {
        let beyond = || DecodeError::Shape(format!("token {} lies beyond the block", path.len()));
        let (slot, before) = (path.len().wrapping_sub(1), path.last().ok_or_else(beyond)?);
        let logits = self.logits.get(slot).ok_or_else(beyond)?;
        if let Some(chain) = self.draft.chain().filter(Chain::is_sequential) {
            return self.chained(chain, logits, path);
        }
        let Some((candidates, selector)) = self.candidates.as_ref().zip(self.draft.selector())
        else {
            return Ok(logits.clone());
        };
        let of_slot = slot * candidates.each..(slot + 1) * candidates.each;
        let projected = candidates.projected.narrow(0, slot, 1)?;
        let ids = &candidates.ids[of_slot.clone()];
        let preferences = selector.preferences(&projected, &[before.0], ids)?.squeeze(0)?;
        let mut chosen = vec![f32::NEG_INFINITY; logits.len()];
        for (column, preference) in
            candidates.columns[of_slot].iter().zip(preferences.to_vec1::<f32>()?)
        {
            chosen[*column as usize] = logits[*column as usize] + preference;
        }
        Ok(chosen)
    }
}
