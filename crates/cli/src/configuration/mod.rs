//! YAML files and command-line arguments into checked configurations.
//!
//! Files compose through their `defaults` list, arguments change the result, references are
//! replaced, then everything is checked against the types; all problems are told at once, each
//! with the line that caused it.

mod check;
mod compose;
mod inputs;
mod interpolate;
mod origins;
mod overrides;
mod schema;
mod show;
mod tree;

use std::fmt;
use std::path::{Path, PathBuf};

use longdraft_rules::{Check, Checked, Problem as Broken};
use longdraft_train::checkpoint::StartFrom;
use longdraft_train::config::{References, TrainConfig};
use longdraft_train::inputs::{Purpose, Reach};
use longdraft_train::pretrain::PretrainConfig;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::failure::{Failure, Result};
use overrides::{Change, Override};
use tree::{Node, Origin, Tree};

pub(crate) use inputs::{input_problems, stage_input_problems};
pub(crate) use schema::{json_schema, markdown, markdown_of, schema_of, schema_places};
pub(crate) use show::show;

/// The composed configuration in a run directory.
pub(crate) const CONFIG_FILE: &str = "config.yaml";

/// How the configuration file in a run directory begins.
pub(crate) const RECORD_MARK: &str = "# longdraft ";

/// Something that is wrong with a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    origin: Option<Origin>,
    /// Dotted.
    key: Option<String>,
    text: String,
}

impl Problem {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self { origin: None, key: None, text: text.into() }
    }

    pub(crate) fn at(origin: &Origin, text: impl fmt::Display) -> Self {
        Self { origin: Some(origin.clone()), ..Self::new(text.to_string()) }
    }

    /// A problem with a whole file.
    pub(crate) fn in_file(path: &Path, text: impl fmt::Display) -> Self {
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
    pub(crate) fn to_json(&self) -> Value {
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
pub(crate) type Validated<T> = std::result::Result<T, Vec<Problem>>;

/// A configuration that broke no rule before the program itself changed a key of it.
///
/// # Errors
/// - the change breaks a rule
pub(crate) fn recheck<T: Check>(config: T) -> Result<Checked<T>> {
    let told = |broken: Vec<Broken>| {
        Failure::problems(&broken.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    Checked::new(config).map_err(told)
}

/// All problems as one failure of use.
pub(crate) fn failure(problems: &[Problem]) -> Failure {
    Failure::problems(&problems.iter().map(ToString::to_string).collect::<Vec<_>>())
}

/// A configuration with the origins of its values.
#[derive(Debug, Clone)]
pub(crate) struct Located {
    pub(crate) config: TrainConfig,
    tree: Node,
}

/// The configuration of a pretraining run with the origins of its values.
#[derive(Debug, Clone)]
pub(crate) struct LocatedPretrain {
    pub(crate) config: PretrainConfig,
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

/// Composes a file and arguments.
pub(crate) fn compose(path: &Path, arguments: &[String]) -> Validated<Composed> {
    let root = compose::read_file(path).map_err(|problem| vec![problem])?;
    composed(root, arguments)
}

/// As [`compose`]; every problem is an exit 2.
pub(crate) fn read(path: &Path, arguments: &[String]) -> Result<Composed> {
    compose(path, arguments).map_err(|problems| failure(&problems))
}

/// Tries what every stage opens; every problem is an exit 2.
pub(crate) fn require_inputs(composed: &Composed, reach: Reach) -> Result<()> {
    let problems = input_problems(composed, reach, Purpose::Training);
    if problems.is_empty() { Ok(()) } else { Err(failure(&problems)) }
}

/// As [`read`] for one stage; of a curriculum `stage=NAME` among the arguments picks it.
pub(crate) fn read_stage(path: &Path, arguments: &[String]) -> Result<TrainConfig> {
    read_located_stage(path, arguments).map(|located| located.config)
}

/// As [`read_stage`], with the origins of its values.
pub(crate) fn read_located_stage(path: &Path, arguments: &[String]) -> Result<Located> {
    let picked = arguments.iter().find_map(|argument| argument.strip_prefix("stage="));
    let others: Vec<String> =
        arguments.iter().filter(|argument| !argument.starts_with("stage=")).cloned().collect();
    pick_stage(read(path, &others)?, picked, &path.display().to_string())
}

/// The stage that is picked of what goes by `name`.
pub(crate) fn pick_stage(composed: Composed, picked: Option<&str>, name: &str) -> Result<Located> {
    match (composed, picked) {
        (Composed::Stage(located), None) => Ok(*located),
        (Composed::Stage(_), Some(picked)) => {
            Err(Failure::usage(format!("{name}: there are no stages, so no `{picked}`")))
        }
        (Composed::Curriculum { stages, .. }, picked) => {
            let names: Vec<String> = stages.iter().map(|stage| stage.name.clone()).collect();
            let found = stages.into_iter().find(|stage| Some(stage.name.as_str()) == picked);
            found.map(|stage| stage.located).ok_or_else(|| {
                let names = names.join("`, `");
                Failure::usage(format!("{name}: which stage? there are `{names}`"))
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
    /// `lm train`: its `data.train` lists paths.
    Pretrain,
    /// `lm grid`: a base and runs.
    Grid,
}

/// Tells by a composed file's keys what it configures.
pub(crate) fn kind_of(path: &Path) -> Validated<Kind> {
    let root = compose::read_file(path).map_err(|problem| vec![problem])?;
    if root.child("base").is_some() && root.child("runs").is_some() {
        return Ok(Kind::Grid);
    }
    let paths = root.at("data.train").is_some_and(|node| match &node.value {
        Tree::List(items) => items.iter().any(|item| matches!(item.value, Tree::Scalar(_))),
        _ => false,
    });
    Ok(if paths { Kind::Pretrain } else { Kind::Train })
}

/// Composes the configuration of a pretraining run.
pub(crate) fn compose_pretrain(path: &Path, arguments: &[String]) -> Validated<LocatedPretrain> {
    let (root, mut config, tree) = read_tree(path, arguments, PretrainConfig::problems)?;
    config.references = origins::references(&root, &tree)?;
    Ok(LocatedPretrain { config, tree })
}

/// As [`compose_pretrain`], and opens its shards and tokenizer; every problem is an exit 2.
pub(crate) fn read_pretrain(path: &Path, arguments: &[String]) -> Result<PretrainConfig> {
    let located = compose_pretrain(path, arguments).map_err(|problems| failure(&problems))?;
    let problems = located.input_problems();
    if problems.is_empty() { Ok(located.config) } else { Err(failure(&problems)) }
}

/// Composes a configuration of any type.
pub(crate) fn compose_as<T: JsonSchema + DeserializeOwned>(
    path: &Path,
    arguments: &[String],
    problems: fn(&T) -> Vec<Broken>,
) -> Validated<(T, Node)> {
    read_tree(path, arguments, problems).map(|(_, config, tree)| (config, tree))
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
pub(crate) fn recorded_text(path: &Path, key: &str) -> Result<Option<String>> {
    if !path.is_file() {
        return Ok(None);
    }
    let root = compose::read_file(path).map_err(|problem| failure(&[problem]))?;
    let has_reference = |node: &Node| node.to_json().as_str().is_some_and(|t| t.contains("${"));
    let node = match root.at(key) {
        Some(node) if has_reference(node) => {
            let resolved = interpolate::resolve(&root).map_err(|problems| failure(&problems))?;
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
pub(crate) fn file_text<T: serde::Serialize>(
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
pub(crate) fn parse(text: &str, name: &str, arguments: &[String]) -> Result<Composed> {
    let root = compose::read_text(text, name).map_err(|problem| failure(&[problem]))?;
    composed(root, arguments).map_err(|problems| failure(&problems))
}

/// The stages of a text that goes by `name` and needs no other file; without `stages` it is one.
pub(crate) fn parse_stages(
    text: &str,
    name: &str,
    arguments: &[String],
) -> Result<Vec<LocatedStage>> {
    Ok(match parse(text, name, arguments)? {
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
    let tree = interpolate::resolve(tree)?;
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
    problems.extend(handing_on(&result));
    if problems.is_empty() {
        Ok(Composed::Curriculum { output, stages: result })
    } else {
        Err(problems)
    }
}

/// What is wrong between stages that are sound each for itself.
fn handing_on(stages: &[LocatedStage]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (index, stage) in stages.iter().enumerate() {
        let LocatedStage { name, start_from, located } = stage;
        let output = &located.config.output;
        let same = |other: &&LocatedStage| other.located.config.output == *output;
        if let Some(other) = stages[..index].iter().find(same) {
            let text = format!(
                "stages `{}` and `{name}` have one `output`, {}: give each its own",
                other.name,
                output.display()
            );
            problems.push(Problem::of_key(&located.tree, "output", text));
        }
        let before = index.checked_sub(1).and_then(|before| stages.get(before));
        if let Some(before) = before.filter(|_| *start_from == StartFrom::Best) {
            let (run, data) = (&before.located.config.train, &before.located.config.data);
            if !run.keep_best || (data.held_out.is_empty() && data.held_out_rows == 0) {
                let text = format!(
                    "stage `{name}` starts from the best draft of `{}`, which keeps none: that needs \
                     held-out rows (`data.held_out_rows`) and `train.keep_best: true`",
                    before.name
                );
                problems.push(Problem::of_key(&before.located.tree, "train.keep_best", text));
            }
        }
    }
    problems
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
