//! A drafter that notes what it sees and proposes.

use std::cell::RefCell;
use std::rc::Rc;

use longdraft_decode::drafter::{DraftContext, DraftRows, DraftState, Drafter, Plan};
use longdraft_decode::{Result, Tree};
use longdraft_models::TargetTokenId;
use longdraft_models::target_model::{Features, Tap};

/// What drafters saw and proposed.
#[derive(Default)]
pub(crate) struct Seen {
    /// Rows of prompts that the target ran.
    pub(crate) rows: usize,
    /// Texts and what was proposed after each.
    pub(crate) proposed: Vec<(Vec<TargetTokenId>, Tree)>,
}

/// Notes that several drafters write.
pub(crate) type Notes = Rc<RefCell<Seen>>;

/// Notes what was proposed after which text.
pub(crate) struct Noted<'a> {
    inner: Box<dyn Drafter + 'a>,
    notes: Notes,
    /// Whether nothing has been proposed since the request began.
    reads: bool,
}

impl<'a> Noted<'a> {
    pub(crate) fn new(inner: Box<dyn Drafter + 'a>, notes: &Notes) -> Self {
        Self { inner, notes: Rc::clone(notes), reads: true }
    }
}

impl Drafter for Noted<'_> {
    fn taps(&self) -> Vec<Tap> {
        self.inner.taps()
    }

    fn reads_last_layer(&self) -> bool {
        self.inner.reads_last_layer()
    }

    fn tells_confidence(&self) -> bool {
        self.inner.tells_confidence()
    }

    fn begin(&mut self, kept: usize) -> Result<()> {
        self.reads = true;
        self.inner.begin(kept)
    }

    fn state(&self) -> DraftState<'_> {
        self.inner.state()
    }

    fn take_over(&mut self, rows: DraftRows<'_>, tokens: usize) -> Result<()> {
        self.inner.take_over(rows, tokens)
    }

    fn observe(&mut self, tokens: &[TargetTokenId], features: &Features) -> Result<()> {
        if self.reads {
            self.notes.borrow_mut().rows += features.final_hidden()?.dim(0)?;
        }
        self.inner.observe(tokens, features)
    }

    fn propose(&mut self, context: DraftContext<'_>, plan: &mut Plan<'_>) -> Result<Tree> {
        self.reads = false;
        let tree = self.inner.propose(context, plan)?;
        self.notes.borrow_mut().proposed.push((context.tokens.to_vec(), tree.clone()));
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
