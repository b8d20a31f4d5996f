//! What this machine takes for this target: passes, a draft's round, steps of training.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use longdraft_decode::evaluate::{Progress, Prompt};
use longdraft_decode::{BatchEngine, DecodeOptions, Sampling};
use longdraft_models::target_model::{Tap, Taps, Target};
use longdraft_models::{DeviceChoice, Precision};
use longdraft_plan::Speed;
use longdraft_records::decode::Cell;
use longdraft_records::median;
use longdraft_serving::{Profile, TargetFacts, require_fit};
use longdraft_train::method::Passes;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::rules::{Candidate, proposed};
use super::speed::{TrainingSpeed, timed};
use super::{prompts, proof};
use crate::cli::{DecodingArguments, LookupChoice, PaceChoice, WeightDtype};
use crate::commands::{eval, train};
use crate::decoding::{Models, stop_tokens};
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;

/// Rows of the passes that are measured, and repetitions.
const ROWS: [usize; 7] = [1, 2, 3, 4, 6, 8, 16];
const REPETITIONS: usize = 5;
/// Seconds after which passes are not repeated.
const PATIENCE: f64 = 8.0;
/// Seconds in which the prompts of several answers must be read.
const READING: f64 = 30.0;
/// Share of these seconds that answers take at least.
const LEAST_WRITTEN: f64 = 0.1;
/// Tokens of the context that passes are measured after.
const CONTEXT: usize = 96;
/// Sequences that are answered at a time: the smaller number, unless the larger one takes clearly less a token.
const BATCHES: [usize; 2] = [8, 16];
const CLEARLY: f64 = 0.95;
/// A trial's rows are cut to the tokens that the target reads in this share of the budget, and at least in so
/// many seconds: a short row costs more a token, and a whole one many seconds where the vocabulary is large.
const ROW_SHARE: f64 = 5e-4;
const ROW_SECONDS: f64 = 0.5;
const LEAST_ROW: usize = 128;
/// Tokens of answers that are written several at a time.
const ANSWER_TOKENS: usize = 96;
/// Prompts of short decodings, and tokens of their answers.
const PROMPTS: usize = 3;
const NEW_TOKENS: usize = 32;
/// Tokens of answers with a draft: as many as [`PATIENCE`] allows, that texts are as long as in use.
const DRAFTED: (usize, usize) = (16, 96);
/// A draft's tokens cost so many plain steps at most, the plain answer of the comparison counted.
const DRAFTED_COST: f64 = 4.0;
/// Times that a training is slower or faster than a trial at most: beyond that something else disturbed one of them.
const MOST_SLOWNESS: f64 = 3.0;
/// What rounds add to a pass at most: beyond that something else disturbed the trial.
const MOST_SURCHARGE: f64 = 2.0;

/// What the target takes here.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Machine {
    /// Rows of a pass, and its seconds.
    pub(super) passes: Vec<(usize, f64)>,
    /// Seconds of a token of a prompt.
    pub(super) prefill: f64,
    /// Seconds of a token of an answer where [`Self::batch`] are written at a time, their prompts read before;
    /// `None` where no prompt leaves room for an answer.
    #[serde(default)]
    pub(super) written_token: Option<f64>,
    /// 10⁹ operations a second.
    pub(super) gflops: f64,
    /// Speed-up of lookup alone, on prompts that were set aside.
    pub(super) lookup: Option<f64>,
    /// Tokens of these prompts: what nine of ten have at most, and the mean.
    #[serde(default)]
    pub(super) long_prompt: usize,
    #[serde(default)]
    pub(super) prompt: f64,
}

impl Machine {
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

    /// Seconds of an answer of so many tokens, several being written at a time: its share of passes, and its prompt.
    pub(super) fn answer(&self, tokens: f64) -> f64 {
        let batch = self.batch();
        let of_token = self.written_token.unwrap_or_else(|| self.pass(batch) / batch as f64);
        tokens * of_token + self.prompt * self.prefill
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

/// What a draft of a method takes here.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Trial {
    pub(super) method: String,
    /// Seconds of a token of training, and of the features of one.
    pub(super) step: f64,
    pub(super) capture: f64,
    /// Seconds of the draft in a round of all its proposals.
    #[serde(rename = "draft")]
    pub(super) seconds: f64,
    /// Plain steps that the pass of such a round takes.
    #[serde(default)]
    pub(super) pass: Option<f64>,
    /// Whether that is the same for fewer proposals.
    #[serde(default)]
    pub(super) is_one_block: bool,
    /// Tokens that are proposed, if not all.
    pub(super) proposed: Option<usize>,
    /// Bytes of a checkpoint, of training in memory, of a token's features.
    pub(super) checkpoint: u64,
    pub(super) memory: u64,
    pub(super) features_of_token: f64,
}

impl Trial {
    /// Seconds of the draft in a round of `n` proposals, of `most`.
    pub(super) fn draft(&self, n: usize, most: usize) -> f64 {
        let share = if self.is_one_block { 1.0 } else { n as f64 / most.max(1) as f64 };
        self.seconds * share
    }

    /// The same where a training takes `times` the seconds.
    pub(super) fn slower(&self, times: f64) -> Self {
        let times = times.clamp(1.0 / MOST_SLOWNESS, MOST_SLOWNESS);
        Self { step: self.step * times, capture: self.capture * times, ..self.clone() }
    }

    /// Times that passes take in rounds what they take alone, of rounds of `most` proposals.
    pub(super) fn surcharge(&self, machine: &Machine, most: usize) -> f64 {
        let alone = machine.pass(most + 1) / machine.step().max(1e-9);
        self.pass.map_or(1.0, |pass| pass / alone.max(1e-9)).clamp(1.0, MOST_SURCHARGE)
    }
}

/// Tokens of the rows of a trial for a budget of some seconds: as long as in training, if that can be afforded.
pub(super) fn trial_row(row_tokens: usize, machine: &Machine, budget: f64) -> usize {
    let seconds = (ROW_SHARE * budget).max(ROW_SECONDS);
    let affordable = (seconds / machine.prefill.max(1e-9)) as usize;
    affordable.clamp(LEAST_ROW.min(row_tokens), row_tokens)
}

/// Arguments that decode as the result will be used.
pub(super) fn plainly() -> DecodingArguments {
    DecodingArguments {
        dtype: WeightDtype::Stored,
        ..DecodingArguments::chain(Path::new(""), 4).without_drafts()
    }
}

/// Measures the target; `held_out` are encoded prompts, answered at a temperature.
pub(super) fn machine(
    models: &Models,
    (held_out, with_lookup): (&[Prompt], bool),
    (temperature, interrupts): (f64, &Interrupts),
) -> Result<Machine> {
    let target = &models.target;
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
        target.logits(&first)?.flatten_all()?.to_vec1::<f32>()?;
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
    let passes = rising(passes.collect());
    let lookup = if with_lookup {
        let lookup = DecodingArguments { lookup: Some(LookupChoice::Switch), ..plainly() };
        let how = (PaceChoice::Measured, NEW_TOKENS);
        let cell = short(&lookup, models, held_out, how, interrupts)?;
        Some(cell.figures.speed_up)
    } else {
        None
    };
    let (gflops, (long_prompt, prompt)) = (Speed::measured_gflops(), lengths(held_out));
    let machine =
        Machine { passes, prefill, written_token: None, gflops, lookup, long_prompt, prompt };
    let speed = (machine.batch(), machine.prefill);
    let written_token = written_token(models, held_out, speed, (temperature, interrupts))?;
    Ok(Machine { written_token, ..machine })
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

/// Tokens that nine of ten prompts have at most, and the mean.
fn lengths(prompts: &[Prompt]) -> (usize, f64) {
    let mut lengths: Vec<usize> = prompts.iter().map(|prompt| prompt.tokens.len()).collect();
    lengths.sort_unstable();
    let long = lengths.get(lengths.len() * 9 / 10).copied().unwrap_or(0);
    (long, lengths.iter().sum::<usize>() as f64 / lengths.len().max(1) as f64)
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

/// A few short answers.
fn short(
    decoding: &DecodingArguments,
    models: &Models,
    prompts: &[Prompt],
    (pace, new_tokens): (PaceChoice, usize),
    interrupts: &Interrupts,
) -> Result<Cell> {
    let mut options = decoding.options(0.0, pace)?;
    options.max_new_tokens = new_tokens;
    options.stop_tokens = stop_tokens(&models.target);
    let prompts = &prompts[..prompts.len().min(PROMPTS)];
    let goes_on = &mut |_: &Progress| !interrupts.asked();
    let cell =
        eval::measure(decoding, models, prompts, (&options, 1), Progress::default(), goes_on)?;
    cell.ok_or_else(|| interrupts.failure())
}

/// Trains a draft for a few steps and decodes with it, to see what both take; a plain step takes `step` seconds.
///
/// # Errors
/// - one of the engines does not compute such a draft of this target, or something cannot run
pub(super) fn trial(
    target: &str,
    candidate: &Candidate,
    ((row_tokens, step), engines): ((usize, f64), &[Profile]),
    (work, folder): (&Path, &Path),
    interrupts: &Interrupts,
) -> Result<Trial> {
    let fail = |error: std::io::Error| Failure::work(format!("{}: {error}", work.display()));
    let _ = std::fs::remove_dir_all(work);
    std::fs::create_dir_all(work).map_err(fail)?;
    let text = work.join("text.jsonl");
    let texts: Vec<String> = prompts::shipped().iter().map(prompts::Asked::text).collect();
    let lines = texts.chunks(20).map(|some| format!("{}\n", json!({ "text": some.join("\n") })));
    std::fs::write(&text, lines.collect::<String>()).map_err(fail)?;
    let run = work.join("run");
    let config = trial_config(
        (target, train::as_served(DeviceChoice::Auto)?),
        candidate,
        row_tokens,
        (&text, &run),
    );
    let TrainingSpeed { step: of_token, capture, features_of_token, memory } =
        timed(&config, interrupts)?;
    let size = |path: std::path::PathBuf| std::fs::metadata(path).map_or(0, |file| file.len());
    let files = std::fs::read_dir(run.join("checkpoints/last")).into_iter().flatten().flatten();
    let checkpoint = files.map(|entry| size(entry.path())).sum();
    let vocabulary = Target::open_config(target)?.vocab_size;
    let proposed = proposed(candidate.recipe.round, vocabulary);
    let mut decoding = DecodingArguments {
        dtype: WeightDtype::Stored,
        ..DecodingArguments::chain(&run.join("checkpoints/last"), candidate.recipe.round.most)
    };
    if let Some(size) = proposed {
        // The few texts of a trial do not hold so many.
        let tokens = work.join("proposed.txt");
        let ids: String = (0..size).map(|id| format!("{id}\n")).collect();
        std::fs::write(&tokens, ids).map_err(fail)?;
        decoding.draft_vocab = Some(tokens);
    }
    let models = decoding.open(target)?;
    require_engines(&run, target, engines)?;
    let held_out = proof::held_out(folder, (&models.target, &models.tokenizer))?;
    let answer = PATIENCE / (DRAFTED_COST * PROMPTS as f64 * step.max(1e-9));
    let how = (PaceChoice::Fixed, (answer as usize).clamp(DRAFTED.0, DRAFTED.1));
    let ms = short(&decoding, &models, &held_out, how, interrupts)?.milliseconds;
    Ok(Trial {
        method: candidate.method.name().to_owned(),
        step: of_token,
        capture,
        seconds: 1e-3 * (ms.draft + ms.rest),
        pass: (ms.plain_step > 0.0).then(|| ms.verify / ms.plain_step),
        is_one_block: candidate.recipe.round.passes == Passes::OneBlock,
        proposed,
        checkpoint,
        memory,
        features_of_token,
    })
}

/// Refuses a run's draft that an engine does not compute.
fn require_engines(run: &Path, target: &str, engines: &[Profile]) -> Result<()> {
    if engines.is_empty() {
        return Ok(());
    }
    let facts = TargetFacts::open(target)?;
    let draft = DraftSource::find(run)?.open(&facts.target)?;
    for engine in engines {
        require_fit(draft.as_ref(), &facts, *engine).map_err(|error| {
            Failure::usage(format!("--for {}: {error}", engine.name())).hint(
                "leave out this engine, or give another --method; `longdraft serve` runs every draft",
            )
        })?;
    }
    Ok(())
}

/// The configuration of a trial over a text.
fn trial_config(
    (target, precision): (&str, Precision),
    candidate: &Candidate,
    row_tokens: usize,
    (text, run): (&Path, &Path),
) -> serde_json::Value {
    let mut draft = candidate.recipe.draft.clone();
    draft.insert("method".into(), candidate.method.name().into());
    json!({
        "target": target, "output": run, "precision": precision, "draft": draft,
        "teacher": candidate.recipe.teacher,
        "data": {
            "train": [{
                "path": text, "template": { "kind": "raw", "fields": ["text"] },
            }],
            "row_tokens": row_tokens, "anchor": { "enabled": false },
        },
    })
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
    fn rows_of_a_trial_are_shorter_where_the_target_is_slow() {
        let of = |speed: f64, budget: f64| {
            let machine = Machine { prefill: 1.0 / speed, ..Machine::default() };
            trial_row(1024, &machine, budget)
        };
        assert_eq!((of(5000.0, 60.0), of(600.0, 60.0), of(20.0, 60.0)), (1024, 300, 128));
        assert_eq!((of(600.0, 7200.0), of(200.0, 7200.0)), (1024, 720));
        assert_eq!(trial_row(64, &Machine { prefill: 1.0, ..Machine::default() }, 60.0), 64);
    }

    #[test]
    fn a_block_costs_the_same_for_fewer_proposals() {
        let trial = Trial { seconds: 1.0, ..Trial::default() };
        assert_eq!((trial.draft(2, 5), trial.draft(5, 5)), (0.4, 1.0));
        let block = Trial { is_one_block: true, ..trial };
        assert!((block.draft(2, 5) - 1.0).abs() < 1e-9);
    }
}
