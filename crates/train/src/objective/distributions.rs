//! A teacher of which only the k most likely tokens are kept.
//!
//! Its distribution over the draft's vocabulary `S` keeps what of the top k lies in `S`; the mass
//! outside the top k, in `S` or not, is a tail bucket, or is dropped. What is left is rescaled to 1
//! inside the loss. With `k = V` nothing lies outside, and the distribution is the whole teacher's.

use longdraft_features::TeacherKind;
use longdraft_kernels::linear_cross_entropy::SparseDistributions;
use longdraft_kernels::top_k::TopK;
use longdraft_models::TargetTokenId;
use longdraft_models::draft::VocabularyMap;

use super::TailKind;

/// How much of the teacher's distribution a loss reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TeacherDistribution {
    /// All of it.
    #[default]
    Whole,
    /// Its most likely tokens.
    TopK {
        /// How many.
        k: usize,
        /// What becomes of the rest.
        tail: TailKind,
    },
}

impl TeacherDistribution {
    /// What it needs of the target, where the teacher of later tokens is read.
    pub(crate) fn needs(self) -> TeacherKind {
        match self {
            Self::Whole => TeacherKind::EveryToken,
            Self::TopK { k, .. } => TeacherKind::EveryTokenTopK(k),
        }
    }
}

/// The distributions of some tokens over the draft's vocabulary.
#[derive(Debug, Clone)]
pub(crate) struct TopDistributions {
    starts: Vec<usize>,
    ids: Vec<u32>,
    log_probs: Vec<f32>,
    tails: Vec<f64>,
    /// Distribution of every token that has one, `[T]`.
    of_token: Vec<Option<u32>>,
}

impl TopDistributions {
    /// Distributions at the tokens `at` of a row of `tokens`, from `k` entries each.
    pub(crate) fn new(
        entries: &TopK,
        k: usize,
        (at, tokens): (&[u32], usize),
        vocabulary: &VocabularyMap,
        tail: TailKind,
    ) -> Self {
        let mut distributions = Self {
            starts: vec![0],
            ids: Vec::new(),
            log_probs: Vec::new(),
            tails: Vec::with_capacity(at.len()),
            of_token: vec![None; tokens],
        };
        let all = entries.ids.chunks(k.max(1)).zip(entries.log_probs.chunks(k.max(1)));
        for ((distribution, &token), (ids, log_probs)) in (0_u32..).zip(at).zip(all) {
            let mass: f64 = log_probs.iter().map(|lp| f64::from(*lp).exp()).sum();
            for (id, log_prob) in ids.iter().zip(log_probs) {
                if let Some(id) = vocabulary.to_draft(TargetTokenId(*id)) {
                    distributions.ids.push(id.0);
                    distributions.log_probs.push(*log_prob);
                }
            }
            distributions.starts.push(distributions.ids.len());
            distributions.tails.push(match tail {
                TailKind::Bucket => (1.0 - mass).max(0.0),
                TailKind::Renormalise => 0.0,
            });
            distributions.of_token[token as usize] = Some(distribution);
        }
        distributions
    }

    /// Which distribution every one of these tokens has; none for a token without.
    pub(crate) fn of_tokens(&self, tokens: &[u32]) -> Option<Vec<u32>> {
        tokens.iter().map(|token| self.of_token.get(*token as usize).copied().flatten()).collect()
    }

    /// As the loss reads them, `rows` being the distribution of every row.
    pub(crate) fn of_rows<'a>(&'a self, rows: &'a [u32]) -> SparseDistributions<'a> {
        SparseDistributions {
            starts: &self.starts,
            ids: &self.ids,
            log_probs: &self.log_probs,
            tails: &self.tails,
            rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_outside_the_vocabulary_are_in_no_distribution_and_in_no_tail() {
        let kept = [1, 4, 6].map(TargetTokenId).to_vec();
        let vocabulary = VocabularyMap::new(kept, 8).expect("map");
        let log = |p: f64| p.ln() as f32;
        let entries = TopK {
            ids: vec![4, 3, 0, 2],
            log_probs: vec![log(0.5), log(0.25), log(0.6), log(0.1)],
        };
        let of = |tail| TopDistributions::new(&entries, 2, (&[2, 5], 6), &vocabulary, tail);
        let distributions = of(TailKind::Bucket);
        assert_eq!((&distributions.starts, &distributions.ids), (&vec![0, 1, 1], &vec![1]));
        assert!(
            (distributions.tails[0] - 0.25).abs() < 1e-6
                && (distributions.tails[1] - 0.3).abs() < 1e-6
        );
        assert_eq!(distributions.of_tokens(&[5, 2]), Some(vec![1, 0]));
        assert_eq!(distributions.of_tokens(&[4]), None);
        assert_eq!(of(TailKind::Renormalise).tails, [0.0, 0.0]);
    }
}
