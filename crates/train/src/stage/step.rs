//! Features, loss, gradients and the update of one optimizer step.

use longdraft_data::Batch;
use longdraft_data::batch::DrawEpochs;
use longdraft_kernels::linear_cross_entropy::{Inputs, SoftTargets, linear_cross_entropy};
use longdraft_models::target::{Tap, Taps};

use super::{Event, Observer, Stage};
use crate::error::{Result, TrainError};
use crate::features::{FeatureSource, FeatureStore, sequence_of};
use crate::loss::Loss;
use crate::metrics::DraftMetrics;
use crate::objective::Objective;
use crate::optim::Gradients;

/// What a step came to.
pub(super) struct Outcome {
    pub(super) metrics: DraftMetrics,
    pub(super) target_loss: Option<f64>,
    pub(super) grad_norm: f64,
    pub(super) learning_rate: f64,
}

impl Stage {
    /// Lays out a packed training row; stored features pin its positions to epoch 0.
    pub(super) fn batch(&self, row: usize, epoch: u64) -> Batch {
        let positions = if self.features.pins_positions() { 0 } else { epoch };
        let epochs = DrawEpochs { positions, delays: epoch };
        let data = &self.train;
        Batch::from_row(row, &data.rows[row], &data.documents, &self.draws, epochs)
    }

    /// Runs the target over every training row once, if features are to be stored.
    pub(super) fn capture(&mut self, observer: &mut dyn Observer) -> Result<()> {
        if !self.features.pins_positions() || self.is_finished() {
            return Ok(());
        }
        let mut store = FeatureStore::default();
        let rows = self.train.rows.len();
        let needs = self.objective.needs();
        for row in 0..rows {
            if observer.should_stop() {
                break;
            }
            store.capture(&self.target, &self.batch(row, 0), &needs)?;
            observer.on_event(Event::Captured(row + 1, rows));
        }
        self.features = FeatureSource::Offline(store);
        Ok(())
    }

    /// Takes one optimizer step over all micro-batches. Nothing changes unless loss and gradients
    /// are finite.
    pub(super) fn optimize(&mut self, batches: &[Batch]) -> Result<Outcome> {
        let step = self.progress.step + 1;
        let origins = || batches.iter().flat_map(|batch| batch.origins.clone()).collect::<Vec<_>>();
        let total: usize = batches.iter().map(|batch| batch.learned.len()).sum();
        if total == 0 {
            return Err(TrainError::NothingLearned { step, origins: origins() });
        }
        let needs = self.objective.needs();
        let parameters = self.objective.draft().parameters();
        let mut gradients = Gradients::new(parameters);
        let mut metrics = DraftMetrics::default();
        for batch in batches {
            let features = self.features.features(batch, &needs)?;
            let loss = self.objective.loss(batch, &features, true)?;
            metrics.merge(&loss.metrics);
            if !self.mean_loss(&loss.metrics).is_finite() {
                return Err(TrainError::NotFinite {
                    step,
                    what: "loss",
                    origins: batch.origins.clone(),
                });
            }
            let share = self.share(&loss, total, batches.len());
            if let Some(numerator) = loss.numerator {
                gradients.add(parameters, &(numerator * share)?.backward()?)?;
            }
        }
        if !gradients.norm().is_finite() {
            return Err(TrainError::NotFinite { step, what: "gradient norm", origins: origins() });
        }
        let target_loss = self.target_loss(step, batches)?;
        let learning_rate = self.schedule.learning_rate(step);
        let grad_norm = self.optimizer.step(parameters, &gradients, learning_rate)?;
        self.progress.step = step;
        Ok(Outcome { metrics, target_loss, grad_norm, learning_rate })
    }

    /// Factor of a micro-batch's `Σ ℓ`: one over all learned rows of the step; in compat one over
    /// its own, micro-batches weighted equally.
    fn share(&self, loss: &Loss, total: usize, micro_batches: usize) -> f64 {
        if self.config.draft.compat.is_some() {
            1.0 / (loss.denominator.max(1) * micro_batches) as f64
        } else {
            1.0 / total as f64
        }
    }

    /// The target's own mean loss on the learned rows, every `target_loss_every` steps.
    fn target_loss(&self, step: u64, batches: &[Batch]) -> Result<Option<f64>> {
        let every = self.config.train.target_loss_every;
        if every == 0 || !step.is_multiple_of(every) {
            return Ok(None);
        }
        let (mut sum, mut rows) = (0.0, 0);
        for batch in batches.iter().filter(|batch| !batch.learned.is_empty()) {
            let sequence = sequence_of(batch);
            let features = self.target.forward(&sequence, &Taps::of(&[Tap::FinalHidden]))?;
            let learned = candle_core::Tensor::from_slice(
                &batch.learned,
                batch.learned.len(),
                self.target.device(),
            )?;
            let output = linear_cross_entropy(&Inputs {
                hidden: &features.final_hidden()?.index_select(&learned, 0)?,
                head: self.target.head()?,
                labels: &batch.labels(),
                soft: SoftTargets::None,
                soft_weight: 0.0,
                teacher: None,
            })?;
            sum += output.rows.hard.iter().sum::<f64>();
            rows += batch.learned.len();
        }
        Ok(Some(sum / rows.max(1) as f64))
    }
}
