//! Some tokens of a row, where one process does not run all of them.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

/// Some tokens of a row: ascending ranges, none of which is empty or touches another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRanges {
    ranges: Vec<Range<usize>>,
    /// How many of the tokens stand before each range, and how many there are.
    before: Vec<usize>,
}

impl TokenRanges {
    /// The tokens of some ranges, which may overlap and stand in any order.
    pub fn of(ranges: impl IntoIterator<Item = Range<usize>>) -> Self {
        let mut some: Vec<Range<usize>> =
            ranges.into_iter().filter(|range| !range.is_empty()).collect();
        some.sort_by_key(|range| range.start);
        let mut ranges: Vec<Range<usize>> = Vec::with_capacity(some.len());
        for range in some {
            match ranges.last_mut().filter(|last| range.start <= last.end) {
                Some(last) => last.end = last.end.max(range.end),
                None => ranges.push(range),
            }
        }
        let mut before = vec![0];
        for (index, range) in ranges.iter().enumerate() {
            before.push(before[index] + range.len());
        }
        Self { ranges, before }
    }

    /// The ranges, ascending.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.before.last().copied().unwrap_or(0)
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The tokens, ascending.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.ranges.iter().cloned().flatten()
    }

    /// Where a token stands among them.
    pub fn place_of(&self, token: usize) -> Option<usize> {
        let index = self.ranges.partition_point(|range| range.end <= token);
        let range = self.ranges.get(index).filter(|range| range.contains(&token))?;
        Some(self.before[index] + token - range.start)
    }

    /// Whether a token is one of them.
    pub fn contains(&self, token: usize) -> bool {
        self.place_of(token).is_some()
    }

    /// Where each of some tokens stands among them.
    ///
    /// # Errors
    /// - one of the tokens is none of them
    pub fn places_of(&self, tokens: &[u32]) -> Result<Vec<u32>> {
        let place = |token: &u32| match self.place_of(*token as usize) {
            Some(place) => Ok(place as u32),
            None => bail!("token {token} of the row is none of the {} that are here", self.len()),
        };
        tokens.iter().map(place).collect()
    }

    /// These with up to `count` tokens before each range.
    #[must_use]
    pub fn with_before(&self, count: usize) -> Self {
        Self::of(self.ranges.iter().map(|range| range.start.saturating_sub(count)..range.end))
    }

    /// These with up to `count` tokens after each range, of a row of `tokens`.
    #[must_use]
    pub fn with_after(&self, count: usize, tokens: usize) -> Self {
        let longer =
            |range: &Range<usize>| range.start..range.end.saturating_add(count).min(tokens);
        Self::of(self.ranges.iter().map(longer))
    }

    /// What a row has at these tokens: `[T]` → `[t]`.
    ///
    /// # Panics
    /// - the row is shorter
    pub fn select<T: Copy>(&self, row: &[T]) -> Vec<T> {
        self.ranges.iter().flat_map(|range| row[range.clone()].iter().copied()).collect()
    }

    /// The rows of a tensor at these tokens: `[T, ..]` → `[t, ..]`; gradients flow into them.
    ///
    /// # Errors
    /// - there are fewer rows, or the device has no memory
    pub fn rows_of(&self, all: &Tensor) -> Result<Tensor> {
        let rows = |range: &Range<usize>| all.narrow(0, range.start, range.len());
        match self.ranges.as_slice() {
            [] => all.narrow(0, 0, 0),
            [only] => rows(only),
            several => Tensor::cat(&several.iter().map(rows).collect::<Result<Vec<_>>>()?, 0),
        }
    }
}

impl Default for TokenRanges {
    /// No tokens.
    fn default() -> Self {
        Self::of([])
    }
}

impl From<Range<usize>> for TokenRanges {
    fn from(range: Range<usize>) -> Self {
        Self::of([range])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn ranges_are_joined_where_they_touch() {
        let some = TokenRanges::of([7..9, 2..4, 5..5, 4..6, 8..11]);
        assert_eq!(some.ranges(), [2..6, 7..11]);
        assert_eq!((some.len(), some.is_empty()), (8, false));
        assert_eq!(some.iter().collect::<Vec<_>>(), [2, 3, 4, 5, 7, 8, 9, 10]);
        assert_eq!(TokenRanges::from(3..3), TokenRanges::of([]));
        assert!(TokenRanges::default().is_empty());
        assert_eq!(
            (TokenRanges::default(), TokenRanges::default().len()),
            (TokenRanges::of([]), 0)
        );
    }

    #[test]
    fn tokens_are_found_among_them() {
        let some = TokenRanges::of([2..4, 7..9]);
        let places: Vec<_> = (0..10).map(|token| some.place_of(token)).collect();
        let wanted = [None, None, Some(0), Some(1), None, None, None, Some(2), Some(3), None];
        assert_eq!(places, wanted);
        assert!(some.contains(8) && !some.contains(4));
        assert_eq!(some.places_of(&[8, 2]).expect("both are there"), [3, 0]);
        assert!(some.places_of(&[8, 4]).is_err());
        assert_eq!(TokenRanges::default().place_of(0), None);
    }

    #[test]
    fn they_grow_to_both_sides_within_the_row() {
        let some = TokenRanges::of([1..2, 5..6, 9..10]);
        assert_eq!(some.with_before(2).ranges(), [0..2, 3..6, 7..10]);
        assert_eq!(some.with_before(3), (0..10).into());
        assert_eq!(some.with_after(2, 10).ranges(), [1..4, 5..8, 9..10]);
        assert_eq!(some.with_after(0, 10), some);
        assert_eq!(some.with_after(usize::MAX, 10), (1..10).into());
    }

    #[test]
    fn rows_are_those_of_the_tokens() {
        let some = TokenRanges::of([1..2, 4..6]);
        assert_eq!(some.select(&['a', 'b', 'c', 'd', 'e', 'f']), ['b', 'e', 'f']);
        let all = Tensor::arange(0_u32, 12, &Device::Cpu).and_then(|all| all.reshape((6, 2)));
        let all = all.expect("rows");
        let rows = |some: &TokenRanges| {
            some.rows_of(&all).and_then(|rows| rows.to_vec2::<u32>()).expect("rows")
        };
        assert_eq!(rows(&some), [[2, 3], [8, 9], [10, 11]]);
        assert_eq!(rows(&TokenRanges::from(2..3)), [[4, 5]]);
        assert!(rows(&TokenRanges::default()).is_empty());
    }
}
