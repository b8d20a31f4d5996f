//! Other texts in which lookup looks: what most often followed the last few tokens there (REST, He et
//! al. 2023). The target's own answers to other prompts are the best ones.

use std::collections::HashMap;
use std::ops::Range;

use longdraft_models::TargetTokenId;
use rayon::prelude::*;

use super::{Match, MatchClass};

/// Longest run that is looked for.
const LONGEST: usize = 8;
/// Tokens by which places are ordered: a run and what follows it.
const REACH: usize = 24;
/// Places of a run that are looked at for the token that most of them go on with.
const SAMPLE: usize = 32;
/// Ends a text; no token has this id.
const END: u32 = u32::MAX;

/// Texts with all their places in the order of what follows (a suffix array), and where in it every pair
/// of tokens begins and ends: 8 bytes a token and some 30 a pair.
#[derive(Debug)]
pub struct Datastore {
    tokens: Vec<u32>,
    order: Vec<u32>,
    pairs: HashMap<[u32; 2], Range<u32>>,
}

impl Datastore {
    /// Orders all places of some texts, at most 2^32 tokens.
    ///
    /// # Panics
    /// - there are more tokens
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a [u32]>) -> Self {
        let mut tokens = Vec::new();
        for text in texts {
            tokens.extend(text);
            tokens.push(END);
        }
        let count = u32::try_from(tokens.len()).expect("at most 2^32 tokens");
        let mut order: Vec<u32> =
            (0..count).filter(|place| tokens[*place as usize] != END).collect();
        let from = |place: u32| &tokens[place as usize..tokens.len().min(place as usize + REACH)];
        order.par_sort_unstable_by(|a, b| from(*a).cmp(from(*b)).then(a.cmp(b)));
        let mut pairs: HashMap<[u32; 2], Range<u32>> = HashMap::new();
        for (rank, place) in (0_u32..).zip(&order) {
            // After the last token of all stands an end.
            let [first, second] = [0, 1].map(|i| tokens[*place as usize + i]);
            if second != END {
                pairs.entry([first, second]).or_insert(rank..rank).end = rank + 1;
            }
        }
        Self { tokens, order, pairs }
    }

    /// The texts, but empty ones.
    pub(super) fn texts(&self) -> impl Iterator<Item = &[u32]> {
        self.tokens.split(|token| *token == END).filter(|text| !text.is_empty())
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there is nothing to look in.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// What most often follows the longest run that ends the text: of matches of a class, at most as
    /// many tokens as `count` says.
    pub(super) fn find(
        &self,
        tokens: &[TargetTokenId],
        count: impl Fn(MatchClass) -> usize,
    ) -> Option<Match> {
        // Where a run does not stand, no longer one does.
        let runs = (MatchClass::SHORTEST..=LONGEST.min(tokens.len())).map_while(|length| {
            let run = &tokens[tokens.len() - length..];
            self.places(run).map(|places| (length, places))
        });
        let runs: Vec<(usize, Range<usize>)> = runs.collect();
        runs.into_iter().rev().find_map(|(length, places)| self.follow(places, length, &count))
    }

    /// The places of a run of at least two tokens, if there are any.
    fn places(&self, run: &[TargetTokenId]) -> Option<Range<usize>> {
        let Range { start, end } = self.pairs.get(&[run[0].0, run[1].0])?;
        let of_pair = *start as usize..*end as usize;
        run.iter().enumerate().skip(2).try_fold(of_pair, |places, (i, t)| {
            let places = self.with(places, i, t.0);
            (!places.is_empty()).then_some(places)
        })
    }

    /// The token at a distance after the place of some rank.
    fn at(&self, rank: usize, distance: usize) -> u32 {
        self.tokens.get(self.order[rank] as usize + distance).copied().unwrap_or(END)
    }

    /// Of places that agree in `distance` tokens, those that go on with `token`.
    fn with(&self, places: Range<usize>, distance: usize, token: u32) -> Range<usize> {
        let order = &self.order[places.clone()];
        let next =
            |place: &u32| self.tokens.get(*place as usize + distance).copied().unwrap_or(END);
        let start = order.partition_point(|place| next(place) < token);
        let count = order[start..].partition_point(|place| next(place) == token);
        places.start + start..places.start + start + count
    }

    /// The token that most of the places go on with, as far as a sample shows, and these.
    fn most_go_on(&self, places: Range<usize>, distance: usize) -> Option<(u32, Range<usize>)> {
        let step = places.len().div_ceil(SAMPLE).max(1);
        let (mut best, mut run) = ((END, 0), (END, 0));
        for rank in places.clone().step_by(step) {
            let token = self.at(rank, distance);
            run = if token == run.0 { (token, run.1 + 1) } else { (token, 1) };
            if token != END && run.1 > best.1 {
                best = run;
            }
        }
        (best.1 > 0).then(|| (best.0, self.with(places, distance, best.0)))
    }

    fn follow(
        &self,
        places: Range<usize>,
        length: usize,
        count: impl Fn(MatchClass) -> usize,
    ) -> Option<Match> {
        let all = places.len();
        let (first, mut places) = self.most_go_on(places, length)?;
        let class = MatchClass::of_datastore(length, all, places.len() as f64 / all as f64);
        let count = count(class);
        let mut continuation = vec![TargetTokenId(first)];
        while continuation.len() < count {
            let distance = length + continuation.len();
            // After what they are ordered by, the first place stands for all.
            places = if distance < REACH { places } else { places.start..places.start + 1 };
            let Some((token, rest)) = self.most_go_on(places, distance) else { break };
            continuation.push(TargetTokenId(token));
            places = rest;
        }
        continuation.truncate(count);
        Some(Match { class, continuation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(tokens: &[u32]) -> Vec<TargetTokenId> {
        tokens.iter().map(|id| TargetTokenId(*id)).collect()
    }

    fn find(store: &Datastore, text: &[u32], count: usize) -> Option<(MatchClass, Vec<u32>)> {
        let found = store.find(&ids(text), |_| count)?;
        Some((found.class, found.continuation.iter().map(|t| t.0).collect()))
    }

    #[test]
    fn most_places_decide_and_texts_end() {
        let texts: [&[u32]; 4] = [&[1, 2, 3, 4], &[9, 1, 2, 3, 5], &[1, 2, 6], &[1, 2]];
        let store = Datastore::new(texts);
        assert_eq!(store.len(), 14);
        // Two of four places go on with 3, one ends; then each way is as frequent, the first is taken.
        let class = MatchClass::of_datastore(2, 4, 0.5);
        assert_eq!(find(&store, &[7, 1, 2], 5), Some((class, vec![3, 4])));
        assert_eq!(find(&store, &[7, 1, 2], 1), Some((class, vec![3])));
        // The longer run knows better.
        assert_eq!(
            find(&store, &[9, 1, 2], 5),
            Some((MatchClass::of_datastore(3, 1, 1.0), vec![3, 5]))
        );
        assert_eq!(find(&store, &[3, 4], 5), None, "the text ends there");
        assert_eq!(find(&store, &[4, 9], 5), None, "texts do not run into one another");
        assert_eq!(find(&store, &[1], 5), None);
        assert_eq!(find(&store, &[1, 2], 0), Some((class, Vec::new())));
        let nothing = Datastore::new([]);
        assert!(nothing.is_empty() && find(&nothing, &[1, 2], 5).is_none());
    }

    /// Against a search place by place, in random texts of few tokens.
    #[test]
    fn the_order_finds_what_a_search_finds() {
        let mut state = 7_u64;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        let texts: Vec<Vec<u32>> =
            (0..20).map(|_| (0..draw(40)).map(|_| draw(3) as u32).collect()).collect();
        let store = Datastore::new(texts.iter().map(Vec::as_slice));
        for _ in 0..300 {
            let text: Vec<u32> = (0..2 + draw(9)).map(|_| draw(3) as u32).collect();
            let places = |length: usize| {
                let run = &text[text.len() - length..];
                let followed = texts.iter().flat_map(|t| t.windows(length + 1));
                followed.filter(|w| w[..length] == *run).map(|w| w[length]).collect::<Vec<_>>()
            };
            let longest = (2..=LONGEST.min(text.len())).rev().find(|n| !places(*n).is_empty());
            let found = find(&store, &text, 1);
            let Some(longest) = longest else {
                assert_eq!(found, None);
                continue;
            };
            let (_, next) = found.expect("a place");
            let followers = places(longest);
            let count = |token| followers.iter().filter(|t| **t == token).count();
            let most = (0..3).map(count).max();
            // A sample may miss the best of two that are nearly as frequent.
            let enough = if followers.len() > SAMPLE { 1 } else { most.unwrap_or(0) };
            assert!(count(next[0]) >= enough, "{next:?} of {followers:?}");
        }
    }
}
