//! `fit.json`: how far a fit has come, written whole or not at all.

use std::path::{Path, PathBuf};
use std::time::Instant;

use longdraft_models::weights::atomic::write_atomically;
pub(super) use longdraft_records::FIT_FILE as STATE_FILE;
use longdraft_records::events::{EVENTS_FILE, Events};
use longdraft_train::checkpoint::RunLock;
use serde::{Deserialize, Serialize};

use super::answers::Cleaned;
use super::measure::{Machine, Trial};
use super::prompts::Split;
use super::rules::Plan;
use super::search::{Choice, Tried};
use crate::failure::{Failure, Result};

const VERSION: u32 = 1;

/// What must stay the same from call to call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Settings {
    pub(super) target: String,
    /// Of its weights.
    pub(super) fingerprint: String,
    /// Hash of all prompts.
    pub(super) prompts: String,
    pub(super) temperature: f64,
    pub(super) max_tokens: usize,
    pub(super) seed: u64,
}

/// Everything that is known so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    version: u32,
    /// Name of the phase under way, for people who look into the file.
    pub(super) phase: String,
    pub(super) settings: Settings,
    pub(super) split: Split,
    pub(super) machine: Option<Machine>,
    /// Of the method that was chosen, or of those that were looked at.
    pub(super) trial: Option<Trial>,
    pub(super) rounds: Vec<Round>,
}

/// A budget that was given and what was made of it; a later, larger budget is a round of its own.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Round {
    /// Seconds that it may take.
    pub(super) budget: f64,
    /// Seconds that it has taken, as far as they were noted.
    pub(super) spent: f64,
    pub(super) plan: Option<Plan>,
    /// Seconds that the target has answered prompts; `None` before it began.
    #[serde(default)]
    pub(super) answering: Option<f64>,
    /// What became of the answers, when there are enough.
    pub(super) answers: Option<Cleaned>,
    /// Beginnings that were tried, and the one that is taken.
    #[serde(default)]
    pub(super) tried: Vec<Tried>,
    #[serde(default)]
    pub(super) chosen: Option<Choice>,
    /// Seconds that the trainings of the search took, over those that were planned.
    #[serde(default)]
    pub(super) slowness: Option<f64>,
    /// The configuration that is trained, fixed before its first step.
    pub(super) training: Option<serde_json::Value>,
    pub(super) trained: bool,
    pub(super) proved: bool,
    pub(super) delivered: bool,
}

impl Round {
    /// Of a budget in seconds.
    pub(super) fn of(budget: f64) -> Self {
        Self { budget, ..Self::default() }
    }

    /// Whether its plan is being carried out: it is not made anew then.
    pub(super) fn has_begun(&self) -> bool {
        self.answering.is_some() || self.answers.is_some() || self.training.is_some()
    }
}

/// The state with its place and the time that runs.
pub(super) struct Ledger {
    pub(super) folder: PathBuf,
    pub(super) state: State,
    /// Who watches.
    pub(super) events: Events,
    noted: Instant,
    _lock: RunLock,
}

impl Ledger {
    /// What an earlier call left in a folder, or a new beginning.
    ///
    /// # Errors
    /// - the folder holds a fit of something else, another process fits in it, or it cannot be written
    pub(super) fn open(folder: &Path, settings: &Settings, split: &Split) -> Result<Self> {
        let path = folder.join(STATE_FILE);
        std::fs::create_dir_all(folder).map_err(|error| unwritable(folder, &error))?;
        let lock = RunLock::acquire(folder)?;
        let state = match std::fs::read_to_string(&path) {
            Ok(text) => read(&path, &text, settings)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => State {
                version: VERSION,
                phase: "measure".to_owned(),
                settings: settings.clone(),
                split: split.clone(),
                machine: None,
                trial: None,
                rounds: Vec::new(),
            },
            Err(error) => return Err(unwritable(&path, &error)),
        };
        let (folder, events) = (folder.to_path_buf(), Events::none());
        let mut ledger = Self { folder, state, events, noted: Instant::now(), _lock: lock };
        ledger.write().map_err(|failure| {
            failure.hint("give another --output, or make room: nothing was done yet")
        })?;
        ledger.events = Events::open(&ledger.folder).unwrap_or_else(|error| {
            let path = ledger.folder.join(EVENTS_FILE);
            errln!("note: {}: {error}: nobody can watch this run", path.display());
            Events::none()
        });
        Ok(ledger)
    }

    /// The round under way.
    pub(super) fn round(&mut self) -> &mut Round {
        if self.state.rounds.is_empty() {
            self.state.rounds.push(Round::default());
        }
        let last = self.state.rounds.len() - 1;
        &mut self.state.rounds[last]
    }

    /// Its number, from 1.
    pub(super) fn number(&self) -> usize {
        self.state.rounds.len().max(1)
    }

    /// Seconds of the round's budget that are left.
    pub(super) fn left(&mut self) -> f64 {
        let running = self.noted.elapsed().as_secs_f64();
        let round = self.round();
        round.budget - round.spent - running
    }

    /// Notes the time and writes the file.
    pub(super) fn write(&mut self) -> Result<()> {
        let running = self.noted.elapsed().as_secs_f64();
        self.noted = Instant::now();
        if let Some(round) = self.state.rounds.last_mut() {
            round.spent += running;
        }
        let text = serde_json::to_string_pretty(&self.state).map_err(Failure::work)?;
        Ok(write_atomically(&self.folder.join(STATE_FILE), format!("{text}\n").as_bytes())?)
    }

    /// Begins a phase.
    pub(super) fn begin(&mut self, phase: &str) -> Result<()> {
        phase.clone_into(&mut self.state.phase);
        self.events.phase(phase, self.number());
        self.write()
    }
}

fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::usage(format!("{}: nothing can be written there: {error}", path.display()))
        .hint("give another folder with --output DIR")
}

fn read(path: &Path, text: &str, settings: &Settings) -> Result<State> {
    let wrong = |problem: String| {
        Failure::usage(format!("{}: {problem}", path.display()))
            .hint("give another --output, or the old values to go on")
    };
    let state: State =
        serde_json::from_str(text).map_err(|error| wrong(format!("unreadable: {error}")))?;
    if state.version != VERSION {
        return Err(wrong(format!("layout {} of another version", state.version)));
    }
    let (old, new) = (&state.settings, settings);
    // The same weights may lie elsewhere now.
    let differing = [
        ("the target", old.fingerprint != new.fingerprint),
        ("the prompts", old.prompts != new.prompts),
        ("--temperature", old.temperature.to_bits() != new.temperature.to_bits()),
        ("--max-tokens", old.max_tokens != new.max_tokens),
        ("--seed", old.seed != new.seed),
    ];
    let differing: Vec<&str> =
        differing.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name).collect();
    if !differing.is_empty() {
        return Err(wrong(format!("was begun with another value of {}", differing.join(", "))));
    }
    Ok(state)
}
