//! What this machine takes for this target: passes, prompts, several answers at a time.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::time::Instant;

use longdraft_decode::evaluate::Prompt;
use longdraft_decode::{BatchEngine, DecodeOptions, Sampling};
use longdraft_models::StepProducts;
use longdraft_models::target_model::{Tap, Taps, Target};
use longdraft_plan::Speed;
use longdraft_records::median;
use serde::{Deserialize, Serialize};

use super::expect::Range;
use super::lengths::Lengths;
use super::lookup;
use super::state::Settings;
use crate::decoding::Models;
use crate::failure::Result;
use crate::interrupts::Interrupts;

/// Rows of the passes that are measured, and repetitions.
const ROWS: [usize; 7] = [1, 2, 3, 4, 6, 8, 16];
const REPETITIONS: usize = 5;
/// Seconds after which passes are not repeated.
pub(super) const PATIENCE: f64 = 8.0;
/// Seconds in which the prompts of several answers must be read.
const READING: f64 = 30.0;
/// Share of these seconds that answers take at least.
const LEAST_WRITTEN: f64 = 0.1;
/// Tokens of the context that passes are measured after.
const CONTEXT: usize = 96;
/// Sequences that are answered at a time: the smaller number, unless the larger one takes clearly less a token.
const BATCHES: [usize; 2] = [8, 16];
const CLEARLY: f64 = 0.95;
/// Tokens of answers that are written several at a time.
const ANSWER_TOKENS: usize = 96;

/// What the target takes here.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Machine {
    /// Rows of a pass, and its seconds.
    pub(super) passes: Vec<(usize, f64)>,
    /// Seconds of a token of a prompt.
    pub(super) prefill: f64,
    /// Seconds of a token of an answer where [`Self::batch`] are written at a time, their prompts read before;
    /// `None` where no prompt leaves room for an answer.
    pub(super) written_token: Option<f64>,
    /// 10⁹ operations a second.
    pub(super) gflops: f64,
    /// Speed-up of lookup alone, on prompts that were set aside, and its 95 % interval.
    pub(super) lookup: Option<f64>,
    pub(super) lookup_interval: Option<(f64, f64)>,
    /// Of these prompts with all of their turns.
    #[serde(flatten)]
    pub(super) lengths: Lengths,
}

impl Machine {
    /// Mean answers of a row.
    pub(super) fn answers_of_row(&self) -> f64 {
        self.lengths.turns.max(1.0)
    }

    /// Tokens of the row that nine of ten are not longer than, where an answer has some.
    pub(super) fn long_row(&self, of_answer: f64) -> usize {
        let Lengths { long_prompt, long_turns, .. } = self.lengths;
        long_prompt.saturating_add((long_turns.max(1) as f64 * of_answer) as usize)
    }

    /// Speed-up of lookup alone with its interval.
    pub(super) fn lookup_range(&self) -> Option<Range> {
        let (middle, (low, high)) = self.lookup.zip(self.lookup_interval)?;
        Some(Range { low, middle, high })
    }

    /// Seconds of a plain step.
    pub(super) fn step(&self) -> f64 {
        self.pass(1)
    }

    /// Seconds of a pass over some rows: on the line between two sizes that were measured.
    pub(super) fn pass(&self, rows: usize) -> f64 {
        let after = self.passes.iter().position(|(size, _)| *size >= rows);
        let at = after.unwrap_or(self.passes.len().saturating_sub(1));
        let Some(&(size, seconds)) = self.passes.get(at) else { return 1.0 };
        match at.checked_sub(1).and_then(|before| self.passes.get(before)) {
            Some(&(low, least)) if size > low => {
                let slope = (seconds - least) / (size - low) as f64;
                least + slope * (rows as f64 - low as f64)
            }
            _ => seconds,
        }
    }

    /// Seconds of a row whose answers have so many tokens each, several rows being written at a time: its share of
    /// passes, and its prompts.
    pub(super) fn row(&self, of_answer: f64) -> f64 {
        let batch = self.batch();
        let of_token = self.written_token.unwrap_or_else(|| self.pass(batch) / batch as f64);
        self.answers_of_row() * of_answer * of_token + self.lengths.prompt * self.prefill
    }

    /// Answers that are written at a time.
    pub(super) fn batch(&self) -> usize {
        let [few, many] = BATCHES;
        let of_row = |rows| self.pass(rows) / rows as f64;
        if of_row(many) < CLEARLY * of_row(few) { many } else { few }
    }

    /// Whether lookup was measured to help.
    pub(super) fn lookup_helps(&self) -> bool {
        self.lookup.is_some_and(|speed_up| speed_up >= 1.05)
    }
}

/// Measures the target with the prompts that were set aside, encoded, and the lengths of all of their turns; lookup within
/// some seconds, where it is measured.
pub(super) fn machine(
    models: &Models,
    (held_out, lengths): (&[Prompt], Lengths),
    lookup: Option<f64>,
    settings: &Settings,
    interrupts: &Interrupts,
) -> Result<Machine> {
    let (passes, prefill) = passes(&models.target)?;
    let machine = Machine { passes, prefill, lengths, ..Machine::default() };
    let lookup = match lookup {
        Some(seconds) => {
            let time = (seconds, machine.step());
            lookup::measure(models, held_out, time, settings, interrupts)?
        }
        None => None,
    };
    let gflops = Speed::measured_gflops(StepProducts::default());
    let (speed, how) = ((machine.batch(), prefill), (settings.temperature, interrupts));
    let written_token = written_token(models, held_out, speed, how)?;
    let lookup_interval = lookup.map(|range| (range.low, range.high));
    let lookup = lookup.map(|range| range.middle);
    Ok(Machine { written_token, gflops, lookup, lookup_interval, ..machine })
}

/// Seconds of passes over some rows, and of a token of a prompt.
fn passes(target: &Target) -> Result<(Vec<(usize, f64)>, f64)> {
    let most = target.config().max_position_embeddings;
    let context = CONTEXT.min(most / 2);
    let ids: Vec<u32> =
        (0..(context + 16) as u32).map(|i| i % target.config().vocab_size as u32).collect();
    let taps = Taps::of(&[Tap::FinalHidden]);
    let positions: Vec<u32> = (0..ids.len() as u32).collect();
    let mut cache = target.new_cache()?;
    let mut run = |from: usize, rows: usize| -> Result<f64> {
        cache.truncate(from);
        let started = Instant::now();
        let (ids, positions) = (&ids[from..from + rows], &positions[from..from + rows]);
        let features = target.extend(ids, positions, &mut cache, &taps)?;
        let first = features.final_hidden()?.narrow(0, 0, rows.min(16))?;
        target.hold_ends()?.logits(&first)?.flatten_all()?.to_vec1::<f32>()?;
        Ok(started.elapsed().as_secs_f64())
    };
    run(0, context)?;
    let prefill = run(0, context)? / context as f64;
    // In turns, so that what else the machine does falls on all sizes alike.
    let (mut times, started) = (vec![Vec::new(); ROWS.len()], Instant::now());
    for turn in 0..REPETITIONS {
        if turn > 0 && started.elapsed().as_secs_f64() >= PATIENCE {
            break;
        }
        for (rows, times) in ROWS.into_iter().zip(&mut times) {
            times.push(run(context, rows)?);
        }
    }
    let passes = ROWS.into_iter().zip(&times).map(|(rows, times)| (rows, median(times)));
    Ok((rising(passes.collect()), prefill))
}

/// Seconds of a token, several answers being written at a time, without the reading of their prompts, of whose tokens
/// each takes `prefill` seconds.
fn written_token(
    models: &Models,
    prompts: &[Prompt],
    (batch, prefill): (usize, f64),
    (temperature, interrupts): (f64, &Interrupts),
) -> Result<Option<f64>> {
    let target = &models.target;
    let context = target.config().max_position_embeddings;
    let fits = |prompt: &&Prompt| prompt.tokens.len() + ANSWER_TOKENS < context;
    let prompts: Vec<&Prompt> = prompts.iter().filter(fits).collect();
    let mut engine = BatchEngine::new(target, (0..batch).map(|_| None).collect());
    let options = DecodeOptions {
        max_new_tokens: ANSWER_TOKENS,
        sampling: Sampling::at(temperature),
        ..DecodeOptions::default()
    };
    for (key, prompt) in prompts.iter().cycle().take(batch).enumerate() {
        engine.join(key, &prompt.tokens, &options)?;
    }
    let asked = prompts.iter().cycle().take(engine.running());
    let read = asked.map(|prompt| prompt.tokens.len()).sum::<usize>() as f64 * prefill;
    let mut waiting: HashSet<usize> = (0..engine.running()).collect();
    let (mut tokens, started) = (0, Instant::now());
    while engine.running() > 0 {
        let patience = if waiting.is_empty() { PATIENCE + read } else { READING };
        if started.elapsed().as_secs_f64() >= patience {
            break;
        }
        if interrupts.asked() {
            return Err(interrupts.failure());
        }
        let ended = engine.round(&mut |key, _, _| {
            waiting.remove(&key);
            tokens += 1;
            ControlFlow::Continue(())
        })?;
        for (key, generation) in ended {
            waiting.remove(&key);
            generation?;
        }
    }
    // What prompts take beyond their reading alone, answers wait for.
    let seconds = started.elapsed().as_secs_f64();
    let written = (seconds - read).max(LEAST_WRITTEN * seconds) / f64::from(tokens.max(1));
    Ok((waiting.is_empty() && tokens > 0).then_some(written))
}

/// Without what only other work on the machine explains: fewer rows never take longer than more.
fn rising(mut passes: Vec<(usize, f64)>) -> Vec<(usize, f64)> {
    let mut least = f64::INFINITY;
    for (_, seconds) in passes.iter_mut().rev() {
        least = least.min(*seconds);
        *seconds = least;
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_between_two_sizes_lie_on_a_line() {
        let machine = Machine { passes: vec![(1, 1.0), (2, 1.2), (4, 1.8)], ..Machine::default() };
        for (rows, seconds) in [(1, 1.0), (2, 1.2), (3, 1.5), (4, 1.8), (6, 2.4)] {
            assert!((machine.pass(rows) - seconds).abs() < 1e-9, "{rows}");
        }
    }

    #[test]
    fn more_answers_are_written_at_a_time_where_that_is_faster() {
        let of = |many: f64| {
            let passes = vec![(1, 1.0), (8, 2.0), (16, many)];
            Machine { passes, ..Machine::default() }.batch()
        };
        assert_eq!((of(3.0), of(3.9), Machine::default().batch()), (16, 8, 16));
    }

    #[test]
    fn fewer_rows_never_take_longer() {
        let noisy = vec![(1, 2.0), (2, 1.0), (4, 3.0), (8, 2.5), (16, 4.0)];
        assert_eq!(rising(noisy), [(1, 1.0), (2, 1.0), (4, 2.5), (8, 2.5), (16, 4.0)]);
    }

    #[test]
    fn every_turn_of_a_row_is_answered() {
        let of = |turns: f64, long_turns: usize| Machine {
            passes: vec![(1, 1.0)],
            prefill: 0.5,
            written_token: Some(0.1),
            lengths: Lengths {
                prompt: 40.0,
                long_prompt: 100,
                turns,
                long_turns,
                ..Lengths::default()
            },
            ..Machine::default()
        };
        assert!((of(1.0, 1).row(200.0) - 40.0).abs() < 1e-9);
        assert!((of(3.0, 5).row(200.0) - 80.0).abs() < 1e-9);
        assert_eq!((of(1.0, 1).long_row(200.0), of(3.0, 5).long_row(200.0)), (300, 1100));
        // Where no prompt fits, nothing is known of turns.
        assert_eq!((of(0.0, 0).long_row(200.0), of(0.0, 0).answers_of_row()), (300, 1.0));
    }
}
