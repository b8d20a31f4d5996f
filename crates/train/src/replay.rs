//! Decoding rounds replayed over a text.
//!
//! Where a text was written by the target, greedily, a round of chain decoding can be read off the
//! draft's agreement at every token: it commits the proposals up to the first wrong one, and the
//! target's own token after them. The mean is what the decoder reaches on the same text. A product
//! of rates over all tokens is not: rounds begin after rejections, and agreement runs in streaks.

use longdraft_data::Batch;
use longdraft_features::BatchFeatures;

/// Rounds and the tokens that they commit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rounds {
    /// Passes of the target.
    pub rounds: usize,
    /// Committed tokens, the target's own included.
    pub tokens: usize,
}

/// Whether a row is replayed here. Ranks that share it know a part of it each; where it is too short to share, the others
/// own nothing of it.
pub(crate) fn is_replayed(batch: &Batch, features: &BatchFeatures) -> bool {
    features.part.is_none() && batch.owns(0)
}

impl Rounds {
    /// Decodes every supervised run of tokens again with chains of `gamma`. The first token of a run
    /// comes from the pass over what stands before it; `holds(root, level)` tells whether the chain
    /// below token `root` has its `level`-th proposal right (from 1).
    pub fn replay(batch: &Batch, gamma: usize, holds: impl Fn(usize, usize) -> bool) -> Self {
        let mut sum = Self::default();
        let tokens = batch.document_ids.len().min(batch.loss_mask.len());
        let place = |t: usize| (batch.document_ids[t], batch.loss_mask[t]);
        let places: Vec<usize> = (0..tokens).collect();
        for run in places.chunk_by(|a, b| place(*a) == place(*b)) {
            let (mut root, last) = (run[0], run[run.len() - 1]);
            if !batch.loss_mask[root] || batch.document_ids[root] < 0 {
                continue;
            }
            while root < last {
                let left = last - root;
                let held = (1..=gamma.min(left)).take_while(|level| holds(root, *level)).count();
                let committed = left.min(held + 1);
                sum.rounds += 1;
                sum.tokens += committed;
                root += committed;
            }
        }
        sum
    }

    /// Tokens committed per pass; `None` without a pass.
    pub fn acceptance_length(&self) -> Option<f64> {
        (self.rounds > 0).then(|| self.tokens as f64 / self.rounds as f64)
    }

    /// Adds other rounds.
    pub fn merge(&mut self, other: Self) {
        self.rounds += other.rounds;
        self.tokens += other.tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(mask: &[u8], documents: &[i32]) -> Batch {
        Batch {
            ids: vec![0; mask.len()],
            loss_mask: mask.iter().map(|m| *m == 1).collect(),
            document_ids: documents.to_vec(),
            ..Batch::default()
        }
    }

    #[test]
    fn rounds_end_behind_the_first_wrong_proposal_and_at_the_end_of_a_run() {
        //                   0  1  2  3  4  5  6  7  8    9  10 11   12
        let batch = batch(
            &[0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1],
            &[0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, -1],
        );
        // Below token 1 two proposals hold, a third after a wrong one does not count; below 4 all.
        let holds = |root: usize, level: usize| match root {
            1 => level != 3,
            4 => true,
            _ => false,
        };
        // 1 -> 4 (3 tokens), 4 -> 7 (3 of 5 that are left), 9 -> 10 -> 11.
        let all = Rounds::replay(&batch, 4, holds);
        assert_eq!(all, Rounds { rounds: 4, tokens: 8 });
        assert_eq!(all.acceptance_length(), Some(2.0));
        assert_eq!(Rounds::default().acceptance_length(), None);
        // Shorter chains.
        assert_eq!(Rounds::replay(&batch, 1, holds), Rounds { rounds: 6, tokens: 8 });
    }
}
