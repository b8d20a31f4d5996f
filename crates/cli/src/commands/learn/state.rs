//! `learning.json`: which draft was learned last, and what every training came to.

use std::path::{Path, PathBuf};

use longdraft_models::weights::atomic::write_atomically;
use longdraft_server::Training;
use serde::{Deserialize, Serialize};

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

/// What was learned so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    version: u32,
    /// Fingerprint of the target.
    target: String,
    /// Hash of the draft that `--draft` gave.
    base: String,
    /// The draft that was learned last, if one was better.
    pub(super) current: Option<u32>,
    /// All trainings, oldest first.
    pub(super) trainings: Vec<Outcome>,
}

impl State {
    /// What a folder holds for this target and draft.
    ///
    /// # Errors
    /// - it belongs to another target, or cannot be read
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
            current: None,
            trainings: Vec::new(),
        };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(fresh()),
            Err(error) => return Err(wrong(error.to_string())),
        };
        let state: Self =
            serde_json::from_str(&text).map_err(|error| wrong(format!("unreadable: {error}")))?;
        if state.version != VERSION {
            return Err(wrong(format!("layout {} of another version", state.version)));
        }
        if state.target != target {
            return Err(wrong("this was learned for another target".to_owned()));
        }
        if state.base == base {
            return Ok(state);
        }
        // Another draft to begin with: what was learned of the one before is no part of it.
        Ok(Self { base: base.to_owned(), current: None, ..state })
    }

    /// Writes it, whole or not at all.
    ///
    /// # Errors
    /// - there is no room
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        write_json(&folder.join(STATE_FILE), self)
    }

    /// Adds what a training came to.
    pub(super) fn add(&mut self, outcome: Outcome) {
        self.current = outcome.draft.or(self.current);
        self.trainings.push(outcome);
        let over = self.trainings.len().saturating_sub(MOST);
        self.trainings.drain(..over);
    }

    /// When the last training ended, in seconds since 1970.
    pub(super) fn trained_at(&self) -> u64 {
        self.trainings.last().map_or(0, |last| last.at)
    }
}

/// The draft that was learned last.
pub(super) fn current(folder: &Path) -> Option<u32> {
    read_json::<State>(&folder.join(STATE_FILE))?.current
}

/// Folder of a learned draft.
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
    /// The draft to go on from, and to compare with, if there is one.
    pub(super) draft: Option<PathBuf>,
    /// The method of a new one.
    pub(super) method: Option<String>,
    /// Time that the steps may take.
    pub(super) minutes: f64,
    /// What the draft may be called if it is better.
    pub(super) number: u32,
}

impl Job {
    /// The one under way in a learner's folder.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        read_json(&folder.join(TRAINING).join(JOB_FILE))
    }

    /// Begins it.
    ///
    /// # Errors
    /// - there is no room
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        super::store::private_folder(&folder.join(TRAINING))?;
        write_json(&folder.join(TRAINING).join(JOB_FILE), self)
    }
}

/// What a training came to.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Outcome {
    /// When it ended, in seconds since 1970.
    pub(super) at: u64,
    pub(super) seconds: f64,
    /// Rows that it learned from, some answers twice, and answers that the drafts were compared on.
    pub(super) rows: usize,
    pub(super) held_out: usize,
    /// Simulated acceptance length of the draft before and of the candidate, and the 95 % interval of the
    /// difference.
    pub(super) before: f64,
    pub(super) after: f64,
    pub(super) interval: (f64, f64),
    /// The candidate's number, if it is better.
    pub(super) draft: Option<u32>,
}

impl Outcome {
    /// That of the training in a learner's folder, if it ended.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        read_json(&folder.join(TRAINING).join(OUTCOME_FILE))
    }

    /// Ends the training.
    ///
    /// # Errors
    /// - there is no room
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        write_json(&folder.join(TRAINING).join(OUTCOME_FILE), self)
    }

    /// Whether the candidate is better, and not by chance.
    pub(super) fn is_better(&self) -> bool {
        self.interval.0 > 0.0
    }

    /// As the server tells it.
    pub(super) fn told(&self) -> Training {
        let Self { at, seconds, held_out, before, after, interval, .. } = *self;
        Training { at, seconds, held_out, before, after, interval, replaced: self.draft.is_some() }
    }
}

fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Option<T> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(Failure::work)?;
    Ok(write_atomically(path, format!("{text}\n").as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_learned_belongs_to_a_target_and_to_a_draft() {
        let folder = tempfile::tempdir().expect("folder");
        let mut state = State::open(folder.path(), "target", "draft").expect("fresh");
        state.add(Outcome { draft: Some(3), at: 9, ..Outcome::default() });
        state.add(Outcome { at: 12, ..Outcome::default() });
        assert_eq!((state.current, state.trained_at()), (Some(3), 12));
        state.write(folder.path()).expect("written");
        assert_eq!(State::open(folder.path(), "target", "draft").expect("again"), state);
        let other = State::open(folder.path(), "target", "another").expect("another draft");
        assert_eq!((other.current, other.trainings.len()), (None, 2));
        assert!(State::open(folder.path(), "another", "draft").is_err());
        std::fs::write(folder.path().join(STATE_FILE), "{").expect("file");
        assert!(State::open(folder.path(), "target", "draft").is_err());
    }
}
