//! Prompt lookup: what followed the last few tokens when they stood there before (Saxena 2023).
//! Free, deterministic given the text, good where answers repeat it.

use std::collections::HashMap;

use longdraft_models::TargetTokenId;

use super::{DraftContext, Drafter, Plan, Worth};
use crate::error::Result;
use crate::tree::Tree;

/// Longest and shortest run of tokens that is looked for.
const LONGEST: usize = 4;
const SHORTEST: usize = 2;

/// An index of the text's short runs, one update a token.
#[derive(Debug, Default)]
pub struct LookupDrafter {
    tokens: Vec<TargetTokenId>,
    /// Where the newest occurrence of each run ends (index behind it), among runs that something
    /// follows.
    ends: HashMap<Vec<TargetTokenId>, usize>,
    /// Runs that end before this index are in `ends`.
    indexed: usize,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// Tokens that agree.
    pub length: usize,
    /// What followed them.
    pub continuation: Vec<TargetTokenId>,
}

/// How often a token that lookup found holds where all before it did, by tokens that agreed and
/// depth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LookupChances([[f64; Self::DEPTHS]; Self::LENGTHS]);

impl LookupChances {
    /// Depths that are told apart; deeper ones count as the last.
    pub const DEPTHS: usize = 6;
    /// Lengths of matches.
    pub const LENGTHS: usize = LONGEST - SHORTEST + 1;

    /// From rows by [`Self::row_of`] a match's length.
    pub fn new(chances: [[f64; Self::DEPTHS]; Self::LENGTHS]) -> Self {
        Self(chances)
    }

    /// Where a match of this length is counted.
    pub fn row_of(matched: usize) -> usize {
        matched.clamp(SHORTEST, LONGEST) - SHORTEST
    }

    /// Chances that the first, the first two, ... tokens behind a match hold.
    pub fn along(&self, matched: usize) -> impl Iterator<Item = f64> {
        let chances = self.0[Self::row_of(matched)];
        (0..).scan(1.0, move |path, depth: usize| {
            *path *= chances[depth.min(Self::DEPTHS - 1)];
            Some(*path)
        })
    }
}

impl Match {
    /// The tokens that are worth their rows of the target's pass.
    #[must_use]
    pub fn worthy(mut self, worth: Option<&Worth>) -> Self {
        if let Some(worth) = worth {
            let chances = worth.lookup.along(self.length).take(self.continuation.len());
            self.continuation.truncate(chances.take_while(|chance| *chance >= worth.node).count());
        }
        self
    }
}

impl LookupDrafter {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// What followed the newest earlier place of the longest run that ends the text, at most
    /// `count` tokens.
    pub fn find(&mut self, tokens: &[TargetTokenId], count: usize) -> Option<Match> {
        self.update(tokens);
        (SHORTEST..=LONGEST.min(tokens.len())).rev().find_map(|length| {
            let end = *self.ends.get(&tokens[tokens.len() - length..])?;
            let continuation = tokens[end..].iter().copied().take(count).collect::<Vec<_>>();
            (!continuation.is_empty()).then_some(Match { length, continuation })
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
                self.ends.insert(tokens[end - length..end].to_vec(), end);
            }
        }
        self.indexed = tokens.len();
    }
}

impl Drafter for LookupDrafter {
    fn begin(&mut self, _kept: usize) -> Result<()> {
        *self = Self::default();
        Ok(())
    }

    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        let mut tree = Tree::new(context.tokens[context.tokens.len() - 1]);
        if let Some(found) = self.find(context.tokens, plan.shape.depth()) {
            let found = found.worthy(plan.worth.as_ref());
            tree.insert_lookup(found.length, &found.continuation);
        }
        Ok(tree)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(ids: &[u32]) -> Vec<TargetTokenId> {
        ids.iter().map(|id| TargetTokenId(*id)).collect()
    }

    fn find(ids: &[u32], count: usize) -> Option<(usize, Vec<u32>)> {
        let found = LookupDrafter::new().find(&tokens(ids), count)?;
        Some((found.length, found.continuation.iter().map(|token| token.0).collect()))
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
        let mut chances = [[0.5; LookupChances::DEPTHS]; LookupChances::LENGTHS];
        chances[LookupChances::row_of(4)] = [0.9; LookupChances::DEPTHS];
        let lookup = LookupChances::new(chances);
        let worth = Worth { node: 0.2, level: 0.0, calibration: 1.0, first: 0.5, lookup };
        let found = |length| Match { length, continuation: tokens(&[7; 30]) };
        let kept = |length| found(length).worthy(Some(&worth)).continuation.len();
        // 0.5 ^ 2 and 0.9 ^ 15 are above 0.2, the next powers below.
        assert_eq!([2, 3, 4, 9].map(kept), [2, 2, 15, 15]);
        assert_eq!(found(2).worthy(None), found(2));
    }

    #[test]
    fn the_index_grows_with_the_text_and_starts_anew_with_another() {
        let text = tokens(&[1, 2, 3, 1, 2, 4, 1, 2]);
        let mut lookup = LookupDrafter::new();
        for end in 1..=text.len() {
            let fresh = LookupDrafter::new().find(&text[..end], 3);
            assert_eq!(lookup.find(&text[..end], 3), fresh, "{end} tokens");
        }
        let other = tokens(&[4, 1, 2, 9, 4, 1]);
        assert_eq!(lookup.find(&other, 3), LookupDrafter::new().find(&other, 3));
    }
}
