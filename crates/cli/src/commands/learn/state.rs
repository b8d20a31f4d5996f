//! `learning.json`: which draft was learned last, and what every training came to.

use std::path::{Path, PathBuf};
use std::time::Duration;

use longdraft_models::target_model::is_same_target;
use longdraft_records::other_layout;
use longdraft_server::{Check, Training};
use serde::{Deserialize, Serialize};

use super::rows::{LEAST_CHECKED, LEAST_HELD_OUT};
use super::store::now;
use crate::commands::write_json;
use crate::failure::{Failure, Result};

/// Name of the file.
pub(super) const STATE_FILE: &str = "learning.json";
/// Folder of what is under way.
pub(super) const TRAINING: &str = "training";
/// Folder of the drafts that were taken.
pub(super) const DRAFTS: &str = "drafts";
/// What a training is asked for, and what it came to, in its folder.
const JOB_FILE: &str = "job.json";
const OUTCOME_FILE: &str = "outcome.json";
/// Layout of the files.
const VERSION: u32 = 1;
/// Trainings that are remembered.
const MOST: usize = 1000;
/// Drafts to begin with whose learned drafts are remembered.
const MOST_BASES: usize = 4;

/// What was learned so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    version: u32,
    target: String,
    /// Hash of the draft that `--draft` gave last; empty without one.
    base: String,
    /// The drafts that were learned last, each of another one; the newest stands last.
    learned: Vec<Learned>,
    /// All trainings, oldest first.
    pub(super) trainings: Vec<Outcome>,
}

/// What was learned of a draft.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Learned {
    base: String,
    draft: u32,
    /// Whether the one that `--draft` gave proposes instead, because it is better on what is asked now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    rests: bool,
}

/// Where a draft comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Origin {
    /// `--draft` gave it.
    Given,
    Learned,
}

impl Origin {
    /// The other one of the two that a check compares.
    pub(super) fn other(self) -> Self {
        match self {
            Self::Given => Self::Learned,
            Self::Learned => Self::Given,
        }
    }
}

impl State {
    /// What a learner wrote into a folder; none if it did not, or it is unreadable.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        read_json(&folder.join(STATE_FILE))
    }

    /// What a folder holds for this target and draft. It fails where it belongs to another target, or cannot be read.
    pub(super) fn open(folder: &Path, target: &str, base: &str) -> Result<Self> {
        let path = folder.join(STATE_FILE);
        let wrong = |problem: String| {
            Failure::usage(format!("{}: {problem}", path.display()))
                .hint("give another --learn DIR, or remove what is there with `longdraft learn purge DIR`")
        };
        let fresh = || Self {
            version: VERSION,
            target: target.to_owned(),
            base: base.to_owned(),
            learned: Vec::new(),
            trainings: Vec::new(),
        };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(fresh()),
            Err(error) => return Err(wrong(error.to_string())),
        };
        // Nothing else of another layout may be read, and `learn purge` does not know it.
        if let Some(layout) = other_layout(&text, VERSION) {
            return Err(wrong(format!("another version wrote it (layout {layout})"))
                .hint("give another --learn DIR, or go on with the version that wrote it"));
        }
        let state: Self = serde_json::from_str(&text).map_err(|error| {
            wrong(format!("unreadable: {error}"))
                .hint("give another --learn DIR, or remove this one yourself")
        })?;
        if !is_same_target(&state.target, target) {
            return Err(wrong("this was learned for another target".to_owned()));
        }
        // With another draft to begin with, what was learned of the one before waits for it.
        Ok(Self { base: base.to_owned(), target: target.to_owned(), ..state })
    }

    /// Hash of the draft that `--draft` gave.
    pub(super) fn base(&self) -> &str {
        &self.base
    }

    /// What was learned of that one, if a draft was better.
    fn own(&self) -> Option<&Learned> {
        self.learned.iter().find(|learned| learned.base == self.base)
    }

    /// The draft that was learned last of it.
    pub(super) fn current(&self) -> Option<u32> {
        self.own().map(|learned| learned.draft)
    }

    /// Which one proposes where both are there.
    pub(super) fn proposes(&self) -> Origin {
        if self.own().is_some_and(|own| own.rests) { Origin::Given } else { Origin::Learned }
    }

    /// The learned draft if it proposes.
    pub(super) fn proposing(&self) -> Option<u32> {
        self.current().filter(|_| self.proposes() == Origin::Learned)
    }

    /// Has that one propose.
    fn prefer(&mut self, origin: Origin) {
        let learned = self.learned.iter_mut().filter(|learned| learned.base == self.base);
        learned.for_each(|learned| learned.rests = origin == Origin::Given);
    }

    /// Forgets it: the one that `--draft` gave proposes again.
    pub(super) fn forget(&mut self) {
        self.learned.retain(|learned| learned.base != self.base);
    }

    /// Whether a draft may propose again: that of some `--draft`, or the one before the current one.
    pub(super) fn keeps(&self, number: u32) -> bool {
        let taken = self.trainings.iter().rev().filter_map(|outcome| outcome.draft);
        self.learned.iter().any(|learned| learned.draft == number)
            || taken.take(2).any(|draft| draft == number)
    }

    /// Writes it, whole or not at all. It fails where there is no room.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        write_json(&folder.join(STATE_FILE), self)
    }

    /// Adds what a training or a check came to.
    pub(super) fn add(&mut self, outcome: Outcome) {
        if let Some(origin) = outcome.prefers() {
            return self.prefer(origin);
        }
        if let Some(draft) = outcome.draft {
            self.forget();
            self.learned.push(Learned { base: self.base.clone(), draft, rests: false });
            let over = self.learned.len().saturating_sub(MOST_BASES);
            self.learned.drain(..over);
        }
        self.trainings.push(outcome);
        let over = self.trainings.len().saturating_sub(MOST);
        self.trainings.drain(..over);
    }

    /// Until when the rows of the last training were kept, in seconds since 1970.
    pub(super) fn trained_until(&self) -> u64 {
        self.trainings.last().map_or(0, |last| last.rows_at)
    }

    /// Until when the rows were kept that the learned draft knows, in seconds since 1970.
    pub(super) fn known_until(&self) -> u64 {
        let current = self.current();
        let trainings = self.trainings.iter().rev();
        let mut of_current = trainings.filter(|outcome| outcome.draft == current);
        // One whose training is not remembered any more knows nothing newer than the last one does.
        of_current.next().map_or_else(|| self.trained_until(), |outcome| outcome.rows_at)
    }

    /// A number that no draft had.
    pub(super) fn next_number(&self, folder: &Path) -> u32 {
        let taken = self.trainings.iter().filter_map(|outcome| outcome.draft);
        taken.chain(drafts(folder)).max().unwrap_or(0) + 1
    }
}

pub(super) fn draft_folder(folder: &Path, number: u32) -> PathBuf {
    folder.join(DRAFTS).join(number.to_string())
}

/// Numbers of the drafts that are kept.
pub(super) fn drafts(folder: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(folder.join(DRAFTS)).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// What a training is asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Job {
    pub(super) target: String,
    pub(super) device: String,
    /// Hash of the draft that `--draft` gave: what comes of it belongs to that one.
    pub(super) base: String,
    /// The draft to go on from, and to compare with, if there is one.
    pub(super) draft: Option<PathBuf>,
    /// The method of a new one.
    pub(super) method: Option<String>,
    /// Time that the steps may take.
    pub(super) minutes: f64,
    /// What the draft may be called if it is better.
    pub(super) number: u32,
    /// When it was asked for, in seconds since 1970: answers that are kept later count for the next one.
    pub(super) began: u64,
    /// Processes that were started for it.
    pub(super) attempts: u32,
    /// The draft that rests: nothing is trained, this one is compared.
    pub(super) check: Option<Resting>,
}

/// A draft that rests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Resting {
    pub(super) draft: PathBuf,
    pub(super) origin: Origin,
    /// Answers that were kept later are new to both drafts, in seconds since 1970.
    pub(super) since: u64,
}

impl Job {
    /// The one under way in a learner's folder.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        read_json(&folder.join(TRAINING).join(JOB_FILE))
    }

    /// What it is called.
    pub(super) fn name(&self) -> &'static str {
        if self.check.is_some() { "check" } else { "training" }
    }

    /// Whether its texts have been kept for longer than that.
    pub(super) fn is_older_than(&self, age: Duration) -> bool {
        now().saturating_sub(self.began) > age.as_secs()
    }

    /// Begins it. It fails where there is no room.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        super::folder::private_folder(&folder.join(TRAINING))?;
        write_json(&folder.join(TRAINING).join(JOB_FILE), self)
    }
}

/// What a training came to, or a check.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// When it ended, in seconds since 1970.
    pub(super) at: u64,
    /// Until when its rows were kept.
    pub(super) rows_at: u64,
    /// How long it worked, without the time in which it rested.
    pub(super) seconds: f64,
    /// Texts that it learned from, some twice, and answers that the drafts were compared on.
    pub(super) rows: usize,
    pub(super) held_out: usize,
    /// Simulated acceptance length of the draft before and of the candidate, in a check of the one that rests, and
    /// the 95 % interval of the difference.
    pub(super) before: f64,
    pub(super) after: f64,
    pub(super) interval: (f64, f64),
    /// The candidate's number, if it is better.
    pub(super) draft: Option<u32>,
    /// Of a check: which draft rested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rested: Option<Origin>,
}

impl Outcome {
    /// That of the training in a learner's folder, if it ended.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        read_json(&folder.join(TRAINING).join(OUTCOME_FILE))
    }

    /// Ends the training or the check. It fails where there is no room.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        write_json(&folder.join(TRAINING).join(OUTCOME_FILE), self)
    }

    /// Whether too few answers were set aside to learn at all.
    pub(super) fn has_too_few(&self) -> bool {
        self.held_out < LEAST_HELD_OUT
    }

    /// Whether the candidate is better, and not by chance.
    pub(super) fn is_better(&self) -> bool {
        self.interval.0 > 0.0
    }

    /// Of a check: which draft is to propose. In doubt it is the one that did.
    pub(super) fn prefers(&self) -> Option<Origin> {
        self.rested.map(|rested| if self.is_better() { rested } else { rested.other() })
    }

    /// A check, as the server tells it; none if there was too little to compare on.
    pub(super) fn told_as_check(&self) -> Option<Check> {
        let Self { at, held_out: answers, before, after, interval: (low, high), .. } = *self;
        let (given, learned, interval) = match self.rested? {
            Origin::Learned => (before, after, (low, high)),
            Origin::Given => (after, before, (-high, -low)),
        };
        (answers >= LEAST_CHECKED).then_some(Check { at, answers, given, learned, interval })
    }

    /// As the server tells it.
    pub(super) fn told(&self) -> Training {
        let Self { at, seconds, held_out, before, after, interval, .. } = *self;
        let (replaced, too_few) = (self.draft.is_some(), self.has_too_few());
        Training { at, seconds, held_out, too_few, before, after, interval, replaced }
    }
}

pub(super) fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Option<T> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

#[cfg(test)]
mod tests;
