//! YAML files and command-line arguments into checked configurations.
//!
//! Files compose through their `defaults` list, arguments change the result, references are
//! replaced, then everything is checked against the types; all problems are told at once, each
//! with the line that caused it.

mod check;
mod compose;
mod interpolate;
mod overrides;
mod schema;
mod show;
mod tree;

use std::fmt;
use std::path::{Path, PathBuf};

use longdraft_train::config::TrainConfig;
use longdraft_train::curriculum::StartFrom;
use longdraft_train::pretrain::PretrainConfig;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::failure::{Failure, Result};
use overrides::{Change, Override};
use tree::{Node, Origin, Tree};

pub(crate) use schema::{json_schema, markdown, markdown_of, schema_of};
pub(crate) use show::show;

/// Something that is wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem(String);

impl Problem {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(crate) fn at(origin: &Origin, text: impl fmt::Display) -> Self {
        Self(format!("{origin}: {text}"))
    }

    fn context(self, text: impl fmt::Display) -> Self {
        Self(format!("{} {text}", self.0))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// All problems as one failure of use.
fn failure(problems: &[Problem]) -> Failure {
    Failure::problems(&problems.iter().map(ToString::to_string).collect::<Vec<_>>())
}

/// A configuration with the origins of its values.
#[derive(Debug, Clone)]
pub(crate) struct Located {
    pub(crate) config: TrainConfig,
    tree: Node,
}

/// One stage of a curriculum.
#[derive(Debug, Clone)]
pub(crate) struct LocatedStage {
    pub(crate) name: String,
    /// Which draft of the stage before it starts from.
    pub(crate) start_from: StartFrom,
    pub(crate) located: Located,
}

/// What a file came to.
#[derive(Debug, Clone)]
pub(crate) enum Composed {
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

/// Composes a file and arguments; every problem is an exit 2.
pub(crate) fn read(path: &Path, arguments: &[String]) -> Result<Composed> {
    let root = compose::read_file(path).map_err(|problem| failure(&[problem]))?;
    composed(root, arguments).map_err(|problems| failure(&problems))
}

/// As [`read`] for one stage; of a curriculum `stage=NAME` among the arguments picks it.
pub(crate) fn read_stage(path: &Path, arguments: &[String]) -> Result<TrainConfig> {
    let picked = arguments.iter().find_map(|argument| argument.strip_prefix("stage="));
    let others: Vec<String> =
        arguments.iter().filter(|argument| !argument.starts_with("stage=")).cloned().collect();
    match (read(path, &others)?, picked) {
        (Composed::Stage(located), None) => Ok(located.config),
        (Composed::Stage(_), Some(name)) => {
            let problem = format!("{}: there are no stages, so no `{name}`", path.display());
            Err(Failure::usage(problem))
        }
        (Composed::Curriculum { stages, .. }, picked) => {
            let names: Vec<String> = stages.iter().map(|stage| stage.name.clone()).collect();
            let found = stages.into_iter().find(|stage| Some(stage.name.as_str()) == picked);
            found.map(|stage| stage.located.config).ok_or_else(|| {
                let (path, names) = (path.display(), names.join("`, `"));
                Failure::usage(format!("{path}: which stage? there are `{names}`"))
                    .hint("add stage=NAME")
            })
        }
    }
}

/// What a file configures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `train`: a stage or a curriculum.
    Train,
    /// `pretrain`: its `data.train` lists paths.
    Pretrain,
    /// `experiment`: a base and runs.
    Grid,
}

/// Tells by a composed file's keys what it configures.
pub(crate) fn kind_of(path: &Path) -> Result<Kind> {
    let root = compose::read_file(path).map_err(|problem| failure(&[problem]))?;
    if root.child("base").is_some() && root.child("runs").is_some() {
        return Ok(Kind::Grid);
    }
    let paths = root.at("data.train").is_some_and(|node| match &node.value {
        Tree::List(items) => items.iter().any(|item| matches!(item.value, Tree::Scalar(_))),
        _ => false,
    });
    Ok(if paths { Kind::Pretrain } else { Kind::Train })
}

/// Composes the configuration of a pretraining run; every problem is an exit 2.
pub(crate) fn read_pretrain(path: &Path, arguments: &[String]) -> Result<PretrainConfig> {
    read_as(path, arguments, PretrainConfig::problems)
}

/// Composes a configuration of any type.
pub(crate) fn read_as<T: JsonSchema + DeserializeOwned>(
    path: &Path,
    arguments: &[String],
    problems: fn(&T) -> Vec<String>,
) -> Result<T> {
    let mut root = compose::read_file(path).map_err(|problem| failure(&[problem]))?;
    let changes = arguments.iter().map(|argument| Override::parse(argument)?.apply(&mut root));
    let wrong: Vec<Problem> = changes.filter_map(std::result::Result::err).collect();
    if !wrong.is_empty() {
        return Err(failure(&wrong));
    }
    let (config, _) = checked(&root, problems).map_err(|problems| failure(&problems))?;
    Ok(config)
}

/// The stages of a text that goes by `name` and needs no other file; without `stages` it is one.
pub(crate) fn parse_stages(
    text: &str,
    name: &str,
    arguments: &[String],
) -> Result<Vec<LocatedStage>> {
    let root = compose::read_text(text, name).map_err(|problem| failure(&[problem]))?;
    let composed = composed(root, arguments).map_err(|problems| failure(&problems))?;
    Ok(match composed {
        Composed::Curriculum { stages, .. } => stages,
        Composed::Stage(located) => vec![LocatedStage {
            name: "draft".to_owned(),
            start_from: StartFrom::default(),
            located: *located,
        }],
    })
}

fn composed(mut root: Node, arguments: &[String]) -> std::result::Result<Composed, Vec<Problem>> {
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
            curriculum(&root, stages, &common)
        }
    }
}

/// Resolves references and checks one stage's tree.
fn located(tree: &Node) -> std::result::Result<Located, Vec<Problem>> {
    let (config, tree) = checked(tree, TrainConfig::problems)?;
    Ok(Located { config, tree })
}

/// Resolves references and checks a tree against a type and its own rules.
fn checked<T: JsonSchema + DeserializeOwned>(
    tree: &Node,
    problems: fn(&T) -> Vec<String>,
) -> std::result::Result<(T, Node), Vec<Problem>> {
    let tree = interpolate::resolve(tree)?;
    let config: T = check::typed(&tree)?;
    let problems: Vec<Problem> = problems(&config)
        .into_iter()
        .map(|text| {
            // The first key that a problem names is where to look.
            let key = text.split('`').nth(1).unwrap_or_default();
            let key = key.split(':').next().unwrap_or_default();
            Problem::at(tree.origin_of(key), text.as_str())
        })
        .collect();
    if problems.is_empty() { Ok((config, tree)) } else { Err(problems) }
}

fn curriculum(
    common: &Node,
    stages: Node,
    changes: &[Override],
) -> std::result::Result<Composed, Vec<Problem>> {
    let origin = stages.origin.clone();
    let Tree::List(items) = stages.value else {
        return Err(vec![Problem::at(&origin, "`stages` is a list")]);
    };
    if items.is_empty() {
        return Err(vec![Problem::at(&origin, "`stages` is empty")]);
    }
    let output = match common.child("output").map(Node::to_json) {
        Some(Value::String(output)) => PathBuf::from(output),
        _ => return Err(vec![Problem::at(&common.origin, "`output` is missing")]),
    };
    let mut problems = Vec::new();
    let mut trees = Vec::new();
    for item in items {
        match stage_tree(common, item, &output) {
            Ok(tree) => trees.push(tree),
            Err(problem) => problems.push(problem),
        }
    }
    apply_to_all(changes, &mut trees, &mut problems);
    let mut result: Vec<LocatedStage> = Vec::new();
    for StageTree { name, start_from, tree, origin } in trees {
        if result.iter().any(|stage| stage.name == name) {
            problems.push(Problem::at(&origin, format!("two stages are named `{name}`")));
        }
        match located(&tree) {
            Ok(located) => result.push(LocatedStage { name, start_from, located }),
            Err(more) => problems
                .extend(more.into_iter().map(|p| p.context(format_args!("(stage `{name}`)")))),
        }
    }
    if problems.is_empty() {
        Ok(Composed::Curriculum { output, stages: result })
    } else {
        Err(problems)
    }
}

struct StageTree {
    name: String,
    start_from: StartFrom,
    tree: Node,
    origin: Origin,
}

/// A stage's keys over its defaults over the curriculum's.
fn stage_tree(common: &Node, item: Node, output: &Path) -> std::result::Result<StageTree, Problem> {
    let origin = item.origin.clone();
    if !matches!(item.value, Tree::Map(_)) {
        return Err(Problem::at(&origin, "a stage is a map of keys"));
    }
    let mut own = compose::with_defaults(item)?;
    let name = match own.remove("name").map(|node| node.to_json()) {
        Some(Value::String(name)) if is_folder_name(&name) => name,
        Some(other) => {
            return Err(Problem::at(
                &origin,
                format!("{other} cannot be a stage's `name`: letters, digits, - and _"),
            ));
        }
        None => return Err(Problem::at(&origin, "a stage needs a `name`")),
    };
    let start_from = match own.remove("start_from") {
        None => StartFrom::default(),
        Some(node) => check::typed(&node).map_err(|_| {
            Problem::at(&node.origin, "`start_from` is `last`, `best` or `scratch`")
        })?,
    };
    let mut tree = common.clone();
    let stage_output =
        Node::new(Tree::Scalar(output.join(&name).display().to_string().into()), origin.clone());
    tree.merge(Node::new(Tree::Map(vec![("output".into(), stage_output)]), origin.clone()));
    tree.merge(own);
    Ok(StageTree { name, start_from, tree, origin })
}

fn is_folder_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    !name.is_empty() && name.chars().all(plain)
}

/// Arguments go over every stage; one that fits no stage is a problem.
fn apply_to_all(changes: &[Override], stages: &mut [StageTree], problems: &mut Vec<Problem>) {
    for change in changes {
        let change = match &change.change {
            // A key may be set in some stages and not in others.
            Change::Add(value) if !matches!(value.value, Tree::List(_)) => {
                let set = Change::Set(value.clone());
                &Override { change: set, ..change.clone() }
            }
            _ => change,
        };
        let failed: Vec<Problem> =
            stages.iter_mut().filter_map(|stage| change.apply(&mut stage.tree).err()).collect();
        if failed.len() == stages.len() {
            problems.extend(failed.into_iter().next());
        }
    }
}

#[cfg(test)]
mod tests;
