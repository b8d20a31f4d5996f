//! A drafter that notes what it proposed.

use std::cell::RefCell;
use std::rc::Rc;

use longdraft_decode::drafter::{DraftContext, Drafter, Plan};
use longdraft_decode::{Result, Tree};
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{Features, Tap};

/// Texts and what was proposed after each.
pub(crate) type Notes = Rc<RefCell<Vec<(Vec<TargetTokenId>, Tree)>>>;

/// Notes what was proposed after which text.
pub(crate) struct Noted<D> {
    pub(crate) inner: D,
    pub(crate) notes: Notes,
}

impl<D: Drafter> Drafter for Noted<D> {
    fn taps(&self) -> Vec<Tap> {
        self.inner.taps()
    }

    fn tells_confidence(&self) -> bool {
        self.inner.tells_confidence()
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.inner.begin(kept)
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        self.inner.observe(tokens, features)
    }

    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        let tree = self.inner.propose(context, plan)?;
        self.notes.borrow_mut().push((context.tokens.to_vec(), tree.clone()));
        Ok(tree)
    }
}

/// Tokens of a path from the root down, by following first children, each with the draft's chance of
/// the path.
pub(crate) fn first_path(tree: &Tree) -> Vec<(TargetTokenId, Option<f64>)> {
    let mut path = Vec::new();
    let mut row = 0;
    while let Some((child, node)) = tree.children(row).next() {
        path.push((node.token, node.chance));
        row = child;
    }
    path
}
