//! A draft model with prompt lookup beside it.

use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{Features, Tap};

use super::grow::Growth;
use super::lookup::Match;
use super::together::propose_alone;
use super::{DraftContext, DraftModel, DraftRows, DraftState, Drafter, LookupDrafter, Plan, Worth};
use crate::error::Result;
use crate::tree::{Origin, Tree};

/// How the two share a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combination {
    /// Lookup alone where what it finds is expected to gain at least what the model's rounds gain, or,
    /// as long as nothing is measured, agrees in [`CombinedDrafter::LONG_MATCH`] tokens; else the
    /// model.
    Switch,
    /// Both in one tree; equal paths are shared. Beside drawn proposals those of lookup stand as
    /// certain siblings and are tested first: they follow from the text, so the distribution is
    /// kept.
    Merge,
}

/// A model's drafter and lookup.
pub struct CombinedDrafter<'a> {
    model: Box<dyn Drafter + 'a>,
    lookup: LookupDrafter,
    combination: Combination,
    /// What lookup adds to the tree that grows.
    found: Option<Match>,
}

impl<'a> CombinedDrafter<'a> {
    /// Match of lookup from which it replaces the model: tokens that agree.
    pub const LONG_MATCH: usize = 3;

    /// Adds lookup to a drafter.
    pub fn new(
        model: Box<dyn Drafter + 'a>,
        lookup: LookupDrafter,
        combination: Combination,
    ) -> Self {
        Self { model, lookup, combination, found: None }
    }
}

impl Drafter for CombinedDrafter<'_> {
    fn taps(&self) -> Vec<Tap> {
        self.model.taps()
    }

    fn reads_last_layer(&self) -> bool {
        self.model.reads_last_layer()
    }

    fn tells_confidence(&self) -> bool {
        self.model.tells_confidence()
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.lookup.begin(kept)?;
        self.model.begin(kept)
    }

    fn state(&self) -> DraftState<'_> {
        self.model.state()
    }

    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        self.model.take_over(rows, tokens)
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        self.model.observe(tokens, features)
    }

    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        propose_alone(self, context, plan)
    }

    fn start(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Growth> {
        let worth = plan.worth.as_ref();
        let found = self.lookup.find(context.tokens, plan.shape.depth(), worth);
        plan.looked_up = self.lookup.outcomes();
        let found = found.map(|found| found.worthy(worth));
        let found = found.filter(|found| !found.continuation.is_empty());
        let alone = found
            .as_ref()
            .is_some_and(|found| self.combination == Combination::Switch && replaces(found, worth));
        let merged = self.combination == Combination::Merge;
        self.found = found.filter(|_| merged || alone || !plan.paid);
        if plan.paid && !alone {
            self.model.start(context, plan)
        } else {
            Ok(Growth::whole(Tree::new(context.tokens[context.tokens.len() - 1])))
        }
    }

    fn model(&mut self) -> Option<&mut dyn DraftModel> {
        self.model.model()
    }

    fn finish(&mut self, growth: Growth) -> Tree {
        let mut tree = self.model.finish(growth);
        if let Some(found) = self.found.take() {
            tree.insert_chain(&found.continuation, Origin::Lookup);
        }
        tree
    }
}

/// Whether what was found stands in for the model: it is expected to gain as much, as far as that is
/// measured, else it is long.
fn replaces(found: &Match, worth: Option<&Worth>) -> bool {
    match worth {
        None => found.class.agrees_in(CombinedDrafter::LONG_MATCH),
        Some(worth) => found.gain(worth) >= worth.gain,
    }
}
