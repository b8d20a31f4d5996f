//! Whether a run directory is that of the run which is to go on, and how its length may change.

use std::path::Path;

use serde_json::Value;

use super::state::{RunIdentity, keys_that_differ};
use crate::error::{Result, TrainError};

/// What happens when a run directory holds a checkpoint of other settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ResumePolicy {
    /// The run is refused, old and new values are named.
    #[default]
    Strict,
    /// The run may become longer; anything else is refused.
    Extend,
    /// The run goes on under the new settings, with a warning that names both.
    Force,
}

/// Compares a checkpoint's settings with those of the run that wants to go on from it; `lengths` names
/// those that say how long it is. Returns what differs and is let pass.
///
/// # Errors
/// - something differs that `policy` does not let pass
pub fn require_same_run(
    saved: &RunIdentity,
    new: &RunIdentity,
    lengths: &[&str],
    policy: ResumePolicy,
    path: &Path,
) -> Result<Vec<String>> {
    let differences = saved.differences(new);
    if differences.is_empty() || policy == ResumePolicy::Force {
        return Ok(differences);
    }
    let path = path.to_path_buf();
    let is_length = |name: &String| lengths.contains(&name.as_str());
    let changed = |(name, value): &&(String, String)| !saved.agrees(name, value);
    let mut changed = new.values.iter().filter(changed);
    if !changed.clone().all(|(name, _)| is_length(name)) {
        return Err(TrainError::OtherRun { path, differences });
    }
    let longer =
        changed.all(|(name, value)| length(value) >= saved.value(name).map_or(0.0, length));
    if longer && policy == ResumePolicy::Extend {
        return Ok(differences);
    }
    Err(TrainError::OtherLength { path, differences, longer })
}

/// Refuses to put the weights of one network into another, forced or not: both descriptions of a draft
/// must be the same. It fails where a value differs, or only one of them has it.
pub(crate) fn require_same_network(saved: &Value, new: &Value, path: &Path) -> Result<()> {
    if saved == new {
        return Ok(());
    }
    let mut differences = Vec::new();
    match (saved, new) {
        (Value::Object(saved), Value::Object(new)) => {
            keys_that_differ("draft", saved, new, &mut differences);
        }
        _ => differences.push(format!("draft was {saved}, now {new}")),
    }
    let problem = format!("the saved draft is another network: {}", differences.join("; "));
    Err(TrainError::checkpoint(path, problem))
}

/// What is told where a run whose minutes are over is asked for more steps.
pub fn time_is_used_up(minutes: f64) -> String {
    format!(
        "`train.max_minutes` counts from the run's beginning, and its {minutes} minutes are used up: raise it to go on"
    )
}

/// A number, or no limit.
fn length(text: &str) -> f64 {
    text.parse().unwrap_or(f64::INFINITY)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn identity(steps: &str, minutes: &str, seed: &str) -> RunIdentity {
        let values = [("steps", steps), ("minutes", minutes), ("seed", seed)];
        RunIdentity { values: values.map(|(k, v)| (k.to_owned(), v.to_owned())).into() }
    }

    fn compared(new: &RunIdentity, policy: ResumePolicy) -> Result<Vec<String>> {
        let saved = identity("12", "5", "0");
        require_same_run(&saved, new, &["steps", "minutes"], policy, Path::new("run"))
    }

    #[test]
    fn a_run_becomes_longer_on_demand_only() {
        use ResumePolicy::{Extend, Force, Strict};
        let same = identity("12", "5", "0");
        assert_eq!(compared(&same, Strict).expect("the same"), Vec::<String>::new());
        for longer in [identity("14", "5", "0"), identity("14", "null", "0")] {
            let error = compared(&longer, Strict).expect_err("longer");
            assert!(matches!(error, TrainError::OtherLength { longer: true, .. }), "{error}");
            assert_eq!(compared(&longer, Extend).expect("extended")[0], "steps was 12, now 14");
        }
        for shorter in [identity("11", "5", "0"), identity("14", "4", "0")] {
            for policy in [Strict, Extend] {
                let error = compared(&shorter, policy).expect_err("shorter");
                assert!(matches!(error, TrainError::OtherLength { longer: false, .. }), "{error}");
            }
        }
        // Files may tell less of a target, never something else.
        let of = |target: &str, steps: &str, more: &[(&str, &str)]| {
            let values = [&[("target", target), ("steps", steps)], more].concat();
            RunIdentity { values: values.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect() }
        };
        let new = of("a-1", "14", &[("precision", "f32")]);
        let by_steps = |saved: &RunIdentity| {
            require_same_run(saved, &new, &["steps"], Extend, Path::new("run"))
        };
        let precise = &[("precision", "f32")];
        assert_eq!(by_steps(&of("a", "12", precise)).expect("extended").len(), 1);
        for saved in [
            of("b", "12", precise),
            of("a-2", "12", precise),
            of("a", "12", &[("precision", "bf16")]),
            of("a", "12", &[]),
        ] {
            assert!(matches!(by_steps(&saved), Err(TrainError::OtherRun { .. })), "{saved:?}");
        }
        let other = identity("14", "5", "1");
        assert!(matches!(compared(&other, Extend), Err(TrainError::OtherRun { .. })));
        assert_eq!(compared(&other, Force).expect("forced").len(), 2);
    }

    #[test]
    fn a_network_is_another_one_by_any_value() {
        let saved = json!({ "layers": 2, "old": 1, "dflash": { "mask": 7, "ids": [0, 2] } });
        let path = Path::new("checkpoint");
        require_same_network(&saved, &saved.clone(), path).expect("the same");
        let other = json!({ "layers": 2, "dflash": { "mask": 8, "ids": [0, 3] } });
        let error = require_same_network(&saved, &other, path).expect_err("another").to_string();
        for wanted in [
            "draft.dflash.mask was 7, now 8",
            "draft.dflash.ids was [0,2], now [0,3]",
            "draft.old was 1, now it is not set",
        ] {
            assert!(error.contains(wanted), "{error}");
        }
    }
}
