//! What a draft of a method takes here: a round of its proposals, steps of its training, memory and disk.

use std::path::Path;

use longdraft_decode::evaluate::{Progress, Prompt};
use longdraft_models::DeviceChoice;
use longdraft_models::target_model::Target;
use longdraft_records::decode::Cell;
use longdraft_serving::{Profile, TargetFacts, require_fit};
use longdraft_train::method::Passes;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::measure::{Machine, PATIENCE};
use super::rules::{Candidate, proposed};
use super::speed::{TrainingSpeed, timed};
use super::state::Settings;
use super::{prompts, proof};
use crate::cli::{DecodingArguments, OpenOptions, PaceChoice};
use crate::commands::{eval, train};
use crate::decoding::Models;
use crate::draft_source::DraftSource;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;

/// A trial's rows are cut to the tokens that the target reads in this share of the budget, and at least in so
/// many seconds: a short row costs more a token, and a whole one many seconds where the vocabulary is large.
const ROW_SHARE: f64 = 5e-4;
const ROW_SECONDS: f64 = 0.5;
const LEAST_ROW: usize = 128;
/// The trial of long rows may take this share of the budget, and at least so many seconds, by the time of so many
/// rows: those that are timed and one in reserve. Tokens of its documents have so many letters: they fill a row.
const LONG_SHARE: f64 = 0.01;
const LONG_SECONDS: f64 = 3.0;
const LONG_ROWS: f64 = 4.0;
const LETTERS: usize = 5;
/// Prompts of short decodings with a draft.
const PROMPTS: usize = 3;
/// Tokens of answers with a draft: as many as [`PATIENCE`] allows, that texts are as long as in use.
const DRAFTED: (usize, usize) = (16, 96);
/// A draft's tokens cost so many plain steps at most, the plain answer of the comparison counted.
const DRAFTED_COST: f64 = 4.0;
/// Times that a training is slower or faster than a trial at most: beyond that something else disturbed one of them.
const MOST_SLOWNESS: f64 = 3.0;
/// What rounds add to a pass at most: beyond that something else disturbed the trial.
const MOST_SURCHARGE: f64 = 2.0;

/// What a draft of a method takes here.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Trial {
    pub(super) method: String,
    pub(super) row_tokens: usize,
    /// Seconds of a token of training, and of the features of one.
    pub(super) step: f64,
    pub(super) capture: f64,
    /// Seconds of the draft in a round of all its proposals.
    #[serde(rename = "draft")]
    pub(super) seconds: f64,
    /// Plain steps that the pass of such a round takes.
    pub(super) pass: Option<f64>,
    /// Whether that is the same for fewer proposals.
    pub(super) is_one_block: bool,
    /// Tokens that are proposed, if not all.
    pub(super) proposed: Option<usize>,
    /// Bytes of a checkpoint, of training in memory, of a token's features.
    pub(super) checkpoint: u64,
    pub(super) memory: u64,
    pub(super) features_of_token: f64,
    /// What a token takes in long rows, where the training has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) long: Option<LongRows>,
}

/// What a token takes in long rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct LongRows {
    /// Tokens of the other rows of the trial, and of these.
    pub(super) short: usize,
    pub(super) row_tokens: usize,
    /// Seconds of a token of training, and of the features of one.
    pub(super) step: f64,
    pub(super) capture: f64,
}

impl Trial {
    /// The same in rows of so many tokens: a token reads what stands before it, so that it takes longer by as much as its
    /// row is longer.
    pub(super) fn in_rows(&self, row_tokens: usize) -> Self {
        let Some(long) = self.long else { return self.clone() };
        let beyond = |tokens: usize| tokens.saturating_sub(long.short) as f64;
        let way = beyond(row_tokens) / beyond(long.row_tokens).max(1.0);
        let at =
            |short: f64, measured: f64| (short + way * (measured - short)).max(short.min(measured));
        let (step, capture) = (at(self.step, long.step), at(self.capture, long.capture));
        Self { step, capture, long: None, ..self.clone() }
    }

    /// Tokens of the long rows of a trial for a budget of some seconds, where its other rows have `short`; `None` where
    /// what can be afforded is hardly longer.
    pub(super) fn long_row(&self, (short, whole): (usize, usize), budget: f64) -> Option<usize> {
        let seconds = (LONG_SHARE * budget).max(LONG_SECONDS);
        let of_token = LONG_ROWS * (self.step + self.capture);
        let row = ((seconds / of_token.max(1e-12)) as usize).min(whole);
        (row >= 2 * short).then_some(row)
    }

    /// Whether a budget of some seconds affords rows that are at least twice as long as those that were tried. Such rows, and
    /// whole ones where a training has stages, are given.
    pub(super) fn is_outgrown(&self, (row, whole): (usize, Option<usize>), budget: f64) -> bool {
        let long = whole.and_then(|whole| self.long_row((row, whole), budget));
        let tried = self.long.map_or(0, |long| long.row_tokens);
        row >= 2 * self.row_tokens || long.is_some_and(|long| long >= 2 * tried)
    }

    /// Seconds of the draft in a round of `n` proposals, of `most`.
    pub(super) fn draft(&self, n: usize, most: usize) -> f64 {
        let share = if self.is_one_block { 1.0 } else { n as f64 / most.max(1) as f64 };
        self.seconds * share
    }

    /// The same where a training takes `times` the seconds.
    pub(super) fn slower(&self, times: f64) -> Self {
        let times = times.clamp(1.0 / MOST_SLOWNESS, MOST_SLOWNESS);
        let slower = |long: LongRows| LongRows {
            step: long.step * times,
            capture: long.capture * times,
            ..long
        };
        Self {
            step: self.step * times,
            capture: self.capture * times,
            long: self.long.map(slower),
            ..self.clone()
        }
    }

    /// Times that passes take in rounds what they take alone, of rounds of `most` proposals.
    pub(super) fn surcharge(&self, machine: &Machine, most: usize) -> f64 {
        let alone = machine.pass(most + 1) / machine.step().max(1e-9);
        self.pass.map_or(1.0, |pass| pass / alone.max(1e-9)).clamp(1.0, MOST_SURCHARGE)
    }
}

/// Tokens of the rows of a trial for a budget of some seconds: as long as in training, if that can be afforded.
pub(super) fn row(row_tokens: usize, machine: &Machine, budget: f64) -> usize {
    let seconds = (ROW_SHARE * budget).max(ROW_SECONDS);
    let affordable = (seconds / machine.prefill.max(1e-9)) as usize;
    affordable.clamp(LEAST_ROW.min(row_tokens), row_tokens)
}

/// A few short answers with a draft in every round.
fn short(
    decoding: &DecodingArguments,
    models: &Models,
    prompts: &[Prompt],
    new_tokens: usize,
    interrupts: &Interrupts,
) -> Result<Cell> {
    let options = decoding.request((0.0, PaceChoice::Fixed), new_tokens, &models.target)?;
    let prompts = &prompts[..prompts.len().min(PROMPTS)];
    let goes_on = &mut |_: &Progress| !interrupts.asked();
    let (how, from) = ((&options, 1), Progress::default());
    let cell = eval::measure(decoding, models, prompts, how, from, goes_on, &|_| false)?;
    cell.ok_or_else(|| interrupts.failure())
}

/// Trains a draft for a few steps and decodes with it, to see what both take; a plain step takes `step` seconds.
/// It fails where one of the engines does not compute such a draft of this target, or something cannot run.
pub(super) fn measure(
    settings: &Settings,
    candidate: &Candidate,
    ((row_tokens, step), engines): ((usize, f64), &[Profile]),
    (work, folder): (&Path, &Path),
    interrupts: &Interrupts,
) -> Result<Trial> {
    let target = settings.target.as_str();
    let fail = Failure::at(work);
    let _ = std::fs::remove_dir_all(work);
    std::fs::create_dir_all(work).map_err(fail)?;
    let run = work.join("run");
    let texts: Vec<String> = shipped_texts().chunks(20).map(|some| some.join("\n")).collect();
    let TrainingSpeed { step: of_token, capture, features_of_token, memory } =
        trained(&run, &texts, (target, candidate), row_tokens, interrupts)?;
    let size = |path: std::path::PathBuf| std::fs::metadata(path).map_or(0, |file| file.len());
    let files = std::fs::read_dir(run.join("checkpoints/last")).into_iter().flatten().flatten();
    let checkpoint = files.map(|entry| size(entry.path())).sum();
    let vocabulary = Target::open_config(target)?.vocab_size;
    let proposed = proposed(candidate.recipe.round, vocabulary);
    let mut decoding = DecodingArguments {
        held: OpenOptions::default(),
        template: settings.template(),
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
    let new_tokens = (answer as usize).clamp(DRAFTED.0, DRAFTED.1);
    let ms = short(&decoding, &models, &held_out, new_tokens, interrupts)?.milliseconds;
    Ok(Trial {
        method: candidate.method.name().to_owned(),
        row_tokens,
        step: of_token,
        capture,
        seconds: 1e-3 * (ms.draft + ms.rest),
        pass: (ms.plain_step > 0.0).then(|| ms.verify / ms.plain_step),
        is_one_block: candidate.recipe.round.passes == Passes::OneBlock,
        proposed,
        checkpoint,
        memory,
        features_of_token,
        long: None,
    })
}

/// Trains for a few steps in long rows, too; `work` is there.
pub(super) fn measure_long(
    trial: &mut Trial,
    (target, candidate): (&str, &Candidate),
    (short, row_tokens): (usize, usize),
    work: &Path,
    interrupts: &Interrupts,
) -> Result<()> {
    let texts = documents(&shipped_texts(), LETTERS * row_tokens);
    let TrainingSpeed { step, capture, memory, .. } =
        trained(&work.join("long"), &texts, (target, candidate), row_tokens, interrupts)?;
    trial.long = Some(LongRows { short, row_tokens, step, capture });
    trial.memory = trial.memory.max(memory);
    Ok(())
}

/// Texts, as many together as have so many letters.
fn documents(texts: &[String], letters: usize) -> Vec<String> {
    let mut documents: Vec<String> = Vec::new();
    for text in texts {
        match documents.last_mut() {
            Some(last) if last.len() < letters => {
                last.push('\n');
                last.push_str(text);
            }
            _ => documents.push(text.clone()),
        }
    }
    documents
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

fn shipped_texts() -> Vec<String> {
    prompts::shipped().iter().map(prompts::Asked::text).collect()
}

/// Trains for a few steps over texts, which are written beside the run directory.
fn trained(
    run: &Path,
    texts: &[String],
    (target, candidate): (&str, &Candidate),
    row_tokens: usize,
    interrupts: &Interrupts,
) -> Result<TrainingSpeed> {
    let text = run.with_extension("jsonl");
    let lines: String = texts.iter().map(|text| format!("{}\n", json!({ "text": text }))).collect();
    std::fs::write(&text, lines).map_err(Failure::at(&text))?;
    let mut draft = candidate.recipe.draft.clone();
    draft.insert("method".into(), candidate.method.name().into());
    let config = json!({
        "target": target, "output": run, "precision": train::as_served(DeviceChoice::Auto)?,
        "draft": draft,
        "teacher": candidate.recipe.teacher,
        "data": {
            "train": [{
                "path": text, "template": { "kind": "raw", "fields": ["text"] },
            }],
            "row_tokens": row_tokens, "anchor": { "enabled": false },
        },
    });
    timed(&config, interrupts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_trial_are_shorter_where_the_target_is_slow() {
        let of = |speed: f64, budget: f64| {
            let machine = Machine { prefill: 1.0 / speed, ..Machine::default() };
            row(1024, &machine, budget)
        };
        assert_eq!((of(5000.0, 60.0), of(600.0, 60.0), of(20.0, 60.0)), (1024, 300, 128));
        assert_eq!((of(600.0, 7200.0), of(200.0, 7200.0)), (1024, 720));
        assert_eq!(row(64, &Machine { prefill: 1.0, ..Machine::default() }, 60.0), 64);
    }

    #[test]
    fn a_token_takes_longer_in_longer_rows() {
        let long = LongRows { short: 1024, row_tokens: 3072, step: 3e-3, capture: 2e-3 };
        let trial = Trial { step: 1e-3, capture: 2e-3, long: Some(long), ..Trial::default() };
        let of = |row_tokens: usize| trial.in_rows(row_tokens).step * 1e3;
        for (row_tokens, expected) in
            [(512, 1.0), (1024, 1.0), (2048, 2.0), (3072, 3.0), (5120, 5.0)]
        {
            assert!((of(row_tokens) - expected).abs() < 1e-9, "{row_tokens}: {}", of(row_tokens));
        }
        assert!((trial.in_rows(5120).capture - 2e-3).abs() < 1e-12);
        // What disturbed the short rows makes no row take nothing.
        let disturbed = Trial { step: 5e-3, ..trial.clone() };
        assert!((disturbed.in_rows(1 << 20).step - 3e-3).abs() < 1e-12);
        assert!((trial.slower(2.0).in_rows(3072).step - 6e-3).abs() < 1e-12);
        // Without long rows a token takes what it takes.
        let without = Trial { long: None, ..trial };
        assert_eq!(without.in_rows(8192), without);
    }

    #[test]
    fn long_rows_are_tried_as_far_as_they_can_be_afforded() {
        let trial = Trial { step: 1e-3, capture: 5e-4, ..Trial::default() };
        let of = |budget| trial.long_row((1024, 8192), budget);
        // Four rows take 6 ms a token.
        assert_eq!((of(86400.0), of(600.0)), (Some(8192), None));
        assert!(of(1440.0).is_some_and(|row| (2398..=2401).contains(&row)), "{:?}", of(1440.0));
        assert_eq!(trial.long_row((512, 2048), 3600.0), Some(2048));
    }

    #[test]
    fn a_trial_is_outgrown_by_rows_twice_as_long() {
        let trial = Trial { row_tokens: 512, step: 1e-3, capture: 5e-4, ..Trial::default() };
        let of = |trial: &Trial, row, whole| trial.is_outgrown((row, whole), 86400.0);
        assert!(!of(&trial, 512, None) && !of(&trial, 1000, None) && of(&trial, 1024, None));
        // Long rows are tried where there was no time for any, and where there is time for longer ones.
        assert!(of(&trial, 512, Some(8192)));
        let long = LongRows { short: 512, row_tokens: 4096, step: 2e-3, capture: 5e-4 };
        let tried = Trial { long: Some(long), ..trial };
        assert!(of(&tried, 512, Some(8192)) && !of(&tried, 512, Some(4096)));
        assert!(of(&Trial::default(), 128, None));
    }

    #[test]
    fn documents_of_a_trial_fill_its_rows() {
        let texts: Vec<String> = (0..10).map(|i| format!("{i}234")).collect();
        let found = documents(&texts, 12);
        assert_eq!(found[0], "0234\n1234\n2234");
        assert!(found[..3].iter().all(|text| text.len() >= 12) && found.len() == 4);
    }

    #[test]
    fn a_block_costs_the_same_for_fewer_proposals() {
        let trial = Trial { seconds: 1.0, ..Trial::default() };
        assert_eq!((trial.draft(2, 5), trial.draft(5, 5)), (0.4, 1.0));
        let block = Trial { is_one_block: true, ..trial };
        assert!((block.draft(2, 5) - 1.0).abs() < 1e-9);
    }
}
