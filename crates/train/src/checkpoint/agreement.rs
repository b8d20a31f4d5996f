//! Whether a run directory is that of the run which is to go on, and how its length may change.

use std::path::Path;

use super::state::RunIdentity;
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
pub(crate) fn require_same_run(
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
    let changed = |(name, value): &&(String, String)| saved.value(name) != Some(value.as_str());
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

/// A number, or no limit.
fn length(text: &str) -> f64 {
    text.parse().unwrap_or(f64::INFINITY)
}

#[cfg(test)]
mod tests {
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
        let other = identity("14", "5", "1");
        assert!(matches!(compared(&other, Extend), Err(TrainError::OtherRun { .. })));
        assert_eq!(compared(&other, Force).expect("forced").len(), 2);
    }
}
