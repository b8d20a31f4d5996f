//! What comes of finds, whether they were proposed or not.

use longdraft_models::TargetTokenId;

use super::{LookupChances, Match, MatchClass};

/// How far something that was found held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookedUp {
    /// What was found.
    pub class: MatchClass,
    /// Tokens of it that could be compared with the text: up to the first one that did not hold.
    pub tested: usize,
    /// Those that held.
    pub held: usize,
}

/// Finds that the text has not reached the end of.
#[derive(Debug, Default)]
pub(super) struct Watched {
    waiting: Vec<Waiting>,
    outcomes: Vec<LookedUp>,
}

#[derive(Debug)]
struct Waiting {
    class: MatchClass,
    /// Index of the first token that was foretold, and those that were.
    at: usize,
    foretold: Vec<TargetTokenId>,
}

impl Watched {
    /// Watches a find after a text of so many tokens.
    pub(super) fn add(&mut self, at: usize, found: &Match) {
        let foretold = found.continuation.iter().take(LookupChances::DEPTHS).copied().collect();
        self.waiting.push(Waiting { class: found.class, at, foretold });
    }

    /// Compares what was foretold with a text that has grown since.
    pub(super) fn compare(&mut self, tokens: &[TargetTokenId]) {
        let Self { waiting, outcomes } = self;
        waiting.retain(|Waiting { class, at, foretold }| {
            let came = tokens.get(*at..).unwrap_or_default();
            let held = came.iter().zip(foretold).take_while(|(came, told)| came == told).count();
            let known = foretold.len().min(came.len());
            let is_open = held == known && known < foretold.len();
            if !is_open && known > 0 {
                outcomes.push(LookedUp { class: *class, tested: known.min(held + 1), held });
            }
            is_open
        });
    }

    pub(super) fn outcomes(&mut self) -> Vec<LookedUp> {
        std::mem::take(&mut self.outcomes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(ids: &[u32]) -> Vec<TargetTokenId> {
        ids.iter().map(|id| TargetTokenId(*id)).collect()
    }

    /// What came of a find after two tokens, seen after each of some lengths of the text.
    fn seen(foretold: &[u32], text: &[u32], lengths: &[usize]) -> Vec<Option<(usize, usize)>> {
        let class = MatchClass::of_text(2);
        let mut watched = Watched::default();
        watched.add(2, &Match { class, continuation: tokens(foretold) });
        let looks = lengths.iter().map(|length| {
            watched.compare(&tokens(&text[..*length]));
            let outcomes = watched.outcomes();
            assert!(outcomes.len() < 2 && outcomes.iter().all(|outcome| outcome.class == class));
            outcomes.first().map(|outcome| (outcome.tested, outcome.held))
        });
        looks.collect()
    }

    #[test]
    fn an_outcome_is_told_once_when_it_is_known() {
        let text = [1, 2, 3, 4, 5, 6];
        assert_eq!(seen(&[3, 4], &text, &[2, 3, 4, 5]), [None, None, Some((2, 2)), None]);
        assert_eq!(seen(&[3, 9, 5], &text, &[3, 4, 5]), [None, Some((2, 1)), None]);
        assert_eq!(seen(&[7, 4], &text, &[6]), [Some((1, 0))]);
        // Several tokens at a time, and more than are told apart.
        assert_eq!(seen(&[3, 4, 5, 9], &text, &[6]), [Some((4, 3))]);
        let long: Vec<u32> = (0..20).collect();
        assert_eq!(seen(&long[2..], &long, &[4, 20]), [None, Some((6, 6))]);
    }

    #[test]
    fn nothing_is_expected_of_nothing() {
        assert_eq!(seen(&[], &[1, 2, 3], &[2, 3]), [None, None]);
    }
}
