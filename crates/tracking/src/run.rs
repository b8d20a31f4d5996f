//! What a tracker knows about its run and the process it runs in.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::{Moment, TrackingConfig};
use serde_json::Value;

/// Environment variables that trackers may read. Values are secrets: they stay in memory.
#[derive(Clone, Default)]
pub struct Environment(HashMap<String, String>);

impl Environment {
    /// Those of the process that trackers know.
    pub fn from_process() -> Self {
        let known = |name: &str| name.starts_with("WANDB_") || name.starts_with("MLFLOW_");
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self(std::env::vars_os().filter_map(text).filter(|(name, _)| known(name)).collect())
    }

    /// A variable that is set and not empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }
}

impl<const N: usize> From<[(&str, &str); N]> for Environment {
    fn from(variables: [(&str, &str); N]) -> Self {
        Self(variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into())
    }
}

/// A run as its trackers see it. Everything that clocks and chance decide is in here, so that the
/// same run makes the same bytes.
#[derive(Clone)]
pub struct Run {
    /// Run directory.
    pub directory: PathBuf,
    /// Name on the board.
    pub name: String,
    /// The `tracking:` section.
    pub tracking: TrackingConfig,
    /// The whole configuration as records show it, an object.
    pub config: Value,
    /// Steps that a checkpoint holds; 0 starts a new run.
    pub resumed_step: u64,
    /// When this process started to track.
    pub started: Moment,
    /// Name of the machine.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// Eight letters and digits, new for every process.
    pub id: String,
    /// Environment variables.
    pub environment: Environment,
}

impl Run {
    /// The run in `directory` of a configuration as records show it, in this process; resumed after
    /// `resumed_step` steps.
    pub fn new(
        directory: &Path,
        tracking: &TrackingConfig,
        config: Value,
        resumed_step: u64,
    ) -> Self {
        let started = Moment::now();
        let host = gethostname::gethostname().to_string_lossy().into_owned();
        let pid = std::process::id();
        let seed = format!("{started:?} {host} {pid} {}", directory.display());
        Self {
            directory: directory.to_path_buf(),
            name: tracking.run_name(directory),
            tracking: tracking.clone(),
            config,
            resumed_step,
            started,
            host,
            pid,
            id: run_id(seed.as_bytes()),
            environment: Environment::from_process(),
        }
    }
}

/// Eight of 36 letters and digits: the form of run ids in W&B and SwanLab.
fn run_id(seed: &[u8]) -> String {
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let hash = blake3::hash(seed);
    let digit =
        |pair: &[u8]| char::from(DIGITS[(usize::from(pair[0]) * 256 + usize::from(pair[1])) % 36]);
    hash.as_bytes().chunks(2).take(8).map(digit).collect()
}

/// The newest folder `prefix*-<id>` in `parent` that holds a file `run-<id>.<extension>`.
/// Names hold times, so the greatest name is the newest.
pub(super) fn newest_run(parent: &Path, prefix: &str, extension: &str) -> Option<PathBuf> {
    let folders = std::fs::read_dir(parent).ok()?;
    let mut names: Vec<String> = folders
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with(prefix))
        .collect();
    names.sort();
    let file = |name: &String| {
        let id = name.rsplit('-').next()?;
        let path = parent.join(name).join(format!("run-{id}.{extension}"));
        path.is_file().then_some(path)
    };
    names.iter().rev().find_map(file)
}

/// A command on a path that a user can paste into a shell.
pub(super) fn shell(words: &[&str], path: &Path) -> String {
    let path = path.display().to_string();
    let plain = path.chars().all(|c| c.is_alphanumeric() || "/._-".contains(c));
    let path = if plain { path } else { format!("'{}'", path.replace('\'', r"'\''")) };
    format!("{} {path}", words.join(" "))
}

#[cfg(test)]
pub(super) mod test_support {
    use super::*;
    use crate::Row;

    /// A run that makes the same bytes every time.
    pub(crate) fn run(directory: &Path, resumed_step: u64) -> Run {
        Run {
            directory: directory.to_path_buf(),
            name: "first".to_owned(),
            tracking: TrackingConfig {
                tags: vec!["glide".to_owned(), "test".to_owned()],
                group: Some("tests".to_owned()),
                notes: Some("a run of two steps".to_owned()),
                ..TrackingConfig::default()
            },
            config: serde_json::json!({
                "target": "org/name", "train": {"steps": 2, "seed": 0}, "draft": {"from": null},
                "optimizer": {"betas": [0.9, 0.95]}
            }),
            resumed_step,
            started: Moment { seconds: 1_700_000_000, nanos: 500_000_000 },
            host: "host".to_owned(),
            pid: 7,
            id: "abcd1234".to_owned(),
            environment: Environment::default(),
        }
    }

    /// Two scalars of a step, a second after the step before.
    pub(crate) fn row(step: u64) -> Row {
        Row {
            step,
            time: Moment { seconds: 1_700_000_000 + step, nanos: 0 },
            scalars: vec![
                ("train/loss".to_owned(), 4.0 / step as f64),
                ("held_out/acceptance_1".to_owned(), 0.25),
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_by_seed_and_have_eight_letters_or_digits() {
        let (one, two) = (run_id(b"one"), run_id(b"two"));
        assert_ne!(one, two);
        assert!(
            one.len() == 8 && one.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        );
    }

    #[test]
    fn commands_survive_a_shell() {
        assert_eq!(shell(&["wandb", "sync"], Path::new("runs/a-1")), "wandb sync runs/a-1");
        assert_eq!(shell(&["x"], Path::new("my runs/it's")), r"x 'my runs/it'\''s'");
    }

    #[test]
    fn the_newest_folder_with_a_file_is_found() {
        let dir = tempfile::tempdir().expect("tempdir");
        assert_eq!(newest_run(dir.path(), "run-", "log"), None);
        for (stamp, id, whole) in
            [("20240101", "b", true), ("20240102", "a", true), ("20240103", "c", false)]
        {
            let folder = dir.path().join(format!("run-{stamp}-{id}"));
            std::fs::create_dir(&folder).expect("folder");
            if whole {
                std::fs::write(folder.join(format!("run-{id}.log")), "").expect("file");
            }
        }
        let found = newest_run(dir.path(), "run-", "log").expect("a run");
        assert!(found.ends_with("run-20240102-a/run-a.log"));
    }
}
