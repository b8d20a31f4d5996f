//! `key=value`, `+key=value`, `++key=value` and `~key` arguments.

use serde_json::Value;

use super::Problem;
use super::compose::canonical;
use super::interpolate::shortened;
use super::tree::{Node, Origin, Tree};

/// Parts of a key. Every one takes stack; the deepest key of a configuration has less than ten.
const DEEPEST: usize = 64;

/// One argument, taken apart.
#[derive(Debug, Clone)]
pub(crate) struct Override {
    /// Dotted.
    pub(crate) key: String,
    pub(crate) change: Change,
    /// As it was given.
    pub(crate) text: String,
}

#[derive(Debug, Clone)]
pub(crate) enum Change {
    /// Sets a key, whether or not a file sets it.
    Set(Node),
    /// Sets a key that no file sets.
    Add(Node),
    /// Takes a key away.
    Remove,
}

impl Override {
    pub(crate) fn parse(text: &str) -> Result<Self, Problem> {
        let shown = shortened(text);
        let wrong = |problem: String| {
            Problem::new(format!(
                "override `{shown}`: {problem} (overrides are written dotted.key=value, \
                 +new.key=value or ~key, e.g. train.steps=100)"
            ))
        };
        let (key, change) = if let Some(key) = text.strip_prefix('~') {
            if key.contains('=') {
                return Err(wrong("`~` takes a key without a value".into()));
            }
            (key, Change::Remove)
        } else {
            let (key, value) =
                text.split_once('=').ok_or_else(|| wrong("there is no `=`".into()))?;
            let value = Node::parse_value(value)
                .map_err(|problem| wrong(format!("bad value: {problem}")))?;
            let value = from_command_line(value, &without_password(text));
            match (key.strip_prefix("++"), key.strip_prefix('+')) {
                (Some(key), _) => (key, Change::Set(value)),
                (None, Some(key)) => (key, Change::Add(value)),
                (None, None) => (key, Change::Set(value)),
            }
        };
        if key.split('.').count() > DEEPEST {
            return Err(wrong(format!("a key has more than {DEEPEST} parts, and none is as deep")));
        }
        if key.split('.').any(str::is_empty) {
            return Err(wrong("a key is empty".into()));
        }
        Ok(Self { key: canonical(key), change, text: without_password(text) })
    }

    /// Changes a tree. It fails where the key cannot be set, is there already (`+`) or is not there (`~`).
    pub(crate) fn apply(&self, root: &mut Node) -> Result<(), Problem> {
        let origin = Origin::CommandLine(self.text.clone());
        let (parent, last) = self.key.rsplit_once('.').unwrap_or(("", &self.key));
        let wrong = |problem: String| Problem::new(format!("override `{}`: {problem}", self.text));
        let mut place = root;
        for part in parent.split('.').filter(|part| !part.is_empty()) {
            if place.is_null() {
                place.value = Tree::Map(Vec::new());
            }
            if place.child(part).is_none() {
                let Tree::Map(entries) = &mut place.value else {
                    return Err(wrong(format!("there is no `{part}` to change")));
                };
                if matches!(self.change, Change::Remove) {
                    return Err(wrong(format!("there is no key `{}`", self.key)));
                }
                entries.push((part.to_owned(), Node::new(Tree::Map(Vec::new()), origin.clone())));
            }
            place = place.child_mut(part).ok_or_else(|| wrong(format!("there is no `{part}`")))?;
        }
        if place.is_null() {
            place.value = Tree::Map(Vec::new());
        }
        match &self.change {
            Change::Remove => match place.remove(last) {
                Some(_) => Ok(()),
                None => Err(wrong(format!("there is no key `{}`", self.key))),
            },
            Change::Add(_)
                if place.child(last).is_some_and(|node| !matches!(node.value, Tree::List(_))) =>
            {
                let old = &place.origin_of(last);
                Err(wrong(format!("`{}` is set already ({old}); leave the `+` out", self.key)))
            }
            Change::Add(value) | Change::Set(value) => {
                let appends = matches!(self.change, Change::Add(_));
                set(place, last, value.clone(), appends).map_err(wrong)
            }
        }
    }
}

/// Sets a key of a map or an item of a list; `appends` adds to a list that stands there.
fn set(place: &mut Node, key: &str, value: Node, appends: bool) -> Result<(), String> {
    if let Some(old) = place.child_mut(key) {
        match &mut old.value {
            Tree::List(items) if appends => match value.value {
                Tree::List(new) => items.extend(new),
                _ => items.push(value),
            },
            _ => *old = value,
        }
        return Ok(());
    }
    match &mut place.value {
        Tree::Map(entries) => {
            entries.push((key.to_owned(), value));
            Ok(())
        }
        Tree::List(items) => Err(format!("`{key}` is none of the list's {} items", items.len())),
        Tree::Scalar(_) => Err(format!("`{key}` is set inside something that has no keys")),
    }
}

/// An argument as it may be shown: `scheme://user:password@host` loses what stands before the `@`.
fn without_password(text: &str) -> String {
    let Some((before, after)) = text.split_once("://") else { return text.to_owned() };
    let authority = after.find('/').unwrap_or(after.len());
    match after[..authority].rfind('@') {
        Some(at) => format!("{before}://...{}", &after[at..]),
        None => text.to_owned(),
    }
}

/// Every part of an argument's value comes from the argument.
fn from_command_line(node: Node, text: &str) -> Node {
    let value = match node.value {
        Tree::Scalar(Value::String(value)) if value.is_empty() => Tree::Scalar(Value::Null),
        Tree::Scalar(value) => Tree::Scalar(value),
        Tree::List(items) => {
            Tree::List(items.into_iter().map(|item| from_command_line(item, text)).collect())
        }
        Tree::Map(entries) => Tree::Map(
            entries.into_iter().map(|(key, item)| (key, from_command_line(item, text))).collect(),
        ),
    };
    Node::new(value, Origin::CommandLine(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn applied(text: &str, arguments: &[&str]) -> Result<Value, String> {
        let mut node = Node::parse(text, Path::new("a.yaml")).expect("YAML");
        for argument in arguments {
            let parsed = Override::parse(argument).map_err(|p| p.to_string())?;
            parsed.apply(&mut node).map_err(|p| p.to_string())?;
        }
        Ok(node.to_json())
    }

    const TEXT: &str = "a: {b: 1}\nl: [{name: x, v: 1}, {name: y, v: 2}]\n";

    #[test]
    fn keys_are_set_added_removed() {
        let value =
            applied(TEXT, &["a.b=2", "+a.c=[1, two]", "d.e.f=", "l.1.v=5", "l.x.v=6", "~a.b"]);
        assert_eq!(
            value.expect("applied"),
            serde_json::json!({
                "a": {"c": [1, "two"]}, "d": {"e": {"f": null}},
                "l": [{"name": "x", "v": 6}, {"name": "y", "v": 5}],
            })
        );
        let appended = applied(TEXT, &["+l={name: z}"]).expect("appended");
        assert_eq!(appended["l"][2]["name"], "z");
        let noted = applied(TEXT, &["a.b=retry of #3", "+a.c=#1", "+a.d='x' # y", "+a.e=[z]"]);
        let expected = serde_json::json!({
            "b": "retry of #3", "c": "#1", "d": "'x' # y", "e": ["z"],
        });
        assert_eq!(noted.expect("applied")["a"], expected);
        assert_eq!(applied(TEXT, &["++a.b=3"]).expect("forced")["a"]["b"], 3);
    }

    #[test]
    fn what_cannot_be_done_is_told() {
        let fails = |argument: &str| applied(TEXT, &[argument]).expect_err("problem");
        assert!(fails("+a.b=2").contains("set already (a.yaml:1)"), "{}", fails("+a.b=2"));
        assert!(fails("~a.x").contains("no key `a.x`"));
        assert!(fails("~q.x").contains("no key `q.x`"));
        assert!(fails("a").contains("no `=`"));
        assert!(fails("a..b=1").contains("empty"));
        assert!(
            fails("a.b.c=1").contains("no keys") || fails("a.b.c=1").contains("no `"),
            "{}",
            fails("a.b.c=1")
        );
        assert!(fails("l.7=1").contains("none of the list's 2"));
        assert!(fails("a=[1").contains("bad value"));
        let deep = fails(&format!("{}a=1", "a.".repeat(15_000)));
        assert!(deep.contains("more than 64 parts") && deep.len() < 400, "{deep}");
        assert_eq!(without_password("a=http://me:secret@host/x"), "a=http://...@host/x");
    }
}
