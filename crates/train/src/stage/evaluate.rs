//! Held-out rows, each at every delay.

use longdraft_data::Batch;
use longdraft_data::batch::{AnchorOffset, DrawEpochs, Draws};

use super::Stage;
use crate::error::Result;
use crate::features::{FeatureNeeds, TeacherKind, run_target};
use crate::metrics::DraftMetrics;
use crate::objective::Objective;

impl Stage {
    /// Loss, agreement and acceptance of the held-out rows at ordinary positions. The teacher is
    /// always the full softmax here, so that acceptance is exact.
    ///
    /// # Errors
    /// - the target cannot run
    pub fn evaluate(&self) -> Result<DraftMetrics> {
        let anchor = AnchorOffset { enabled: false, ..AnchorOffset::default() };
        let gamma = self.objective.glide().config().gamma;
        let needs = FeatureNeeds { teacher: TeacherKind::Full, ..self.objective.needs() };
        let epochs = DrawEpochs { positions: 0, delays: 0 };
        let mut metrics = DraftMetrics::default();
        for (index, row) in self.held_out.rows.iter().enumerate() {
            let draws = Draws { anchor, ..self.draws.clone() };
            let mut batch = Batch::from_row(index, row, &self.held_out.documents, &draws, epochs);
            let features = run_target(&self.target, &batch, &needs)?;
            for delay in 1..=gamma as u32 {
                batch.delays.fill(delay);
                metrics.merge(&self.objective.loss(&batch, &features, false)?.metrics);
            }
        }
        Ok(metrics)
    }
}
