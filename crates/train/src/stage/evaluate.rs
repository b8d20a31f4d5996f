//! Held-out rows, each at every delay or step.

use std::sync::Arc;

use longdraft_data::Batch;
use longdraft_data::batch::{AnchorOffset, DrawEpochs, Draws};
use longdraft_kernels::random::CounterRng;

use super::{DataSet, Stage};
use crate::error::Result;
use crate::features::{FeatureSource, Part};
use crate::metrics::{DraftMetrics, Rate};
use crate::objective::Objective;

/// Draws with replacement for an interval.
const RESAMPLES: usize = 1000;

impl Stage {
    /// Loss, agreement and acceptance of the held-out rows at ordinary positions.
    ///
    /// # Errors
    /// - the target cannot run
    pub fn evaluate(&self) -> Result<DraftMetrics> {
        let mut metrics = DraftMetrics::default();
        for row in measure(
            &self.held_out_features(),
            self.objective.as_ref(),
            &self.held_out,
            &self.draws,
        )? {
            metrics.merge(&row);
        }
        Ok(metrics)
    }

    /// Where held-out features come from: never from memory, which holds training rows.
    fn held_out_features(&self) -> FeatureSource {
        match &self.features {
            FeatureSource::Stored(store) => FeatureSource::Stored(store.clone()),
            FeatureSource::Online(_) | FeatureSource::Memory(_) => {
                FeatureSource::Online(Arc::clone(&self.target))
            }
        }
    }

    /// Lets go of everything but the draft and the held-out rows.
    pub fn into_evaluator(self) -> Evaluator {
        Evaluator {
            features: self.held_out_features(),
            objective: self.objective,
            held_out: self.held_out,
            draws: self.draws,
        }
    }
}

/// A trained draft with its stage's held-out rows.
pub struct Evaluator {
    /// Of its held-out rows.
    features: FeatureSource,
    objective: Box<dyn Objective>,
    held_out: DataSet,
    draws: Draws,
}

impl Evaluator {
    /// Measures this draft on another stage's held-out rows, one figure a row.
    ///
    /// # Errors
    /// - the target cannot run
    pub fn on_rows_of(&self, other: &Self) -> Result<RowMetrics> {
        let objective = self.objective.as_ref();
        let rows = measure(&other.features, objective, &other.held_out, &other.draws)?;
        Ok(RowMetrics { rows, gamma: objective.draft_len() })
    }
}

/// Held-out metrics, row by row.
#[derive(Debug, Clone)]
pub struct RowMetrics {
    rows: Vec<DraftMetrics>,
    gamma: usize,
}

impl RowMetrics {
    /// Greedy simulated acceptance length over all rows.
    pub fn simulated_length(&self) -> f64 {
        self.length_of(0..self.rows.len())
    }

    /// 95 % bootstrap interval of it over rows (percentile method, fixed seed).
    pub fn interval(&self) -> (f64, f64) {
        if self.rows.is_empty() {
            return (0.0, 0.0);
        }
        let mut random = CounterRng::new(0, "bootstrap", &[self.rows.len() as u64]);
        let mut lengths: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                let draws: Vec<usize> = (0..self.rows.len())
                    .map(|_| random.below(self.rows.len() as u64) as usize)
                    .collect();
                self.length_of(draws)
            })
            .collect();
        lengths.sort_by(f64::total_cmp);
        (lengths[RESAMPLES / 40], lengths[RESAMPLES - 1 - RESAMPLES / 40])
    }

    fn length_of(&self, rows: impl IntoIterator<Item = usize>) -> f64 {
        let mut sum = DraftMetrics::default();
        rows.into_iter().for_each(|row| sum.merge(&self.rows[row]));
        sum.simulated_acceptance_length(Rate::Top1, self.gamma)
    }
}

/// Counters of every held-out row.
fn measure(
    features: &FeatureSource,
    objective: &dyn Objective,
    held_out: &DataSet,
    draws: &Draws,
) -> Result<Vec<DraftMetrics>> {
    let needs = objective.held_out_needs();
    let one = |index: usize| {
        let batch = held_out_batch(index, held_out, draws);
        let rows = objective.teacher_rows(&batch);
        let found = features.features(Part::HeldOut, &batch, &needs, &rows)?;
        if index + 1 < held_out.rows.len() {
            features.read_ahead(Part::HeldOut, index + 1);
        }
        objective.measure(&batch, &found)
    };
    (0..held_out.rows.len()).map(one).collect()
}

/// A held-out row at ordinary positions.
pub(super) fn held_out_batch(index: usize, held_out: &DataSet, draws: &Draws) -> Batch {
    let anchor = AnchorOffset { enabled: false, ..AnchorOffset::default() };
    let draws = Draws { anchor, ..draws.clone() };
    let epochs = DrawEpochs { positions: 0, delays: 0 };
    Batch::from_row(index, &held_out.rows[index], &held_out.documents, &draws, epochs)
}
