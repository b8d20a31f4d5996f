//! Randomness of drafting and verification, as a trait: tests enumerate all outcomes instead.
//!
//! Every draw is a function of seed, request, prompt, round, place and purpose, so that a request's output
//! does not depend on threads or on other requests. A round is known by the index of the first token
//! that it decides. It belongs to the key: a position that is drafted again after a rejection must not
//! see the number that rejected it. So does the prompt: a later turn of a conversation that lost its first
//! messages may stand where an earlier answer stood, and must not be drawn with the numbers of that answer.

use longdraft_kernels::random::CounterRng;
use longdraft_models::TargetTokenId;

/// What a draw decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A token of the draft.
    Draft,
    /// Whether a proposal holds.
    Accept,
    /// The token at a rejected place, or the bonus.
    Residual,
    /// A token of the target's own distribution, keyed by its position in the text alone. Exact
    /// because it is made once a position and always committed; it makes output equal to plain
    /// sampling.
    Token,
}

impl Purpose {
    fn name(self) -> &'static str {
        match self {
            Self::Draft => "drafted token",
            Self::Accept => "acceptance",
            Self::Residual => "residual token",
            Self::Token => "sampled token",
        }
    }
}

/// Where a draw stands in its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// What it decides.
    pub purpose: Purpose,
    /// Index of the first token that the round decides, or of the token for [`Purpose::Token`].
    pub round: u64,
    /// Row of the tree below which it decides.
    pub row: u64,
    /// Which of several children.
    pub child: u64,
}

/// A source of random decisions.
pub trait Draws {
    /// True with probability `min(1, p / q)`; never for `p = 0`.
    fn accepts(&mut self, at: Place, p: f64, q: f64) -> bool;

    /// An index with probability proportional to `weights`, never one of weight 0.
    fn choose(&mut self, at: Place, weights: &[f64]) -> usize;
}

/// Counter-based draws of one request.
#[derive(Debug, Clone)]
pub struct CounterDraws {
    seed: u64,
    request: Vec<u64>,
}

impl CounterDraws {
    /// Draws that follow from `seed` and `request` (which text this is).
    pub fn new(seed: u64, request: &[u64]) -> Self {
        Self { seed, request: request.to_vec() }
    }

    /// The same for what follows a prompt.
    #[must_use]
    pub fn after(mut self, prompt: &[TargetTokenId]) -> Self {
        let ids: Vec<u64> = prompt.iter().map(|token| u64::from(token.0)).collect();
        self.request.push(CounterRng::new(self.seed, "prompt", &ids).next_u64());
        self
    }

    fn stream(&self, at: Place) -> CounterRng {
        let mut key = self.request.clone();
        key.extend([at.round, at.row, at.child]);
        CounterRng::new(self.seed, at.purpose.name(), &key)
    }
}

impl Draws for CounterDraws {
    fn accepts(&mut self, at: Place, p: f64, q: f64) -> bool {
        self.stream(at).uniform() * q < p
    }

    fn choose(&mut self, at: Place, weights: &[f64]) -> usize {
        self.stream(at).categorical(weights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_repeat_with_their_key_and_differ_without() {
        let place = |round, row, child| Place { purpose: Purpose::Draft, round, row, child };
        let draw = |seed, request: u64, at| {
            CounterDraws::new(seed, &[request]).choose(at, &vec![1.0; 1 << 20])
        };
        let all = [
            draw(1, 1, place(0, 0, 0)),
            draw(2, 1, place(0, 0, 0)),
            draw(1, 2, place(0, 0, 0)),
            draw(1, 1, place(1, 0, 0)),
            draw(1, 1, place(0, 1, 0)),
            draw(1, 1, place(0, 0, 1)),
            draw(1, 1, Place { purpose: Purpose::Residual, ..place(0, 0, 0) }),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b));
        }
        assert_eq!(all[0], draw(1, 1, place(0, 0, 0)));
    }
}
