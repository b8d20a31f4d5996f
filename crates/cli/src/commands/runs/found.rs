//! Run directories on disk, as far as their files tell.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use longdraft_pretrain::Standing;
use longdraft_records::CONFIG_FILE;
use longdraft_records::decode::DecodeRecord;
use longdraft_train::checkpoint::{Located, RunLock, Wanted, read_state, stages};
use serde::Serialize;
use serde_json::{Value, json};

use crate::commands::recorded::last_change;
use crate::failure::{Failure, Result};

/// Folders below one in which runs are looked for.
const DEPTH: usize = 3;

/// How a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    /// A process works in it.
    Running,
    /// It was trained to its end.
    Finished,
    /// The same command goes on.
    Stopped,
    /// There is no checkpoint.
    Begun,
    /// Figures of decoding alone.
    Measured,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// A run directory, or that of a curriculum.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) folder: PathBuf,
    pub(super) state: State,
    /// Steps of the newest checkpoint, and of the whole run.
    steps: Option<(u64, Option<u64>)>,
    /// Stages that are finished, of all.
    stages: Option<(usize, usize)>,
    pub(super) tau: Option<f64>,
    pub(super) bytes: u64,
    pub(super) files: usize,
    pub(super) changed: Option<SystemTime>,
}

impl Found {
    /// What a folder tells; nothing if it is no run.
    pub(super) fn at(folder: &Path) -> Option<Self> {
        let own = stages(folder);
        let has = |name: &str| folder.join(name).exists();
        let is_trained = has(CONFIG_FILE) && (has("metrics.jsonl") || has("checkpoints"));
        let record = DecodeRecord::read(folder).ok();
        if own.is_empty() && !is_trained && record.is_none() {
            return None;
        }
        let parts = if own.is_empty() { vec![folder.to_path_buf()] } else { own };
        let standing: Vec<_> = parts.iter().map(|part| standing(part)).collect();
        let finished = standing.iter().filter(|(state, _)| *state == State::Finished).count();
        let states = || standing.iter().map(|(state, _)| *state);
        let state = if states().any(|state| state == State::Running) || RunLock::is_held(folder) {
            State::Running
        } else if finished == parts.len() {
            State::Finished
        } else if states().any(|state| matches!(state, State::Stopped | State::Finished)) {
            State::Stopped
        } else if is_trained || parts.len() > 1 {
            State::Begun
        } else {
            State::Measured
        };
        let (bytes, files) = size_below(folder);
        let cell = record.as_ref().and_then(|record| record.cells.first());
        Some(Self {
            folder: folder.to_path_buf(),
            state,
            steps: standing.iter().rev().find_map(|(_, steps)| *steps),
            stages: (parts.len() > 1).then_some((finished, parts.len())),
            tau: cell.map(|cell| cell.figures.tau_incl_bonus),
            bytes,
            files,
            changed: last_change(folder),
        })
    }

    /// Steps done of all, or stages.
    pub(super) fn progress(&self) -> String {
        match (self.stages, self.steps) {
            (Some((done, all)), _) => format!("{done}/{all} stages"),
            (None, Some((step, Some(steps)))) => format!("{step}/{steps}"),
            (None, Some((step, None))) => step.to_string(),
            (None, None) => String::new(),
        }
    }

    pub(super) fn to_json(&self) -> Value {
        let (step, steps) = self.steps.map_or((None, None), |(step, all)| (Some(step), all));
        json!({
            "run": self.folder.to_string_lossy(), "state": self.state,
            "step": step, "steps": steps,
            "stages_finished": self.stages.map(|(done, _)| done),
            "stages": self.stages.map(|(_, all)| all),
            "tau": self.tau, "bytes": self.bytes, "files": self.files,
        })
    }
}

/// How one stage stands, and its steps.
fn standing(run: &Path) -> (State, Option<(u64, Option<u64>)>) {
    let of_draft = || {
        let located = Located::at(run, Wanted::Newest)?;
        let saved = read_state(&located.checkpoint).ok()?;
        Some((saved.progress.step, saved.steps(), saved.is_finished()))
    };
    let of_model = || Standing::of(run).map(|saved| (saved.step, saved.steps, saved.is_finished));
    let saved = of_draft().or_else(of_model);
    let state = match saved {
        _ if RunLock::is_held(run) => State::Running,
        Some((.., true)) => State::Finished,
        Some(_) => State::Stopped,
        None => State::Begun,
    };
    (state, saved.map(|(step, steps, _)| (step, steps)))
}

/// Bytes and files below a folder; links are not followed.
pub(in crate::commands) fn size_below(folder: &Path) -> (u64, usize) {
    let (mut bytes, mut files, mut open) = (0, 0, vec![folder.to_path_buf()]);
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(inside) if inside.is_dir() => open.push(entry.path()),
                Ok(inside) => (bytes, files) = (bytes + inside.len(), files + 1),
                Err(_) => {}
            }
        }
    }
    (bytes, files)
}

/// Runs at and below a folder, in order; what lies in a run belongs to it.
pub(super) fn below(folder: &Path) -> Result<Vec<Found>> {
    let fail = |error| Failure::file(format!("{}: {error}", folder.display()), &error);
    std::fs::read_dir(folder).map_err(fail)?;
    let (mut found, mut level) = (Vec::new(), vec![folder.to_path_buf()]);
    for _ in 0..=DEPTH {
        let mut next = Vec::new();
        for folder in level {
            if let Some(run) = Found::at(&folder) {
                found.push(run);
                continue;
            }
            let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
            let is_folder = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|t| t.is_dir());
            next.extend(entries.filter(is_folder).map(|entry| entry.path()));
        }
        level = next;
    }
    found.sort_by(|a, b| a.folder.cmp(&b.folder));
    Ok(found)
}
