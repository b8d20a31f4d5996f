//! Stages of a curriculum: their own keys over what they share.

use std::path::{Path, PathBuf};

use longdraft_train::checkpoint::StartFrom;
use serde_json::Value;

use super::overrides::{Change, Override};
use super::tree::{Node, Origin, Tree};
use super::{
    Composed, Located, LocatedStage, Problem, Validated, check, compose, interpolate, located,
    origins,
};

/// Every stage of a curriculum, checked each for itself and for what it hands on.
pub(crate) fn composed(common: &Node, stages: Node, changes: &[Override]) -> Validated<Composed> {
    let origin = stages.origin.clone();
    let Tree::List(items) = stages.value else {
        return Err(vec![Problem::at(&origin, "`stages` is a list")]);
    };
    if items.is_empty() {
        return Err(vec![Problem::at(&origin, "`stages` is empty")]);
    }
    let written = match common.child("output").map(Node::to_json) {
        Some(Value::String(output)) => PathBuf::from(output),
        _ => return Err(vec![Problem::at(&common.origin, "`output` is missing")]),
    };
    let output = output(common, changes)?;
    let mut problems = Vec::new();
    let mut trees = Vec::new();
    for item in items {
        match stage_tree(common, item, &written) {
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
            Ok(mut located) => {
                let before = result.last().filter(|_| start_from != StartFrom::Scratch);
                problems.extend(before.and_then(|before| follow(before, &mut located)));
                result.push(LocatedStage { name, start_from, located });
            }
            Err(more) => problems
                .extend(more.into_iter().map(|p| p.context(format_args!("(stage `{name}`)")))),
        }
    }
    problems.extend(handing_on(&result));
    reserve(&mut result);
    if problems.is_empty() {
        Ok(Composed::Curriculum { output, stages: result })
    } else {
        Err(problems)
    }
}

/// The folder of the whole, without references.
fn output(common: &Node, changes: &[Override]) -> Validated<PathBuf> {
    let mut shared = common.clone();
    for change in changes {
        // One that fits no stage is told of there.
        let _ = over_all(change).apply(&mut shared);
    }
    let resolved = interpolate::resolve_key(&shared, "output")?;
    let origin = shared.origin_of("output");
    let text = resolved.as_ref().map(Node::to_json);
    let Some(text) = text.as_ref().and_then(Value::as_str).filter(|text| !text.is_empty()) else {
        return Err(vec![Problem::at(origin, "`output` is not a folder's name")]);
    };
    let entries = resolved.iter().map(|node| ("output".to_owned(), node.clone())).collect();
    origins::references(&shared, &Node::new(Tree::Map(entries), origin.clone()))?;
    Ok(PathBuf::from(text))
}

/// Gives a stage what its draft leaves open of the network that the stage before trains.
fn follow(before: &LocatedStage, stage: &mut Located) -> Option<Problem> {
    let known = before.located.config.draft.method.keys();
    let draft = &mut stage.config.draft;
    match draft.method.with(draft.method.left_open(&known)) {
        Ok(method) => draft.method = method,
        Err(error) => return Some(Problem::of_key(&stage.tree, "draft", error)),
    }
    None
}

/// Keeps stages that begin with the same source from what others of them hold out, so that their drafts are measured on
/// text that none has seen.
fn reserve(stages: &mut [LocatedStage]) {
    let held_out: Vec<_> = stages
        .iter()
        .map(|stage| {
            let data = &stage.located.config.data;
            let rows = if data.held_out.is_empty() { data.held_out_rows } else { 0 };
            (data.train.first().cloned(), rows.saturating_mul(data.row_tokens))
        })
        .collect();
    for (index, stage) in stages.iter_mut().enumerate() {
        let data = &mut stage.located.config.data;
        let others = held_out.iter().enumerate().filter(|(other, _)| *other != index);
        let same = others.filter(|(_, of)| of.0.as_ref() == data.train.first());
        if data.reserved_tokens.is_none() {
            data.reserved_tokens = same.map(|(_, (_, tokens))| *tokens).max();
        }
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
fn stage_tree(common: &Node, item: Node, output: &Path) -> Result<StageTree, Problem> {
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
        let change = over_all(change);
        let failed: Vec<Problem> =
            stages.iter_mut().filter_map(|stage| change.apply(&mut stage.tree).err()).collect();
        if failed.len() == stages.len() {
            problems.extend(failed.into_iter().next());
        }
    }
}

/// A change as it goes over stages: a key may be set in some of them and not in others.
fn over_all(change: &Override) -> Override {
    match &change.change {
        Change::Add(value) if !matches!(value.value, Tree::List(_)) => {
            Override { change: Change::Set(value.clone()), ..change.clone() }
        }
        _ => change.clone(),
    }
}
