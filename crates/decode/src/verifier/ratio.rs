//! Recursive rejection over the children of one node (Leviathan et al. 2023, algorithm 1; several
//! children: Miao et al. 2024, without replacement: Jeon et al. 2024).
//!
//! ```text
//! P = p;  certain children x:  accept with P(x), else P(x) = 0 and renormalise
//! Q = q;  drawn children x in draw order:  accept with min(1, P(x) / Q(x)),
//!         else P = norm((P − Q)₊) and Q(x) = 0, renormalised
//! nobody accepted: commit a token from P
//! ```

use longdraft_models::TargetTokenId;

use crate::distribution::normalise;
use crate::draws::{Draws, Place, Purpose};
use crate::tree::Tree;

/// Mass of a residual below which it is rounding, not distribution.
const NO_MASS: f64 = 1e-12;

/// What came of a node's children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Row of the accepted child.
    pub accepted: Option<usize>,
    /// The target's token if there is none.
    pub token: TargetTokenId,
    /// Whether a residual without mass had to be replaced by the target's distribution.
    pub fell_back: bool,
}

/// Tests the children of `row` against the target's distribution `p` there, `[V]`.
pub fn test_children(
    tree: &Tree,
    row: usize,
    p: Vec<f64>,
    round: u64,
    draws: &mut dyn Draws,
) -> Outcome {
    let at = |purpose, child| Place { purpose, round, row: row as u64, child };
    let original = p.clone();
    let (mut p, mut fell_back, mut tested) = (p, false, 0);
    let (drawn, certain): (Vec<_>, Vec<_>) = tree.children(row).partition(|(_, node)| node.drawn);
    for (child, node) in certain {
        let place = node.token.0 as usize;
        let own = p.get(place).copied().unwrap_or(0.0);
        if draws.accepts(at(Purpose::Accept, tested), own, 1.0) {
            return Outcome { accepted: Some(child), token: node.token, fell_back };
        }
        tested += 1;
        if own > 0.0 {
            p[place] = 0.0;
            fell_back |= residual(&mut p, &original);
        }
    }
    let mut q = tree.distribution(row).unwrap_or_default();
    q.resize(p.len(), 0.0);
    for (child, node) in drawn {
        let place = node.token.0 as usize;
        let (own, of_draft) = (p.get(place), q.get(place));
        let (own, of_draft) = (own.copied().unwrap_or(0.0), of_draft.copied().unwrap_or(0.0));
        if draws.accepts(at(Purpose::Accept, tested), own, of_draft) {
            return Outcome { accepted: Some(child), token: node.token, fell_back };
        }
        tested += 1;
        p.iter_mut().zip(&q).for_each(|(p, q)| *p = (*p - q).max(0.0));
        fell_back |= residual(&mut p, &original);
        if place < q.len() {
            q[place] = 0.0;
            normalise(&mut q);
        }
    }
    let token = TargetTokenId(draws.choose(at(Purpose::Residual, 0), &p) as u32);
    Outcome { accepted: None, token, fell_back }
}

/// Renormalises what a rejection left; true if nothing was left and the distribution itself had to
/// do.
fn residual(p: &mut Vec<f64>, original: &[f64]) -> bool {
    let fell_back = normalise(p) <= NO_MASS;
    if fell_back {
        p.clear();
        p.extend_from_slice(original);
    }
    fell_back
}
