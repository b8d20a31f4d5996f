//! `learning.json`: which draft was learned last, and what every training came to.

use std::path::{Path, PathBuf};
use std::time::Duration;

use longdraft_models::weights::atomic::write_atomically;
use longdraft_server::Training;
use serde::{Deserialize, Serialize};

use super::rows::LEAST_HELD_OUT;
use super::store::now;
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
    /// Fingerprint of the target.
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
}

impl State {
    /// What a learner wrote into a folder; none if it did not, or it is unreadable.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        read_json(&folder.join(STATE_FILE))
    }

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
            learned: Vec::new(),
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
        // With another draft to begin with, what was learned of the one before waits for it.
        Ok(Self { base: base.to_owned(), ..state })
    }

    /// Hash of the draft that `--draft` gave.
    pub(super) fn base(&self) -> &str {
        &self.base
    }

    /// The draft that was learned last of that one, if one was better.
    pub(super) fn current(&self) -> Option<u32> {
        self.learned.iter().find(|learned| learned.base == self.base).map(|learned| learned.draft)
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

    /// Writes it, whole or not at all.
    ///
    /// # Errors
    /// - there is no room
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        write_json(&folder.join(STATE_FILE), self)
    }

    /// Adds what a training came to.
    pub(super) fn add(&mut self, outcome: Outcome) {
        if let Some(draft) = outcome.draft {
            self.forget();
            self.learned.push(Learned { base: self.base.clone(), draft });
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

    /// A number that no draft had.
    pub(super) fn next_number(&self, folder: &Path) -> u32 {
        let taken = self.trainings.iter().filter_map(|outcome| outcome.draft);
        taken.chain(drafts(folder)).max().unwrap_or(0) + 1
    }
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
}

impl Job {
    /// The one under way in a learner's folder.
    pub(super) fn read(folder: &Path) -> Option<Self> {
        read_json(&folder.join(TRAINING).join(JOB_FILE))
    }

    /// Whether its texts have been kept for longer than that.
    pub(super) fn is_older_than(&self, age: Duration) -> bool {
        now().saturating_sub(self.began) > age.as_secs()
    }

    /// Begins it.
    ///
    /// # Errors
    /// - there is no room
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        super::folder::private_folder(&folder.join(TRAINING))?;
        write_json(&folder.join(TRAINING).join(JOB_FILE), self)
    }
}

/// What a training came to.
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

    /// Whether too few answers were set aside to learn at all.
    pub(super) fn has_too_few(&self) -> bool {
        self.held_out < LEAST_HELD_OUT
    }

    /// Whether the candidate is better, and not by chance.
    pub(super) fn is_better(&self) -> bool {
        self.interval.0 > 0.0
    }

    /// As the server tells it.
    pub(super) fn told(&self) -> Training {
        let Self { at, seconds, held_out, before, after, interval, .. } = *self;
        let (replaced, too_few) = (self.draft.is_some(), self.has_too_few());
        Training { at, seconds, held_out, too_few, before, after, interval, replaced }
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
        let open = |target: &str, base: &str| State::open(folder.path(), target, base);
        let mut state = open("target", "draft").expect("fresh");
        state.add(Outcome { draft: Some(3), at: 9, rows_at: 8, ..Outcome::default() });
        state.add(Outcome { at: 12, rows_at: 11, ..Outcome::default() });
        assert_eq!((state.current(), state.trained_until()), (Some(3), 11));
        state.write(folder.path()).expect("written");
        assert_eq!(open("target", "draft").expect("again"), state);
        // Another draft begins anew, and the one before finds what it learned.
        for base in ["", "another"] {
            let other = open("target", base).expect("another draft");
            assert_eq!((other.current(), other.trainings.len()), (None, 2));
            other.write(folder.path()).expect("written");
        }
        assert_eq!(open("target", "draft").expect("again").current(), Some(3));
        assert!(open("another", "draft").is_err());
        std::fs::write(folder.path().join(STATE_FILE), "{").expect("file");
        assert!(open("target", "draft").is_err());
        assert_eq!(State::read(folder.path()), None);
    }

    #[test]
    fn drafts_that_may_propose_again_are_kept_and_others_are_not() {
        let folder = tempfile::tempdir().expect("folder");
        let mut state = State::open(folder.path(), "target", "0").expect("fresh");
        let taken = |number| Outcome { draft: Some(number), ..Outcome::default() };
        for number in 1..=3 {
            state.add(taken(number));
        }
        let kept = |state: &State| (0..20).filter(|n| state.keeps(*n)).collect::<Vec<u32>>();
        assert_eq!(kept(&state), [2, 3]);
        for base in 1..=6 {
            state.base = base.to_string();
            state.add(taken(3 + base));
        }
        assert_eq!(kept(&state), [6, 7, 8, 9]);
        // However long ago it was taken.
        state.base = "3".into();
        assert_eq!(state.current(), Some(6));
        assert_eq!(state.next_number(folder.path()), 10);
        state.forget();
        assert_eq!(state.current(), None);
        assert_eq!(kept(&state), [7, 8, 9]);
    }
}
