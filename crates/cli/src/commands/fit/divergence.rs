//! A training that diverges: how that is noticed, and what was good of it.
//!
//! It has diverged
//! - where a loss or a gradient is not finite: the stage ends by itself then, and nothing of that step is saved;
//! - where the mean loss of [`WINDOW`] steps is more than [`EXPLODED`] times the least one before it and a nat: steps differ
//!   by less, also where a draft goes on from another one and its learning rate rises again;
//! - where held-out rows lose [`WORSE`] times what the draft lost in its first step, if it began anew: rows differ by less.
//!   One that goes on from another draft knew much then: for it the bound is that of steps.
//!
//! What was good is the best checkpoint by held-out rows, if these were well then.

use std::collections::VecDeque;
use std::fmt;
use std::path::{Path, PathBuf};

use longdraft_train::checkpoint::{
    BEST, CheckpointState, LAST, Located, PREVIOUS, Wanted, read_state, verify,
};
use longdraft_train::config::TrainConfig;
use longdraft_train::stage::{Event, Observer};
use serde_json::{Value, json};

use crate::commands::remove_folder;
use crate::failure::{Failure, Result};

/// Steps whose mean loss is looked at, and the multiple of an earlier one that they do not reach by chance.
const WINDOW: usize = 16;
const EXPLODED: f64 = 2.0;
/// Times the loss of a new draft's first step that held-out rows lose at most.
const WORSE: f64 = 1.1;
/// Log of a run, and the folder of its checkpoints.
const METRICS: &str = "metrics.jsonl";
const CHECKPOINTS: &str = "checkpoints";
/// A checkpoint that is being copied; a stage removes what begins so.
const COPY: &str = ".saving-good";

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Diverged {
    what: String,
    /// Steps after which held-out rows were well.
    well: Vec<u64>,
}

impl fmt::Display for Diverged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

/// Looks for a training that diverges, and stops it.
pub(super) struct Watch {
    run: PathBuf,
    is_fresh: bool,
    /// Loss of the first step, before anything was learned.
    first: Option<f64>,
    recent: VecDeque<f64>,
    /// The least mean of recent ones, or the first one.
    least: f64,
    well: Vec<u64>,
    problem: Option<String>,
}

impl Watch {
    /// Of a run that begins or goes on.
    pub(super) fn of(config: &TrainConfig) -> Self {
        Self::new(config.output.clone(), config.draft.from.is_none())
    }

    fn new(run: PathBuf, is_fresh: bool) -> Self {
        let (first, recent, least) = (None, VecDeque::new(), f64::INFINITY);
        Self { run, is_fresh, first, recent, least, well: Vec::new(), problem: None }
    }

    /// How it diverged, if it did; `is_finite` is whether the stage met finite numbers only.
    pub(super) fn found(self, is_finite: bool) -> Option<Diverged> {
        let what = if is_finite { self.problem? } else { "a loss is not finite".to_owned() };
        Some(Diverged { what, well: self.well })
    }

    /// A loss that is not reached by chance.
    fn exploded(of: f64) -> f64 {
        EXPLODED * of + 1.0
    }

    fn learned(&mut self, step: u64, loss: f64) {
        let first = *self.first.get_or_insert(loss);
        self.recent.push_back(loss);
        if self.recent.len() > WINDOW {
            self.recent.pop_front();
        }
        if self.recent.len() < WINDOW {
            return;
        }
        let mean = self.recent.iter().sum::<f64>() / WINDOW as f64;
        self.least = self.least.min(first).min(mean);
        if mean > Self::exploded(self.least) {
            let least = self.least;
            self.tell(format!(
                "its loss is {mean:.2} after step {step}, and was {least:.2} before"
            ));
        }
    }

    fn judged(&mut self, step: u64, loss: f64) {
        let first = self.first.unwrap_or(f64::INFINITY);
        let bound = if self.is_fresh { WORSE * first } else { Self::exploded(first) };
        if loss <= bound {
            self.well.push(step);
        } else {
            self.tell(format!(
                "the held-out loss is {loss:.2} after step {step}, and the first step's loss was {first:.2}"
            ));
        }
    }

    fn tell(&mut self, problem: String) {
        self.problem.get_or_insert(problem);
    }

    /// Takes up what an earlier process saw of its first steps.
    fn recall(&mut self, steps: u64) {
        let log = std::fs::read_to_string(self.run.join(METRICS)).unwrap_or_default();
        for record in log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            let Some(step) = record["step"].as_u64().filter(|step| *step <= steps) else {
                continue;
            };
            let held_out = &record["held_out"];
            let of_held_out = held_out["as_trained"]["loss"].as_f64();
            if let Some(loss) = of_held_out.or_else(|| held_out["loss"].as_f64()) {
                self.judged(step, loss);
            } else if let Some(loss) = record["loss"].as_f64()
                && record["rows"].as_u64() != Some(0)
            {
                self.learned(step, loss);
            }
        }
    }
}

impl Observer for Watch {
    fn on_event(&mut self, event: Event<'_>) {
        match event {
            Event::Resumed(steps) => self.recall(steps),
            Event::Step(report) if report.metrics.rows > 0 => {
                self.learned(report.step, report.loss);
            }
            Event::Evaluated(step, metrics) => {
                // Of the same quantity as that of training rows.
                let as_trained = metrics.as_trained.as_deref().unwrap_or(metrics);
                self.judged(step, as_trained.loss());
            }
            _ => {}
        }
    }

    fn should_stop(&self) -> bool {
        self.problem.is_some()
    }
}

/// The state of a run's best checkpoint, if it was good.
pub(super) fn good(run: &Path, diverged: &Diverged) -> Option<CheckpointState> {
    let best = run.join(CHECKPOINTS).join(BEST);
    let state = read_state(&best).ok()?;
    (diverged.well.contains(&state.progress.step) && verify(&best).is_ok()).then_some(state)
}

/// Whether a run has anything to show.
pub(super) fn has_checkpoint(run: &Path) -> bool {
    Located::at(run, Wanted::Newest).is_some()
}

/// Takes away a run's newest checkpoints; its best one stands in their place where it `is_good`, else the run begins anew.
pub(super) fn restore(run: &Path, is_good: bool) -> Result<()> {
    let folder = run.join(CHECKPOINTS);
    if !is_good {
        return remove_folder(&folder);
    }
    let copy = folder.join(COPY);
    let fail = Failure::at(&copy);
    remove_folder(&copy)?;
    std::fs::create_dir_all(&copy).map_err(fail)?;
    for entry in std::fs::read_dir(folder.join(BEST)).map_err(fail)? {
        let file = entry.map_err(fail)?;
        std::fs::copy(file.path(), copy.join(file.file_name())).map_err(fail)?;
    }
    let (last, previous) = (folder.join(LAST), folder.join(PREVIOUS));
    // A kill at any of these steps leaves a whole checkpoint to go on from.
    if last.exists() {
        remove_folder(&previous)?;
        std::fs::rename(&last, &previous).map_err(fail)?;
    }
    std::fs::rename(&copy, &last).map_err(fail)?;
    remove_folder(&previous)
}

/// Makes a configuration of a training that begins one that goes on from a checkpoint: its steps and minutes come on top of
/// those that were taken.
pub(super) fn go_on(config: &mut Value, state: &CheckpointState) {
    let run = &mut config["train"];
    let steps = run["steps"].as_u64().unwrap_or(0);
    let minutes = run["max_minutes"].as_f64().unwrap_or(0.0);
    run["steps"] = json!(steps + state.progress.step);
    run["max_minutes"] = json!(minutes + state.progress.seconds / 60.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(is_fresh: bool) -> Watch {
        Watch::new(PathBuf::from("nowhere"), is_fresh)
    }

    /// What is told of a training with these losses, one step after the other.
    fn told(mut watch: Watch, losses: impl IntoIterator<Item = f64>) -> Option<String> {
        for (step, loss) in (1..).zip(losses) {
            watch.learned(step, loss);
        }
        watch.found(true).map(|diverged| diverged.to_string())
    }

    #[test]
    fn losses_that_explode_are_noticed_and_those_that_differ_are_not() {
        let falling = (0..100).map(|i| 9.0 - 0.05 * f64::from(i));
        assert_eq!(told(watch(true), falling.clone()), None);
        let exploded = told(watch(true), falling.clone().chain([20.0; WINDOW]));
        assert!(exploded.is_some_and(|what| what.contains("after step")));
        // Some rows are harder, and a draft that goes on loses more while its rate is high.
        let hard = falling.clone().chain([9.0; 4]).chain([4.5; 40]);
        assert_eq!(told(watch(true), hard), None);
        assert_eq!(told(watch(false), [2.7; 4].into_iter().chain([4.5; 100])), None);
        // From its first step on.
        assert!(told(watch(true), [9.0].into_iter().chain([40.0; WINDOW])).is_some());
    }

    #[test]
    fn a_new_draft_must_not_lose_more_than_at_its_start() {
        let judged = |is_fresh, loss| {
            let mut watch = watch(is_fresh);
            watch.learned(1, 9.0);
            watch.judged(40, loss);
            (watch.should_stop(), watch.well)
        };
        assert_eq!((judged(true, 5.0), judged(true, 9.5)), ((false, vec![40]), (false, vec![40])));
        assert_eq!((judged(true, 10.5), judged(true, f64::NAN)), ((true, vec![]), (true, vec![])));
        // One that went on knew much at its start.
        assert_eq!((judged(false, 10.5).0, judged(false, 30.0).0), (false, true));
    }

    #[test]
    fn what_is_not_finite_diverged_whatever_was_seen() {
        let mut seen = watch(true);
        seen.learned(1, 9.0);
        seen.judged(10, 4.0);
        let diverged = seen.found(false).expect("diverged");
        assert_eq!(
            (diverged.to_string().as_str(), diverged.well),
            ("a loss is not finite", vec![10])
        );
        assert_eq!(watch(true).found(true), None);
    }

    #[test]
    fn a_process_that_goes_on_knows_the_first_loss() {
        let folder = tempfile::tempdir().expect("folder");
        let log = "{\"step\":1,\"loss\":9.0,\"rows\":5}\n{\"step\":2,\"loss\":0.0,\"rows\":0}\n\
                   {\"step\":2,\"held_out\":{\"loss\":20.0,\"as_trained\":{\"loss\":4.0}}}\n\
                   {\"step\":3,\"held_out\":{\"loss\":30.0}}\n{\"st";
        std::fs::write(folder.path().join(METRICS), log).expect("log");
        let mut watch = Watch::new(folder.path().to_path_buf(), true);
        watch.on_event(Event::Resumed(2));
        // What came after the checkpoint is done again.
        assert!(!watch.should_stop());
        assert_eq!((watch.first, watch.recent.len(), &watch.well[..]), (Some(9.0), 1, &[2][..]));
    }

    fn write(path: &Path, text: &str) {
        std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
        std::fs::write(path, text).expect("file");
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_good_checkpoint_takes_the_place_of_the_newest_ones() {
        let run = tempfile::tempdir().expect("folder");
        let folder = run.path().join(CHECKPOINTS);
        for (place, text) in [(BEST, "good"), (LAST, "bad"), (PREVIOUS, "worse")] {
            write(&folder.join(place).join("state.json"), text);
        }
        restore(run.path(), true).expect("restored");
        assert_eq!(names(&folder), [BEST, LAST]);
        for place in [BEST, LAST] {
            let text = std::fs::read_to_string(folder.join(place).join("state.json"));
            assert_eq!(text.expect("state"), "good");
        }
        // As a kill between two steps leaves it.
        std::fs::rename(folder.join(LAST), folder.join(PREVIOUS)).expect("moved");
        restore(run.path(), true).expect("restored again");
        assert_eq!(names(&folder), [BEST, LAST]);
        restore(run.path(), false).expect("removed");
        assert!(!folder.exists() && !has_checkpoint(run.path()));
        restore(run.path(), false).expect("nothing is there");
    }

    fn state(step: u64) -> CheckpointState {
        let state = json!({
            "step": step, "cursor": { "epoch": 0, "position": 3 }, "learned_rows": 100, "tokens": 5000,
            "seconds": 120.0, "evaluations_since_best": 0, "ended": false, "metrics_bytes": 10,
            "identity": { "values": [] }, "method": "any",
            "draft": {}, "target_fingerprint": "t",
        });
        serde_json::from_value(state).expect("a state")
    }

    #[test]
    fn only_a_checkpoint_that_was_measured_well_is_good() {
        let run = tempfile::tempdir().expect("folder");
        let diverged = Diverged { what: String::new(), well: vec![40] };
        assert_eq!(good(run.path(), &diverged), None);
        let best = run.path().join(CHECKPOINTS).join(BEST);
        write(&best.join("state.json"), &json!(state(40)).to_string());
        // Nothing vouches for its files.
        assert_eq!(good(run.path(), &diverged), None);
        write(&best.join("manifest.json"), "{\"version\": \"1\", \"files\": {}}");
        assert_eq!(good(run.path(), &diverged).map(|state| state.progress.step), Some(40));
        let later = Diverged { well: vec![80], ..diverged };
        assert_eq!(good(run.path(), &later), None);
    }

    #[test]
    fn steps_and_minutes_come_on_top_of_those_that_were_taken() {
        let mut config = json!({ "train": { "steps": 30, "max_minutes": 1.5, "seed": 7 } });
        go_on(&mut config, &state(40));
        assert_eq!(config, json!({ "train": { "steps": 70, "max_minutes": 3.5, "seed": 7 } }));
    }
}
