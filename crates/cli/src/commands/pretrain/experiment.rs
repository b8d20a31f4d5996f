//! `longdraft lm grid`: a grid of runs, several seeds each, scored in several ways.
//!
//! Every run lives in `output/NAME/seed-N`; what it came to is in `scores.json` there, and a second
//! call goes on after the last finished one.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use longdraft_configuration::{
    ConfigurationError, Problem, Validated, compose_as, compose_pretrain, read_pretrain,
};
use longdraft_models::bits_per_byte::Tail;
use longdraft_models::language_model::{LanguageModel, open as open_model};
use longdraft_models::weights::artifact::Embedding;
use longdraft_parallel::World;
use longdraft_pretrain::{Pretraining, build_artifact};
use longdraft_rules::{Problem as Broken, Rules};
use longdraft_train::stage::{Ending, ResumePolicy};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::table::Summary;
use super::{Progress, train, write_json};
use crate::cli::ExperimentArguments;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::ranks::Voice;
use crate::recording::quoted;

/// A grid.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Grid {
    /// Configuration of `lm train` that all runs share, relative to the grid.
    base: PathBuf,
    /// Folder of all runs.
    output: PathBuf,
    /// A run each.
    seeds: Vec<u64>,
    /// Changes of all runs.
    #[serde(default)]
    set: Vec<String>,
    /// What differs.
    runs: Vec<GridRun>,
    /// How every run is scored.
    evaluations: Vec<Evaluation>,
}

/// One line of the table.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GridRun {
    /// Names line and folder.
    name: String,
    /// Changes: dotted.key=value.
    #[serde(default)]
    set: Vec<String>,
}

/// Which weights are scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Weights {
    /// As trained.
    Live,
    /// From the artifact.
    #[default]
    Artifact,
    /// From an artifact whose embedding is f16.
    ArtifactF16Embedding,
}

/// One column of the table.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Evaluation {
    /// Names the column.
    name: String,
    /// Which weights.
    #[serde(default)]
    weights: Weights,
    /// Window in lengths of training.
    #[serde(default = "one")]
    window_factor: f64,
    /// Stride in windows; without one, windows do not overlap.
    #[serde(default)]
    stride_factor: Option<f64>,
}

fn one() -> f64 {
    1.0
}

impl Grid {
    fn problems(&self) -> Vec<Broken> {
        let mut rules = Rules::default();
        rules.require(!self.seeds.is_empty(), "seeds", "is empty");
        rules.require(!self.runs.is_empty(), "runs", "is empty");
        rules.require(!self.evaluations.is_empty(), "evaluations", "is empty");
        let plain = |name: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !name.is_empty() && !name.starts_with('.') && name.chars().all(allowed)
        };
        rules.require(
            self.runs.iter().all(|run| plain(&run.name)),
            "runs",
            "have names of letters, digits, -, _ and dots",
        );
        let names: HashSet<&str> = self.runs.iter().map(|run| run.name.as_str()).collect();
        rules.require(names.len() == self.runs.len(), "runs", "have names of their own");
        let columns: HashSet<&str> = scores_of(self).into_iter().chain(COSTS).collect();
        rules.require(
            columns.len() == self.evaluations.len() + COSTS.len(),
            "evaluations",
            "have names of their own, other than artifact_bytes, seconds and \
             tokens_per_second",
        );
        let factor = |factor: f64| factor > 0.0 && factor <= 64.0;
        rules.require(
            self.evaluations.iter().all(|e| {
                factor(e.window_factor) && e.stride_factor.is_none_or(|s| s > 0.0 && s <= 1.0)
            }),
            "evaluations",
            "need `window_factor` in 0 to 64 and `stride_factor` in 0 to 1",
        );
        rules.into_problems()
    }
}

/// Runs what is missing, then prints the table.
pub(crate) fn run(arguments: &ExperimentArguments, json: bool) -> Result<()> {
    let (grid, base) = open(&arguments.grid).map_err(ConfigurationError::from)?;
    for name in &arguments.only {
        if !grid.runs.iter().any(|run| run.name == *name) {
            return Err(Failure::usage(format!("there is no run `{name}` in the grid")));
        }
    }
    let wanted = |run: &&GridRun| arguments.only.is_empty() || arguments.only.contains(&run.name);
    let runs: Vec<&GridRun> = grid.runs.iter().filter(wanted).collect();
    let problems = problems_of_runs(&grid, &base, &runs, &arguments.overrides, false);
    if !problems.is_empty() {
        return Err(ConfigurationError::from(problems).into());
    }
    let interrupts = Interrupts::listen();
    let mut lines: Vec<Line> = Vec::new();
    for run in runs {
        let mut columns: BTreeMap<String, Vec<Option<f64>>> = BTreeMap::new();
        for &seed in &grid.seeds {
            let output = grid.output.join(&run.name).join(format!("seed-{seed}"));
            let mut set = changes(&grid, run, &arguments.overrides);
            set.push(format!("output={}", as_yaml(&output.display().to_string())));
            set.push(format!("train.seed={seed}"));
            let mut progress = Progress::new(interrupts.clone(), Voice::alone());
            let Some(scores) = scores(&grid, &base, &set, &output, &mut progress)? else {
                if json {
                    outjson!({ "output": grid.output, "finished": false });
                } else {
                    outln!("stopped: the same command goes on from there");
                }
                return Err(interrupts.failure());
            };
            for (name, value) in scores {
                columns.entry(name).or_default().push(value.as_f64());
            }
        }
        lines.push((run.name.clone(), columns));
    }
    let table = to_json(&grid, &lines);
    write_json(&grid.output.join("table.json"), &table)?;
    if json {
        outln!("{table}");
    } else {
        print(&grid, &lines);
    }
    Ok(())
}

/// A text as a value of YAML; a plain one stays as it is, for scores are known by it.
fn as_yaml(text: &str) -> String {
    if quoted(text) == text { text.to_owned() } else { json!(text).to_string() }
}

/// A grid and the path of what its runs share.
fn open(path: &Path) -> Validated<(Grid, PathBuf)> {
    let grid: Grid = compose_as(path, &[], Grid::problems)?;
    let base = path.parent().unwrap_or(Path::new(".")).join(&grid.base);
    Ok((grid, base))
}

/// What a run changes, the user's own changes last.
fn changes(grid: &Grid, run: &GridRun, overrides: &[String]) -> Vec<String> {
    grid.set.iter().chain(&run.set).chain(overrides).cloned().collect()
}

/// What is wrong with any run of a grid; nothing is run.
pub(crate) fn problems(
    path: &Path,
    overrides: &[String],
    keys_alone: bool,
) -> Validated<Vec<Problem>> {
    let (grid, base) = open(path)?;
    let runs: Vec<&GridRun> = grid.runs.iter().collect();
    Ok(problems_of_runs(&grid, &base, &runs, overrides, keys_alone))
}

/// Every problem once, however many runs share it.
fn problems_of_runs(
    grid: &Grid,
    base: &Path,
    runs: &[&GridRun],
    overrides: &[String],
    keys_alone: bool,
) -> Vec<Problem> {
    let mut all: Vec<Problem> = Vec::new();
    for run in runs {
        let found = match compose_pretrain(base, &changes(grid, run, overrides)) {
            Err(problems) => problems,
            Ok(located) => {
                let data = &located.config.data;
                let mut problems = Vec::new();
                if data.held_out.is_empty() || data.tokenizer.is_none() {
                    problems.push(Problem::in_file(base, NOT_SCORED));
                }
                if !keys_alone {
                    problems.extend(located.input_problems());
                }
                problems
            }
        };
        for problem in found {
            if !all.contains(&problem) {
                all.push(problem);
            }
        }
    }
    all
}

/// What runs without held-out text are told.
const NOT_SCORED: &str = "an experiment needs `data.held_out` and `data.tokenizer`";

/// Scores of one run, by column; `None` if the user stopped it.
fn scores(
    grid: &Grid,
    base: &Path,
    set: &[String],
    output: &Path,
    progress: &mut Progress,
) -> Result<Option<Map<String, Value>>> {
    let file = output.join("scores.json");
    let config = read_pretrain(base, set)?;
    let key = json!({ "set": set, "evaluations": grid.evaluations, "configuration": config });
    if let Ok(text) = std::fs::read_to_string(&file)
        && let Ok(Value::Object(mut known)) = serde_json::from_str::<Value>(&text)
        && known.get("of") == Some(&key)
        && let Some(Value::Object(scores)) = known.remove("scores")
        && COSTS.iter().all(|column| scores.contains_key(*column))
    {
        return Ok(Some(scores));
    }
    errln!("== {}", output.display());
    let trained = train(config, ResumePolicy::Strict, &World::single(), progress)?;
    if trained.ending != Ending::Finished {
        return Ok(None);
    }
    let mut scores = Map::new();
    for evaluation in &grid.evaluations {
        let value = score(&trained.run, evaluation, output)?;
        scores.insert(evaluation.name.clone(), json!(value));
    }
    let summary = trained.to_json();
    let artifact = output.join(super::ARTIFACT);
    let bytes = std::fs::metadata(&artifact).map_err(Failure::at(&artifact))?;
    scores.insert("artifact_bytes".into(), json!(bytes.len()));
    scores.insert("seconds".into(), summary["seconds"].clone());
    scores.insert("tokens_per_second".into(), summary["median_tokens_per_second"].clone());
    write_json(&file, &json!({ "of": key, "scores": scores, "run": summary }))?;
    Ok(Some(scores))
}

fn score(run: &Pretraining, evaluation: &Evaluation, output: &Path) -> Result<f64> {
    let stream = run.held_out().ok_or_else(|| Failure::usage(NOT_SCORED))?;
    let config = run.config();
    let model = weights(run, evaluation.weights, output)?;
    let length = config.data.row_tokens as f64;
    let window = ((length * evaluation.window_factor).round() as usize).max(1);
    let batch_tokens = config.evaluation.batch_tokens;
    let score = match evaluation.stride_factor {
        None => stream.score_plain(&model, window, batch_tokens)?,
        Some(factor) => {
            let stride = ((window as f64 * factor).round() as usize).clamp(1, window);
            stream.score_sliding(&model, (window, stride), Tail::Score, batch_tokens)?
        }
    };
    Ok(score.bits_per_byte())
}

fn weights(run: &Pretraining, weights: Weights, output: &Path) -> Result<LanguageModel> {
    let live = run.final_model()?;
    let file = match weights {
        Weights::Live => return Ok(live),
        Weights::Artifact => output.join(super::ARTIFACT),
        Weights::ArtifactF16Embedding => {
            let file = output.join("model-f16-embedding.ldq");
            let mut config = run.config().artifact.clone();
            config.quantise.embedding = Embedding::F16;
            build_artifact(&live, run.tokenizer_hash(), &config, &file)?;
            file
        }
    };
    Ok(open_model(&file)?.0.frozen()?)
}

/// Columns beside the scores.
const COSTS: [&str; 3] = ["artifact_bytes", "seconds", "tokens_per_second"];

/// A run's name and its values by column, one a seed; none where a score is not finite.
type Line = (String, BTreeMap<String, Vec<Option<f64>>>);

fn scores_of(grid: &Grid) -> Vec<&str> {
    grid.evaluations.iter().map(|evaluation| evaluation.name.as_str()).collect()
}

/// Differences to the first line, seed by seed: what seeds have in common falls out.
fn differences(grid: &Grid, lines: &[Line]) -> Vec<Line> {
    let Some((_, first)) = lines.first() else { return Vec::new() };
    let of_line = |(name, columns): &Line| {
        let of_column = |column: &str| {
            let (own, reference) = (columns.get(column)?, first.get(column)?);
            let values = own.iter().zip(reference);
            let values = values.map(|(own, reference)| Some((*own)? - (*reference)?));
            Some((column.to_owned(), values.collect()))
        };
        (name.clone(), scores_of(grid).into_iter().filter_map(of_column).collect())
    };
    lines.iter().skip(1).map(of_line).collect()
}

/// Of the seeds that have a value.
fn summary(values: &[Option<f64>]) -> Option<Summary> {
    Summary::of(&values.iter().copied().flatten().collect::<Vec<_>>())
}

fn summaries(columns: &BTreeMap<String, Vec<Option<f64>>>) -> Value {
    let mut line = Map::new();
    for (column, values) in columns {
        if let Some(mean) = summary(values) {
            line.insert(
                column.clone(),
                json!({ "n": mean.n, "mean": mean.mean, "deviation": mean.deviation,
                        "half_width_95": mean.half_width, "values": values }),
            );
        }
    }
    Value::Object(line)
}

fn to_json(grid: &Grid, lines: &[Line]) -> Value {
    let of = |lines: &[Line]| -> Map<String, Value> {
        lines.iter().map(|(name, columns)| (name.clone(), summaries(columns))).collect()
    };
    let against = lines.first().map(|(name, _)| name);
    json!({
        "seeds": grid.seeds, "runs": of(lines),
        "against": against, "differences": of(&differences(grid, lines)),
    })
}

fn print(grid: &Grid, lines: &[Line]) {
    outln!("bits per byte, mean of {} seeds ± 95 % interval", grid.seeds.len());
    print_lines(&[scores_of(grid), COSTS.to_vec()].concat(), lines);
    if let (Some((first, _)), true) = (lines.first(), lines.len() > 1) {
        outln!("\ndifference to {first} of the same seed");
        print_lines(&scores_of(grid), &differences(grid, lines));
    }
}

fn print_lines(columns: &[&str], lines: &[Line]) {
    let width = lines.iter().map(|line| line.0.len()).max().unwrap_or(0).max(3);
    let head: Vec<String> = columns.iter().map(|name| format!("{name:>20}")).collect();
    outln!("{:width$} {}", "run", head.join(" "));
    for (name, values) in lines {
        let cells = columns.iter().map(|column| {
            let mean = summary(values.get(*column).map_or(&[], Vec::as_slice));
            let text = mean.map_or_else(|| "-".to_owned(), |mean| mean.to_string());
            format!("{text:>20}")
        });
        outln!("{name:width$} {}", cells.collect::<Vec<_>>().join(" "));
    }
}
