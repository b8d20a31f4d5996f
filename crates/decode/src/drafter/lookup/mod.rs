//! Prompt lookup: what followed the last few tokens when they stood there before (Saxena 2023), in the
//! text itself or in a [`Datastore`]. Free, deterministic given the text, good where answers repeat it
//! or one another.

mod chances;
mod datastore;
mod grown;
mod watched;

use std::collections::HashMap;
use std::sync::Arc;

use longdraft_models::TargetTokenId;

use super::{DraftContext, DraftState, Drafter, Plan, Worth};
use crate::error::Result;
use crate::tree::{Origin, Tree};
use watched::Watched;

pub use crate::match_class::MatchClass;
pub use chances::LookupChances;
pub use datastore::Datastore;
pub use grown::GrownDatastore;
pub use watched::LookedUp;

/// Shortest and longest run of tokens that is looked for in the text.
const SHORTEST: usize = MatchClass::SHORTEST;
const LONGEST: usize = MatchClass::LONGEST_IN_TEXT;

/// An index of the text's short runs, one update a token.
#[derive(Debug, Default)]
pub struct LookupDrafter {
    tokens: Vec<TargetTokenId>,
    /// Where the newest occurrence of each run ends (index after it), among runs that something
    /// follows.
    ends: HashMap<[u32; LONGEST], usize>,
    /// Runs that end before this index are in `ends`.
    indexed: usize,
    datastore: Option<Arc<Datastore>>,
    grown: Option<Arc<GrownDatastore>>,
    watched: Watched,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// Where, and after how many tokens that agree.
    pub class: MatchClass,
    /// What followed them.
    pub continuation: Vec<TargetTokenId>,
}

impl Match {
    /// The tokens that are worth their rows of the target's pass.
    #[must_use]
    pub fn worthy(mut self, worth: Option<&Worth>) -> Self {
        self.continuation.truncate(worthy(self.class, self.continuation.len(), worth));
        self
    }

    /// Expected tokens that hold, less what their rows cost.
    pub(super) fn gain(&self, worth: &Worth) -> f64 {
        gain(self.class, self.continuation.len(), worth)
    }

    /// What speaks for it: what it is expected to gain, as far as that is measured, and where it gains nothing the
    /// chance of its first token, as measured or as assumed.
    fn merit(&self, worth: Option<&Worth>) -> (f64, f64) {
        let Some(worth) = worth else { return (0.0, self.class.prior()) };
        let count = worthy(self.class, self.continuation.len(), Some(worth));
        (gain(self.class, count, worth).max(0.0), worth.lookup.first(self.class))
    }
}

/// Of so many tokens that were found those that are worth their rows.
fn worthy(class: MatchClass, count: usize, worth: Option<&Worth>) -> usize {
    let Some(worth) = worth else { return count };
    let chances = worth.lookup.along(class).take(count);
    let count = chances.take_while(|chance| *chance >= worth.node).count();
    if gain(class, count, worth) > 0.0 { count } else { 0 }
}

fn gain(class: MatchClass, count: usize, worth: &Worth) -> f64 {
    let chances = worth.lookup.along(class).take(count);
    chances.map(|chance| chance - worth.node).sum::<f64>() - worth.jump
}

impl LookupDrafter {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// Looks in other texts, too.
    #[must_use]
    pub fn with_datastore(self, datastore: Option<Arc<Datastore>>) -> Self {
        Self { datastore, ..self }
    }

    /// Looks in texts that are added meanwhile, too.
    #[must_use]
    pub fn with_grown(self, grown: Option<Arc<GrownDatastore>>) -> Self {
        Self { grown, ..self }
    }

    /// What has come since of what was found before: also of what was not proposed, so that what is to be
    /// expected is known without trying it.
    pub fn outcomes(&mut self) -> Vec<LookedUp> {
        self.watched.outcomes()
    }

    /// The match in the text or in the datastore that is expected to gain more, at most `count` tokens;
    /// where it is the same, that in the text. Of the datastore's, those that are worth their rows, and
    /// one at least.
    pub fn find(
        &mut self,
        tokens: &[TargetTokenId],
        count: usize,
        worth: Option<&Worth>,
    ) -> Option<Match> {
        self.watched.compare(tokens);
        let found = self.search(tokens, count, worth);
        if let Some(found) = &found {
            self.watched.add(tokens.len(), found);
        }
        found
    }

    fn search(
        &mut self,
        tokens: &[TargetTokenId],
        count: usize,
        worth: Option<&Worth>,
    ) -> Option<Match> {
        let in_text = self.find_in_text(tokens, count);
        let most = |class| worthy(class, count, worth).max(count.min(1));
        let in_store = self.datastore.as_ref().and_then(|store| store.find(tokens, most));
        let in_grown = self.grown.as_ref().map(|grown| grown.find(tokens, most));
        let found = in_store.into_iter().chain(in_grown.into_iter().flatten());
        let found = found.filter(|found| !found.continuation.is_empty());
        let is_better = |one: &Match, other: &Match| one.merit(worth) > other.merit(worth);
        let in_store =
            found.reduce(|best, other| if is_better(&other, &best) { other } else { best });
        match (in_text, in_store) {
            (Some(text), Some(store)) if is_better(&store, &text) => Some(store),
            (text, store) => text.or(store),
        }
    }

    /// What followed the newest earlier place of the longest run that ends the text.
    fn find_in_text(&mut self, tokens: &[TargetTokenId], count: usize) -> Option<Match> {
        self.update(tokens);
        (SHORTEST..=LONGEST.min(tokens.len())).rev().find_map(|length| {
            let end = *self.ends.get(&key(&tokens[tokens.len() - length..]))?;
            let continuation = tokens[end..].iter().copied().take(count).collect::<Vec<_>>();
            let class = MatchClass::of_text(length);
            (!continuation.is_empty()).then_some(Match { class, continuation })
        })
    }

    /// Indexes what is new; starts anew if the text is another one.
    fn update(&mut self, tokens: &[TargetTokenId]) {
        if !tokens.starts_with(&self.tokens) {
            self.tokens.clear();
            self.ends.clear();
            self.indexed = 0;
        }
        self.tokens.extend_from_slice(&tokens[self.tokens.len()..]);
        // The run that ends the text is what is looked for: nothing follows it yet.
        for end in self.indexed.max(SHORTEST)..tokens.len() {
            for length in SHORTEST..=LONGEST.min(end) {
                self.ends.insert(key(&tokens[end - length..end]), end);
            }
        }
        self.indexed = tokens.len();
    }
}

/// A run of at most [`LONGEST`] tokens. No token has the id that fills the rest.
fn key(run: &[TargetTokenId]) -> [u32; LONGEST] {
    let mut key = [u32::MAX; LONGEST];
    key.iter_mut().zip(run).for_each(|(place, token)| *place = token.0);
    key
}

impl Drafter for LookupDrafter {
    fn begin(&mut self, _kept: usize) -> Result<()> {
        let (datastore, grown) = (self.datastore.take(), self.grown.take());
        *self = Self::default().with_datastore(datastore).with_grown(grown);
        Ok(())
    }

    fn state(&self) -> DraftState<'_> {
        DraftState::Nothing
    }

    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        let mut tree = Tree::new(context.tokens[context.tokens.len() - 1]);
        let worth = plan.worth.as_ref();
        if let Some(found) = self.find(context.tokens, plan.shape.depth(), worth) {
            tree.insert_chain(&found.worthy(worth).continuation, Origin::Lookup);
        }
        plan.looked_up = self.outcomes();
        Ok(tree)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(ids: &[u32]) -> Vec<TargetTokenId> {
        ids.iter().map(|id| TargetTokenId(*id)).collect()
    }

    /// Tokens that agree and what followed.
    fn find(ids: &[u32], count: usize) -> Option<(usize, Vec<u32>)> {
        let found = LookupDrafter::new().find(&tokens(ids), count, None)?;
        let of_length = |length: &usize| MatchClass::of_text(*length) == found.class;
        let length = (SHORTEST..=LONGEST).find(of_length).expect("in the text");
        Some((length, found.continuation.iter().map(|token| token.0).collect()))
    }

    #[test]
    fn the_newest_place_of_the_longest_run_is_found() {
        assert_eq!(find(&[1, 2, 3, 9, 1, 2, 4, 1, 2], 2), Some((2, vec![4, 1])));
        assert_eq!(
            find(&[7, 1, 2, 3, 9, 8, 1, 2, 4, 7, 1, 2], 8),
            Some((3, vec![3, 9, 8, 1, 2, 4, 7, 1]))
        );
        assert_eq!(find(&[1, 2, 3], 4), None);
        assert_eq!(find(&[1], 4), None);
        assert_eq!(find(&[], 4), None);
        // A run may overlap what it is found in.
        assert_eq!(find(&[5, 5, 5, 5, 5, 5], 3), Some((4, vec![5])));
    }

    #[test]
    fn what_rarely_holds_is_cut() {
        let mut chances = [[0.5; LookupChances::DEPTHS]; MatchClass::COUNT];
        chances[MatchClass::of_text(4).index()] = [0.9; LookupChances::DEPTHS];
        let lookup = LookupChances::new(chances);
        let mut worth =
            Worth { node: 0.2, jump: 0.0, level: 0.0, calibration: 1.0, gain: 0.5, lookup };
        let found =
            |length| Match { class: MatchClass::of_text(length), continuation: tokens(&[7; 30]) };
        let kept = |length, worth: &Worth| found(length).worthy(Some(worth)).continuation.len();
        // 0.5 ^ 2 and 0.9 ^ 15 are above 0.2, the next powers below.
        assert_eq!([2, 3, 4, 9].map(|length| kept(length, &worth)), [2, 2, 15, 15]);
        assert_eq!(found(2).worthy(None), found(2));
        // 0.3 and 0.05 beyond their rows do not pay for leaving the plain step.
        worth.jump = 0.4;
        assert_eq!([2, 4].map(|length| kept(length, &worth)), [0, 15]);
    }

    #[test]
    fn the_index_grows_with_the_text_and_starts_anew_with_another() {
        let text = tokens(&[1, 2, 3, 1, 2, 4, 1, 2]);
        let mut lookup = LookupDrafter::new();
        for end in 1..=text.len() {
            let fresh = LookupDrafter::new().find(&text[..end], 3, None);
            assert_eq!(lookup.find(&text[..end], 3, None), fresh, "{end} tokens");
        }
        let other = tokens(&[4, 1, 2, 9, 4, 1]);
        assert_eq!(lookup.find(&other, 3, None), LookupDrafter::new().find(&other, 3, None));
    }

    #[test]
    fn the_datastore_is_asked_too_and_stays_for_the_next_request() {
        let store = Arc::new(Datastore::new([&[1, 2, 3, 7, 8][..], &[1, 2, 3, 7, 9], &[4, 5, 6]]));
        let mut lookup = LookupDrafter::new().with_datastore(Some(store));
        let mut next = |ids: &[u32], worth: Option<&Worth>| {
            lookup.begin(0).expect("begun");
            let found = lookup.find(&tokens(ids), 2, worth)?;
            Some(found.continuation.iter().map(|token| token.0).collect::<Vec<_>>())
        };
        assert_eq!(next(&[0, 4, 5], None), Some(vec![6]));
        // The same is assumed of both: the text's own comes first, until the other is better.
        let text = [1, 2, 3, 9, 9, 1, 2, 3];
        assert_eq!(next(&text, None), Some(vec![9, 9]));
        let mut chances = [[0.5; LookupChances::DEPTHS]; MatchClass::COUNT];
        chances[MatchClass::of_datastore(3, 2, 1.0).index()][0] = 0.6;
        let lookup = LookupChances::new(chances);
        let worth = Worth { node: 0.2, jump: 0.0, level: 0.0, calibration: 1.0, gain: 0.5, lookup };
        assert_eq!(next(&text, Some(&worth)), Some(vec![7, 8]));
        // A first token that holds more often is not worth two that hold.
        chances[MatchClass::of_datastore(3, 2, 1.0).index()] = [0.8, 0.1, 0.1, 0.1, 0.1, 0.1];
        chances[MatchClass::of_text(3).index()] = [0.7; LookupChances::DEPTHS];
        let worth = Worth { lookup: LookupChances::new(chances), ..worth };
        assert_eq!(next(&text, Some(&worth)), Some(vec![9, 9]));
        // Where neither is worth a row its chance decides.
        let worth = Worth { node: 0.9, ..worth };
        assert_eq!(next(&text, Some(&worth)), Some(vec![7]));
    }
}
