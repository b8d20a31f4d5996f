//! `fit.json`: how far a fit has come, written whole or not at all.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use longdraft_models::target_model::is_same_target;
pub(super) use longdraft_records::FIT_FILE as STATE_FILE;
use longdraft_records::events::{EVENTS_FILE, Events, FitPhase, Reader, now};
use longdraft_records::{FIT_LAYOUT, other_layout};
use longdraft_train::checkpoint::RunLock;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::answers::Cleaned;
use super::measure::Machine;
use super::prompts::Split;
use super::rules::Plan;
use super::search::{Choice, Tried};
use super::trial::Trial;
use crate::cli::{DecodingArguments, TemplateArguments};
use crate::commands::write_json;
use crate::failure::{Failure, Result};

/// Seconds between two events of work at most: a longer time is that of a clock that was set, or of a machine that slept.
const LONGEST_GAP: f64 = 600.0;

/// What must stay the same from call to call.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Settings {
    pub(super) target: String,
    /// Digest of its files' names and sizes.
    #[serde(rename = "fingerprint")]
    pub(super) files: String,
    /// The target's fingerprint.
    pub(super) weights: String,
    /// Hash of all prompts.
    pub(super) prompts: String,
    pub(super) temperature: f64,
    pub(super) max_tokens: usize,
    pub(super) seed: u64,
    /// Variables of the chat template.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub(super) chat_template_kwargs: Map<String, Value>,
}

impl Settings {
    /// Plain decoding of the target, its chat template with its variables.
    pub(super) fn decoding(&self) -> DecodingArguments {
        let template = self.template();
        DecodingArguments { template, ..DecodingArguments::plain() }
    }

    /// The variables as an option.
    pub(super) fn template(&self) -> TemplateArguments {
        TemplateArguments::of(self.chat_template_kwargs.clone())
    }
}

/// Everything that is known so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    version: u32,
    /// When this was written, in seconds since 1970.
    noted: f64,
    /// The phase under way, for people who look into the file.
    pub(super) phase: FitPhase,
    pub(super) settings: Settings,
    pub(super) split: Split,
    pub(super) machine: Option<Machine>,
    /// Of the method that was chosen, or of those that were looked at.
    pub(super) trial: Option<Trial>,
    pub(super) rounds: Vec<Round>,
    /// What lies in the folders of exports, by engine.
    pub(super) exported: BTreeMap<String, Exported>,
}

/// A draft that was exported for an engine, and found right.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Exported {
    pub(super) round: usize,
    /// What `--target-name` said.
    pub(super) target_name: Option<String>,
}

/// A budget that was given and what was made of it; a later, larger budget is a round of its own.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Round {
    /// Seconds that it may take.
    pub(super) budget: f64,
    /// Seconds that it has taken, as far as they were noted.
    pub(super) spent: f64,
    pub(super) plan: Option<Plan>,
    /// Seconds that the method was set up for.
    pub(super) set_up_for: Option<f64>,
    /// Seconds that the target has answered prompts; `None` before it began.
    pub(super) answering: Option<f64>,
    /// What became of the answers, when there are enough.
    pub(super) answers: Option<Cleaned>,
    /// Beginnings that were tried, and the one that is taken.
    pub(super) tried: Vec<Tried>,
    pub(super) chosen: Option<Choice>,
    /// Seconds that the trainings of the search took, over those that were planned.
    pub(super) slowness: Option<f64>,
    /// The configuration that is trained, fixed before its first step, and how often its rate was lowered since, for the
    /// training diverged.
    pub(super) training: Option<serde_json::Value>,
    pub(super) lowered: usize,
    pub(super) trained: bool,
    /// The round whose draft is the result: this one, or an earlier one where that draft was better.
    pub(super) kept: Option<usize>,
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

impl State {
    /// The round whose draft is the result of a round, both from 1.
    pub(super) fn kept(&self, round: usize) -> usize {
        let known = round.checked_sub(1).and_then(|index| self.rounds.get(index)?.kept);
        known.filter(|kept| (1..=round).contains(kept)).unwrap_or(round)
    }

    /// Tokens that the draft learned from which the round under way goes on: those of its own round, of the one that this
    /// went on from, and so on.
    pub(super) fn learned(&self) -> f64 {
        let mut tokens = 0.0;
        let mut before = self.rounds.len().saturating_sub(1);
        while before > 0 {
            let round = self.kept(before);
            let plan = self.rounds[round - 1].plan.as_ref();
            tokens += plan.map_or(0.0, Plan::learned);
            before = round - 1;
        }
        tokens
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
    /// It fails where the folder holds a fit of something else, another process fits in it, or it cannot be written.
    pub(super) fn open(folder: &Path, settings: &Settings, split: &Split) -> Result<Self> {
        let path = folder.join(STATE_FILE);
        std::fs::create_dir_all(folder).map_err(Failure::unwritable(folder))?;
        let lock = RunLock::acquire(folder)?;
        let mut state = match std::fs::read_to_string(&path) {
            Ok(text) => read(&path, &text, settings)?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => State {
                version: FIT_LAYOUT,
                noted: now(),
                phase: FitPhase::Measure,
                settings: settings.clone(),
                split: split.clone(),
                machine: None,
                trial: None,
                rounds: Vec::new(),
                exported: BTreeMap::new(),
            },
            Err(error) => return Err(Failure::unwritable(&path)(error)),
        };
        if let Some(round) = state.rounds.last_mut() {
            round.spent += since(state.noted, folder);
        }
        let (folder, events) = (folder.to_path_buf(), Events::none());
        let mut ledger = Self { folder, state, events, noted: Instant::now(), _lock: lock };
        let hint = if ledger.state.rounds.is_empty() {
            "give another --output, or make room: nothing was done yet"
        } else {
            "make room: what is done is kept, and the same command goes on"
        };
        ledger.write().map_err(|failure| failure.hint(hint))?;
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

    /// The round whose draft is its result.
    pub(super) fn kept(&self) -> usize {
        self.state.kept(self.number())
    }

    /// Seconds of the round's budget that are left.
    pub(super) fn left(&mut self) -> f64 {
        let running = self.noted.elapsed().as_secs_f64();
        let round = self.round();
        round.budget - round.spent - running
    }

    /// What the target takes here; nothing before it was measured.
    pub(super) fn machine(&self) -> Machine {
        self.state.machine.clone().unwrap_or_default()
    }

    /// What a draft takes here; nothing before it was tried.
    pub(super) fn trial(&self) -> Trial {
        self.state.trial.clone().unwrap_or_default()
    }

    /// Drops the round under way, which did nothing but measure: the next call plans anew, with the time that it is given.
    pub(super) fn drop_round(&mut self) -> Result<()> {
        // The time counts for this round, not for the one before.
        self.write()?;
        self.state.rounds.pop();
        if self.state.rounds.is_empty() { self.write() } else { self.finish() }
    }

    /// Notes that the last round is over.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.round().delivered = true;
        self.state.phase = FitPhase::Finished;
        self.write()
    }

    /// Notes the time and writes the file.
    pub(super) fn write(&mut self) -> Result<()> {
        let running = self.noted.elapsed().as_secs_f64();
        (self.noted, self.state.noted) = (Instant::now(), now());
        if let Some(round) = self.state.rounds.last_mut() {
            round.spent += running;
        }
        write_json(&self.folder.join(STATE_FILE), &self.state)
    }

    pub(super) fn begin(&mut self, phase: FitPhase) -> Result<()> {
        self.state.phase = phase;
        self.events.phase(phase, self.number());
        self.write()
    }
}

/// Seconds that a call worked after it noted its time and before it was killed: up to the last event that it told.
fn since(noted: f64, folder: &Path) -> f64 {
    let (lines, _) = Reader::of(folder).more();
    let later = lines.iter().map(|line| line.at).skip_while(|at| *at < noted);
    let add =
        |(sum, before): (f64, f64), at: f64| (sum + (at - before).clamp(0.0, LONGEST_GAP), at);
    later.fold((0.0, noted), add).0
}

fn read(path: &Path, text: &str, settings: &Settings) -> Result<State> {
    let wrong = |problem: String| {
        Failure::usage(format!("{}: {problem}", path.display()))
            .hint("give another --output, or the old values to go on")
    };
    if let Some(layout) = other_layout(text, FIT_LAYOUT) {
        return Err(wrong(format!("another version wrote it (layout {layout})"))
            .hint("give another --output, or go on with the version that wrote it"));
    }
    let state: State =
        serde_json::from_str(text).map_err(|error| wrong(format!("unreadable: {error}")))?;
    let (old, new) = (&state.settings, settings);
    // The same weights may lie elsewhere now.
    let differing = [
        ("the target", old.files != new.files || !is_same_target(&old.weights, &new.weights)),
        ("the prompts", old.prompts != new.prompts),
        ("--temperature", old.temperature.to_bits() != new.temperature.to_bits()),
        ("--max-tokens", old.max_tokens != new.max_tokens),
        ("--seed", old.seed != new.seed),
        ("--chat-template-kwargs", old.chat_template_kwargs != new.chat_template_kwargs),
    ];
    let differing: Vec<&str> =
        differing.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name).collect();
    if !differing.is_empty() {
        return Err(wrong(format!("was begun with another value of {}", differing.join(", "))));
    }
    Ok(state)
}

#[cfg(test)]
mod tests;
