//! What a run needs to go on bit for bit.

use longdraft_data::sampler::Cursor;
use longdraft_models::target_model::is_same_target;
use longdraft_parallel::World;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Result, TrainError};

/// Name of a stage's length in its identity.
pub(crate) const STEPS: &str = "train.steps";
/// Name of the target's fingerprint among what decides the weights.
pub(crate) const TARGET: &str = "target";

/// What must not change under a resumed run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunIdentity {
    /// Name and value of everything that decides the result, in a fixed order.
    pub values: Vec<(String, String)>,
}

impl RunIdentity {
    /// One of the values by name.
    pub fn value(&self, name: &str) -> Option<&str> {
        let found = self.values.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Whether a value is what it was.
    pub(super) fn agrees(&self, name: &str, value: &str) -> bool {
        let is_same = |old: &str| old == value || name == TARGET && is_same_target(old, value);
        self.value(name).is_some_and(is_same)
    }

    /// `name was old, now new` for everything that differs; of records only the keys that do.
    pub fn differences(&self, new: &Self) -> Vec<String> {
        let mut differences = Vec::new();
        for (name, value) in new.values.iter().filter(|(name, value)| !self.agrees(name, value)) {
            match self.value(name) {
                Some(old) => match (record(old), record(value)) {
                    (Some(old), Some(new)) => keys_that_differ(name, &old, &new, &mut differences),
                    _ => differences.push(format!("{name} was {old}, now {value}")),
                },
                None => differences.push(format!("{name} is new: {value}")),
            }
        }
        differences
    }

    /// Refuses ranks that would train something else than the first one.
    ///
    /// # Errors
    /// - a rank has another target, other data, or another configuration
    pub fn require_agreement(&self, world: &World) -> Result<()> {
        let all = world.gather_json(self)?;
        let differing = all.iter().enumerate().find_map(|(rank, other)| {
            let differences = all[0].differences(other);
            (!differences.is_empty()).then_some((rank, differences))
        });
        differing.map_or(Ok(()), |(rank, differences)| {
            let differences = differences.join("; ");
            let problem = format!("rank {rank} would train something else: {differences}");
            Err(TrainError::ranks(problem))
        })
    }
}

/// A value that has keys of its own.
fn record(value: &str) -> Option<Map<String, Value>> {
    serde_json::from_str(value).ok()
}

/// The same of what is in a record, which goes by `name`.
pub(super) fn keys_that_differ(
    name: &str,
    old: &Map<String, Value>,
    new: &Map<String, Value>,
    differences: &mut Vec<String>,
) {
    for (key, value) in new {
        let name = format!("{name}.{key}");
        match (old.get(key), value) {
            (Some(Value::Object(old)), Value::Object(new)) => {
                keys_that_differ(&name, old, new, differences);
            }
            (Some(old), new) if old == new => {}
            (Some(old), new) => differences.push(format!("{name} was {old}, now {new}")),
            (None, new) => differences.push(format!("{name} is new: {new}")),
        }
    }
    for (key, value) in old.iter().filter(|(key, _)| !new.contains_key(*key)) {
        differences.push(format!("{name}.{key} was {value}, now it is not set"));
    }
}

/// A held-out evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Optimizer steps done before it.
    pub step: u64,
    /// Simulated acceptance length, greedy.
    pub length: f64,
    /// Hash of the rows that it was measured on, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
}

/// How far a run is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Optimizer steps done.
    pub step: u64,
    /// Learned rows so far.
    pub learned_rows: u64,
    /// Tokens so far, learned or not.
    pub tokens: u64,
    /// Seconds of training so far, over all processes that worked on it. In a process that trains, those of the processes
    /// before it.
    pub seconds: f64,
    /// The best held-out evaluation so far.
    pub best: Option<Best>,
    /// Evaluations since then.
    pub evaluations_since_best: u64,
    /// Whether the run ended before its budget, by patience or time.
    pub ended: bool,
    /// Whether the held-out rows are still to be measured after the last step.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unjudged: bool,
}

/// The small part of a checkpoint; tensors lie beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckpointState {
    /// How far the run is.
    #[serde(flatten)]
    pub progress: Progress,
    /// Where the data goes on. All other random draws are functions of seed, epoch and document.
    pub cursor: Cursor,
    /// Steps of the whole run as it began, where it was extended since: its warm-up is a share of these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_steps: Option<u64>,
    /// Limit of the run in minutes when this was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_minutes: Option<f64>,
    /// Length of `metrics.jsonl` in bytes when this was saved.
    pub metrics_bytes: u64,
    /// What must not change.
    pub identity: RunIdentity,
    /// Name of the draft's method.
    pub method: String,
    /// What the draft's `config.json` says.
    pub draft: Value,
    /// Whose features it was trained on.
    pub target_fingerprint: String,
}

impl CheckpointState {
    /// Steps of the whole run, if it says them.
    pub fn steps(&self) -> Option<u64> {
        self.identity.value(STEPS).and_then(|steps| steps.parse().ok())
    }

    /// Whether the run that saved this had nothing left to do.
    pub fn is_finished(&self) -> bool {
        self.is_trained() && !self.progress.unjudged
    }

    /// Whether it had taken its last step.
    pub(crate) fn is_trained(&self) -> bool {
        let Progress { step, ended, .. } = self.progress;
        ended || self.steps().is_some_and(|steps| step >= steps)
    }
}

#[cfg(test)]
mod agreement {
    use super::*;
    use longdraft_parallel::threads::in_threads;
    use serde_json::json;

    #[test]
    fn ranks_that_would_train_something_else_are_told_apart() {
        let of = |tokens: &str| RunIdentity { values: vec![("data".into(), tokens.into())] };
        let agree = |other: &'static str| {
            in_threads(3, move |world| {
                let tokens = if world.rank() == 2 { other } else { "same" };
                of(tokens).require_agreement(&world).map_err(|error| error.to_string())
            })
        };
        assert!(agree("same").iter().all(std::result::Result::is_ok));
        let told = "rank 2 would train something else: data was same, now old";
        assert!(agree("old").iter().all(|result| result == &Err(told.to_owned())));
    }

    #[test]
    fn of_a_record_only_the_keys_that_differ_are_told() {
        let of = |draft: Value| RunIdentity { values: vec![("draft".into(), draft.to_string())] };
        let old = of(json!({ "size": 8192, "glide": { "a": 1, "b": 2 }, "gone": true }));
        let new = of(json!({ "size": 1024, "glide": { "a": 1, "b": 3 }, "added": null }));
        assert_eq!(old.differences(&old), Vec::<String>::new());
        let told = [
            "draft.size was 8192, now 1024",
            "draft.glide.b was 2, now 3",
            "draft.added is new: null",
            "draft.gone was true, now it is not set",
        ];
        assert_eq!(old.differences(&new), told);
        // A record in place of a plain value.
        let plain = RunIdentity { values: vec![("draft".into(), "8192".into())] };
        assert_eq!(
            plain.differences(&of(json!({ "size": 1 }))),
            ["draft was 8192, now {\"size\":1}"]
        );
    }
}
