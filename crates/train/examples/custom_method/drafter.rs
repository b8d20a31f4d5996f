//! Both tokens in one pass.

use candle_core::Tensor;
use longdraft_decode::Result;
use longdraft_decode::drafter::{BlockModel, DraftContext};
use longdraft_models::TargetTokenId;
use longdraft_models::draft::{Draft, VocabularyMap};
use longdraft_models::target::{Features, Tap};

use crate::draft::{HEADS, TwoHeads};

/// The heads over the newest token that the target has run.
pub(crate) struct TwoHeadsModel<'a> {
    draft: &'a TwoHeads,
    /// `[1, H]`
    newest: Option<Tensor>,
    /// Logits of each head in this round.
    block: Vec<Vec<f32>>,
}

impl<'a> TwoHeadsModel<'a> {
    pub(crate) fn new(draft: &'a TwoHeads) -> Self {
        Self { draft, newest: None, block: Vec::new() }
    }
}

impl BlockModel for TwoHeadsModel<'_> {
    fn taps(&self) -> Vec<Tap> {
        self.draft.taps()
    }

    fn vocabulary(&self) -> Option<&VocabularyMap> {
        None
    }

    fn block_len(&self) -> usize {
        // Nothing to propose from before the target has run.
        if self.newest.is_some() { HEADS } else { 0 }
    }

    fn begin(&mut self, _: usize) -> Result<()> {
        self.newest = None;
        Ok(())
    }

    fn observe(&mut self, _: &[TargetTokenId], features: &Features) -> Result<()> {
        let hidden = features.final_hidden()?;
        let rows = hidden.dim(0)?;
        if rows > 0 {
            self.newest = Some(hidden.narrow(0, rows - 1, 1)?.copy()?);
        }
        Ok(())
    }

    fn run(&mut self, context: DraftContext<'_>, depth: usize) -> Result<()> {
        self.block.clear();
        for (head, newest) in (1..=depth).zip(self.newest.iter().cycle()) {
            let states = self.draft.states(newest, head)?.detach();
            self.block.extend(context.target.logits(&states)?.to_vec2::<f32>()?);
        }
        Ok(())
    }

    fn logits(&self, path: &[TargetTokenId]) -> Result<Vec<f32>> {
        Ok(self.block[path.len() - 1].clone())
    }
}
