//! How often what lookup finds holds, by what was found.

use crate::match_class::MatchClass;

/// How often a token that lookup found holds where all before it did, by class and depth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LookupChances([[f64; Self::DEPTHS]; MatchClass::COUNT]);

impl LookupChances {
    /// Depths that are told apart; deeper ones count as the last.
    pub const DEPTHS: usize = 6;

    /// From rows by [`MatchClass::index`].
    pub fn new(chances: [[f64; Self::DEPTHS]; MatchClass::COUNT]) -> Self {
        Self(chances)
    }

    /// Chances that the first, the first two, ... tokens of a match hold.
    pub fn along(&self, class: MatchClass) -> impl Iterator<Item = f64> {
        let chances = self.0[class.index()];
        (0..).scan(1.0, move |path, depth: usize| {
            *path *= chances[depth.min(Self::DEPTHS - 1)];
            Some(*path)
        })
    }

    /// The chance of the first token.
    pub fn first(&self, class: MatchClass) -> f64 {
        self.0[class.index()][0]
    }
}
