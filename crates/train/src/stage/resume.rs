//! Where a run goes on: its newest checkpoint, if that is of the same run, and to which end.

use std::collections::HashMap;

use candle_core::Tensor;
use longdraft_data::sampler::Cursor;
use longdraft_parallel::DataParallel;

use super::identity::{tensor_hash, upgraded};
use super::{Event, Observer, Progress};
use crate::checkpoint::{
    CheckpointState, Checkpointer, ResumePolicy, RunIdentity, STEPS, require_same_network,
    require_same_run,
};
use crate::config::TrainConfig;
use crate::error::{Result, TrainError};
use crate::objective::Objective;
use crate::optim::AdamW;
use crate::schedule::Schedule;

/// Where a run goes on.
pub(super) struct Resumed {
    pub(super) cursor: Cursor,
    pub(super) progress: Progress,
    pub(super) metrics_bytes: u64,
    pub(super) schedule: Schedule,
}

impl Resumed {
    /// A run that begins.
    fn fresh(schedule: Schedule) -> Self {
        let (cursor, progress) = (Cursor::default(), Progress::default());
        Self { cursor, progress, metrics_bytes: 0, schedule }
    }
}

/// Puts the newest checkpoint's tensors into draft and optimizer, if there is one.
pub(super) fn resume(
    (config, schedule): (&TrainConfig, Schedule),
    checkpointer: &Checkpointer,
    (objective, parallel, optimizer): (&dyn Objective, &DataParallel, &mut AdamW),
    (identity, policy): (&RunIdentity, ResumePolicy),
    observer: &mut dyn Observer,
) -> Result<Resumed> {
    let Some(loaded) = checkpointer.load_latest()? else {
        return Ok(Resumed::fresh(schedule));
    };
    let resumed = going_on(config, schedule, &loaded.state, (identity, policy), observer)?;
    if let Some(warning) = &loaded.warning {
        observer.on_event(Event::Warning(warning));
    }
    require_same_network(&loaded.state.draft, &objective.draft().config_json(), &loaded.path)?;
    let saved: HashMap<&str, &Tensor> =
        loaded.draft.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let parameters = objective.draft().parameters();
    for parameter in parameters {
        let tensor = saved.get(parameter.name.as_str()).ok_or_else(|| {
            TrainError::checkpoint(&loaded.path, format!("no tensor `{}`", parameter.name))
        })?;
        parameter.var.set(&tensor.to_device(parameter.var.device())?)?;
    }
    // Weights mean nothing over another vocabulary, forced or not.
    for (name, tensor) in objective.draft().binding_tensors()? {
        let same = match saved.get(name.as_str()) {
            Some(saved) => tensor_hash(saved)? == tensor_hash(&tensor)?,
            None => false,
        };
        if !same {
            let problem = format!("the saved draft has another `{name}`");
            return Err(TrainError::checkpoint(&loaded.path, problem));
        }
    }
    loaded.restore(optimizer, parallel, objective.draft())?;
    observer.on_event(Event::Resumed(loaded.state.step));
    Ok(resumed)
}

/// Where a run goes on from a checkpoint, and to which end.
fn going_on(
    config: &TrainConfig,
    schedule: Schedule,
    state: &CheckpointState,
    (identity, policy): (&RunIdentity, ResumePolicy),
    observer: &mut dyn Observer,
) -> Result<Resumed> {
    let output = &config.output;
    let changed = require_same_run(&upgraded(&state.identity), identity, &[STEPS], policy, output)?;
    let mut resumed = Resumed {
        cursor: state.cursor,
        progress: Progress {
            step: state.step,
            tokens: state.tokens,
            learned_rows: state.learned_rows,
            seconds: state.seconds,
            best: state.best,
            evaluations_since_best: state.evaluations_since_best,
            ended: state.ended,
        },
        metrics_bytes: state.metrics_bytes,
        ..Resumed::fresh(schedule)
    };
    let minutes = config.train.max_minutes;
    match policy {
        ResumePolicy::Force => {
            if !changed.is_empty() {
                let warning = format!("resumed although {}", changed.join("; "));
                observer.on_event(Event::Warning(&warning));
                // Patience begins anew. Time ends the run again by itself.
                resumed.progress.ended = false;
                resumed.progress.evaluations_since_best = 0;
            }
            if state.identity.value(STEPS) == identity.value(STEPS) {
                resumed.schedule.warmup_of = state.first_steps.unwrap_or(schedule.steps);
            }
        }
        // What time ended is not longer by itself where more time is given.
        ResumePolicy::Strict if state.ended && is_raised(state.max_minutes, minutes) => {
            let (path, was) = (output.clone(), state.max_minutes.unwrap_or_default());
            let now = minutes.map_or_else(|| "no limit".to_owned(), |minutes| minutes.to_string());
            let differences = vec![format!("train.max_minutes was {was}, now {now}")];
            return Err(TrainError::OtherLength { path, differences, longer: true });
        }
        ResumePolicy::Strict | ResumePolicy::Extend => {
            resumed.schedule.warmup_of = state.first_steps.unwrap_or(schedule.steps);
        }
    }
    if policy == ResumePolicy::Extend {
        extend(config, state, &mut resumed, observer);
    }
    Ok(resumed)
}

/// Whether a limit in minutes was lifted.
fn is_raised(was: Option<f64>, now: Option<f64>) -> bool {
    was.is_some_and(|was| now.is_none_or(|now| now > was))
}

/// Takes a run up to a later end than it had, if that is asked for: its schedule keeps its warm-up.
fn extend(
    config: &TrainConfig,
    state: &CheckpointState,
    resumed: &mut Resumed,
    observer: &mut dyn Observer,
) {
    let steps = resumed.schedule.steps;
    let saved = state.identity.value(STEPS).and_then(|steps| steps.parse().ok());
    let before: u64 = saved.unwrap_or(steps);
    let time_is_up =
        config.train.max_minutes.is_some_and(|minutes| state.seconds >= 60.0 * minutes);
    if state.is_finished() && (state.step >= steps || time_is_up) {
        return;
    }
    if before < steps {
        resumed.schedule.warmup_of = state.first_steps.unwrap_or(before);
        let old = resumed.schedule.extended_to(before);
        let note = old.describe_extension(&resumed.schedule, state.step);
        observer.on_event(Event::Note(&note));
    }
    if state.ended {
        // Patience begins anew, or the run would end at once.
        resumed.progress.ended = false;
        resumed.progress.evaluations_since_best = 0;
    }
}
