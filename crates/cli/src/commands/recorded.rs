//! What a run's folder tells of it, without its target.

use std::path::Path;
use std::time::SystemTime;

use longdraft_configuration::file_text;
use longdraft_records::{CONFIG_FILE, median};
use longdraft_tracking::Outcome;
use longdraft_train::checkpoint::{CheckpointState, LAST, read_state, verify};
use longdraft_train::config::{References, TrainConfig};
use longdraft_train::observer::Unheard;
use longdraft_train::stage::{Event, Observer, Tracked};
use serde::Serialize;
use serde_json::Value;

use crate::failure::{Failure, Result};

/// The composed configuration of a run as it is kept there.
pub(crate) fn config_text(
    config: &impl Serialize,
    references: &References,
    run: &Path,
) -> Result<String> {
    file_text(config, references).map_err(Failure::at(run))
}

/// Keeps it, with the version.
pub(crate) fn save_config(run: &Path, text: &str) -> Result<()> {
    let path = run.join(CONFIG_FILE);
    let whole = format!("# longdraft {}\n{text}", env!("CARGO_PKG_VERSION"));
    std::fs::write(&path, whole).map_err(Failure::at(&path))
}

/// Figures that a run has logged.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    /// Of the last evaluation.
    pub(crate) held_out: Option<Value>,
    /// Tokens a second of every logged step.
    pub(crate) speeds: Vec<f64>,
    /// The last step.
    pub(crate) steps: u64,
}

impl Figures {
    /// Of a run's folder; lines that cannot be read are passed over.
    pub(crate) fn of(run: &Path) -> Self {
        let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
        let mut figures = Self::default();
        for record in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            if let Some(held_out) = record.get("held_out") {
                figures.held_out = Some(held_out.clone());
            }
            figures.steps = record["step"].as_u64().unwrap_or(figures.steps);
            figures.speeds.extend(record["tokens_per_second"].as_f64());
        }
        figures
    }

    /// Median speed, if a step was logged.
    pub(crate) fn speed(&self) -> Option<f64> {
        (!self.speeds.is_empty()).then(|| median(&self.speeds))
    }
}

/// A run that was trained to its end under the very configuration that is asked for.
pub(crate) struct FinishedRun {
    pub(crate) steps: u64,
    pub(crate) figures: Figures,
    /// When its last checkpoint was saved.
    pub(crate) saved: SystemTime,
}

impl FinishedRun {
    /// The run that a configuration asks for, if it is finished, undamaged, and its text and target have
    /// not changed since. Where there is doubt there is none: preparing the run looks closer.
    pub(crate) fn find(config: &TrainConfig) -> Option<Self> {
        let text = std::fs::read_to_string(config.output.join(CONFIG_FILE)).ok()?;
        let (_, made_with) = text.split_once('\n')?;
        if made_with != config_text(config, &config.references, &config.output).ok()? {
            return None;
        }
        let checkpoint = config.output.join("checkpoints").join(LAST);
        let state = read_state(&checkpoint).ok().filter(CheckpointState::is_finished)?;
        let saved = last_change(&checkpoint)?;
        let sources = config.data.train.iter().chain(&config.data.held_out);
        let mut inputs = vec![Path::new(&config.target)];
        inputs.extend(sources.map(|source| source.path.as_path()));
        inputs.extend(config.draft.from.as_deref());
        inputs.extend(config.train.features.store().map(Path::new));
        // What lies elsewhere has no time here. Clocks of files are coarse: equal may be later.
        if inputs.iter().any(|input| last_change(input).is_some_and(|change| change >= saved)) {
            return None;
        }
        verify(&checkpoint).ok()?;
        let (steps, figures) = (state.progress.step, Figures::of(&config.output));
        Some(Self { steps, figures, saved })
    }

    /// Tells its trackers of the end, if the process that trained it was killed before it could.
    pub(crate) fn end_tracking(&self, config: &TrainConfig) -> Vec<String> {
        let mut unheard = Unheard;
        let mut tracked = Tracked::new(config, &mut unheard);
        tracked.on_event(Event::Resumed(self.steps));
        tracked.finish(Outcome::Finished)
    }
}

/// When a file, or the newest one of a folder, was last written.
pub(crate) fn last_change(path: &Path) -> Option<SystemTime> {
    let changed = |path: &Path| std::fs::metadata(path).and_then(|file| file.modified()).ok();
    let inside = std::fs::read_dir(path).into_iter().flatten().flatten();
    inside.filter_map(|entry| changed(&entry.path())).max().max(changed(path))
}
