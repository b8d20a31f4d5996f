//! The step loop: micro-batches, the update, scores and checkpoints on the way.

mod identity;
mod prepare;
mod standing;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Instant;

use longdraft_data::token_stream::{Batch, Position, TokenStream};
use longdraft_kernels::factors::with_factors;
use longdraft_models::language_model::{LanguageModel, LanguageModelConfig, Layout};
use longdraft_parallel::{DataParallel, Gradients, World, share_of};
use longdraft_rules::Checked;
use longdraft_tracking::{MetricsLog, Outcome, Row, Run, Trackers, scalars};
use longdraft_train::TrainError;
use longdraft_train::checkpoint::{Checkpointer, Place, RunIdentity, RunLock, SaveClock};
use longdraft_train::memory::peak_resident_mib;
use longdraft_train::observer::Ending;
use serde_json::{Value, json};

use crate::checkpoint::{self, Average, PretrainState, Progress};
use crate::config::{Lengths, PretrainConfig};
use crate::error::Result;
use crate::muon::Muon;
use crate::observer::{PretrainEvent, PretrainObserver, PretrainStep};
use crate::score::ScoredStream;

pub use standing::Standing;

/// Steps that are always logged.
const FIRST_STEPS: u64 = 10;

/// A prepared run.
pub struct Pretraining {
    config: Checked<PretrainConfig>,
    stream: TokenStream,
    held_out: Option<ScoredStream>,
    tokenizer_hash: String,
    model: LanguageModel,
    optimizer: Muon,
    parallel: DataParallel,
    average: Option<Average>,
    progress: Progress,
    saving: SaveClock,
    checkpointer: Checkpointer,
    identity: RunIdentity,
    log: MetricsLog,
    layouts: Layouts,
    trackers: Trackers,
    _lock: Option<RunLock>,
}

/// Layouts of equal sequences of one length, by their number.
#[derive(Default)]
struct Layouts {
    sequence: usize,
    by_count: HashMap<usize, Layout>,
}

impl Layouts {
    fn of(
        &mut self,
        config: &LanguageModelConfig,
        (sequence, count): (usize, usize),
        rope_length: usize,
    ) -> Result<&Layout> {
        if self.sequence != sequence {
            *self = Self { sequence, by_count: HashMap::new() };
        }
        Ok(match self.by_count.entry(count) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(empty) => {
                empty.insert(Layout::new(config, &vec![sequence; count], rope_length)?)
            }
        })
    }
}

impl Pretraining {
    /// Trains to the end of the budget, or until the observer asks to stop; a checkpoint is saved
    /// either way.
    ///
    /// # Errors
    /// - a loss that is not finite, unreadable shards, a full disk; earlier checkpoints stay
    pub fn run(&mut self, observer: &mut dyn PretrainObserver) -> Result<Ending> {
        let value = self.config.references.record(&*self.config);
        let (output, tracking) = (&self.config.output, &self.config.tracking);
        let run = Run::new(output, tracking, value, self.progress.step);
        self.trackers = Trackers::open(&run);
        let ending = self.train(observer);
        let outcome = match &ending {
            Ok(Ending::Finished) => Outcome::Finished,
            Ok(Ending::Stopped) => Outcome::Stopped,
            Err(_) => Outcome::Failed,
        };
        let notes = self.trackers.finish(outcome);
        self.tell_dropped(observer);
        self.trackers = Trackers::default();
        for note in notes {
            observer.on_event(PretrainEvent::Note(&note));
        }
        ending
    }

    /// Tells which trackers were dropped.
    fn tell_dropped(&mut self, observer: &mut dyn PretrainObserver) {
        for warning in self.trackers.warnings() {
            observer.on_event(PretrainEvent::Warning(&warning));
        }
    }

    fn train(&mut self, observer: &mut dyn PretrainObserver) -> Result<Ending> {
        let lacks_score = self.parallel.world().is_first() && self.lacks_score();
        if self.parallel.world().any(lacks_score) {
            self.judge(observer)?;
        }
        while !self.is_finished() {
            if self.parallel.world().any(observer.should_stop()) {
                self.save(observer)?;
                return Ok(Ending::Stopped);
            }
            let report = self.step()?;
            self.log_step(&report)?;
            observer.on_event(PretrainEvent::Step(&report));
            let (judges, world) = (self.is_judged_now(), self.parallel.world());
            let due = self.saving.is_due(self.progress.step, world);
            // Scores take long, and may fail: what was learned is kept before.
            if due || judges || self.is_finished() {
                self.save(observer)?;
                self.saving.saved();
            }
            if judges {
                self.judge(observer)?;
            }
        }
        Ok(Ending::Finished)
    }

    /// Whether nothing is left to do.
    pub fn is_finished(&self) -> bool {
        self.progress.ended || self.progress.step >= self.config.train.steps
    }

    /// Optimizer steps done, tokens seen, milliseconds of training, share of clipped steps.
    pub fn totals(&self) -> (u64, u64, f64, f64) {
        let Progress { step, tokens, elapsed_ms, clipped_steps, .. } = self.progress;
        (step, tokens, elapsed_ms, clipped_steps as f64 / step.max(1) as f64)
    }

    /// The configuration.
    pub fn config(&self) -> &PretrainConfig {
        &self.config
    }

    /// The held-out stream.
    pub fn held_out(&self) -> Option<&ScoredStream> {
        self.held_out.as_ref()
    }

    /// Hash of the tokenizer's file; empty without one.
    pub fn tokenizer_hash(&self) -> &str {
        &self.tokenizer_hash
    }

    /// Tokens of the training stream.
    pub fn training_tokens(&self) -> usize {
        self.stream.len()
    }

    /// The model to keep: averaged weights if there are any, without a gradient graph.
    ///
    /// # Errors
    /// - a tensor cannot be made
    pub fn final_model(&self) -> Result<LanguageModel> {
        match &self.average {
            Some(average) => Ok(average.model(&self.model)?),
            None => Ok(self.model.frozen()?),
        }
    }

    /// Takes one optimizer step. Nothing changes unless loss and gradients are finite.
    fn step(&mut self) -> Result<PretrainStep> {
        let (started, earlier) = (Instant::now(), self.parallel.world().traffic());
        let Progress { step, elapsed_ms, .. } = self.progress;
        let before = self.config.train.progress(step, elapsed_ms);
        let multiplier = self.config.multiplier(step, elapsed_ms);
        let lengths = self.config.lengths_at(before);
        let products = self.config.products;
        let (gradients, loss, position) = products.within(|| self.gradients(lengths))?;
        let mut loss = [loss];
        self.parallel.world().all_reduce_sum(&mut loss);
        let loss = loss[0];
        let gradients = self.parallel.reduce(gradients)?;
        let norm = self.parallel.norm(&gradients)?;
        for (what, value) in [("loss", loss), ("gradient norm", norm)] {
            if !value.is_finite() {
                let origins = vec![format!("tokens after {position:?}")];
                return Err(TrainError::NotFinite { step: step + 1, what, origins }.into());
            }
        }
        let (rank, parameters) = (&self.parallel, self.model.parameters());
        let optimizer = &mut self.optimizer;
        let outcome =
            products.within(|| optimizer.update(rank, parameters, &gradients, norm, multiplier))?;
        let traffic = self.parallel.world().traffic() - earlier;
        let tokens = (lengths.sequence * lengths.sequences * lengths.micro_batches) as u64;
        let progress = &mut self.progress;
        progress.step += 1;
        progress.position = position;
        progress.tokens += tokens;
        progress.clipped_steps += u64::from(outcome.clip_factor < 1.0);
        if let (Some(average), Some(share)) = (&mut self.average, self.config.train.ema_share) {
            // The run's length in steps, as far as is known.
            let steps = progress.step as f64 / before.max(1.0 / self.config.train.steps as f64);
            average.add(self.model.parameters(), share * steps)?;
        }
        // One clock for all: schedules may follow it.
        let seconds = self.parallel.world().of_first(started.elapsed().as_secs_f64());
        progress.elapsed_ms += 1000.0 * seconds;
        let minutes = self.config.train.max_minutes;
        progress.ended = minutes.is_some_and(|minutes| progress.elapsed_ms >= 60_000.0 * minutes);
        Ok(PretrainStep {
            step: progress.step,
            steps: self.config.train.steps,
            loss,
            grad_norm: outcome.grad_norm,
            clip_factor: outcome.clip_factor,
            multiplier,
            momentum: outcome.momentum,
            tokens,
            total_tokens: progress.tokens,
            seconds,
            progress: self.config.train.progress(progress.step, progress.elapsed_ms),
            traffic: (self.parallel.world().size() > 1).then_some(traffic),
        })
    }

    /// This rank's share of the mean gradients and loss of the next micro-batches, and where the
    /// loader stands then. Every rank draws all sequences and learns its part of them.
    fn gradients(&mut self, lengths: Lengths) -> Result<(Gradients, f64, Position)> {
        let parameters = self.model.parameters();
        let mut gradients = Gradients::new(parameters);
        let mut loss = 0.0;
        let mut position = self.progress.position;
        let (rope_length, sequence) = (self.config.data.row_tokens, lengths.sequence);
        let all = lengths.micro_batches * lengths.sequences;
        let world = self.parallel.world();
        let own = share_of(all, world.rank(), world.size());
        for first in (0..all).step_by(lengths.sequences) {
            let batch = self.batch(lengths, &mut position)?;
            let from = own.start.clamp(first, first + lengths.sequences) - first;
            let to = own.end.clamp(first, first + lengths.sequences) - first;
            if from == to {
                continue;
            }
            let batch = batch.sequences(from..to, sequence);
            let own_layout;
            let layout = if self.config.data.document_mask {
                let sizes = vec![sequence; to - from];
                let ids = batch.document_ids(sequence);
                own_layout = Layout::with_documents(&self.config.model, &sizes, &ids, rope_length)?;
                &own_layout
            } else {
                self.layouts.of(&self.config.model, (sequence, to - from), rope_length)?
            };
            let share = 1.0 / (sequence * all) as f64;
            let hard = with_factors(|| -> Result<_> {
                let hidden = self.model.hidden(&batch.inputs, layout)?;
                let output = self.model.cross_entropy(&hidden, &batch.targets)?;
                gradients.add_of(parameters, &(output.loss_sum * share)?)?;
                Ok(output.rows.hard.iter().sum::<f64>())
            })?;
            loss += hard * share;
        }
        Ok((gradients, loss, position))
    }

    fn batch(&self, lengths: Lengths, position: &mut Position) -> Result<Batch> {
        let (stream, sizes) = (&self.stream, (lengths.sequences, lengths.sequence));
        let seed = self.config.train.seed;
        Ok(self.config.data.loader.next_batch((stream, seed), position, sizes)?)
    }

    /// Whether the held-out stream is scored after the step that was taken; all ranks know it.
    fn is_judged_now(&self) -> bool {
        let (every, step) = (self.config.train.evaluate_every, self.progress.step);
        let is_due = every > 0 && step > 0 && step.is_multiple_of(every) && !self.is_finished();
        is_due && self.config.is_scored()
    }

    /// Whether an earlier process ended while it scored the step that this one goes on from: the metrics lack it.
    fn lacks_score(&self) -> bool {
        let path = self.config.output.join("metrics.jsonl");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let last: Option<Value> =
            text.lines().last().and_then(|line| serde_json::from_str(line).ok());
        let is_scored = last.is_some_and(|record| {
            record["held_out"].is_object() && record["step"] == self.progress.step
        });
        self.is_judged_now() && !is_scored
    }

    /// Has the first rank score the held-out stream; the others wait for as long as it takes. All ranks call it.
    fn judge(&mut self, observer: &mut dyn PretrainObserver) -> Result<()> {
        self.score(observer)?;
        self.parallel.world().patiently(World::barrier);
        Ok(())
    }

    /// Scores the held-out stream, which the first rank alone holds.
    fn score(&mut self, observer: &mut dyn PretrainObserver) -> Result<()> {
        let Some(held_out) = &self.held_out else { return Ok(()) };
        let (window, batch_tokens) =
            (self.config.data.row_tokens, self.config.evaluation.batch_tokens);
        let score = held_out.score_plain(&self.final_model()?, window, batch_tokens)?;
        let step = self.progress.step;
        let record = json!({ "hard_loss": score.loss(), "bits_per_byte": score.bits_per_byte() });
        self.log.write(&json!({ "step": step, "held_out": record }))?;
        self.trackers.log(&Row::now(step, scalars("held_out", &record)));
        observer.on_event(PretrainEvent::Evaluated(step, &score.bits_per_byte()));
        Ok(())
    }

    fn log_step(&mut self, report: &PretrainStep) -> Result<()> {
        let run = &self.config.train;
        if report.step > FIRST_STEPS && !report.step.is_multiple_of(run.log_every) {
            return Ok(());
        }
        let speed = report.tokens as f64 / report.seconds.max(1e-9);
        let operations =
            self.config.model.training_operations_per_token(self.config.data.row_tokens);
        let mut record: Value = json!({
            "step": report.step, "loss": report.loss, "grad_norm": report.grad_norm,
            "clip_factor": report.clip_factor, "multiplier": report.multiplier,
            "learning_rate": report.multiplier * self.config.optimizer.matrix_learning_rate,
            "momentum": report.momentum, "tokens": report.total_tokens,
            "tokens_per_second": speed, "gflops": 1e-9 * speed * operations,
            "memory_mib": peak_resident_mib(),
        });
        if let Some(traffic) = report.traffic {
            record["sent_bytes"] = json!(traffic.sent_bytes);
            record["waited_seconds"] = json!(traffic.seconds);
        }
        self.log.write(&record)?;
        self.trackers.log(&Row::now(report.step, scalars("train", &record)));
        Ok(())
    }

    fn save(&mut self, observer: &mut dyn PretrainObserver) -> Result<()> {
        self.trackers.flush();
        self.tell_dropped(observer);
        let state = PretrainState {
            progress: self.progress,
            metrics_bytes: self.log.position()?,
            identity: self.identity.clone(),
        };
        let saved = checkpoint::Files {
            state: &state,
            config: &self.config.model,
            tokenizer_hash: &self.tokenizer_hash,
            parameters: self.model.parameters(),
            optimizer: self.optimizer.state(),
            parallel: &self.parallel,
            average: self.average.as_ref(),
        };
        let path = self.checkpointer.put(Place::Last, |folder| saved.write(folder))?;
        observer.on_event(PretrainEvent::Saved(&path));
        Ok(())
    }
}
