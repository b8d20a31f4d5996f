//! YAML files and command-line arguments into checked configurations.
//!
//! Files compose through their `defaults` list, arguments change the result, references are
//! replaced, then everything is checked against the types; all problems are told at once, each
//! with the line that caused it.

#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

mod check;
mod compose;
mod curriculum;
mod error;
mod inputs;
mod interpolate;
mod origins;
mod overrides;
mod place;
mod schema;
mod show;
mod tree;
mod validate;

use std::fmt;
use std::path::{Path, PathBuf};

use longdraft_pretrain::PretrainConfig;
use longdraft_rules::{Check, Checked, Problem as Broken};
use longdraft_train::checkpoint::StartFrom;
use longdraft_train::config::{References, TrainConfig};
use longdraft_train::inputs::{Purpose, Reach};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use overrides::Override;
use tree::{Node, Origin, Tree};

pub use error::{ConfigurationError, Result};
pub use inputs::{input_problems, stage_input_problems};
pub use schema::{json_schema, markdown_of, schema_of, schema_places};
pub use show::show;

/// Something that is wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    origin: Option<Origin>,
    /// Dotted.
    key: Option<String>,
    text: String,
    /// Whether the configuration itself is not there.
    is_missing_file: bool,
}

impl Problem {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self { origin: None, key: None, text: text.into(), is_missing_file: false }
    }

    pub(crate) fn at(origin: &Origin, text: impl fmt::Display) -> Self {
        Self { origin: Some(origin.clone()), ..Self::new(text.to_string()) }
    }

    /// A problem with a whole file.
    pub fn in_file(path: &Path, text: impl fmt::Display) -> Self {
        Self::at(&Origin::WholeFile(path.to_path_buf()), text)
    }

    /// A problem with a key, at its place in a tree.
    fn of_key(tree: &Node, key: &str, text: impl fmt::Display) -> Self {
        Self { key: Some(key.to_owned()), ..Self::at(tree.origin_of(key), text) }
    }

    fn context(mut self, text: impl fmt::Display) -> Self {
        self.text = format!("{} {text}", self.text);
        self
    }

    /// Place, key and message apart.
    pub fn to_json(&self) -> Value {
        let (mut file, mut line, mut argument) = (None, None, None);
        match &self.origin {
            Some(Origin::File { path, line: at }) => (file, line) = (Some(path), Some(*at)),
            Some(Origin::WholeFile(path)) => file = Some(path),
            Some(Origin::CommandLine(text)) => argument = Some(text),
            None => {}
        }
        json!({
            "file": file, "line": line, "argument": argument, "key": self.key, "message": self.text,
        })
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Some(origin) => write!(f, "{origin}: {}", self.text),
            None => f.write_str(&self.text),
        }
    }
}

/// Of a configuration, or all that is wrong with it.
pub type Validated<T> = std::result::Result<T, Vec<Problem>>;

/// A configuration that broke no rule before the program itself changed a key of it.
///
/// # Errors
/// - the change breaks a rule
pub fn recheck<T: Check>(config: T) -> Result<Checked<T>> {
    let told = |broken: &Broken| Problem::new(broken.to_string());
    Checked::new(config)
        .map_err(|broken: Vec<Broken>| broken.iter().map(told).collect::<Vec<_>>().into())
}

/// A configuration with the origins of its values.
#[derive(Debug, Clone)]
pub struct Located<T = TrainConfig> {
    /// As it was composed.
    pub config: T,
    tree: Node,
}

/// The same of a pretraining run.
pub type LocatedPretrain = Located<PretrainConfig>;

/// One stage of a curriculum.
#[derive(Debug, Clone)]
pub struct LocatedStage {
    /// Names it and its folder.
    pub name: String,
    /// Which draft of the stage before it starts from.
    pub start_from: StartFrom,
    /// What it is trained with.
    pub located: Located,
}

/// What a file came to.
#[derive(Debug, Clone)]
pub enum Composed {
    /// One stage.
    Stage(Box<Located>),
    /// Several, under one output folder.
    Curriculum {
        /// Run directory of the whole.
        output: PathBuf,
        /// In order.
        stages: Vec<LocatedStage>,
    },
}

/// Composes a file and arguments.
///
/// # Errors
/// - the file cannot be read; keys, types, references or rules are broken: all of it
pub fn compose(path: &Path, arguments: &[String]) -> Validated<Composed> {
    let root = compose::read_file(path).map_err(|problem| vec![problem])?;
    composed(root, arguments)
}

/// As [`compose()`], with the problems as one error.
///
/// # Errors
/// - as [`compose()`]
pub fn read(path: &Path, arguments: &[String]) -> Result<Composed> {
    Ok(compose(path, arguments)?)
}

/// Tries what every stage opens.
///
/// # Errors
/// - some of it cannot be opened
pub fn require_inputs(composed: &Composed, reach: Reach) -> Result<()> {
    let problems = input_problems(composed, reach, Purpose::Training);
    if problems.is_empty() { Ok(()) } else { Err(problems.into()) }
}

/// As [`read`] for one stage; of a curriculum `stage=NAME` among the arguments picks it.
///
/// # Errors
/// - as [`compose()`] and [`pick_stage`]
pub fn read_stage(path: &Path, arguments: &[String]) -> Result<TrainConfig> {
    read_located_stage(path, arguments).map(|located| located.config)
}

/// As [`read_stage`], with the origins of its values.
///
/// # Errors
/// - as [`read_stage`]
pub fn read_located_stage(path: &Path, arguments: &[String]) -> Result<Located> {
    let (picked, others) = picked_stage(arguments);
    pick_stage(read(path, &others)?, picked, &path.display().to_string())
}

/// As [`read_located_stage`] of a file beside others: if it has no stages, it does not matter which one is picked.
///
/// # Errors
/// - as [`read_stage`]
pub fn read_located_beside(path: &Path, arguments: &[String]) -> Result<Located> {
    let (picked, others) = picked_stage(arguments);
    pick_stage_beside(read(path, &others)?, picked, &path.display().to_string())
}

/// The last `stage=NAME` of some arguments, and the other arguments.
pub fn picked_stage(arguments: &[String]) -> (Option<&str>, Vec<String>) {
    let is_other = |argument: &&String| !argument.starts_with("stage=");
    let others = arguments.iter().filter(is_other).cloned().collect();
    let picked = arguments.iter().rev().find_map(|argument| argument.strip_prefix("stage="));
    (picked, others)
}

/// As [`pick_stage`] of what stands beside others: if it has no stages, it does not matter which one is picked.
///
/// # Errors
/// - as [`pick_stage`]
pub fn pick_stage_beside(composed: Composed, picked: Option<&str>, name: &str) -> Result<Located> {
    let has_stages = matches!(composed, Composed::Curriculum { .. });
    pick_stage(composed, picked.filter(|_| has_stages), name)
}

/// The stage that is picked of what goes by `name`.
///
/// # Errors
/// - no stage of that name is there, or there are several and none is picked
pub fn pick_stage(composed: Composed, picked: Option<&str>, name: &str) -> Result<Located> {
    match (composed, picked) {
        (Composed::Stage(located), None) => Ok(*located),
        (Composed::Stage(_), Some(picked)) => {
            Err(ConfigurationError::NoStages { name: name.to_owned(), picked: picked.to_owned() })
        }
        (Composed::Curriculum { stages, .. }, picked) => {
            let names: Vec<String> = stages.iter().map(|stage| stage.name.clone()).collect();
            let found = stages.into_iter().find(|stage| Some(stage.name.as_str()) == picked);
            let name = name.to_owned();
            found
                .map(|stage| stage.located)
                .ok_or(ConfigurationError::WhichStage { name, stages: names })
        }
    }
}

/// What a file configures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `train`: a stage or a curriculum.
    Train,
    /// `lm train`: it has a `model`, or its `data.train` lists paths, and no key that a draft's
    /// training alone has.
    Pretrain,
    /// `lm grid`: a base and runs.
    Grid,
}

/// Tells by a composed file's keys what it configures.
///
/// # Errors
/// - the file cannot be read
pub fn kind_of(path: &Path) -> Validated<Kind> {
    let root = compose::read_file(path).map_err(|problem| vec![problem])?;
    if root.child("base").is_some() && root.child("runs").is_some() {
        return Ok(Kind::Grid);
    }
    let paths = root.at("data.train").is_some_and(|node| match &node.value {
        Tree::List(items) => items.iter().any(|item| matches!(item.value, Tree::Scalar(_))),
        _ => false,
    });
    let of_drafts = ["target", "draft", "teacher", "stages"];
    let of_drafts = of_drafts.iter().any(|key| root.child(key).is_some());
    let has_sizes = root.child("model").is_some_and(|node| matches!(node.value, Tree::Map(_)));
    Ok(if (paths || has_sizes) && !of_drafts { Kind::Pretrain } else { Kind::Train })
}

/// Composes the configuration of a pretraining run.
///
/// # Errors
/// - as [`compose()`]
pub fn compose_pretrain(path: &Path, arguments: &[String]) -> Validated<LocatedPretrain> {
    let (root, mut config, tree) = read_tree(path, arguments, PretrainConfig::problems)?;
    config.references = origins::references(&root, &tree)?;
    Ok(LocatedPretrain { config, tree })
}

/// As [`compose_pretrain`], and opens its shards and tokenizer.
///
/// # Errors
/// - as [`compose()`], or one of them cannot be opened
pub fn read_pretrain(path: &Path, arguments: &[String]) -> Result<PretrainConfig> {
    let located = compose_pretrain(path, arguments)?;
    let problems = located.input_problems();
    if problems.is_empty() { Ok(located.config) } else { Err(problems.into()) }
}

/// Composes a configuration of any type, whose own rules are `problems`.
///
/// # Errors
/// - as [`compose()`]
pub fn compose_as<T: JsonSchema + DeserializeOwned>(
    path: &Path,
    arguments: &[String],
    problems: fn(&T) -> Vec<Broken>,
) -> Validated<T> {
    read_tree(path, arguments, problems).map(|(_, config, _)| config)
}

/// The composed tree, what it configures, and the tree without references.
fn read_tree<T: JsonSchema + DeserializeOwned>(
    path: &Path,
    arguments: &[String],
    problems: fn(&T) -> Vec<Broken>,
) -> Validated<(Node, T, Node)> {
    let mut root = compose::read_file(path).map_err(|problem| vec![problem])?;
    let changes = arguments.iter().map(|argument| Override::parse(argument)?.apply(&mut root));
    let wrong: Vec<Problem> = changes.filter_map(std::result::Result::err).collect();
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let (config, tree) = checked(&root, problems)?;
    Ok((root, config, tree))
}

/// One text of a run's own configuration file, its references replaced again; none if the file or
/// the key is not there.
///
/// # Errors
/// - the file is no configuration, or a variable that it refers to is not set
pub fn recorded_text(path: &Path, key: &str) -> Result<Option<String>> {
    if !path.is_file() {
        return Ok(None);
    }
    let root = compose::read_file(path)?;
    let has_reference = |node: &Node| node.to_json().as_str().is_some_and(|t| t.contains("${"));
    let node = match root.at(key) {
        Some(node) if has_reference(node) => {
            let resolved = interpolate::resolve_as_texts(&root)?;
            resolved.at(key).cloned()
        }
        other => other.cloned(),
    };
    Ok(node.and_then(|node| node.to_json().as_str().map(str::to_owned)))
}

/// A configuration as a file that composes to it again: values of the environment are written as
/// their references.
///
/// # Errors
/// - it cannot be written as YAML
pub fn file_text<T: serde::Serialize>(
    config: &T,
    references: &References,
) -> std::result::Result<String, String> {
    let plain = serde_saphyr::to_string(config).map_err(|error| error.to_string())?;
    if references.is_empty() && !plain.contains("${") {
        return Ok(plain);
    }
    serde_saphyr::to_string(&references.file_record(config)).map_err(|error| error.to_string())
}

/// As [`read`] for a text that goes by `name`.
///
/// # Errors
/// - as [`compose()`]
pub fn parse(text: &str, name: &str, arguments: &[String]) -> Result<Composed> {
    let root = compose::read_text(text, name)?;
    Ok(composed(root, arguments)?)
}

/// The stages of a text that goes by `name` and needs no other file; without `stages` it is one.
///
/// # Errors
/// - as [`compose()`]
pub fn parse_stages(text: &str, name: &str, arguments: &[String]) -> Result<Vec<LocatedStage>> {
    Ok(match parse(text, name, arguments)? {
        Composed::Curriculum { stages, .. } => stages,
        Composed::Stage(located) => vec![LocatedStage {
            name: "draft".to_owned(),
            start_from: StartFrom::default(),
            located: *located,
        }],
    })
}

fn composed(mut root: Node, arguments: &[String]) -> Validated<Composed> {
    let mut problems = Vec::new();
    let mut changes = Vec::new();
    for argument in arguments {
        match Override::parse(argument) {
            Ok(change) => changes.push(change),
            Err(problem) => problems.push(problem),
        }
    }
    let several = root.child("stages").is_some();
    // A curriculum's own keys; the others go over every stage.
    let own = |change: &Override| {
        !several || change.key == "output" || change.key.split('.').next() == Some("stages")
    };
    for change in changes.iter().filter(|change| own(change)) {
        problems.extend(change.apply(&mut root).err());
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    match root.remove("stages") {
        None => Ok(Composed::Stage(Box::new(located(&root)?))),
        Some(stages) => {
            let common: Vec<Override> = changes.into_iter().filter(|change| !own(change)).collect();
            curriculum::composed(&root, stages, &common)
        }
    }
}

/// Resolves references and checks one stage's tree.
fn located(tree: &Node) -> Validated<Located> {
    let (mut config, resolved) = checked(tree, TrainConfig::problems)?;
    config.references = origins::references(tree, &resolved)?;
    Ok(Located { config, tree: resolved })
}

/// Resolves references and checks a tree against a type and its own rules, as far as the rules can
/// be asked where values are of a wrong type.
fn checked<T: JsonSchema + DeserializeOwned>(
    tree: &Node,
    rules: fn(&T) -> Vec<Broken>,
) -> Validated<(T, Node)> {
    let tree = check::with_texts::<T>(interpolate::resolve(tree)?, tree);
    let (config, mut problems, wrong) = match check::typed::<T>(&tree) {
        Ok(config) => (Some(config), Vec::new(), Vec::new()),
        Err(problems) => {
            let (rest, wrong) = check::without_faults::<T>(&tree);
            (rest, problems, wrong)
        }
    };
    let is_sound =
        |problem: &Broken| !problem.keys().any(|key| wrong.iter().any(|wrong| wrong.touches(key)));
    let broken = config.as_ref().map(rules).unwrap_or_default().into_iter().filter(is_sound);
    problems.extend(broken.map(|problem| Problem::of_key(&tree, problem.key.as_str(), &problem)));
    match config {
        Some(config) if problems.is_empty() => Ok((config, tree)),
        _ => Err(problems),
    }
}

#[cfg(test)]
mod tests;
