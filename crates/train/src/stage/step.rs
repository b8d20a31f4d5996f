//! Features, loss, gradients and the update of one optimizer step.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use longdraft_data::Batch;
use longdraft_data::batch::DrawEpochs;
use longdraft_features::{BatchFeatures, FeatureSource, Part, forward, join_target, learned_of};
use longdraft_kernels::linear_cross_entropy::{Inputs, linear_cross_entropy};
use longdraft_kernels::rows::select_rows;
use longdraft_models::target_model::{RowPart, Tap, Taps};
use longdraft_parallel::Gradients;

use super::Stage;
use super::evaluate::over_ranks;
use crate::error::{Result, TrainError};
use crate::metrics::DraftMetrics;
use crate::objective::{Normalisation, Prepared};

/// Between two looks whether sums that run beside have ended.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// Features of a micro-batch and what is learned of it.
type Held = (BatchFeatures, Prepared);

/// Features of a row of a later step.
pub(super) struct Ahead {
    row: usize,
    epoch: u64,
    features: BatchFeatures,
}

/// What a step came to.
pub(super) struct Outcome {
    pub(super) metrics: DraftMetrics,
    pub(super) target_loss: Option<f64>,
    pub(super) grad_norm: f64,
    pub(super) learning_rate: f64,
    pub(super) capture_seconds: f64,
}

impl Outcome {
    fn nothing(learning_rate: f64, capture_seconds: f64) -> Self {
        let metrics = DraftMetrics::default();
        Self { metrics, target_loss: None, grad_norm: 0.0, learning_rate, capture_seconds }
    }
}

impl Stage {
    /// Lays out a packed training row, of which what falls to this rank is learned; stored features pin its positions to epoch 0.
    pub(super) fn batch(&self, row: usize, epoch: u64) -> Batch {
        let pinned = self.features.pins_positions() || !self.draws.anchor.redraw;
        let positions = if pinned { 0 } else { epoch };
        let epochs = DrawEpochs { positions, batch: epoch };
        let data = &self.train;
        let batch = Batch::from_row(row, &data.rows[row], &data.documents, &self.draws, epochs);
        self.groups.cut(batch)
    }

    /// Keeps the features of rows in memory that this process has not seen before. Every rank makes
    /// as many passes as the one with most of them. Returns the seconds that it took.
    fn capture_new(&mut self, batches: &[Batch]) -> Result<f64> {
        let started = Instant::now();
        let needs = self.objective.needs();
        if let FeatureSource::Memory(store) = &mut self.features {
            let new: Vec<&Batch> = batches.iter().filter(|b| !store.holds(b.row)).collect();
            let mut rounds = [new.len() as u64];
            self.parallel.world().all_reduce_max(&mut rounds);
            for round in 0..rounds[0] as usize {
                match new.get(round) {
                    Some(batch) => {
                        let part = self.groups.part_of(&batch.document_ids);
                        store.capture(&self.target, batch, part.as_ref(), &needs)?;
                    }
                    None => join_target(&self.target, &needs)?,
                }
            }
        }
        Ok(started.elapsed().as_secs_f64())
    }

    /// Makes the draft whole for its use; all ranks call it.
    pub(super) fn gather_draft(&mut self) -> Result<()> {
        Ok(self.parallel.gather(self.objective.draft_mut().parameters_mut())?)
    }

    /// Lets go of what other ranks keep of the draft.
    pub(super) fn release_draft(&mut self) -> Result<()> {
        Ok(self.parallel.release(self.objective.draft_mut().parameters_mut())?)
    }

    /// Takes one optimizer step over the micro-batches of all ranks, of which `batches` are this
    /// one's. Nothing changes unless loss and gradients are finite. A step without anything to learn counts.
    pub(super) fn optimize(&mut self, batches: &[Batch]) -> Result<Outcome> {
        self.config.products.within(|| self.optimize_within(batches))
    }

    fn optimize_within(&mut self, batches: &[Batch]) -> Result<Outcome> {
        let step = self.progress.step + 1;
        // What is a share of the steps stays as it is where a run is extended.
        self.objective.begin_step(step, self.schedule.warmup_of);
        let capture_seconds = self.capture_new(batches)?;
        let origins = || batches.iter().flat_map(|batch| batch.origins.clone()).collect::<Vec<_>>();
        let (denominators, held) = self.denominators(batches)?;
        if denominators.iter().all(|count| *count == 0.0) {
            self.empty_steps += 1;
            self.progress.step = step;
            return Ok(Outcome::nothing(self.schedule.learning_rate(step), capture_seconds));
        }
        self.empty_steps = 0;
        let (gradients, metrics) = self.accumulate(batches, &denominators, held)?;
        let (gradients, grad_norm) = self.sum(gradients)?;
        if !grad_norm.is_finite() {
            return Err(TrainError::NotFinite { step, what: "gradient norm", origins: origins() });
        }
        let target_loss = self.target_loss(step, batches)?;
        let learning_rate = self.schedule.learning_rate(step);
        let (rank, parameters) = (&self.parallel, self.objective.draft().parameters());
        self.optimizer.update(rank, parameters, &gradients, grad_norm, learning_rate)?;
        self.progress.step = step;
        let metrics = over_ranks(self.parallel.world(), &metrics.to_numbers())?;
        Ok(Outcome { metrics, target_loss, grad_norm, learning_rate, capture_seconds })
    }

    /// Gradients of all ranks and their norm. While they are summed the target runs over the next step's
    /// first row, where it asks nothing of other ranks.
    fn sum(&mut self, gradients: Gradients) -> Result<(Gradients, f64)> {
        let parallel = &self.parallel;
        let sum = |gradients: Gradients| {
            let gradients = parallel.reduce(gradients)?;
            let norm = parallel.norm(&gradients)?;
            Ok((gradients, norm))
        };
        // A GPU would take turns at both.
        let next_row = if parallel.sums_on_gpus() { None } else { self.next_row() };
        let Some((batch, epoch)) = next_row else { return sum(gradients) };
        // Read from the device by the thread that computed them.
        let gradients = Gradients::from_values(gradients.into_values()?);
        let tokens = self.objective.teacher_tokens(&batch);
        let (sums, features) = std::thread::scope(|scope| {
            let sums = scope.spawn(|| sum(gradients));
            let needs = self.objective.needs();
            let features = self.features.features(Part::Train, (&batch, None), &needs, &tokens);
            // Parallel loops of the sums run on this thread's pool, of which it may be the only one.
            while !sums.is_finished() {
                if rayon::yield_now() != Some(rayon::Yield::Executed) {
                    std::thread::sleep(LOOK_EVERY);
                }
            }
            let sums = sums.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (sums, features)
        });
        self.ahead = Some(Ahead { row: batch.row, epoch, features: features? });
        sums
    }

    /// This rank's first row of the next step and its epoch, if its features can be had meanwhile.
    fn next_row(&self) -> Option<(Batch, u64)> {
        let config = &self.config.parallel;
        let world = self.parallel.world();
        let possible = config.overlap
            && world.size() > 1
            && config.runs_target_alone(world)
            && matches!(self.features, FeatureSource::Online(_))
            && self.progress.step + 1 < self.schedule.steps;
        let row = self.sampler.peek(self.own_rows().start).filter(|_| possible)?;
        let epoch = self.sampler.cursor().epoch;
        Some((self.batch(row, epoch), epoch))
    }

    /// Gradients and counters of this rank's micro-batches, `denominators` being those of the step.
    fn accumulate(
        &mut self,
        batches: &[Batch],
        denominators: &[f64],
        held: Option<VecDeque<Held>>,
    ) -> Result<(Gradients, DraftMetrics)> {
        let mut gradients = Gradients::new(self.objective.draft().parameters());
        let mut metrics = DraftMetrics::default();
        let known = held.is_some();
        let mut held = held.unwrap_or_default();
        for round in 0..self.rounds() {
            let round_held = if known { held.pop_front() } else { self.prepared(batches, round)? };
            let target = Arc::clone(&self.target);
            let _ends = target.hold_ends()?;
            self.gather_draft()?;
            if let (Some(batch), Some(held)) = (batches.get(round), round_held) {
                let sums = (&mut gradients, &mut metrics);
                let written = self.optimizer.written();
                written.with(|| self.learn(batch, &held, denominators, sums))?;
            }
            self.release_draft()?;
        }
        Ok((gradients, metrics))
    }

    /// Adds one micro-batch's gradients and counters.
    fn learn(
        &self,
        batch: &Batch,
        (features, prepared): &Held,
        denominators: &[f64],
        (gradients, metrics): (&mut Gradients, &mut DraftMetrics),
    ) -> Result<()> {
        let denominators = match self.objective.normalisation() {
            Normalisation::WholeStep => denominators.to_vec(),
            Normalisation::MeanOfBatches => {
                let (own, all) = (prepared.denominators.iter(), self.rows_of_a_step());
                own.map(|count| count.max(1.0) * all as f64).collect()
            }
        };
        let share = self.objective.share(batch, features, prepared, &denominators, true)?;
        metrics.merge(&share.metrics);
        if !share.metrics.loss().is_finite() {
            return Err(TrainError::NotFinite {
                step: self.progress.step + 1,
                what: "loss",
                origins: batch.origins.clone(),
            });
        }
        if let Some(loss) = share.loss {
            gradients.add_of(self.objective.draft().parameters(), &loss)?;
        }
        Ok(())
    }

    /// Micro-batches of the rank that has most of them. Every rank makes as many passes: where the
    /// target is spread, one without a micro-batch takes part in what the others gather.
    fn rounds(&self) -> usize {
        self.groups.rounds(self.rows_of_a_step())
    }

    /// Features of a round's micro-batch, if there is one, and what is learned of it; those of the
    /// next one are read meanwhile.
    fn prepared(&mut self, batches: &[Batch], round: usize) -> Result<Option<Held>> {
        let needs = self.objective.needs();
        let Some(batch) = batches.get(round) else {
            self.features.join(&needs)?;
            if self.objective.prepares_with_draft() {
                self.gather_draft()?;
                self.release_draft()?;
            }
            return Ok(None);
        };
        let tokens = self.objective.teacher_tokens(batch);
        let part = self.groups.part_of(&batch.document_ids);
        let of = (batch, part.as_ref());
        let epoch = self.sampler.cursor().epoch;
        let known =
            self.ahead.take().filter(|known| (known.row, known.epoch) == (batch.row, epoch));
        let features = match known {
            Some(known) => known.features,
            None => self.features.features(Part::Train, of, &needs, &tokens)?,
        };
        let next = batches
            .get(round + 1)
            .map(|batch| batch.row)
            .or_else(|| self.sampler.peek(self.own_rows().start));
        if let Some(next) = next {
            self.features.read_ahead(Part::Train, next, &needs);
        }
        let runs = self.objective.prepares_with_draft();
        if runs {
            self.gather_draft()?;
        }
        let prepared = self.objective.prepare(batch, &features)?;
        if runs {
            self.release_draft()?;
        }
        Ok(Some((features, prepared)))
    }

    /// Sums of the denominators of all ranks' micro-batches. Where these depend on features, all of the step's
    /// features of this rank come along: the target runs once.
    fn denominators(&mut self, batches: &[Batch]) -> Result<(Vec<f64>, Option<VecDeque<Held>>)> {
        let of_masks = batches.iter().map(|batch| self.objective.denominators_of_masks(batch));
        let of_masks = of_masks.collect::<Option<Vec<Vec<f64>>>>();
        // A rank without a row cannot tell.
        let of_features = self.parallel.world().any(of_masks.is_none());
        let (all, held) = match of_masks {
            Some(all) if !of_features => (all, None),
            _ => {
                let mut held = VecDeque::new();
                for round in 0..self.rounds() {
                    held.extend(self.prepared(batches, round)?);
                }
                let counts = held.iter().map(|(_, prepared)| prepared.denominators.clone());
                (counts.collect(), Some(held))
            }
        };
        let sum = |all: &[Vec<f64>]| {
            let mut sums = vec![0.0; all.iter().map(Vec::len).max().unwrap_or(0)];
            for counts in all {
                sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
            }
            sums
        };
        // A rank without a row has no counts.
        Ok((sum(&self.parallel.world().gather_varied(&sum(&all))), held))
    }

    /// The target's own mean loss on the learned tokens, every `target_loss_every` steps.
    fn target_loss(&self, step: u64, batches: &[Batch]) -> Result<Option<f64>> {
        let every = self.config.train.target_loss_every;
        if every == 0 || !step.is_multiple_of(every) {
            return Ok(None);
        }
        let (mut sum, mut count) = (0.0, 0);
        let taps = Taps::of(&[Tap::FinalHidden]);
        for round in 0..self.rounds() {
            let batch = batches.get(round);
            let part = batch.and_then(|batch| self.groups.part_of(&batch.document_ids));
            let features = match batch {
                Some(batch) => Some(forward(&self.target, batch, part.as_ref(), &taps)?),
                None => self.target.join_forward(&taps).map(|()| None)?,
            };
            let ends = self.target.hold_ends()?;
            let (Some(batch), Some(features)) = (batch, features) else { continue };
            if batch.learned.is_empty() {
                continue;
            }
            let learned = learned_of(batch, part.as_ref().map(RowPart::rows))?;
            let states = select_rows(features.final_hidden()?, &learned)?;
            let (head, labels) = (ends.loss_head()?, batch.labels());
            let inputs = Inputs::of_labels(&states, &head, &labels).bent(self.target.bend());
            let output = linear_cross_entropy(&inputs)?;
            sum += output.rows.hard.iter().sum::<f64>();
            count += batch.learned.len();
        }
        let mut sums = [sum, count as f64];
        self.parallel.world().all_reduce_sum(&mut sums);
        Ok(Some(sums[0] / sums[1].max(1.0)))
    }
}
