//! Who accepts tokens.

mod greedy;
mod sampling;

use candle_core::Tensor;
use longdraft_models::TargetTokenId;

use crate::error::Result;

pub use greedy::{GreedyVerifier, argmax_rows};
pub use sampling::SamplingVerifier;

/// The outcome of one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// How many proposals hold, from the first on.
    pub accepted: usize,
    /// The target's own token after them: the correction, or the bonus when all hold.
    pub next: TargetTokenId,
}

/// Accepts a prefix of a chain from the target's logits.
pub trait Verifier {
    /// Judges `proposed` (k tokens) by the target's logits at the root and at each of them.
    ///
    /// # Shapes
    /// - `logits`: `[k + 1, V]`
    ///
    /// # Errors
    /// - the logits cannot be read
    fn verify(&mut self, proposed: &[TargetTokenId], logits: &Tensor) -> Result<Verdict>;
}
