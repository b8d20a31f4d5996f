//! How a row is cut into parts of equal work.
//!
//! A token attends to those before it in its document. So neighbouring tokens would be unequal work: of one document over two ranks
//! the second would have three times the pairs of the first. A rank takes a piece near the beginning of a document
//! and the piece that is as far from its end, as Llama 3 does (<https://arxiv.org/abs/2407.21783>, 3.3.2):
//!
//! ```text
//! one document over ranks 0, 1, 2     | 0 | 1 | 2 | 2 | 1 | 0 |
//! ```
//!
//! Pieces cost something: a draft's window reaches back from each. So a row is cut like one document, if that is even enough.
//! Else its documents are cut one by one, the longest first, until it is; documents that are much shorter than a piece of
//! the row stay together, for their attention is little work.

use longdraft_kernels::token_ranges::TokenRanges;

/// The most pairs of a rank are even with the mean if they exceed it by no more than one in so many.
const EVEN: u64 = 20;

/// The parts of a row, one for each rank.
#[derive(Debug)]
pub(super) struct RowCut {
    parts: Vec<TokenRanges>,
    tokens: usize,
    longest: usize,
}

impl RowCut {
    /// The row of these documents, `[T]`, over some ranks; their tokens differ by one at most.
    pub(super) fn even(document_ids: &[i32], ranks: usize) -> Self {
        let parts = even_parts(document_ids, ranks.max(1));
        let longest = parts.iter().map(TokenRanges::len).max().unwrap_or(0);
        Self { parts, tokens: document_ids.len(), longest }
    }

    /// Tokens of the row.
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tokens of the longest part.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// The parts, by rank.
    pub(super) fn parts(&self) -> &[TokenRanges] {
        &self.parts
    }

    /// The tokens of all parts, one part after the other, `[T]`.
    pub(super) fn in_parts(&self) -> Vec<u32> {
        self.parts.iter().flat_map(TokenRanges::iter).map(|token| token as u32).collect()
    }

    /// The same where each part is filled up to the longest one with the row's first token, `[N·longest]`.
    pub(super) fn in_equal_parts(&self) -> Vec<u32> {
        let of_part = |part: &TokenRanges| {
            let mut tokens: Vec<u32> = part.iter().map(|token| token as u32).collect();
            tokens.resize(self.longest, 0);
            tokens
        };
        self.parts.iter().flat_map(of_part).collect()
    }

    /// Where each token of the row stands among the parts, one after the other, each as long as the longest, `[T]`.
    pub(super) fn places(&self) -> Vec<u32> {
        let mut places = vec![0; self.tokens];
        for (rank, part) in self.parts.iter().enumerate() {
            for (place, token) in part.iter().enumerate() {
                places[token] = (rank * self.longest + place) as u32;
            }
        }
        places
    }

    /// The tokens of each rank that another one wants which asks for those up to `count` after its own.
    pub(super) fn lent(&self, count: usize) -> Vec<TokenRanges> {
        let mut wanted = vec![false; self.tokens];
        for part in &self.parts {
            let after = part.with_after(count, self.tokens);
            after
                .iter()
                .filter(|token| !part.contains(*token))
                .for_each(|token| wanted[token] = true);
        }
        let of_part = |part: &TokenRanges| {
            TokenRanges::of(
                part.iter().filter(|token| wanted[*token]).map(|token| token..token + 1),
            )
        };
        self.parts.iter().map(of_part).collect()
    }
}

fn even_parts(document_ids: &[i32], ranks: usize) -> Vec<TokenRanges> {
    let (tokens, pairs) = (document_ids.len(), pairs_before(document_ids));
    let most_of = |parts: &[TokenRanges]| {
        let of_part = |part: &TokenRanges| -> u64 {
            part.ranges().iter().map(|range| pairs[range.end] - pairs[range.start]).sum()
        };
        parts.iter().map(of_part).max().unwrap_or(0)
    };
    // Documents of more tokens are cut by themselves.
    let mut together = tokens;
    let mut best = zigzag(&runs(document_ids, together), ranks);
    let mut most = most_of(&best);
    while most * ranks as u64 * EVEN > pairs[tokens] * (EVEN + 1) && together > tokens / (8 * ranks)
    {
        together /= 2;
        let parts = zigzag(&runs(document_ids, together), ranks);
        let other = most_of(&parts);
        if other < most {
            (best, most) = (parts, other);
        }
    }
    best
}

/// Pairs of a token with one that it sees, of all tokens before each place, `[T + 1]`.
fn pairs_before(document_ids: &[i32]) -> Vec<u64> {
    let mut pairs = vec![0];
    let mut sum = 0;
    for document in document_ids.chunk_by(|a, b| a == b) {
        for seen in 1..=document.len() as u64 {
            // Padding sees nothing.
            sum += if document[0] < 0 { 0 } else { seen };
            pairs.push(sum);
        }
    }
    pairs
}

/// Lengths of what is cut like one document: a document of more than `together` tokens, or the shorter ones between two
/// such.
fn runs(document_ids: &[i32], together: usize) -> Vec<usize> {
    let (mut lengths, mut short) = (Vec::new(), 0);
    for document in document_ids.chunk_by(|a, b| a == b) {
        if document.len() > together {
            lengths.extend([short, document.len()]);
            short = 0;
        } else {
            short += document.len();
        }
    }
    lengths.push(short);
    lengths.retain(|length| *length > 0);
    lengths
}

/// Two pieces of each run for every rank.
fn zigzag(runs: &[usize], ranks: usize) -> Vec<TokenRanges> {
    let (mut pieces, mut counts) = (vec![Vec::new(); ranks], vec![0; ranks]);
    let mut start = 0;
    for length in runs {
        // What is over goes to those with fewest tokens so far.
        let mut shares = vec![length / ranks; ranks];
        let mut fewest: Vec<usize> = (0..ranks).collect();
        fewest.sort_by_key(|rank| counts[*rank]);
        fewest.iter().take(length % ranks).for_each(|rank| shares[*rank] += 1);
        let heads = (0..ranks).map(|rank| (rank, shares[rank].div_ceil(2)));
        let tails = (0..ranks).rev().map(|rank| (rank, shares[rank] / 2));
        for (rank, tokens) in heads.chain(tails) {
            pieces[rank].push(start..start + tokens);
            start += tokens;
        }
        counts.iter_mut().zip(shares).for_each(|(count, share)| *count += share);
    }
    pieces.into_iter().map(TokenRanges::of).collect()
}

#[cfg(test)]
mod tests {
    use longdraft_kernels::attention::{Delays, KeyRanges};
    use longdraft_kernels::random::CounterRng;

    use super::*;

    fn documents(lengths: &[usize]) -> Vec<i32> {
        let of = |(id, length): (usize, &usize)| std::iter::repeat_n(id as i32, *length);
        lengths.iter().enumerate().flat_map(of).collect()
    }

    /// By how much the rank with most visible pairs exceeds the mean, as a share of it.
    fn excess(document_ids: &[i32], parts: &[TokenRanges]) -> f64 {
        let seen = KeyRanges::packed(document_ids, None, Delays::Same(0));
        let of = |part: &TokenRanges| part.iter().map(|t| seen.of(t).len()).sum::<usize>();
        let pairs: Vec<usize> = parts.iter().map(of).collect();
        let (most, all) = (pairs.iter().max(), pairs.iter().sum::<usize>());
        *most.expect("a part") as f64 * parts.len() as f64 / all as f64 - 1.0
    }

    /// Neighbouring tokens for each rank, as a row would be cut without regard to its work.
    fn neighbours(tokens: usize, ranks: usize) -> Vec<TokenRanges> {
        (0..ranks).map(|rank| (tokens * rank / ranks..tokens * (rank + 1) / ranks).into()).collect()
    }

    #[test]
    fn a_rank_has_a_piece_near_each_end_of_a_document() {
        let cut = RowCut::even(&documents(&[24]), 3);
        let [first, second] = [[0..4, 20..24], [4..8, 16..20]].map(TokenRanges::of);
        assert_eq!(cut.parts(), [first, second, (8..16).into()]);
        assert_eq!(RowCut::even(&documents(&[7]), 1).parts(), [TokenRanges::from(0..7)]);
    }

    #[test]
    fn every_token_has_one_rank_and_ranks_have_as_many() {
        for ranks in 1..6 {
            for lengths in [&[1][..], &[5], &[23], &[7, 16], &[1, 30, 2, 9, 9], &[100], &[3; 40]] {
                let ids = documents(lengths);
                let cut = RowCut::even(&ids, ranks);
                let mut all = cut.in_parts();
                all.sort_unstable();
                assert_eq!(all, (0..ids.len() as u32).collect::<Vec<_>>());
                let counts = cut.parts().iter().map(TokenRanges::len);
                let (least, most) = (counts.clone().min(), counts.max());
                assert!(most.expect("one") - least.expect("one") <= 1, "{ranks}: {lengths:?}");
                let (places, tokens) = (cut.places(), cut.in_equal_parts());
                assert!((0..ids.len()).all(|t| tokens[places[t] as usize] == t as u32));
                assert_eq!(tokens.len(), ranks * cut.longest());
            }
        }
    }

    /// Documents of very different lengths that fill a row, with padding at its end.
    fn packed(tokens: usize, seed: u64) -> Vec<i32> {
        let mut rng = CounterRng::new(seed, "documents", &[]);
        let mut ids = Vec::with_capacity(tokens);
        let text = tokens - 100;
        for id in 0.. {
            let shortest = 1_u64 << (4 + rng.below(11));
            let length = (shortest + rng.below(shortest)) as usize;
            ids.extend(std::iter::repeat_n(id, length.min(text - ids.len())));
            if ids.len() == text {
                break;
            }
        }
        ids.resize(tokens, -1);
        ids
    }

    #[test]
    fn ranks_see_as_many_pairs() {
        for ranks in [2, 3, 4, 8] {
            let one = documents(&[32_768]);
            let cut = RowCut::even(&one, ranks);
            assert!(excess(&one, cut.parts()) < 1e-3, "{ranks} ranks");
            // The last of neighbours has nearly twice the mean.
            let before = excess(&one, &neighbours(one.len(), ranks));
            assert!((before - (1.0 - 1.0 / ranks as f64)).abs() < 1e-3, "{ranks}: {before}");
            // A long document after short ones, and long ones that end within a piece of the row.
            for lengths in [&[256; 64][..], &[20_000, 12_768], &[9000, 300, 11_000, 700, 11_768]] {
                let mut ids = documents(lengths);
                ids.extend(std::iter::repeat_n(1000, 32_768 - ids.len()));
                let cut = RowCut::even(&ids, ranks);
                assert!(excess(&ids, cut.parts()) <= 0.05, "{ranks}: {lengths:?}");
            }
        }
    }

    #[test]
    fn packed_documents_of_any_length_are_even() {
        let (mut now, mut before, mut rows) = (0.0, 0.0, 0.0);
        for ranks in [2, 4, 8] {
            for seed in 0..40 {
                let ids = packed(32_768, seed);
                let own = excess(&ids, RowCut::even(&ids, ranks).parts());
                assert!(own < 0.1, "{ranks} ranks, row {seed}: {own}");
                now += own;
                before += excess(&ids, &neighbours(ids.len(), ranks));
                rows += 1.0;
            }
        }
        let (now, before) = (now / rows, before / rows);
        assert!(now < 0.03 && before > 0.5, "{now} after {before}");
    }

    #[test]
    fn a_row_is_cut_in_few_pieces_where_that_is_even() {
        let pieces = |lengths: &[usize]| {
            let cut = RowCut::even(&documents(lengths), 4);
            cut.parts().iter().map(|part| part.ranges().len()).max().expect("a part")
        };
        assert_eq!(pieces(&[4096]), 2);
        assert_eq!(pieces(&[16; 256]), 2);
        assert!(pieces(&[3000, 1096]) <= 4);
    }

    #[test]
    fn ranks_lend_what_stands_after_the_parts_of_others() {
        let cut = RowCut::even(&documents(&[16]), 2);
        assert_eq!(cut.parts()[0].ranges(), [0..4, 12..16]);
        assert_eq!(cut.lent(2), [TokenRanges::from(12..14), TokenRanges::from(4..6)]);
        assert!(cut.lent(0).iter().all(TokenRanges::is_empty));
        assert_eq!(cut.lent(99)[1], (4..12).into());
    }
}
