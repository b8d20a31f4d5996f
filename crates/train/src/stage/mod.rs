//! One training stage: fetch, features, forward, backward, clip, step, log, checkpoint.

mod data_sets;
mod encoder;
mod evaluate;
mod metrics_log;
mod observer;
mod prepare;
mod step;

use std::sync::Arc;
use std::time::Instant;

use longdraft_data::batch::Draws;
use longdraft_data::packing::PackedRow;
use longdraft_data::sampler::Sampler;
use longdraft_data::{Batch, Document};
use longdraft_models::target::Target;
use longdraft_models::tokenizer::TextTokenizer;
use serde_json::json;

use crate::checkpoint::{CheckpointState, Checkpointer, RunIdentity};
use crate::config::TrainConfig;
use crate::error::Result;
use crate::features::FeatureSource;
use crate::metrics::DraftMetrics;
use crate::objective::{GlideObjective, Objective};
use crate::optim::AdamW;
use crate::schedule::Schedule;

pub use data_sets::source_paths;
pub use encoder::Encoder;
pub use observer::{Ending, Event, Observer, StepReport};

use metrics_log::MetricsLog;

/// Documents and how they are packed.
struct DataSet {
    documents: Vec<Document>,
    rows: Vec<PackedRow>,
}

/// A prepared stage.
pub struct Stage {
    config: TrainConfig,
    target: Arc<Target>,
    tokenizer: TextTokenizer,
    objective: GlideObjective,
    optimizer: AdamW,
    schedule: Schedule,
    sampler: Sampler,
    draws: Draws,
    train: DataSet,
    held_out: DataSet,
    features: FeatureSource,
    identity: RunIdentity,
    checkpointer: Checkpointer,
    log: MetricsLog,
    progress: Progress,
}

/// How far the run is.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    step: u64,
    tokens: u64,
    learned_rows: u64,
}

impl Stage {
    /// Trains to the end of the budget, or until the observer asks to stop. A checkpoint is saved
    /// at the end either way.
    ///
    /// # Errors
    /// - a loss that is not finite, rows without labels, a full disk; earlier checkpoints stay
    pub fn run(&mut self, observer: &mut dyn Observer) -> Result<Ending> {
        self.capture(observer)?;
        while self.progress.step < self.schedule.steps {
            if observer.should_stop() {
                self.save(observer)?;
                return Ok(Ending::Stopped);
            }
            let started = Instant::now();
            let batches = self.next_batches();
            let outcome = self.optimize(&batches)?;
            let report = self.report(&batches, outcome, started.elapsed().as_secs_f64());
            self.log_step(&report)?;
            observer.on_event(Event::Step(&report));
            let last = self.progress.step == self.schedule.steps;
            let every = self.config.train.evaluate_every;
            let due = last || (every > 0 && self.progress.step.is_multiple_of(every));
            if due && !self.held_out.rows.is_empty() {
                let metrics = self.evaluate()?;
                self.log_held_out(&metrics)?;
                observer.on_event(Event::Evaluated(self.progress.step, &metrics));
            }
            if last || self.progress.step.is_multiple_of(self.config.train.save_every) {
                self.save(observer)?;
            }
        }
        Ok(Ending::Finished)
    }

    /// The draft as it stands.
    pub fn objective(&self) -> &dyn Objective {
        &self.objective
    }

    /// The frozen target.
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }

    /// The target's tokenizer.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// Optimizer steps done and in all.
    pub fn steps(&self) -> (u64, u64) {
        (self.progress.step, self.schedule.steps)
    }

    /// Packed training rows, their tokens, and held-out rows.
    pub fn data_sizes(&self) -> (usize, usize, usize) {
        let tokens = self.train.rows.iter().map(PackedRow::tokens).sum();
        (self.train.rows.len(), tokens, self.held_out.rows.len())
    }

    fn save(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let state = CheckpointState {
            step: self.progress.step,
            cursor: self.sampler.cursor(),
            learned_rows: self.progress.learned_rows,
            tokens: self.progress.tokens,
            metrics_bytes: self.log.position()?,
            identity: self.identity.clone(),
            draft: self.objective.glide().config().clone(),
            target_fingerprint: self.target.fingerprint().to_owned(),
        };
        let parameters = self.objective.draft().parameters();
        let path =
            self.checkpointer.save(&state, parameters, self.optimizer.state(), &self.tokenizer)?;
        observer.on_event(Event::Saved(&path));
        Ok(())
    }

    fn next_batches(&mut self) -> Vec<Batch> {
        (0..self.config.train.rows_per_step)
            .map(|_| {
                let (row, epoch) = self.sampler.next_row();
                self.batch(row, epoch)
            })
            .collect()
    }

    fn log_step(&mut self, report: &StepReport) -> Result<()> {
        if !report.step.is_multiple_of(self.config.train.log_every) {
            return Ok(());
        }
        self.log.write(&report.to_json(self.objective.glide().config().gamma))
    }

    fn log_held_out(&mut self, metrics: &DraftMetrics) -> Result<()> {
        let gamma = self.objective.glide().config().gamma;
        let record = json!({ "step": self.progress.step, "held_out": metrics.to_json(gamma) });
        self.log.write(&record)
    }

    /// Numbers of the step that was just taken.
    fn report(&mut self, batches: &[Batch], outcome: step::Outcome, seconds: f64) -> StepReport {
        let tokens: usize = batches.iter().map(|batch| batch.ids.len()).sum();
        self.progress.tokens += tokens as u64;
        self.progress.learned_rows += outcome.metrics.rows as u64;
        StepReport {
            step: self.progress.step,
            steps: self.schedule.steps,
            epoch: self.sampler.cursor().epoch,
            loss: self.mean_loss(&outcome.metrics),
            target_loss: outcome.target_loss,
            grad_norm: outcome.grad_norm,
            learning_rate: outcome.learning_rate,
            tokens,
            total_tokens: self.progress.tokens,
            seconds,
            metrics: outcome.metrics,
        }
    }

    /// `(1−λ) hard + λ soft`, in nats per learned row.
    fn mean_loss(&self, metrics: &DraftMetrics) -> f64 {
        let weight = self.config.objective.soft_weight;
        (1.0 - weight) * metrics.hard_loss() + weight * metrics.soft_loss()
    }
}
