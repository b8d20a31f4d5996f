//! A block draft, fresh or from another one.

use std::collections::HashSet;
use std::path::Path;

use longdraft_data::Document;
use longdraft_kernels::bend::Bend;
use longdraft_kernels::matrix::Matrix;
use longdraft_models::draft::Init;
use longdraft_models::draft::block::{BlockConfig, BlockDraft, LayerKind, OwnHead};
use longdraft_models::draft::files::SavedDraft;
use longdraft_models::{ModelError, TargetConfig};
use serde_json::{Map, Value, json};

use super::attention::BlockAttention;
use super::blocks::BlockDraws;
use super::drawn::DrawnBlocks;
use super::keys::BlockKeys;
use super::slot_loss::SlotLoss;
use crate::error::Result;
use crate::method::recipe::keys;
use crate::method::{Materials, vocabulary};
use crate::observer::{Event, Observer};

/// What a draft that goes on from another one keeps unless it is told otherwise; what layers see is told as a whole.
pub(in crate::method) const OPEN_KEYS: [&[&str]; 5] = [
    &["target_layers"],
    &["num_key_value_heads"],
    &["draft_vocab_size"],
    &["mask_token_id"],
    &["sliding_window", "layer_types", "sliding_window_pattern"],
];

/// Checks that a draft is one that a network with some loss can start from.
pub(in crate::method) fn check_start(
    sizes: &BlockConfig,
    loss: SlotLoss,
    target: &TargetConfig,
    start: &SavedDraft,
) -> Result<()> {
    check_sizes(sizes, target)?;
    if sizes.has_own_head() && loss.compares_whole() {
        let problem = format!(
            "the draft proposes {} tokens, and the loss compares distributions over all {} of the target: choose \
             another loss",
            sizes.draft_vocab_size, sizes.vocab_size
        );
        return Err(ModelError::invalid(&start.path, problem).into());
    }
    Ok(BlockDraft::check_file(start, sizes)?)
}

/// What is said of a saved block draft, and the keys of it that all block drafts share.
pub(in crate::method) fn keys_of(
    start: &SavedDraft,
) -> Result<Option<(BlockConfig, Map<String, Value>)>> {
    let Some(found) = BlockConfig::of_saved(start)? else { return Ok(None) };
    let ids: Vec<usize> = found.target_layers.iter().map(|layer| layer.0).collect();
    let mut known = keys(json!({
        "layers": found.layers.len(), "target_layers": ids, "block_size": found.block_size,
        "mask_token_id": found.mask_token_id, "num_key_value_heads": found.num_key_value_heads,
        "draft_vocab_size": found.has_own_head().then_some(found.draft_vocab_size),
    }));
    known.extend(keys(json!(BlockAttention::of(&found))));
    Ok(Some((found, known)))
}

/// A draft of a network, which `sizes` makes of the token of unknown slots, with a loss at blocks that are drawn as
/// `keys` say.
pub(in crate::method) fn objective<L>(
    materials: &Materials<'_>,
    sizes: impl Fn(u32) -> BlockConfig,
    (keys, loss): (&BlockKeys, L),
    observer: &mut dyn Observer,
) -> Result<DrawnBlocks<L>> {
    let of_keys = (keys.mask_token_id, keys.init);
    let (draft, (head, bend)) = build(materials, sizes, of_keys, observer)?;
    let draws = BlockDraws { seed: materials.seed, budget: keys.budget() };
    let objective = DrawnBlocks::new(draft, head, loss, draws.clone());
    Ok(objective.with_bend(bend).with_rule(keys.block_starts, draws))
}

/// The draft of a network, whose token of unknown slots is `set` if it is known, begun as `init` says if it
/// starts from no other, and the target's head `[V, H]` with what makes logits of its products.
fn build(
    materials: &Materials<'_>,
    sizes: impl Fn(u32) -> BlockConfig,
    (set, init): (Option<u32>, Init),
    observer: &mut dyn Observer,
) -> Result<(BlockDraft, (Matrix, Bend))> {
    let Materials { seed, target, .. } = materials;
    let found = materials.start.map(BlockConfig::of_saved).transpose()?.flatten();
    let mut sizes = sizes(mask_token(materials, set)?);
    if let Some(found) = &found {
        // Its weights were trained with these numbers, whatever those of the target are.
        sizes.rms_norm_eps = found.rms_norm_eps;
        sizes.embedding_scale = found.embedding_scale;
        if found.rope.is_kept_beside(&sizes.rope) {
            sizes.rope = found.rope.clone();
        }
    }
    check_sizes(&sizes, target.config())?;
    warn_of_mask_token(sizes.mask_token_id, materials.documents, observer);
    let has_head = found.as_ref().is_some_and(BlockConfig::has_own_head);
    if let Some(found) = &found {
        let other = other_windows(&windows(found), &windows(&sizes));
        let told = other.into_iter().chain(other_blocks(found.block_size, sizes.block_size));
        told.for_each(|text| observer.on_event(Event::Warning(&text)));
    }
    // The draft keeps the table, its objective the head.
    let ends = target.hold_ends()?;
    let (embedding, seed) = (ends.embedding_matrix(), *seed);
    let chosen = || -> Result<Option<OwnHead>> {
        if !sizes.has_own_head() {
            return Ok(None);
        }
        let counts = materials.counts_of_documents()?;
        let map = vocabulary::of_documents(materials, &counts, sizes.draft_vocab_size)?;
        let kept: Vec<u32> = map.kept().iter().map(|id| id.0).collect();
        Ok(Some(OwnHead::new(map, &ends.head_matrix().rows(&kept)?)?))
    };
    let draft = match (materials.start, init) {
        (Some(start), _) => {
            let own = if has_head { None } else { chosen()? };
            BlockDraft::load(start, &sizes, embedding, (own, seed))?
        }
        (None, Init::Random) => BlockDraft::initialise_with(&sizes, embedding, chosen()?, seed)?,
        (None, Init::LastLayer) => BlockDraft::initialise_from(&sizes, target, chosen()?, seed)?,
    };
    if let Some(own) = draft.own_head() {
        vocabulary::report(own.vocabulary(), &materials.counts_of_documents()?, observer);
    }
    Ok((draft, (ends.loss_head()?, target.bend())))
}

/// Refuses a network that does not fit a target.
pub(super) fn check_sizes(sizes: &BlockConfig, target: &TargetConfig) -> Result<()> {
    Ok(sizes.problems_with(target).into_result(Path::new("draft configuration"))?)
}

/// Says if texts hold the token of unknown slots: such a slot looks like that token then.
fn warn_of_mask_token(token: u32, documents: &[Document], observer: &mut dyn Observer) {
    let of = |document: &Document| document.ids.iter().filter(|id| **id == token).count();
    let found: usize = documents.iter().map(of).sum();
    if found > 0 {
        let text = format!(
            "token {token} stands in slots that are not known yet, and {found} times in the text: the draft \
             cannot tell these apart (`draft.mask_token_id` names the token of a fresh draft)"
        );
        observer.on_event(Event::Warning(&text));
    }
}

/// The window of every layer, in tokens; `None` for one that sees everything.
fn windows(config: &BlockConfig) -> Vec<Option<usize>> {
    let of = |kind: &LayerKind| config.sliding_window.filter(|_| *kind == LayerKind::Sliding);
    config.layers.iter().map(of).collect()
}

fn other_windows(learned: &[Option<usize>], now: &[Option<usize>]) -> Option<String> {
    let listed = |windows: &[Option<usize>]| {
        let of = |window: &Option<usize>| window.map_or("none".to_owned(), |w| w.to_string());
        windows.iter().map(of).collect::<Vec<_>>().join(", ")
    };
    (learned != now).then(|| {
        let (learned, now) = (listed(learned), listed(now));
        format!("windows of the draft's layers: {learned} where it learned before, {now} here")
    })
}

fn other_blocks(learned: usize, now: usize) -> Option<String> {
    let text = || format!("slots of a block: {learned} where the draft learned before, {now} here");
    (learned != now).then(text)
}

/// The token of unknown slots: the known one, or the first that neither the tokenizer nor a document
/// uses.
fn mask_token(materials: &Materials<'_>, known: Option<u32>) -> Result<u32> {
    if let Some(token) = known {
        return Ok(token);
    }
    let used: HashSet<u32> =
        materials.documents.iter().flat_map(|document| &document.ids).copied().collect();
    let tokenizer = materials.tokenizer;
    let rows = materials.target.config().vocab_size as u32;
    let unused = |id: &u32| !used.contains(id);
    let spare = (0..rows).filter(unused).find(|id| tokenizer.token(*id).is_none());
    // A full table still has special tokens that no document holds.
    let mut special = tokenizer.special_ids();
    special.sort_unstable();
    let special = || special.into_iter().rev().find(|id| *id < rows && unused(id));
    spare.or_else(special).ok_or_else(|| {
        let problem = "every token of the target is used: set `draft.mask_token_id` to one that \
                       texts do not hold";
        ModelError::invalid(Path::new("draft configuration"), problem).into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observer::tests::Heard;

    #[test]
    fn a_text_that_holds_the_token_of_unknown_slots_is_told() {
        let document = |ids: &[u32]| Document {
            ids: ids.to_vec(),
            loss_mask: vec![true; ids.len()],
            origin: String::new(),
        };
        let documents = [document(&[1, 7, 2]), document(&[7, 7]), document(&[3])];
        let mut told = Heard::default();
        warn_of_mask_token(9, &documents, &mut told);
        assert_eq!(told.0, [""; 0]);
        warn_of_mask_token(7, &documents, &mut told);
        assert!(told.0.len() == 1 && told.0[0].contains("token 7"), "{:?}", told.0);
        assert!(told.0[0].contains("3 times in the text"), "{:?}", told.0);
    }

    #[test]
    fn other_windows_than_those_that_a_draft_learned_with_are_told() {
        assert_eq!(other_windows(&[None, Some(8)], &[None, Some(8)]), None);
        let told = other_windows(&[None, Some(8)], &[Some(16), Some(16)]).expect("told");
        assert!(told.contains("none, 8 where") && told.contains("16, 16 here"), "{told}");
    }
}
