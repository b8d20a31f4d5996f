//! What a block draft computes on the fixed input.

use candle_core::Tensor;
use longdraft_models::draft::block::{Anchor, BlockDraft, Visible};

use crate::error::Result;
use crate::parity::{ParityVector, TOKENS, fixed_ids, normal, records};

/// Candidates of a slot that a selector is asked about.
const CANDIDATES: u32 = 8;

/// The vector of a block draft: states of blocks over a fixed text, then what its heads make of them.
pub(super) fn outputs(draft: &BlockDraft) -> Result<ParityVector> {
    let config = draft.config();
    let slots = config.block_size;
    let ids = fixed_ids(config.vocab_size);
    let width = config.hidden_size * config.target_layers.len();
    let positions: Vec<u32> = (0..TOKENS as u32).collect();
    let context = draft.context(&normal("parity features", &[TOKENS, width])?, &positions)?;
    // As many blocks as give a row for every recorded one, spread over the text.
    let blocks = TOKENS.div_ceil(slots);
    let starts: Vec<usize> = (0..blocks).map(|block| 1 + block * (TOKENS - 1) / blocks).collect();
    let anchors: Vec<Anchor> =
        starts.iter().map(|start| Anchor { index: *start, document_start: 0 }).collect();
    let visible = Visible::new(config, &anchors, slots, TOKENS);
    let (tokens, at) = config.inputs(starts.iter().map(|start| (ids[*start], *start as u32)));
    let states = draft.blocks(&tokens, &at, &context, &visible)?.detach();
    let mut rows = records(0, &states)?;
    let before: Vec<u32> = (0..tokens.len()).map(|row| ids[row % TOKENS]).collect();
    for (step, head) in (1..).zip(heads(draft, &states, &before)?) {
        rows.extend(records(step, &head.detach())?);
    }
    Ok(ParityVector::of(rows))
}

/// Outputs of the draft's own heads, a row a slot.
fn heads(draft: &BlockDraft, states: &Tensor, before: &[u32]) -> Result<Vec<Tensor>> {
    let mut all = Vec::new();
    if let Some(selector) = draft.selector() {
        let vocabulary = draft.config().vocab_size as u32;
        let next = |id: u32| (0..CANDIDATES).map(move |i| id.wrapping_add(977 * i) % vocabulary);
        let candidates: Vec<u32> = before.iter().copied().flat_map(next).collect();
        all.push(selector.preferences(&selector.project(states)?, before, &candidates)?);
    }
    if let Some(chain) = draft.chain() {
        let embedded = chain.embed(before)?;
        if let Some(embedded) = &embedded {
            let first = chain.step(None, states, embedded)?;
            let second = chain.step(first.state.as_ref(), states, embedded)?;
            all.push(chain.logits(&second.mixed)?);
        }
        if let Some(confidence) = chain.confidence(states, embedded.as_ref())? {
            all.push(confidence.unsqueeze(1)?);
        }
    }
    Ok(all)
}
