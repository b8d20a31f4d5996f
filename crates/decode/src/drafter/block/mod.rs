//! Models that propose a whole block in one pass.
//!
//! Trees grow from a block as from any model: what is said of a slot's token is there before the token
//! is chosen. A level more costs nothing but its rows of the target's pass, which the pace learns.

mod chained;
mod model;
mod selected;

use longdraft_models::TargetTokenId;

use super::{Asked, Turn};

pub use model::BlockDraftModel;
pub(super) use model::drafter;

/// A token that a slot of a block follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chosen {
    /// The token.
    pub token: TargetTokenId,
    /// The token before it: its place among those that the slot before followed; 0 for the root.
    pub after: usize,
}

impl Turn<'_> {
    /// The tokens before the slot of a block that is asked for. Slot 0 follows the root. A later slot follows the
    /// tokens that were chosen for the slot before it.
    pub fn chosen(&self) -> Vec<Chosen> {
        let tokens = self.context.tokens;
        match self.asked {
            Asked::Root { .. } => vec![Chosen { token: tokens[tokens.len() - 1], after: 0 }],
            Asked::After { readings, .. } => {
                readings.iter().map(|r| Chosen { token: r.token, after: r.after }).collect()
            }
        }
    }
}
