//! Both tokens in one pass.

use candle_core::Tensor;
use longdraft_decode::Result;
use longdraft_decode::drafter::{Asked, Beside, DraftModel, Forecast, Turn};
use longdraft_models::TargetTokenId;
use longdraft_models::draft::Draft;
use longdraft_models::target_model::{Features, Tap};

use crate::draft::{HEADS, TwoHeads};

/// The heads over the newest token that the target has run.
pub(crate) struct TwoHeadsModel<'a> {
    draft: &'a TwoHeads,
    /// `[1, H]`
    newest: Option<Tensor>,
    /// What each head says in this round.
    block: Vec<Forecast>,
}

impl<'a> TwoHeadsModel<'a> {
    pub(crate) fn new(draft: &'a TwoHeads) -> Self {
        Self { draft, newest: None, block: Vec::new() }
    }
}

impl DraftModel for TwoHeadsModel<'_> {
    fn taps(&self) -> Vec<Tap> {
        self.draft.taps()
    }

    fn block_len(&self) -> Option<usize> {
        // Nothing to propose from before the target has run.
        Some(if self.newest.is_some() { HEADS } else { 0 })
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

    fn read(&mut self, turn: Turn<'_>, _: &mut [Beside<'_>]) -> Result<Vec<Vec<Forecast>>> {
        if let Asked::Root { depth, .. } = turn.asked {
            self.block.clear();
            let ends = turn.context.target.hold_ends()?;
            for (head, newest) in (1..=depth).zip(self.newest.iter().cycle()) {
                let states = self.draft.states(newest, head)?.detach();
                let logits = ends.logits(&states)?.to_vec2::<f32>()?;
                self.block.extend(logits.into_iter().map(Forecast::from));
            }
        }
        // The same whatever token comes before.
        Ok(vec![vec![self.block[turn.asked.level()].clone(); turn.chosen().len()]])
    }
}
