//! Which keys each query sees: one contiguous range per query, and a few single keys beside it.

use std::ops::Range;

/// How far before a query its newest visible key lies.
#[derive(Debug, Clone, Copy)]
pub enum Delays<'a> {
    /// The same delay for every token; 0 sees the token itself.
    Same(usize),
    /// A delay per token, `[T]`.
    PerToken(&'a [u32]),
}

/// How far back a token of a sequence sees, the token itself included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// To the start.
    All,
    /// The last so many tokens.
    Window(usize),
    /// To the start of its chunk: positions are cut at multiples of so many tokens.
    Chunk(usize),
}

impl Reach {
    /// The first place that the token before place `end` sees.
    pub fn first(self, end: usize) -> usize {
        match self {
            Self::All => 0,
            Self::Window(window) => end.saturating_sub(window),
            Self::Chunk(chunk) => end.saturating_sub(1) / chunk.max(1) * chunk.max(1),
        }
    }
}

/// Visible keys of every query `t`: `[start_t, end_t)` by token index, then single keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRanges {
    start: Vec<u32>,
    end: Vec<u32>,
    /// Single keys of all queries, one query after the other.
    singles: Vec<u32>,
    /// Where each query's single keys end in `singles`; empty if no query has any.
    singles_end: Vec<u32>,
}

impl KeyRanges {
    /// Queries and keys are the same packed tokens.
    ///
    /// Key `s` is visible to query `t` iff both lie in the same document, `s ≤ t − δ_t`, and,
    /// with a window `W`, `t − W ≤ s` (so `W + 1` keys with the token itself). A document is a
    /// run of equal ids; a negative id is padding, which sees nothing and is seen by nobody.
    ///
    /// # Panics
    /// - per-token delays of another length than `document_ids`
    pub fn packed(document_ids: &[i32], window: Option<usize>, delays: Delays<'_>) -> Self {
        let tokens = document_ids.len();
        if let Delays::PerToken(delays) = delays {
            assert_eq!(delays.len(), tokens, "one delay per token");
        }
        let mut document_start = 0;
        Self::of_each((0..tokens).map(|t| {
            if t > 0 && document_ids[t] != document_ids[t - 1] {
                document_start = t;
            }
            let delay = match delays {
                Delays::Same(delay) => delay,
                Delays::PerToken(delays) => delays[t] as usize,
            };
            let first = window.map_or(document_start, |w| document_start.max(t.saturating_sub(w)));
            let last = (t + 1).saturating_sub(delay);
            if document_ids[t] < 0 { 0..0 } else { first..last }
        }))
    }

    /// Packed tokens that see their document as far as `reach` goes; padding sees nothing.
    pub fn packed_in(document_ids: &[i32], reach: Reach) -> Self {
        let mut document_start = 0;
        Self::of_each((0..document_ids.len()).map(|t| {
            if t > 0 && document_ids[t] != document_ids[t - 1] {
                document_start = t;
            }
            let first = document_start + reach.first(t + 1 - document_start);
            if document_ids[t] < 0 { 0..0 } else { first..t + 1 }
        }))
    }

    /// Each query sees the keys of its own range.
    pub fn of_each(ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        let ranges = ranges.into_iter().map(|range| if range.is_empty() { 0..0 } else { range });
        let (start, end) = ranges.map(|range| (range.start as u32, range.end as u32)).unzip();
        Self { start, end, singles: Vec::new(), singles_end: Vec::new() }
    }

    /// `queries` new tokens after `cached` ones: each sees the cache, its predecessors, itself.
    pub fn appended(cached: usize, queries: usize) -> Self {
        Self::appended_in(cached, queries, Reach::All)
    }

    /// The same as far as `reach` goes.
    pub fn appended_in(cached: usize, queries: usize, reach: Reach) -> Self {
        let ends = cached + 1..cached + 1 + queries;
        Self::of_each(ends.map(|end| reach.first(end)..end))
    }

    /// Nodes of a token tree after `cached` tokens, one key each in node order: a node sees the
    /// cache, its ancestors and itself (`SpecInfer`, Miao et al. 2024).
    ///
    /// # Panics
    /// - a parent does not come before its child
    pub fn tree(cached: usize, parents: &[Option<usize>]) -> Self {
        Self::tree_in(cached, parents, Reach::All)
    }

    /// The same as far as `reach` goes along a node's path. Where that leaves nothing of the cache, the
    /// node's empty range stands at the place that its first visible ancestor has in a plain sequence.
    ///
    /// # Panics
    /// - as [`Self::tree`]
    pub fn tree_in(cached: usize, parents: &[Option<usize>], reach: Reach) -> Self {
        let mut paths: Vec<Vec<u32>> = Vec::with_capacity(parents.len());
        for (node, parent) in parents.iter().enumerate() {
            assert!(parent.is_none_or(|parent| parent < node), "parents come before children");
            let mut path = parent.map_or_else(Vec::new, |parent| paths[parent].clone());
            path.push((cached + node) as u32);
            paths.push(path);
        }
        let (mut start, mut end) =
            (Vec::with_capacity(paths.len()), Vec::with_capacity(paths.len()));
        for path in &mut paths {
            let first = reach.first(cached + path.len());
            path.drain(..first.saturating_sub(cached));
            start.push(first as u32);
            end.push(first.max(cached) as u32);
        }
        Self { start, end, singles: Vec::new(), singles_end: Vec::new() }.with_singles(paths)
    }

    /// The same where the first `dropped` keys are not held, so that places count from there on; `None` if a
    /// query sees one of these. With whole tiles ([`super::TILE_KEYS`]) results keep their bits.
    #[must_use]
    pub fn without_first(mut self, dropped: usize) -> Option<Self> {
        let dropped = u32::try_from(dropped).ok()?;
        for (start, end) in self.start.iter_mut().zip(&mut self.end) {
            // What sees nothing may stand anywhere.
            if start == end && *start < dropped {
                (*start, *end) = (dropped, dropped);
            }
            (*start, *end) = (start.checked_sub(dropped)?, end.checked_sub(dropped)?);
        }
        for key in &mut self.singles {
            *key = key.checked_sub(dropped)?;
        }
        Some(self)
    }

    /// Adds `steps` later blocks of keys, as long as the queries, after the keys so far: query `t`
    /// sees row `t` of each. These are the test-time steps of EAGLE-3 (Li et al. 2025): one pass
    /// over the context and the own column of every later step.
    #[must_use]
    pub fn with_own_columns(self, steps: usize) -> Self {
        let queries = self.queries();
        let column = |t: usize| (1..=steps).map(|step| (step * queries + t) as u32).collect();
        self.with_singles((0..queries).map(column))
    }

    /// The same keys for some of the queries, in the order given.
    ///
    /// # Panics
    /// - a query is out of range
    #[must_use]
    pub fn select(&self, queries: &[u32]) -> Self {
        let of = |values: &[u32]| queries.iter().map(|&t| values[t as usize]).collect();
        let (singles, singles_end) = (Vec::new(), Vec::new());
        let chosen = Self { start: of(&self.start), end: of(&self.end), singles, singles_end };
        if self.singles.is_empty() {
            return chosen;
        }
        chosen.with_singles(queries.iter().map(|&t| self.singles_of(t as usize).to_vec()))
    }

    /// Replaces the single keys: one list a query, none of them in the query's range.
    #[must_use]
    pub fn with_singles(mut self, of_queries: impl IntoIterator<Item = Vec<u32>>) -> Self {
        self.singles.clear();
        self.singles_end.clear();
        for keys in of_queries {
            self.singles.extend(keys);
            self.singles_end.push(self.singles.len() as u32);
        }
        self
    }

    /// Every one of `queries` sees the same keys.
    pub fn shared(keys: &Range<usize>, queries: usize) -> Self {
        Self::of_each(std::iter::repeat_n(keys.clone(), queries))
    }

    /// The same with further queries that see nothing, up to `queries`.
    #[must_use]
    pub(super) fn filled_up(&self, queries: usize) -> Self {
        let mut all = self.clone();
        all.start.resize(queries, 0);
        all.end.resize(queries, 0);
        if !all.singles_end.is_empty() {
            all.singles_end.resize(queries, all.singles.len() as u32);
        }
        all
    }

    /// Number of queries.
    pub fn queries(&self) -> usize {
        self.start.len()
    }

    /// The contiguous part of the keys that one query sees.
    ///
    /// # Panics
    /// - `query` is out of range
    pub fn of(&self, query: usize) -> Range<usize> {
        self.start[query] as usize..self.end[query] as usize
    }

    /// The single keys of one query, none of which lies in its range.
    ///
    /// # Panics
    /// - `query` is out of range
    pub fn singles_of(&self, query: usize) -> &[u32] {
        if self.singles_end.is_empty() {
            return &[];
        }
        let start = if query == 0 { 0 } else { self.singles_end[query - 1] as usize };
        &self.singles[start..self.singles_end[query] as usize]
    }

    /// Largest key index that any query sees, plus 1.
    pub fn max_end(&self) -> usize {
        let ends = self.end.iter().map(|&end| end as usize);
        ends.chain(self.singles.iter().map(|&key| key as usize + 1)).max().unwrap_or(0)
    }

    /// The queries that see each single key, ascending: `(key, query)` sorted by key.
    pub(super) fn singles_by_key(&self) -> Vec<(u32, u32)> {
        // By counting: where the pairs of each key begin.
        let keys = self.singles.iter().max().map_or(0, |&key| key as usize + 1);
        let mut next = vec![0; keys + 1];
        self.singles.iter().for_each(|&key| next[key as usize + 1] += 1);
        (0..keys).for_each(|key| next[key + 1] += next[key]);
        let mut all = vec![(0, 0); self.singles.len()];
        for t in 0..self.queries() {
            for &key in self.singles_of(t) {
                all[next[key as usize]] = (key, t as u32);
                next[key as usize] += 1;
            }
        }
        all
    }

    /// The keys that at least one of `queries` may see: smallest start, largest end.
    pub(super) fn hull(&self, queries: Range<usize>) -> Range<usize> {
        let visible = queries.map(|t| self.of(t)).filter(|r| !r.is_empty());
        visible.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_of_two_sees_three_keys_and_stays_in_its_document() {
        let ranges = KeyRanges::packed(&[0, 0, 0, 0, 1, 1], Some(2), Delays::Same(0));
        let seen: Vec<_> = (0..6).map(|t| ranges.of(t)).collect();
        assert_eq!(seen, [0..1, 0..2, 0..3, 1..4, 4..5, 4..6]);
    }

    #[test]
    fn rows_within_the_delay_and_padding_see_nothing() {
        let ranges = KeyRanges::packed(&[7, 7, 7, 8, -1], None, Delays::PerToken(&[1, 2, 1, 1, 1]));
        let seen: Vec<_> = (0..5).map(|t| ranges.of(t)).collect();
        assert_eq!(seen, [0..0, 0..0, 0..2, 0..0, 0..0]);
    }

    #[test]
    fn appended_tokens_see_cache_and_themselves() {
        let ranges = KeyRanges::appended(3, 2);
        assert_eq!((ranges.of(0), ranges.of(1), ranges.max_end()), (0..4, 0..5, 5));
    }

    #[test]
    fn own_ranges_are_kept_and_empty_ones_see_nothing() {
        let ranges = KeyRanges::of_each([2..5, 7..7, Range { start: 4, end: 3 }]).with_singles([
            vec![6],
            vec![],
            vec![],
        ]);
        assert_eq!((ranges.of(0), ranges.of(1), ranges.of(2)), (2..5, 0..0, 0..0));
        assert_eq!((ranges.queries(), ranges.max_end()), (3, 7));
        let last = KeyRanges::appended(1, 1).with_singles([vec![u32::MAX]]);
        assert_eq!(last.max_end(), u32::MAX as usize + 1);
    }

    #[test]
    fn hull_skips_empty_ranges() {
        let (singles, singles_end) = (Vec::new(), Vec::new());
        let ranges = KeyRanges { start: vec![0, 5, 3], end: vec![0, 9, 6], singles, singles_end };
        assert_eq!(ranges.hull(0..3), 3..9);
        assert_eq!(ranges.hull(0..1), 0..0);
    }

    #[test]
    fn tree_node_sees_cache_and_ancestors() {
        let ranges = KeyRanges::tree(3, &[None, Some(0), Some(0), Some(2)]);
        assert_eq!(ranges.of(3), 0..3);
        assert_eq!(ranges.singles_of(3), [3, 5, 6]);
        assert_eq!((ranges.singles_of(0), ranges.max_end()), (&[3][..], 7));
    }

    #[test]
    fn a_window_leaves_the_last_keys_of_a_sequence_and_of_a_path() {
        let ranges = KeyRanges::appended_in(3, 3, Reach::Window(2));
        assert_eq!((ranges.of(0), ranges.of(2)), (2..4, 4..6));
        assert_eq!(KeyRanges::appended_in(3, 2, Reach::Window(9)), KeyRanges::appended(3, 2));
        let parents = [None, Some(0), Some(0), Some(2), Some(3)];
        let wide = KeyRanges::tree_in(3, &parents, Reach::Window(8));
        assert_eq!(wide, KeyRanges::tree(3, &parents));
        let ranges = KeyRanges::tree_in(3, &parents, Reach::Window(3));
        let seen = |t: usize| (ranges.of(t), ranges.singles_of(t).to_vec());
        assert_eq!(seen(0), (1..3, vec![3]));
        assert_eq!(seen(2), (2..3, vec![3, 5]));
        assert_eq!(seen(3), (3..3, vec![3, 5, 6]));
        // Its oldest ancestor is out of reach: the next one would stand at 4.
        assert_eq!(seen(4), (4..4, vec![5, 6, 7]));
    }

    #[test]
    fn keys_that_are_not_held_are_counted_off_and_never_read() {
        let chain = KeyRanges::appended_in(9, 2, Reach::Window(4));
        let held = chain.clone().without_first(6).expect("seven is the first key");
        assert_eq!((held.of(0), held.of(1)), (0..4, 1..5));
        assert_eq!(chain.clone().without_first(0), Some(chain.clone()));
        assert_eq!(chain.without_first(7), None);
        let tree = KeyRanges::tree_in(9, &[None, Some(0)], Reach::Window(1));
        let held = tree.without_first(9).expect("only themselves");
        assert_eq!((held.of(1), held.singles_of(1)), (1..1, &[1][..]));
        // A query that sees nothing has no key to lose.
        let nothing = KeyRanges::of_each([0..0, 5..6]).without_first(5).expect("one key");
        assert_eq!((nothing.of(0), nothing.of(1)), (0..0, 0..1));
        assert_eq!(KeyRanges::shared(&(6..8), 1).with_singles([vec![4]]).without_first(6), None);
    }

    #[test]
    fn selected_queries_keep_their_keys() {
        let ranges = KeyRanges::packed(&[0, 0, 0], None, Delays::Same(0)).with_own_columns(1);
        let chosen = ranges.select(&[2, 0]);
        assert_eq!((chosen.of(0), chosen.of(1), chosen.queries()), (0..3, 0..1, 2));
        assert_eq!((chosen.singles_of(0), chosen.singles_of(1)), (&[5][..], &[3][..]));
        assert_eq!(KeyRanges::appended(2, 3).select(&[1]).of(0), 0..4);
    }

    #[test]
    fn single_keys_are_sorted_by_key_then_query() {
        let lists = [vec![9, 2], vec![], vec![2, 7, 9], vec![0], vec![9, 9]];
        let ranges = KeyRanges::shared(&(0..0), lists.len()).with_singles(lists.clone());
        let pairs = |(t, keys): (usize, Vec<u32>)| keys.into_iter().map(move |key| (key, t as u32));
        let mut sorted: Vec<(u32, u32)> = lists.into_iter().enumerate().flat_map(pairs).collect();
        sorted.sort_unstable();
        assert_eq!(ranges.singles_by_key(), sorted);
        assert!(KeyRanges::appended(3, 2).singles_by_key().is_empty());
    }

    #[test]
    fn later_steps_add_the_own_column() {
        let ranges = KeyRanges::packed(&[0, 0, 0], None, Delays::Same(0)).with_own_columns(2);
        assert_eq!(ranges.of(1), 0..2);
        assert_eq!(ranges.singles_of(1), [4, 7]);
        assert_eq!(ranges.singles_by_key()[..2], [(3, 0), (4, 1)]);
    }
}
