//! The process that trains: it reads what is kept, goes on from the draft that proposes, and tells whether
//! the candidate is better on answers that were set aside. Killed at any moment, the next one goes on.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use longdraft_configuration::parse_stages;
use longdraft_models::target::Target;
use longdraft_models::weights::atomic::write_atomically;
use longdraft_parallel::World;
use longdraft_train::config::TrainConfig;
use longdraft_train::method::{Method, Room};
use longdraft_train::stage::{Ending, ResumePolicy, measure_drafts};
use serde_json::{Map, Value, json};

use super::state::{DRAFTS, Job, Outcome, TRAINING, draft_folder};
use super::store::{Row, now, private_folder, read};
use crate::commands::extract::extract;
use crate::commands::fit;
use crate::commands::train::{self, Resume};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::progress::TrainingProgress;
use crate::ranks::Voice;

/// Newest tokens that are learned from at a time.
const MOST_TOKENS: usize = 1 << 18;
/// Tokens of a training row, where the context allows it.
const ROW_TOKENS: usize = 1024;
/// Times that an answer is learned from.
const EPOCHS: usize = 3;
/// Answers that drafts are compared on, at least and at most.
const LEAST_HELD_OUT: usize = 8;
const MOST_HELD_OUT: usize = 256;

/// Trains and compares; the outcome is told in the folder.
pub(super) fn run(folder: &Path) -> Result<()> {
    end_with_the_server();
    #[cfg(unix)]
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
    let job = Job::read(folder).ok_or_else(|| {
        Failure::usage(format!("{}: no training is under way there", folder.display()))
            .hint("`longdraft serve --learn DIR` begins one")
    })?;
    let started = Instant::now();
    let place = folder.join(TRAINING);
    let counts = write_rows(folder, &place)?;
    let mut outcome = Outcome { rows: counts.0, held_out: counts.1, ..Outcome::default() };
    if outcome.rows > 0 && outcome.held_out >= LEAST_HELD_OUT {
        let candidate = place.join("candidate");
        train_candidate(&job, &place, &candidate)?;
        compare(&job, &place, &candidate, &mut outcome)?;
        if outcome.is_better() {
            keep(folder, &candidate, job.number)?;
            outcome.draft = Some(job.number);
        }
    }
    outcome.at = now();
    outcome.seconds = started.elapsed().as_secs_f64();
    outcome.write(folder)
}

/// Ends this process when the server's end of its input closes, however the server ended.
fn end_with_the_server() {
    std::thread::spawn(|| {
        let mut rest = Vec::new();
        let _ = std::io::stdin().read_to_end(&mut rest);
        std::process::exit(i32::from(Failure::interrupted(15).code()));
    });
}

/// Writes the rows to learn from and those that are set aside, unless they are there; their numbers.
fn write_rows(folder: &Path, place: &Path) -> Result<(usize, usize)> {
    let (train, held_out) = (place.join("train.jsonl"), place.join("held_out.jsonl"));
    let count = |path: &Path| -> Result<usize> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::work(format!("{}: {error}", path.display())))?;
        Ok(text.lines().count())
    };
    // The second file is written last.
    if held_out.is_file() {
        return Ok((count(&train)?, count(&held_out)?));
    }
    let mut tokens = 0;
    let newest = read(folder).into_iter().rev().take_while(|row| {
        tokens += row.input_ids.len();
        tokens <= MOST_TOKENS
    });
    let (mut aside, rows): (Vec<Row>, Vec<Row>) = newest.partition(Row::is_held_out);
    aside.truncate(MOST_HELD_OUT);
    let text = |rows: &[Row]| -> Result<String> {
        let lines = rows.iter().map(|row| {
            let Row { input_ids, loss_mask, .. } = row;
            json!({ "input_ids": input_ids, "loss_mask": loss_mask }).to_string() + "\n"
        });
        Ok(lines.collect())
    };
    let rows = weighted(rows);
    write_atomically(&train, text(&rows)?.as_bytes())?;
    write_atomically(&held_out, text(&aside)?.as_bytes())?;
    Ok((rows.len(), aside.len()))
}

/// Rows in which proposals failed more often than in half of them stand twice.
fn weighted(rows: Vec<Row>) -> Vec<Row> {
    let mut shares: Vec<f64> = rows.iter().map(Row::own_share).collect();
    shares.sort_by(f64::total_cmp);
    let middle = shares.get(shares.len() / 2).copied().unwrap_or_default();
    rows.into_iter()
        .flat_map(|row| {
            let times = if row.own_share() > middle { 2 } else { 1 };
            std::iter::repeat_n(row, times)
        })
        .collect()
}

/// The keys of a training that goes on from the draft of a job.
fn configured(job: &Job, place: &Path) -> Result<Value> {
    let of_draft = job.draft.as_deref().map(fit::start).transpose()?;
    let of_method = || Some((job.method.clone()?, None));
    let (method, keys) = of_draft.or_else(of_method).ok_or_else(|| {
        Failure::usage("nothing says what is to be trained: neither a draft nor a method")
    })?;
    let config = Target::open_config(&job.target)?;
    let row_tokens = ROW_TOKENS.min(config.max_position_embeddings);
    let room = Room { target: &config, seconds: 60.0 * job.minutes, row_tokens };
    let recipe = Method::named(&method).and_then(|method| method.fresh().recipe(&room));
    // A draft that is there has its sizes; a new one has those that suit the target.
    let is_new = job.draft.is_none();
    let sizes = || recipe.as_ref().filter(|_| is_new).map(|recipe| recipe.draft.clone());
    let mut draft: Map<String, Value> = keys.or_else(sizes).unwrap_or_default();
    draft.insert("method".into(), method.into());
    if let Some(from) = &job.draft {
        draft.insert("from".into(), json!(from));
    }
    let train = place.join("train.jsonl");
    let bytes = std::fs::metadata(&train).map_or(0, |file| file.len());
    // A token and its mark take some seven letters: this sets the length of the schedule, no more.
    let rows = (bytes as usize / (7 * row_tokens)).max(1);
    let mut value = json!({
        "target": job.target, "device": job.device, "output": place.join("run"), "draft": draft,
        "data": {
            "train": [source(&train)], "held_out": [source(&place.join("held_out.jsonl"))],
            "row_tokens": row_tokens, "anchor": { "enabled": false },
        },
        "train": {
            "rows_per_step": 1, "steps": EPOCHS * rows, "save_minutes": 1, "keep_best": false,
            "max_minutes": job.minutes,
        },
        "tracking": { "report_to": [] },
    });
    if let Some(recipe) = recipe {
        value["teacher"] = recipe.teacher.into();
        value["schedule"] = json!({ "learning_rate": recipe.learning_rate, "warmup_ratio": 0.05 });
    }
    Ok(value)
}

fn source(path: &Path) -> Value {
    json!({ "path": path, "template": { "kind": "tokens" } })
}

fn parsed(value: &Value) -> Result<TrainConfig> {
    let mut stages = parse_stages(&value.to_string(), "learn", &[])?;
    let stage = stages.pop().ok_or_else(|| Failure::work("no stage"))?;
    Ok(stage.located.config)
}

fn train_candidate(job: &Job, place: &Path, candidate: &Path) -> Result<()> {
    let (config, world) = (parsed(&configured(job, place)?)?, World::single());
    let run = config.output.clone();
    let target = train::open_target(&config, &world)?;
    let interrupts = Interrupts::listen();
    let mut progress = TrainingProgress::new(interrupts.clone(), Voice::alone());
    let resume = Resume { policy: ResumePolicy::Strict, continued_by: None };
    let (ending, stage) = train::train(config, &target, &resume, &world, &mut progress)?;
    drop(stage);
    if ending == Ending::Stopped {
        return Err(interrupts.failure());
    }
    extract(&run.join("checkpoints/last"), candidate).map(drop)
}

/// The candidate and the draft that is there on the answers that were set aside, each of them a row.
fn compare(job: &Job, place: &Path, candidate: &Path, outcome: &mut Outcome) -> Result<()> {
    let mut value = configured(job, place)?;
    value["data"]["packing"] = "none".into();
    value["data"]["train"] = value["data"]["held_out"].clone();
    let config = parsed(&value)?;
    let target = train::open_target(&config, &World::single())?;
    let tokenizer = Target::open_tokenizer(&job.target)?;
    let mut progress = TrainingProgress::new(Interrupts::listen(), Voice::alone());
    let drafts = [Some(candidate.to_path_buf()), job.draft.clone()];
    let drafts: Vec<PathBuf> = drafts.into_iter().flatten().collect();
    let measured = measure_drafts(&config, &drafts, (&target, &tokenizer), &mut progress)?;
    let Some(after) = measured.first() else { return Err(Failure::work("nothing was measured")) };
    outcome.held_out = after.rows();
    outcome.after = after.simulated_length();
    (outcome.before, outcome.interval) = match measured.get(1) {
        Some(before) => (before.simulated_length(), after.gain_over(before).1),
        // A pass without a draft gives a token.
        None => (1.0, (after.interval().0 - 1.0, after.interval().1 - 1.0)),
    };
    Ok(())
}

/// Puts a draft among those that were taken, whole.
fn keep(folder: &Path, candidate: &Path, number: u32) -> Result<()> {
    private_folder(&folder.join(DRAFTS))?;
    let place: PathBuf = draft_folder(folder, number);
    let fail = |error: std::io::Error| Failure::work(format!("{}: {error}", place.display()));
    // One of a training that was killed before it could tell.
    if place.is_dir() {
        std::fs::remove_dir_all(&place).map_err(fail)?;
    }
    std::fs::rename(candidate, &place).map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_in_which_proposals_failed_stand_twice() {
        let row = |own| Row::new(&[1, 2], &[3; 10], own);
        let found = weighted(vec![row(2), row(9), row(1), row(2)]);
        let own: Vec<usize> = found.iter().map(|row| row.own).collect();
        assert_eq!(own, [2, 9, 9, 1, 2]);
        assert!(weighted(Vec::new()).is_empty());
        assert_eq!(weighted(vec![row(4)]).len(), 1);
    }
}
