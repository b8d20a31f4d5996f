//! Where a run goes on: its newest checkpoint, if that is of the same run, and to which end.

use std::collections::HashMap;

use candle_core::Tensor;
use longdraft_data::sampler::Cursor;
use longdraft_parallel::DataParallel;

use super::identity::tensor_hash;
use super::{Event, Observer};
use crate::checkpoint::{
    CheckpointState, Checkpointer, Progress, ResumePolicy, RunIdentity, STEPS, load,
    require_same_network, require_same_run, time_is_used_up,
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
    let Some((loaded, warning)) = checkpointer.newest(load)? else {
        return Ok(Resumed::fresh(schedule));
    };
    let mut resumed = going_on(config, schedule, &loaded.state, (identity, policy), observer)?;
    if let Some(warning) = warning {
        observer.on_event(Event::Warning(&warning));
    }
    let keeps_best = config.train.keep_best && resumed.progress.best.is_some();
    if keeps_best && !checkpointer.holds_best() {
        resumed.progress.best = None;
        observer.on_event(Event::Warning(
            "`checkpoints/best` is not there, or damaged: the best draft is chosen anew",
        ));
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
    loaded.restore(optimizer, parallel, parameters)?;
    observer.on_event(Event::Resumed(resumed.progress.step));
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
    let mut changed = require_same_run(&state.identity, identity, &[STEPS], policy, output)?;
    // Only `--extend` and `--force-resume` give more time to a run that time ended.
    let more_time = raised_limit(state, config.train.max_minutes);
    let mut resumed = Resumed {
        cursor: state.cursor,
        progress: state.progress,
        metrics_bytes: state.metrics_bytes,
        schedule,
    };
    match policy {
        ResumePolicy::Force => {
            changed.extend(more_time);
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
        ResumePolicy::Strict if more_time.is_some() => {
            let (path, differences) = (output.clone(), more_time.into_iter().collect());
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

/// How the limit in minutes was raised since a run ended before its steps, if it was.
fn raised_limit(state: &CheckpointState, now: Option<f64>) -> Option<String> {
    let has_more = |was: &f64| state.progress.ended && now.is_none_or(|now| now > *was);
    let was = state.max_minutes.filter(has_more)?;
    let now = now.map_or_else(|| "no limit".to_owned(), |minutes| minutes.to_string());
    Some(format!("train.max_minutes was {was}, now {now}"))
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
    let used_up =
        config.train.max_minutes.filter(|minutes| state.progress.seconds >= 60.0 * minutes);
    resumed.schedule.warmup_of = state.first_steps.unwrap_or(before);
    if state.is_trained() && state.progress.step >= steps {
        return;
    }
    if state.is_trained()
        && let Some(minutes) = used_up
    {
        // A step more would be taken at the rate of the later end.
        resumed.progress.ended = true;
        observer.on_event(Event::Warning(&time_is_used_up(minutes)));
        return;
    }
    if before < steps {
        // Patience begins anew.
        resumed.progress.evaluations_since_best = 0;
        let old = resumed.schedule.extended_to(before);
        let note = old.describe_extension(&resumed.schedule, state.progress.step);
        observer.on_event(Event::Note(&note));
    }
    if state.progress.ended {
        // The same, or the run would end at once.
        resumed.progress.ended = false;
        resumed.progress.evaluations_since_best = 0;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::observer::tests::Heard;
    use crate::schedule::Kind;

    /// How a run of 8 steps that took an hour is taken up, and what is told of it.
    fn taken_up(
        policy: ResumePolicy,
        saved: &Value,
        steps: u64,
        minutes: Option<f64>,
    ) -> Result<(Progress, Vec<String>)> {
        let mut state = json!({
            "step": 8, "cursor": { "epoch": 0, "position": 3 }, "learned_rows": 100, "tokens": 5000,
            "seconds": 3600.0, "evaluations_since_best": 2, "ended": false, "metrics_bytes": 10,
            "identity": { "values": [[STEPS, "8"]] }, "method": "any", "draft": {},
            "target_fingerprint": "t",
        });
        for (key, value) in saved.as_object().into_iter().flatten() {
            state[key] = value.clone();
        }
        let state: CheckpointState = serde_json::from_value(state).expect("a state");
        let config: TrainConfig = serde_json::from_value(json!({
            "target": "model.gguf", "output": "runs/mine", "draft": { "method": "glide" },
            "data": { "train": [{ "path": "rows.jsonl" }] }, "train": { "max_minutes": minutes },
        }))
        .expect("a configuration");
        let schedule = Schedule::new(Kind::Constant, 1e-3, steps);
        let identity = RunIdentity { values: vec![(STEPS.into(), steps.to_string())] };
        let mut heard = Heard::default();
        let resumed = going_on(&config, schedule, &state, (&identity, policy), &mut heard)?;
        Ok((resumed.progress, heard.0))
    }

    fn extended(saved: &Value, steps: u64, minutes: Option<f64>) -> (Progress, Vec<String>) {
        taken_up(ResumePolicy::Extend, saved, steps, minutes).expect("extended")
    }

    #[test]
    fn more_time_alone_is_refused_unless_it_is_forced() {
        let saved = json!({ "step": 5, "ended": true, "max_minutes": 60.0 });
        let with = |policy, minutes| taken_up(policy, &saved, 8, minutes);
        let error = with(ResumePolicy::Strict, Some(61.0)).expect_err("longer").to_string();
        assert!(error.contains("train.max_minutes was 60, now 61"), "{error}");
        let (progress, told) = with(ResumePolicy::Force, None).expect("forced");
        assert!(!progress.ended && progress.evaluations_since_best == 0);
        assert!(told.len() == 1 && told[0].contains("was 60, now no limit"), "{told:?}");
        for policy in [ResumePolicy::Strict, ResumePolicy::Force] {
            let (progress, told) = with(policy, Some(60.0)).expect("the same run");
            assert!(progress.ended && told.is_empty(), "{told:?}");
        }
    }

    #[test]
    fn more_steps_without_more_time_are_none() {
        for unjudged in [false, true] {
            let (progress, told) = extended(&json!({ "unjudged": unjudged }), 12, Some(60.0));
            assert!(progress.ended && progress.unjudged == unjudged);
            assert!(told.len() == 1 && told[0].contains("from the run's beginning"), "{told:?}");
        }
        let (progress, told) = extended(&json!({}), 12, Some(61.0));
        assert!(!progress.ended && told[0].contains("8 steps become 12"), "{told:?}");
        let (progress, told) = extended(&json!({}), 8, Some(60.0));
        assert!(!progress.ended && told.is_empty(), "{told:?}");
    }

    #[test]
    fn patience_begins_anew_with_more_steps() {
        let since_best = |saved: Value, steps: u64| {
            let (progress, _) = extended(&saved, steps, None);
            assert!(!progress.ended);
            progress.evaluations_since_best
        };
        assert_eq!(since_best(json!({}), 12), 0);
        assert_eq!(since_best(json!({ "step": 5 }), 12), 0);
        assert_eq!(since_best(json!({ "step": 5, "ended": true }), 8), 0);
        // On the way to an end that it has already.
        assert_eq!(since_best(json!({ "step": 5 }), 8), 2);
    }
}
