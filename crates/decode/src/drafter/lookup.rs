//! Prompt lookup: what followed the last few tokens when they stood there before (Saxena 2023).
//! Free, deterministic given the text, good where answers repeat it.

use std::collections::HashMap;

use longdraft_models::TargetTokenId;

use super::{DraftContext, Drafter, Plan};
use crate::error::Result;
use crate::tree::{Origin, Tree};

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
            tree.insert_chain(&found.continuation, Origin::Lookup);
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
