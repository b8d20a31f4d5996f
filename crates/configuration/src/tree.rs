//! Configuration values that remember where they were written.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use serde_saphyr::Spanned;

use super::Problem;

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A line of a file, from 1.
    File { path: PathBuf, line: u64 },
    /// A file as a whole.
    WholeFile(PathBuf),
    /// An argument, as it was given.
    CommandLine(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::WholeFile(path) => write!(f, "{}", path.display()),
            Self::CommandLine(argument) => write!(f, "command line `{argument}`"),
        }
    }
}

/// A value with its origin.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Node {
    pub(crate) value: Tree,
    pub(crate) origin: Origin,
}

/// A YAML value; maps keep their order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Tree {
    Scalar(Value),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

impl Node {
    /// Reads YAML text that goes by `path`.
    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, Problem> {
        // Only `true` and `false` are booleans: a stage may be named `y`, a field `on`.
        let options = serde_saphyr::options! { strict_booleans: true };
        let parsed: Spanned<Raw> = serde_saphyr::from_str_with_options(text, options)
            .map_err(|error| unreadable(&error, path))?;
        Ok(parsed.value.located(parsed.referenced.line(), path))
    }

    /// Reads a value that stands for itself, as an argument or a variable gives it: what would be a
    /// comment in a file is part of it.
    pub(crate) fn parse_value(text: &str) -> Result<Self, Problem> {
        let path = Path::new("value");
        let whole = || {
            let origin = Origin::File { path: path.to_path_buf(), line: 1 };
            Self::new(Tree::Scalar(text.trim().into()), origin)
        };
        match Self::parse(text, path) {
            Ok(node) if matches!(node.value, Tree::Scalar(_)) && has_comment(text) => Ok(whole()),
            Err(_) if has_comment(text) => Ok(whole()),
            parsed => parsed,
        }
    }

    pub(crate) fn new(value: Tree, origin: Origin) -> Self {
        Self { value, origin }
    }

    /// The value without origins.
    pub(crate) fn to_json(&self) -> Value {
        match &self.value {
            Tree::Scalar(value) => value.clone(),
            Tree::List(items) => Value::Array(items.iter().map(Self::to_json).collect()),
            Tree::Map(entries) => {
                let entries = entries.iter().map(|(key, node)| (key.clone(), node.to_json()));
                Value::Object(entries.collect::<Map<_, _>>())
            }
        }
    }

    /// One child: a key of a map, or an index or a `name:` of a list's items.
    pub(crate) fn child(&self, key: &str) -> Option<&Self> {
        match &self.value {
            Tree::Map(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, node)| node),
            Tree::List(items) => items.get(index_of(items, key)?),
            Tree::Scalar(_) => None,
        }
    }

    /// As [`Self::child`], to change it.
    pub(crate) fn child_mut(&mut self, key: &str) -> Option<&mut Self> {
        match &mut self.value {
            Tree::Map(entries) => entries.iter_mut().find(|(k, _)| k == key).map(|(_, node)| node),
            Tree::List(items) => {
                let index = index_of(items, key)?;
                items.get_mut(index)
            }
            Tree::Scalar(_) => None,
        }
    }

    /// What lies in it, each with its key or index.
    pub(crate) fn children(&self) -> Vec<(String, &Self)> {
        match &self.value {
            Tree::Scalar(_) => Vec::new(),
            Tree::List(items) => (0..).map(|i: usize| i.to_string()).zip(items).collect(),
            Tree::Map(entries) => entries.iter().map(|(key, node)| (key.clone(), node)).collect(),
        }
    }

    /// A dotted key.
    pub(crate) fn at(&self, key: &str) -> Option<&Self> {
        key.split('.').try_fold(self, |node, part| node.child(part))
    }

    /// The origin of a dotted key, or of the nearest thing around it.
    pub(crate) fn origin_of(&self, key: &str) -> &Origin {
        let mut node = self;
        for part in key.split('.') {
            match node.child(part) {
                Some(child) => node = child,
                None => break,
            }
        }
        &node.origin
    }

    /// Takes an entry out of a map.
    pub(crate) fn remove(&mut self, key: &str) -> Option<Self> {
        match &mut self.value {
            Tree::Map(entries) => {
                let index = entries.iter().position(|(k, _)| k == key)?;
                Some(entries.remove(index).1)
            }
            Tree::List(items) => {
                let index = index_of(items, key)?;
                Some(items.remove(index))
            }
            Tree::Scalar(_) => None,
        }
    }

    pub(crate) fn is_null(&self) -> bool {
        matches!(self.value, Tree::Scalar(Value::Null))
    }

    /// Lays `over` on top: maps are joined key by key, everything else is replaced.
    pub(crate) fn merge(&mut self, over: Self) {
        match (&mut self.value, over.value) {
            (Tree::Map(entries), Tree::Map(new)) => {
                for (key, node) in new {
                    match entries.iter_mut().find(|(k, _)| *k == key) {
                        Some((_, old)) => old.merge(node),
                        None => entries.push((key, node)),
                    }
                }
            }
            (_, value) => {
                self.value = value;
                self.origin = over.origin;
            }
        }
    }
}

/// Whether a value stands in quotes.
pub(crate) fn is_quoted(text: &str) -> bool {
    let text = text.trim();
    ['"', '\'']
        .iter()
        .any(|quote| text.len() > 1 && text.starts_with(*quote) && text.ends_with(*quote))
}

/// Whether YAML would cut something off a value that is neither quoted nor a list, a map or a block.
fn has_comment(text: &str) -> bool {
    let text = text.trim();
    let is_plain = !is_quoted(text) && !text.starts_with(['[', '{', '|', '>']);
    is_plain && (text.starts_with('#') || text.contains(" #") || text.contains("\t#"))
}

/// The dotted key of what lies in another one, which is empty at the top.
pub(crate) fn inside(key: &str, name: &str) -> String {
    if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") }
}

/// A mistake in words for users, where those of the YAML reader name its own options.
fn in_words(error: &serde_saphyr::Error) -> Option<String> {
    use serde_saphyr::Error;
    use serde_saphyr::budget::BudgetBreach;
    Some(match error.without_snippet() {
        Error::DuplicateMappingKey { key: Some(key), .. } => {
            format!("the key `{key}` stands there twice")
        }
        Error::DuplicateMappingKey { .. } => "a key stands there twice".to_owned(),
        Error::NonFiniteFloat { value, .. } => format!("`{value}` is no finite number"),
        Error::RecursiveReferencesRequireWeakTypes { .. } => {
            "an alias stands inside of the value that it names".to_owned()
        }
        Error::Budget { breach: BudgetBreach::Depth { .. }, .. } => {
            "it is nested too deeply".to_owned()
        }
        Error::Budget { breach: BudgetBreach::Documents { .. }, .. } => {
            "it holds several documents".to_owned()
        }
        Error::Budget { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. } => {
            "it is too large: too many values, those of aliases counted every time".to_owned()
        }
        Error::AliasError { error, .. } => in_words(error)?,
        _ => return None,
    })
}

/// A mistake of the YAML itself, in one line.
fn unreadable(error: &serde_saphyr::Error, path: &Path) -> Problem {
    let text = in_words(error).unwrap_or_else(|| error.without_snippet().to_string());
    let mut text = text.lines().next().unwrap_or_default();
    text = text.strip_prefix("error: ").unwrap_or(text);
    let Some(place) = error.location() else { return Problem::in_file(path, text) };
    let (line, column) = (place.line(), place.column());
    // The place is told in the way of all problems.
    for told in
        [format!("line {line} column {column}: "), format!("line {line}, column {column}: ")]
    {
        text = text.strip_prefix(told.as_str()).unwrap_or(text);
    }
    let at = format!(" at line {line}, column {column}");
    let text = text.strip_suffix(at.as_str()).unwrap_or(text);
    let origin = Origin::File { path: path.to_path_buf(), line };
    Problem::at(&origin, format!("not YAML: {text} (column {column})"))
}

/// Items of a list go by their place, or by their `name`.
fn index_of(items: &[Node], key: &str) -> Option<usize> {
    key.parse().ok().filter(|index| *index < items.len()).or_else(|| {
        items.iter().position(|item| {
            let name = item.child("name").map(|name| &name.value);
            matches!(name, Some(Tree::Scalar(Value::String(name))) if name == key)
        })
    })
}

/// What the YAML reader gives, with lines but without a file.
enum Raw {
    Scalar(Value),
    List(Vec<Spanned<Raw>>),
    Map(Vec<(Spanned<String>, Spanned<Raw>)>),
}

impl Raw {
    fn located(self, line: u64, path: &Path) -> Node {
        let value = match self {
            Self::Scalar(value) => Tree::Scalar(value),
            Self::List(items) => Tree::List(
                items
                    .into_iter()
                    .map(|item| item.value.located(item.referenced.line(), path))
                    .collect(),
            ),
            // A value is found where its key stands.
            Self::Map(entries) => Tree::Map(
                entries
                    .into_iter()
                    .map(|(key, item)| {
                        let line = key.referenced.line();
                        (key.value, item.value.located(line, path))
                    })
                    .collect(),
            ),
        };
        Node::new(value, Origin::File { path: path.to_path_buf(), line })
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

macro_rules! visit_scalars {
    ($($visit:ident: $scalar:ty),*) => {$(
        fn $visit<E>(self, value: $scalar) -> Result<Raw, E> {
            Ok(Raw::Scalar(value.into()))
        }
    )*};
}

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    visit_scalars!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);

    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Null))
    }

    fn visit_none<E>(self) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Null))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Raw, D::Error> {
        Raw::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Raw::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        Ok(Raw::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Node {
        Node::parse(text, Path::new("a.yaml")).expect("YAML")
    }

    #[test]
    fn every_value_knows_its_line() {
        let node = parse("a: 1\nb:\n  c: [x, 2.5]\n  d:\n    e: ~\n");
        assert_eq!(node.origin_of("a").to_string(), "a.yaml:1");
        assert_eq!(node.origin_of("b.c").to_string(), "a.yaml:3");
        assert_eq!(node.origin_of("b.d.e").to_string(), "a.yaml:5");
        // What does not exist is looked for where it should stand.
        assert_eq!(node.origin_of("b.d.f.g").to_string(), "a.yaml:4");
        assert_eq!(
            node.to_json(),
            serde_json::json!({"a": 1, "b": {"c": ["x", 2.5], "d": {"e": null}}})
        );
    }

    #[test]
    fn maps_are_joined_and_lists_replaced() {
        let mut base = parse("a: {b: 1, c: [1, 2]}\nd: 4\n");
        base.merge(parse("a: {c: [3], e: 5}\nd: {f: 6}\n"));
        assert_eq!(
            base.to_json(),
            serde_json::json!({"a": {"b": 1, "c": [3], "e": 5}, "d": {"f": 6}})
        );
    }

    #[test]
    fn list_items_go_by_place_or_name() {
        let node = parse("stages: [{name: base, x: 1}, {name: long, x: 2}]");
        let value = |key: &str| node.at(key).map(Node::to_json);
        assert_eq!(value("stages.1.x"), value("stages.long.x"));
        assert_eq!(value("stages.2.x"), None);
    }
}
