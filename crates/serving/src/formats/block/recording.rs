//! A block draft on a text of its target, for another program to repeat.

use candle_core::{DType, Device, Tensor};
use longdraft_models::draft::Draft;
use longdraft_models::draft::block::{Anchor, BlockDraft, Visible};
use longdraft_models::target_model::{PackedSequence, Taps, Target};

use crate::error::Result;
use crate::formats::Named;

/// Most blocks of a recording.
const BLOCKS: usize = 8;

/// Inputs and outputs of blocks spread over a text, with the frozen tensors that a reader takes from the
/// target. Predecessors are the text's own tokens; each slot of every block is a row.
///
/// | name | shape | |
/// |---|---|---|
/// | `input_ids` | `[T]` | |
/// | `aux` | `[T, A·H]` | states that the draft reads |
/// | `anchors` | `[B]` | ascending |
/// | `embed_tokens`, `lm_head` | `[V, H]` | the target's; the head unless the draft has its own |
/// | `states` | `[B·G, H]` | |
/// | `logits` | `[B·G, Vd]` | with what a chain adds |
/// | `confidence` | `[B·G]` | logits, if there is such a head |
/// | `candidates`, `scores` | `[B·G, K]` | best tokens of a slot, and what the selector makes of them |
///
/// It fails where the target or the draft cannot run, or the text is shorter than two blocks.
pub(super) fn record(draft: &BlockDraft, target: &Target, ids: &[u32]) -> Result<Named> {
    let (config, count) = (draft.config(), ids.len());
    let slots = config.block_size;
    let sequence = PackedSequence::single(ids);
    let features = target.forward(&sequence, &Taps::of(&draft.taps()))?;
    let features = features.hidden_of(&config.target_layers)?;
    let positions: Vec<u32> = (0..count as u32).collect();
    let context = draft.context(&features, &positions)?;
    // A block ends within the text, so that every slot has a predecessor.
    let last = count.checked_sub(2 * slots).filter(|last| *last > 0).ok_or_else(|| {
        candle_core::Error::Msg(format!("{count} tokens are too few for blocks of {slots}"))
    })?;
    let mut starts: Vec<usize> = (0..BLOCKS).map(|block| 1 + block * last / BLOCKS).collect();
    starts.dedup();
    let anchors: Vec<Anchor> =
        starts.iter().map(|index| Anchor { index: *index, document_start: 0 }).collect();
    let visible = Visible::new(config, &anchors, slots, count);
    let (tokens, at) = config.inputs(starts.iter().map(|start| (ids[*start], *start as u32)));
    let states = draft.blocks(&tokens, &at, &context, &visible)?.detach();
    let ends = target.hold_ends()?;
    // Engines make nothing else of a draft's products.
    let mut logits = match draft.own_head_matrix()? {
        Some(own) => own.linear(&states.detach(), None)?.detach(),
        None => ends.head_matrix().linear(&states.detach(), None)?,
    };
    let rows = || starts.iter().flat_map(|start| (0..slots).map(move |slot| (*start, slot)));
    let mut more = Vec::new();
    if let Some(chain) = draft.chain() {
        let before: Vec<u32> = rows().map(|(start, slot)| ids[start + slot]).collect();
        let embedded = chain.embed(&before)?;
        if embedded.is_some() {
            logits = (logits + bias(draft, &states, &before)?)?;
        }
        if let Some(confidence) = chain.confidence(&states, embedded.as_ref())? {
            more.push(("confidence".to_owned(), confidence.detach()));
        }
    }
    if let Some(selector) = draft.selector() {
        let before: Vec<u32> =
            rows().map(|(start, slot)| ids[start + slot.saturating_sub(1)]).collect();
        let top = selector.sizes().top_k;
        let (values, best) = logits.sort_last_dim(false)?;
        let (values, best) = (values.narrow(1, 0, top)?, best.narrow(1, 0, top)?);
        let candidates: Vec<u32> = best.flatten_all()?.to_vec1()?;
        let added =
            selector.preferences(&selector.project(&states)?, &before, &candidates)?.detach();
        more.push(("candidates".to_owned(), best.to_dtype(DType::I64)?.contiguous()?));
        more.push(("scores".to_owned(), (values + added)?));
    }
    let whole = |values: Vec<i64>| Tensor::new(values, &Device::Cpu);
    let mut all = vec![
        ("input_ids".to_owned(), whole(ids.iter().copied().map(i64::from).collect())?),
        ("aux".to_owned(), features),
        ("anchors".to_owned(), whole(starts.iter().map(|start| *start as i64).collect())?),
        ("embed_tokens".to_owned(), ends.embedding()?.to_dtype(DType::F32)?),
        ("states".to_owned(), states),
        ("logits".to_owned(), logits),
    ];
    if draft.vocabulary().is_none() {
        all.push(("lm_head".to_owned(), ends.head()?.to_dtype(DType::F32)?));
    }
    all.extend(more);
    Ok(all)
}

/// What a chain adds to the logits of every slot: slots of a block one after the other.
fn bias(draft: &BlockDraft, states: &Tensor, before: &[u32]) -> Result<Tensor> {
    let slots = draft.config().block_size;
    let Some(chain) = draft.chain() else { return Ok(states.clone()) };
    let blocks = before.len() / slots;
    let (mut state, mut mixed) = (None, Vec::new());
    for slot in 0..slots {
        let rows: Vec<u32> = (0..blocks).map(|block| (block * slots + slot) as u32).collect();
        let tokens: Vec<u32> = rows.iter().map(|row| before[*row as usize]).collect();
        let of_slot = states.index_select(&Tensor::from_vec(rows, blocks, states.device())?, 0)?;
        let Some(embedded) = chain.embed(&tokens)? else { continue };
        let step = chain.step(state.as_ref(), &of_slot, &embedded)?;
        state = step.state;
        mixed.push(step.mixed);
    }
    // [G, B, r] to rows of blocks.
    let mixed = Tensor::stack(&mixed, 0)?.transpose(0, 1)?.contiguous()?.flatten(0, 1)?;
    Ok(chain.logits(&mixed)?.detach())
}
