//! A draft model with prompt lookup beside it.

use longdraft_models::TargetTokenId;
use longdraft_models::target::{Features, Tap};

use super::{DraftContext, Drafter, LookupDrafter, Plan};
use crate::error::Result;
use crate::tree::{Origin, Tree};

/// How the two share a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combination {
    /// Lookup alone where it finds at least [`CombinedDrafter::LONG_MATCH`] tokens, else the model.
    Switch,
    /// Both in one tree; equal paths are shared. Beside drawn proposals those of lookup stand as
    /// certain siblings and are tested first: they follow from the text, so the law is kept.
    Merge,
}

/// A model's drafter and lookup.
pub struct CombinedDrafter<'a> {
    model: Box<dyn Drafter + 'a>,
    lookup: LookupDrafter,
    combination: Combination,
}

impl<'a> CombinedDrafter<'a> {
    /// Match of lookup from which it replaces the model.
    pub const LONG_MATCH: usize = 3;

    /// Adds lookup to a drafter.
    pub fn new(model: Box<dyn Drafter + 'a>, combination: Combination) -> Self {
        Self { model, lookup: LookupDrafter::new(), combination }
    }
}

impl Drafter for CombinedDrafter<'_> {
    fn taps(&self) -> Vec<Tap> {
        self.model.taps()
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.lookup.begin(kept)?;
        self.model.begin(kept)
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        self.model.observe(tokens, features)
    }

    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        let found = self.lookup.find(context.tokens, plan.shape.depth());
        if let Some(found) = &found
            && self.combination == Combination::Switch
            && found.length >= Self::LONG_MATCH
        {
            let mut tree = Tree::new(context.tokens[context.tokens.len() - 1]);
            tree.insert_chain(&found.continuation, Origin::Lookup);
            return Ok(tree);
        }
        let mut tree = self.model.propose(context, plan)?;
        if let Some(found) = found.filter(|_| self.combination == Combination::Merge) {
            tree.insert_chain(&found.continuation, Origin::Lookup);
        }
        Ok(tree)
    }
}
