//! Verification: which tokens are accepted, so that the output follows the target's distribution exactly.
//!
//! - Temperature 0: walk down the tree while the arg max is a child.
//! - Certain children, at a temperature: draw from the target's distribution; a child that is drawn
//!   is accepted, anything else is committed. The draft's own distribution plays no part.
//! - Drawn children: recursive rejection ([`VerifyRule::Ratio`]), see [`test_children`].

mod ratio;

use longdraft_models::TargetTokenId;
use serde::{Deserialize, Serialize};

use crate::distribution::{Sampling, most_likely};
use crate::draws::{Draws, Place, Purpose};
use crate::error::Result;
use crate::grammar::SoFar;
use crate::tree::Tree;

pub use ratio::{Outcome, test_children};

/// The outcome of one round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Rows of the accepted nodes, from the root down.
    pub path: Vec<usize>,
    /// The target's own token after them: the correction, or the bonus when a leaf was reached.
    pub next: TargetTokenId,
    /// Rejections that exact arithmetic rules out; 0 but for rounding.
    pub residual_fallbacks: usize,
}

/// How proposals are tested at a temperature. Both keep the target's distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VerifyRule {
    /// Accept a drawn x with `min(1, p(x) / q(x))`: the highest chance there is, `Σ min(p, q)`.
    #[default]
    Ratio,
    /// Draw from the target's distribution and accept what matches. Output equals plain sampling
    /// with the same seed, token for token.
    Match,
}

/// Judges trees by the target's logits.
#[derive(Debug, Clone, PartialEq)]
pub struct Verifier {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// How drawn proposals are tested.
    pub rule: VerifyRule,
}

impl Verifier {
    /// Judges `tree` by the logits `[rows, V]` of its rows, below a root before which nothing was
    /// generated. `position` is the index of the first token that it decides; draws are keyed by it.
    ///
    /// # Errors
    /// - logits of a row are not numbers
    ///
    /// # Panics
    /// - fewer rows of logits than of the tree
    pub fn verify(
        &self,
        tree: &Tree,
        logits: &[Vec<f32>],
        position: u64,
        draws: &mut dyn Draws,
    ) -> Result<Verdict> {
        self.verify_after(SoFar::of(&[]), tree, logits, position, draws)
    }

    /// The same below what an answer has so far: penalties count its tokens and those of the path down
    /// to a row, and its grammar and late tokens restrict the distribution. The grammar is left where it stood.
    ///
    /// # Errors
    /// - logits of a row are not numbers, or the grammar cannot be followed
    ///
    /// # Panics
    /// - fewer rows of logits than of the tree
    pub fn verify_after(
        &self,
        mut so_far: SoFar<'_>,
        tree: &Tree,
        logits: &[Vec<f32>],
        position: u64,
        draws: &mut dyn Draws,
    ) -> Result<Verdict> {
        let mut verdict = Verdict { path: Vec::new(), next: tree.token(0), residual_fallbacks: 0 };
        let mut row = 0;
        loop {
            let adjusted = self.sampling.adjusted_by(&logits[row], &so_far.counts);
            let logits = so_far.allowed(adjusted)?;
            let accepted = if self.sampling.is_greedy() {
                match_child(tree, row, most_likely(&logits)?)
            } else {
                let distribution = self.sampling.distribution(&logits)?;
                let drawn = tree.children(row).any(|(_, node)| node.drawn);
                if drawn && self.rule == VerifyRule::Ratio {
                    let outcome = test_children(tree, row, distribution, position, draws);
                    verdict.residual_fallbacks += usize::from(outcome.fell_back);
                    outcome.accepted.ok_or(outcome.token)
                } else {
                    let decided = position + verdict.path.len() as u64;
                    let at = Place { purpose: Purpose::Token, round: decided, row: 0, child: 0 };
                    match_child(tree, row, TargetTokenId(draws.choose(at, &distribution) as u32))
                }
            };
            match accepted {
                Ok(child) => {
                    so_far.advance(tree.token(child))?;
                    self.sampling.count(std::iter::once(tree.token(child)), &mut so_far.counts);
                    verdict.path.push(child);
                    row = child;
                }
                Err(token) => {
                    so_far.take_back(verdict.path.len())?;
                    verdict.next = token;
                    return Ok(verdict);
                }
            }
        }
    }
}

/// The row of the child with `token`, or the token if there is none.
fn match_child(
    tree: &Tree,
    row: usize,
    token: TargetTokenId,
) -> std::result::Result<usize, TargetTokenId> {
    tree.child(row, token).ok_or(token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draws::CounterDraws;
    use crate::tree::Origin;

    fn t(id: u32) -> TargetTokenId {
        TargetTokenId(id)
    }

    fn greedy(tree: &Tree, best: &[u32]) -> (Vec<usize>, u32) {
        let rows: Vec<Vec<f32>> =
            best.iter().map(|b| (0..5).map(|id| f32::from(u8::from(id == *b))).collect()).collect();
        let verifier = Verifier { sampling: Sampling::default(), rule: VerifyRule::Ratio };
        let verdict =
            verifier.verify(tree, &rows, 1, &mut CounterDraws::new(0, &[])).expect("verdict");
        (verdict.path, verdict.next.0)
    }

    #[test]
    fn a_chain_is_accepted_up_to_the_first_mismatch() {
        let chain = Tree::chain(t(0), &[t(1), t(2), t(3)]);
        assert_eq!(greedy(&chain, &[1, 2, 3, 4]), (vec![1, 2, 3], 4));
        assert_eq!(greedy(&chain, &[1, 0, 3, 4]), (vec![1], 0));
        assert_eq!(greedy(&chain, &[2, 2, 3, 4]), (vec![], 2));
        assert_eq!(greedy(&Tree::new(t(0)), &[3]), (vec![], 3));
    }

    #[test]
    fn a_tree_is_walked_along_the_arg_max() {
        let mut tree = Tree::chain(t(0), &[t(1), t(2)]);
        tree.insert_chain(&[t(3), t(4)], Origin::Lookup);
        assert_eq!(greedy(&tree, &[3, 0, 0, 4, 2]), (vec![3, 4], 2));
        assert_eq!(greedy(&tree, &[1, 4, 0, 0, 0]), (vec![1], 4));
    }
}
