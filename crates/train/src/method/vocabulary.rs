//! Which tokens a draft proposes that knows some of the target's.

use longdraft_models::TargetTokenId;
use longdraft_models::draft::{Coverage, Ties, TokenCounts, VocabularyMap};

use super::Materials;
use crate::error::Result;
use crate::observer::{Event, Observer};

/// The `size` most frequent supervised tokens, ties to the lower id. Tokens that end a text and special tokens of the
/// documents are always among them: a template brings them, whatever their count.
/// It fails where `size` is 0, more than the target's vocabulary, or less than these.
pub(super) fn of_documents(
    materials: &Materials<'_>,
    counts: &TokenCounts,
    size: usize,
) -> Result<VocabularyMap> {
    let target = materials.target.config();
    let special = materials.tokenizer.special_ids();
    let mut seen = vec![false; target.vocab_size];
    for id in materials.documents.iter().flat_map(|document| &document.ids) {
        if let Some(seen) = seen.get_mut(*id as usize) {
            *seen = true;
        }
    }
    let seen = |id: &u32| seen.get(*id as usize).copied().unwrap_or(false);
    let forced = special.into_iter().filter(seen).chain(target.eos_token_ids.iter().copied());
    let forced: Vec<TargetTokenId> =
        forced.filter(|id| (*id as usize) < target.vocab_size).map(TargetTokenId).collect();
    let (map, _) = VocabularyMap::most_frequent(counts, size, Ties::LowerId, &forced)?;
    Ok(map)
}

/// Tells how much of the supervised text a draft can propose.
pub(super) fn report(map: &VocabularyMap, counts: &TokenCounts, observer: &mut dyn Observer) {
    let coverage = counts.coverage(map);
    let text = format!(
        "draft vocabulary: {} of {} tokens, {:.2} % of the supervised ones",
        map.draft_size(),
        map.target_size(),
        100.0 * coverage.share()
    );
    if coverage.share() < Coverage::LOW {
        let text = format!("{text}: raise `draft.draft_vocab_size`");
        observer.on_event(Event::Warning(&text));
    } else {
        observer.on_event(Event::Note(&text));
    }
}
