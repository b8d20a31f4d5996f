//! What a report reads of a run: one directory of `longdraft train`, a curriculum's or a fit's directory
//! whose stages are such directories, or what `eval decode` measured alone.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use longdraft_records::decode::{DECODE_FILE, DecodeRecord};
use longdraft_records::{CONFIG_FILE, FIT_FILE, ROUND_PREFIX};
use longdraft_train::checkpoint::{CURRICULUM_FILE, CurriculumFile, StageEntry};
use serde_json::Value;

use super::axes::{Place, TrainingAxis};
use super::metrics_log::MetricsLog;
use super::series::Point;
use crate::error::{ReportError, Result};

const METRICS_FILE: &str = "metrics.jsonl";

/// One or more stages, trained one after another.
#[derive(Debug, Clone, Default)]
pub struct Run {
    /// Name of the directory.
    pub name: String,
    /// As given.
    pub folder: PathBuf,
    /// Each with at least one step; none where only decoding was measured.
    pub(crate) stages: Vec<Stage>,
    /// What `eval decode` measured, when it wrote here.
    pub decoding: Option<DecodeRecord>,
    /// What was skipped, as `file:line: cause` or `file: cause`.
    pub problems: Vec<String>,
    /// When the newest of its records was written.
    pub(crate) written: Option<SystemTime>,
}

#[derive(Debug, Clone)]
pub(crate) struct Stage {
    /// Name in the curriculum, and of the fit's round; none when the run is neither.
    pub(crate) name: Option<String>,
    /// The fit's round that it belongs to, from 1; 0 when the run is no fit.
    pub(crate) round: usize,
    /// What it logged.
    pub(crate) log: MetricsLog,
    /// Its configuration, when there is one.
    pub(crate) config: Option<Config>,
}

/// A composed configuration.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// As written.
    pub(crate) text: String,
    /// As read; none when the text is no YAML.
    pub(crate) value: Option<Value>,
}

impl Run {
    /// Reads run directories; runs of the same name are called by their whole path.
    ///
    /// # Errors
    /// - every directory that holds no metrics, with what was looked for
    pub fn open_all(folders: &[PathBuf]) -> Result<Vec<Self>> {
        let mut runs: Vec<Self> = Vec::new();
        let mut failures = Vec::new();
        for folder in folders {
            match Self::open(folder) {
                Ok(run) => runs.push(run),
                Err(cause) => failures.push(cause),
            }
        }
        if !failures.is_empty() {
            return Err(ReportError::NoRuns(failures));
        }
        Self::tell_apart(&mut runs);
        Ok(runs)
    }

    /// Calls runs of the same name by their whole path.
    pub fn tell_apart(runs: &mut [Self]) {
        let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
        for run in runs {
            if names.iter().filter(|name| **name == run.name).count() > 1 {
                run.name = run.folder.display().to_string();
            }
        }
    }

    /// An unreadable record is a problem, not a failure: the plots of the training stand alone.
    fn read_decoding(&mut self, folder: &Path) {
        match DecodeRecord::read(folder) {
            Ok(record) => self.decoding = Some(record),
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                return;
            }
            Err(error) => self.problems.push(format!("{DECODE_FILE}: {error}")),
        }
        self.note_time(&folder.join(DECODE_FILE));
    }

    fn note_time(&mut self, path: &Path) {
        let changed = std::fs::metadata(path).and_then(|file| file.modified()).ok();
        self.written = self.written.max(changed);
    }

    /// Reads what is there, and nothing of it need be.
    pub(crate) fn read(folder: &Path) -> Self {
        let mut run =
            Self { name: name_of(folder), folder: folder.to_path_buf(), ..Self::default() };
        run.read_decoding(folder);
        let rounds = rounds_of_fit(folder);
        if rounds.is_empty() {
            run.read_training(folder, (0, None));
        }
        for (number, round) in (1..).zip(&rounds) {
            let name = format!("round {number}");
            run.read_training(round, (number, (rounds.len() > 1).then_some(&name)));
            run.read_decoding(round);
        }
        run
    }

    /// The stages of a curriculum, or the one training of a folder; of a fit's round with its number and its name.
    fn read_training(&mut self, folder: &Path, (round, name): (usize, Option<&String>)) {
        let curriculum = folder.join(CURRICULUM_FILE);
        if !curriculum.is_file() {
            if folder.join(METRICS_FILE).is_file() {
                self.read_stage(folder, (round, name.cloned()));
            }
            return;
        }
        match read_curriculum(&curriculum) {
            Ok(entries) => {
                for StageEntry { name: own, output } in entries {
                    let name = name.map_or_else(|| own.clone(), |round| format!("{round}, {own}"));
                    let folder = folder.join(output);
                    // A fit that is under way begins its later stages by itself.
                    if round == 0 || folder.join(METRICS_FILE).is_file() {
                        self.read_stage(&folder, (round, Some(name)));
                    }
                }
            }
            Err(problem) => self.problems.push(problem),
        }
    }

    fn open(folder: &Path) -> std::result::Result<Self, String> {
        let run = Self::read(folder);
        if !run.stages.is_empty() || run.decoding.is_some() {
            return Ok(run);
        }
        let has_log =
            [METRICS_FILE, CURRICULUM_FILE].iter().any(|name| folder.join(name).is_file());
        let what = match (has_log, folder.is_dir()) {
            (true, _) => "no steps are logged".to_owned(),
            (false, is_folder) => {
                let what = if is_folder { "no metrics are there" } else { "no such directory" };
                format!("{what}; looked for {METRICS_FILE}, {CURRICULUM_FILE} and {DECODE_FILE}")
            }
        };
        let mut lines = vec![format!("{}: {what}", folder.display())];
        lines.extend(run.problems.into_iter().take(8));
        Err(lines.join("\n    "))
    }

    /// A stage that has not begun is a problem, not an error: the others are worth a report.
    fn read_stage(&mut self, folder: &Path, (round, name): (usize, Option<String>)) {
        let path = folder.join(METRICS_FILE);
        let mut log = match MetricsLog::read(&path) {
            Ok(log) => log,
            Err(error) => {
                self.problems.push(format!("{}: {error}", path.display()));
                return;
            }
        };
        self.problems.append(&mut log.problems);
        if log.steps.is_empty() {
            self.problems.push(format!("{}: no steps are logged", path.display()));
            return;
        }
        self.note_time(&path);
        let config = self.read_config(&folder.join(CONFIG_FILE));
        self.stages.push(Stage { name, round, log, config });
    }

    fn read_config(&mut self, path: &Path) -> Option<Config> {
        let text = match std::fs::read(path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => {
                self.problems.push(format!("{}: {error}", path.display()));
                return None;
            }
        };
        let value = match serde_saphyr::from_str::<Value>(&text) {
            Ok(value) => Some(value),
            Err(error) => {
                let text = error.to_string();
                let cause = text.lines().next().unwrap_or_default();
                self.problems.push(format!("{}: {cause}", path.display()));
                None
            }
        };
        Some(Config { text, value })
    }

    /// Name of a stage among all runs.
    pub(crate) fn stage_name(&self, stage: &Stage) -> String {
        match &stage.name {
            Some(name) => format!("{} / {name}", self.name),
            None => self.name.clone(),
        }
    }

    /// Every stage with where the stages before it ended.
    pub(crate) fn stages_on_axis(&self) -> impl Iterator<Item = (Place, &Stage)> {
        self.stages.iter().scan(Place::default(), |offset, stage| {
            let start = *offset;
            *offset = start + stage.log.end();
            Some((start, stage))
        })
    }

    /// Points of every stage, a segment each, moved to its place on the axis.
    pub(crate) fn segments(&self, points: impl Fn(&Stage) -> Vec<Point>) -> Vec<Vec<Point>> {
        let moved = |(start, stage): (Place, &Stage)| {
            let mut points = points(stage);
            points.iter_mut().for_each(|point| point.at = start + point.at);
            points
        };
        self.stages_on_axis().map(moved).collect()
    }
}

impl Stage {
    /// Tokens of the whole stage so far.
    pub(crate) fn tokens(&self) -> u64 {
        self.log.steps.last().map_or(0, |record| record.tokens)
    }

    pub(crate) fn configured(&self, keys: &[&str]) -> Option<&Value> {
        let value = self.config.as_ref()?.value.as_ref()?;
        keys.iter().try_fold(value, |value, key| value.get(key))
    }
}

/// Axes that all stages have records for, the page's first choice first. Logs of a step's speed alone
/// know of time.
pub(crate) fn training_axes(runs: &[Run]) -> Vec<TrainingAxis> {
    let mut stages = runs.iter().flat_map(|run| &run.stages);
    let mut axes = vec![TrainingAxis::Tokens, TrainingAxis::Steps];
    if stages.all(|stage| stage.log.seconds() > 0.0) {
        axes.push(TrainingAxis::Time);
    }
    axes
}

/// The runs of a fit's rounds that have begun.
fn rounds_of_fit(folder: &Path) -> Vec<PathBuf> {
    let number = |entry: std::fs::DirEntry| -> Option<(usize, PathBuf)> {
        let name = entry.file_name().into_string().ok()?;
        let number = name.strip_prefix(ROUND_PREFIX)?.parse().ok()?;
        let has_begun =
            [METRICS_FILE, CURRICULUM_FILE].iter().any(|name| entry.path().join(name).is_file());
        has_begun.then(|| (number, entry.path()))
    };
    if !folder.join(FIT_FILE).is_file() {
        return Vec::new();
    }
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut rounds: Vec<(usize, PathBuf)> = entries.filter_map(number).collect();
    rounds.sort();
    rounds.into_iter().map(|(_, folder)| folder).collect()
}

fn read_curriculum(path: &Path) -> std::result::Result<Vec<StageEntry>, String> {
    let fail = |cause: &dyn std::fmt::Display| format!("{}: {cause}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| fail(&error))?;
    let file: CurriculumFile = serde_json::from_str(&text).map_err(|error| fail(&error))?;
    Ok(file.stages)
}

/// The directory's own name, also of `.` and `..`.
fn name_of(folder: &Path) -> String {
    let absolute = std::fs::canonicalize(folder).unwrap_or_else(|_| folder.to_path_buf());
    let name = folder.file_name().or(absolute.file_name());
    name.map_or_else(|| folder.display().to_string(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, text: &str) {
        std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
        std::fs::write(path, text).expect("write");
    }

    const STEP: &str = "{\"step\":1,\"tokens\":10}\n";

    #[test]
    fn stages_of_a_curriculum_lie_one_after_another() {
        let dir = tempfile::tempdir().expect("tempdir");
        let stages = "{\"stages\": [{\"name\": \"base\", \"output\": \"a\"}, \
                      {\"name\": \"long\", \"output\": \"b\"}, {\"name\": \"cot\", \"output\": \"c\"}]}";
        write(&dir.path().join("curriculum.json"), stages);
        let held_out = "{\"step\":1,\"held_out\":{\"hard_loss\":2,\"soft_loss\":1}}\n";
        write(&dir.path().join("a/metrics.jsonl"), &format!("{STEP}{held_out}"));
        write(&dir.path().join("a/config.yaml"), "draft: {soft_weight: 0.25}\n");
        write(&dir.path().join("b/metrics.jsonl"), STEP);
        let run = Run::open(dir.path()).expect("two stages have metrics");
        let on_axis: Vec<_> = run
            .stages_on_axis()
            .map(|(start, stage)| (start.tokens, stage.name.as_deref(), stage.log.held_out.len()))
            .collect();
        assert_eq!(on_axis, [(0.0, Some("base"), 1), (10.0, Some("long"), 0)]);
        assert_eq!(run.problems.len(), 2, "{:?}", run.problems);
    }

    #[test]
    fn runs_without_metrics_are_named_together() {
        let dir = tempfile::tempdir().expect("tempdir");
        write(&dir.path().join("empty/metrics.jsonl"), "");
        write(&dir.path().join("bad/curriculum.json"), "{\"stages\": 3}");
        std::fs::create_dir(dir.path().join("bare")).expect("folder");
        let folders = ["empty", "bad", "bare", "absent"].map(|name| dir.path().join(name));
        let failure = Run::open_all(&folders).expect_err("nothing is there");
        let text = failure.to_string();
        for part in
            ["no steps are logged", "curriculum.json: invalid type", "looked for", "no such dir"]
        {
            assert!(text.contains(part), "{part} not in {text}");
        }
    }

    #[test]
    fn a_record_of_decoding_that_cannot_be_read_is_told() {
        let dir = tempfile::tempdir().expect("tempdir");
        write(&dir.path().join("metrics.jsonl"), STEP);
        for (bytes, cause) in [(&b"\xff{}"[..], "UTF-8"), (&b"{"[..], "EOF")] {
            std::fs::write(dir.path().join(DECODE_FILE), bytes).expect("write");
            let run = Run::open(dir.path()).expect("metrics are there");
            let is_told =
                |problem: &String| problem.starts_with(DECODE_FILE) && problem.contains(cause);
            assert!(run.problems.iter().any(is_told), "{:?}", run.problems);
        }
    }

    #[test]
    fn runs_of_the_same_name_are_told_apart() {
        let dir = tempfile::tempdir().expect("tempdir");
        let folders = ["a/run", "b/run", "c"].map(|name| dir.path().join(name));
        folders.iter().for_each(|folder| write(&folder.join("metrics.jsonl"), STEP));
        let runs = Run::open_all(&folders).expect("runs");
        assert!(runs[0].name.ends_with("run") && runs[0].name != runs[1].name);
        assert_eq!(runs[2].name, "c");
    }
}
