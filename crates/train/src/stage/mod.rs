//! One training stage: fetch, features, forward, backward, clip, step, log, checkpoint.

mod capture;
mod data_sets;
mod encoder;
mod evaluate;
mod identity;
mod prepare;
mod resume;
mod row_metrics;
mod step;
mod team;
mod tracked;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use longdraft_data::batch::Draws;
use longdraft_data::packing::PackedRow;
use longdraft_data::sampler::Sampler;
use longdraft_data::{Batch, Document};
use longdraft_features::FeatureSource;
use longdraft_models::draft::TokenCounts;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_parallel::{DataParallel, RowGroups, Traffic};
use longdraft_rules::Checked;
use longdraft_tracking::MetricsLog;
use serde_json::{Value, json};

use self::identity::rows_hash;
use crate::checkpoint::{
    Best, CheckpointState, Checkpointer, Contents, Place, Progress, RunIdentity, RunLock, SaveClock,
};
use crate::config::TrainConfig;
use crate::error::Result;
use crate::method::DraftMethod;
use crate::metrics::{DraftMetrics, Quantities, Rate};
use crate::objective::Objective;
use crate::optim::AdamW;
use crate::schedule::Schedule;

pub use crate::checkpoint::ResumePolicy;
pub use crate::observer::{Ending, Event, Observer, StepReport};
pub use capture::{Capture, CaptureOptions, Reader};
pub use data_sets::source_paths;
pub use encoder::Encoder;
pub use evaluate::{Evaluator, measure_at_places, measure_drafts};
pub use row_metrics::{RowMetrics, bootstrap_interval};
pub use tracked::Tracked;

/// Documents and how they are packed.
#[derive(Default)]
struct DataSet {
    documents: Vec<Document>,
    rows: Vec<PackedRow>,
}

impl DataSet {
    /// Tokens of every document, or piece of one, that stands in a row, and where they come from.
    fn texts(&self) -> impl Iterator<Item = (&[u32], &str)> {
        self.rows.iter().flat_map(|row| &row.pieces).map(|piece| {
            let document = &self.documents[piece.document];
            (&document.ids[piece.tokens.clone()], document.origin.as_str())
        })
    }
}

/// A prepared stage.
pub struct Stage {
    config: Checked<TrainConfig>,
    method: Box<dyn DraftMethod>,
    target: Arc<Target>,
    tokenizer: TextTokenizer,
    token_counts: TokenCounts,
    objective: Box<dyn Objective>,
    optimizer: AdamW,
    parallel: DataParallel,
    groups: RowGroups,
    schedule: Schedule,
    sampler: Sampler,
    draws: Draws,
    train: DataSet,
    held_out: DataSet,
    features: FeatureSource,
    /// What the target made of the next step's first row while gradients were summed.
    ahead: Option<step::Ahead>,
    identity: RunIdentity,
    checkpointer: Checkpointer,
    log: MetricsLog,
    progress: Progress,
    /// Steps since something was learned.
    empty_steps: u64,
    saving: SaveClock,
    /// When this process took the run up.
    started: Instant,
    _lock: Option<RunLock>,
}

impl Stage {
    /// Trains to the end of the budget, or until the observer of any rank asks to stop. A checkpoint
    /// is saved at the end either way, also before the last evaluation: where that fails, it alone is done again.
    /// Under ZeRO-3 the draft's weights are spread from here on.
    ///
    /// # Errors
    /// - a loss that is not finite, rows without labels, a full disk; earlier checkpoints stay
    pub fn run(&mut self, observer: &mut dyn Observer) -> Result<Ending> {
        self.release_draft()?;
        while !self.is_trained() {
            if self.parallel.world().any(observer.should_stop()) {
                self.save(Place::Last, observer)?;
                return Ok(Ending::Stopped);
            }
            let (started, before) = (Instant::now(), self.parallel.world().traffic());
            let batches = self.next_batches();
            let outcome = self.optimize(&batches)?;
            let traffic = self.parallel.world().traffic() - before;
            let seconds = started.elapsed().as_secs_f64();
            let report = self.report(&batches, outcome, (seconds, traffic));
            if self.empty_steps == 0 {
                self.log_step(&report)?;
                observer.on_event(Event::Step(&report));
            } else if self.empty_steps.is_power_of_two() {
                let origins: Vec<&str> =
                    batches.iter().flat_map(|batch| &batch.origins).map(String::as_str).collect();
                let before = match self.empty_steps - 1 {
                    0 => String::new(),
                    steps => format!(", nor in {steps} steps before"),
                };
                let (step, origins) = (report.step, origins.join(", "));
                let told = format!("step {step}: no token is learned of {origins}{before}");
                observer.on_event(Event::Warning(&told));
            }
            let minutes = self.config.train.max_minutes;
            self.progress.ended = minutes.is_some_and(|minutes| {
                self.parallel.world().of_first(self.seconds()) >= 60.0 * minutes
            });
            if self.progress.ended {
                self.tell_early_end("the time of train.max_minutes is over", observer);
            }
            let every = self.config.train.evaluate_every;
            let due = every > 0 && self.progress.step.is_multiple_of(every);
            let measures = !self.held_out.rows.is_empty();
            self.progress.unjudged = measures && self.is_trained();
            if due && measures && !self.progress.unjudged {
                self.judge(observer)?;
            }
            let due = self.saving.is_due(self.progress.step, self.parallel.world());
            if self.progress.unjudged {
                // Told when it is complete.
                self.write(Place::Last)?;
            } else if due || self.is_trained() {
                self.save(Place::Last, observer)?;
                self.saving.saved();
            }
        }
        if self.progress.unjudged {
            if !self.held_out.rows.is_empty() {
                self.judge(observer)?;
            }
            self.progress.unjudged = false;
            self.save(Place::Last, observer)?;
        }
        Ok(Ending::Finished)
    }

    /// Whether nothing is left to do.
    pub fn is_finished(&self) -> bool {
        self.is_trained() && !self.progress.unjudged
    }

    /// Whether no step is left to take.
    fn is_trained(&self) -> bool {
        self.progress.step >= self.schedule.steps || self.progress.ended
    }

    /// Evaluates the held-out rows; keeps the best draft and runs out of patience.
    fn judge(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let metrics = self.evaluate()?;
        self.log_held_out(&metrics)?;
        self.progress.unjudged = false;
        let step = self.progress.step;
        observer.on_event(Event::Evaluated(step, &metrics));
        let gamma = self.objective.draft_len();
        let length = metrics.simulated_acceptance_length(Rate::Top1, gamma);
        let rows = Some(rows_hash(&self.held_out));
        if self.progress.best.is_some_and(|best| best.rows.is_some() && best.rows != rows) {
            observer.on_event(Event::Warning(
                "held-out rows are not those of before: the best draft is chosen anew",
            ));
            (self.progress.best, self.progress.evaluations_since_best) = (None, 0);
        }
        if self.progress.best.is_none_or(|best| length > best.length) {
            self.progress.best = Some(Best { step, length, rows });
            self.progress.evaluations_since_best = 0;
            if self.config.train.keep_best {
                self.save(Place::Best, observer)?;
            }
        } else {
            self.progress.evaluations_since_best += 1;
            if let Some(most) = self.config.train.patience
                && self.progress.evaluations_since_best >= most
                && !self.progress.ended
            {
                let why =
                    format!("no better draft in the last evaluations (train.patience: {most})");
                self.tell_early_end(&why, observer);
                self.progress.ended = true;
            }
        }
        Ok(())
    }

    /// Says why a run ends before its last step.
    fn tell_early_end(&self, why: &str, observer: &mut dyn Observer) {
        let (step, steps) = (self.progress.step, self.schedule.steps);
        if step < steps {
            let told = format!("{why}: the run ends after step {step} of {steps}");
            observer.on_event(Event::Note(&told));
        }
    }

    /// Seconds of training, over all processes that worked on it.
    fn seconds(&self) -> f64 {
        self.progress.seconds + self.started.elapsed().as_secs_f64()
    }

    /// The configuration, as it was given.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// The method, with what the configuration leaves open from the draft to start from.
    pub fn method(&self) -> &dyn DraftMethod {
        self.method.as_ref()
    }

    /// The draft as it stands.
    pub fn objective(&self) -> &dyn Objective {
        self.objective.as_ref()
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

    fn state(&mut self) -> Result<CheckpointState> {
        Ok(CheckpointState {
            progress: Progress { seconds: self.seconds(), ..self.progress },
            cursor: self.sampler.cursor(),
            first_steps: (self.schedule.warmup_of != self.schedule.steps)
                .then_some(self.schedule.warmup_of),
            max_minutes: self.config.train.max_minutes,
            metrics_bytes: self.log.position()?,
            identity: self.identity.clone(),
            method: self.config.draft.method.name().to_owned(),
            draft: self.objective.draft().config_json(),
            target_fingerprint: self.target.fingerprint().to_owned(),
        })
    }

    /// Saves a checkpoint and tells it.
    fn save(&mut self, place: Place, observer: &mut dyn Observer) -> Result<()> {
        let path = self.write(place)?;
        observer.on_event(Event::Saved(&path));
        Ok(())
    }

    fn write(&mut self, place: Place) -> Result<PathBuf> {
        self.gather_draft()?;
        let state = self.state()?;
        let contents = Contents {
            state: &state,
            draft: self.objective.draft(),
            optimizer: &self.optimizer,
            parallel: &self.parallel,
            tokenizer: &self.tokenizer,
            token_counts: &self.token_counts,
        };
        let path = self.checkpointer.put(place, |folder| contents.write(folder))?;
        self.release_draft()?;
        Ok(path)
    }

    /// Micro-batches of one optimizer step, over all ranks.
    fn rows_of_a_step(&self) -> usize {
        self.config.train.rows_of_a_step(self.config.data.row_tokens)
    }

    /// The places among them of this rank's group.
    fn own_rows(&self) -> Range<usize> {
        self.groups.share(self.rows_of_a_step())
    }

    /// This rank's micro-batches. Every rank draws all rows: the order is that of one process.
    fn next_batches(&mut self) -> Vec<Batch> {
        let own = self.own_rows();
        let rows = (0..self.rows_of_a_step()).map(|_| self.sampler.next_row()).collect::<Vec<_>>();
        rows[own].iter().map(|(row, epoch)| self.batch(*row, *epoch)).collect()
    }

    fn log_step(&mut self, report: &StepReport) -> Result<()> {
        if !report.step.is_multiple_of(self.config.train.log_every) {
            return Ok(());
        }
        let mut record = report.to_json(self.objective.draft_len());
        record[Quantities::KEY] = json!(self.objective.training_quantities());
        Ok(self.log.write(&record)?)
    }

    fn log_held_out(&mut self, metrics: &DraftMetrics) -> Result<()> {
        let gamma = self.objective.draft_len();
        let mut figures = Value::from(metrics.to_json(gamma));
        let teacher = self.objective.held_out_needs().teacher;
        figures[Quantities::KEY] = json!(self.objective.quantities(teacher));
        if metrics.as_trained.is_some() {
            let teacher = self.objective.needs().teacher;
            figures["as_trained"][Quantities::KEY] = json!(self.objective.quantities(teacher));
        }
        Ok(self.log.write(&json!({ "step": self.progress.step, "held_out": figures }))?)
    }

    /// Numbers of the step that was just taken.
    fn report(
        &mut self,
        batches: &[Batch],
        outcome: step::Outcome,
        (seconds, traffic): (f64, Traffic),
    ) -> StepReport {
        let tokens: u64 = batches.iter().map(|batch| batch.ids.len() as u64).sum();
        let mut tokens = [if self.groups.is_first_of_group() { tokens } else { 0 }];
        self.parallel.world().all_reduce_sum(&mut tokens);
        let tokens = tokens[0] as usize;
        self.progress.tokens += tokens as u64;
        self.progress.learned_rows += outcome.metrics.rows as u64;
        StepReport {
            step: self.progress.step,
            steps: self.schedule.steps,
            epoch: self.sampler.cursor().epoch,
            loss: outcome.metrics.loss(),
            target_loss: outcome.target_loss,
            grad_norm: outcome.grad_norm,
            learning_rate: outcome.learning_rate,
            tokens,
            total_tokens: self.progress.tokens,
            seconds,
            capture_seconds: outcome.capture_seconds,
            memory_mib: crate::memory::peak_resident_mib(),
            traffic: (self.parallel.world().size() > 1).then_some(traffic),
            metrics: outcome.metrics,
        }
    }
}
