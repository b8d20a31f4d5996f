//! `${other.key}`, `${.sibling}` and `${oc.env:VAR,default}` references, as OmegaConf writes them.

use serde_json::Value;

use super::Problem;
use super::tree::{Node, Tree, inside, is_quoted};

/// Values and bytes of text that a configuration may come to. References to references double it with
/// every line; a configuration of a thousand sources has less than a tenth of this.
const MOST_EXPANDED: usize = 1 << 20;

/// References to references. People write two or three; every one takes stack.
const MOST_REFERENCES: usize = 64;

/// Maps and lists inside of each other, those that references bring included.
const DEEPEST: usize = 512;

/// Replaces every reference; all that cannot be replaced is reported.
pub(crate) fn resolve(root: &Node) -> Result<Node, Vec<Problem>> {
    Resolver::new(root, false).finish(root, "")
}

/// As [`resolve`], but values of the environment stay texts.
pub(crate) fn resolve_as_texts(root: &Node) -> Result<Node, Vec<Problem>> {
    Resolver::new(root, true).finish(root, "")
}

/// As [`resolve_as_texts`] of one key; none if it is not there.
pub(crate) fn resolve_key(root: &Node, key: &str) -> Result<Option<Node>, Vec<Problem>> {
    let node = root.at(key);
    node.map(|node| Resolver::new(root, true).finish(node, key)).transpose()
}

struct Resolver<'a> {
    root: &'a Node,
    /// Keys that are being resolved, to find circles.
    active: Vec<String>,
    problems: Vec<Problem>,
    /// Values and bytes so far.
    expanded: usize,
    /// Maps and lists around the value at hand.
    depth: usize,
    /// Whether values of the environment stay texts.
    as_texts: bool,
}

impl<'a> Resolver<'a> {
    fn new(root: &'a Node, as_texts: bool) -> Self {
        Self { root, active: Vec::new(), problems: Vec::new(), expanded: 0, depth: 0, as_texts }
    }

    fn finish(mut self, node: &Node, key: &str) -> Result<Node, Vec<Problem>> {
        let resolved = self.node(node, key);
        if self.problems.is_empty() { Ok(resolved) } else { Err(self.problems) }
    }

    /// Counts a value towards the limits; the first one beyond them is told, and the last one that is
    /// resolved.
    fn is_beyond_limits(&mut self, node: &Node, key: &str) -> bool {
        if self.is_over() {
            return true;
        }
        let text = match &node.value {
            Tree::Scalar(Value::String(text)) => text.len(),
            _ => 0,
        };
        self.expanded += 1 + text;
        let problem = if self.is_over() {
            format!(
                "with its references the configuration comes to more than {MOST_EXPANDED} values \
                 and bytes of text"
            )
        } else if self.depth > DEEPEST {
            format!("more than {DEEPEST} maps and lists lie inside of each other")
        } else {
            return false;
        };
        self.end();
        let key = shortened(key);
        self.problems.push(Problem::at(&node.origin, format!("`{key}`: {problem}")));
        true
    }

    fn is_over(&self) -> bool {
        self.expanded > MOST_EXPANDED
    }

    /// Nothing more is resolved.
    fn end(&mut self) {
        self.expanded = usize::MAX;
    }

    fn node(&mut self, node: &Node, key: &str) -> Node {
        if self.is_beyond_limits(node, key) {
            return Node::new(Tree::Scalar(Value::Null), node.origin.clone());
        }
        self.depth += 1;
        let resolved = self.resolved(node, key);
        self.depth -= 1;
        resolved
    }

    fn resolved(&mut self, node: &Node, key: &str) -> Node {
        let value = match &node.value {
            Tree::Scalar(Value::String(text)) if text.contains("${") => {
                match self.text(text, key) {
                    Ok(value) => value,
                    Err(problem) => {
                        self.problems
                            .push(Problem::at(&node.origin, format!("`{key}`: {problem}")));
                        Tree::Scalar(Value::Null)
                    }
                }
            }
            Tree::Scalar(value) => Tree::Scalar(value.clone()),
            Tree::List(items) => Tree::List(
                items
                    .iter()
                    .enumerate()
                    .map(|(i, item)| self.node(item, &inside(key, &i.to_string())))
                    .collect(),
            ),
            Tree::Map(entries) => Tree::Map(
                entries
                    .iter()
                    .map(|(name, item)| (name.clone(), self.node(item, &inside(key, name))))
                    .collect(),
            ),
        };
        Node::new(value, node.origin.clone())
    }

    /// A text that is one reference keeps the value's type; others are joined as text.
    fn text(&mut self, text: &str, key: &str) -> Result<Tree, String> {
        if let Some(reference) = whole_reference(text) {
            return self.reference(reference, key);
        }
        let mut out = String::new();
        let mut rest = text;
        while let Some(start) = rest.find("${") {
            if rest[..start].ends_with('\\') {
                out.push_str(&rest[..start - 1]);
                out.push_str("${");
                rest = &rest[start + 2..];
                continue;
            }
            out.push_str(&rest[..start]);
            let end = closing(&rest[start + 2..]).ok_or("a `${` is not closed")?;
            let reference = &rest[start + 2..start + 2 + end];
            match self.joined(reference, key)? {
                Tree::Scalar(Value::String(value)) => out.push_str(&value),
                Tree::Scalar(Value::Null) => out.push_str("null"),
                Tree::Scalar(value) => out.push_str(&value.to_string()),
                _ => return Err(format!("`${{{reference}}}` is not a single value")),
            }
            rest = &rest[start + 3 + end..];
        }
        out.push_str(rest);
        Ok(Tree::Scalar(Value::String(out)))
    }

    /// A reference inside of a text: a variable's value goes into it as it is.
    fn joined(&mut self, reference: &str, key: &str) -> Result<Tree, String> {
        let before = std::mem::replace(&mut self.as_texts, true);
        let value = self.reference(reference, key);
        self.as_texts = before;
        value
    }

    fn reference(&mut self, reference: &str, key: &str) -> Result<Tree, String> {
        if let Some(name) = reference.strip_prefix("oc.env:") {
            return self.environment(name, key);
        }
        if reference.contains(':') {
            return Err(format!("`${{{reference}}}`: only keys and `oc.env:` can be referred to"));
        }
        let wanted = absolute(reference.trim(), key)?;
        if self.active.contains(&wanted) {
            return Err(format!("`{wanted}` refers to itself"));
        }
        self.check_depth()?;
        let Some(node) = self.root.at(&wanted) else {
            return Err(format!("there is no key `{wanted}`"));
        };
        self.active.push(wanted.clone());
        let resolved = self.node(node, &wanted);
        self.active.pop();
        Ok(resolved.value)
    }

    fn check_depth(&mut self) -> Result<(), String> {
        if self.active.len() < MOST_REFERENCES {
            return Ok(());
        }
        self.end();
        Err(format!("more than {MOST_REFERENCES} references lead to each other"))
    }

    /// An environment variable, or its default, which may hold references.
    fn environment(&mut self, name: &str, key: &str) -> Result<Tree, String> {
        let (name, default) = match name.split_once(',') {
            Some((name, default)) => (name.trim(), Some(default.trim())),
            None => (name.trim(), None),
        };
        match (std::env::var(name), default) {
            (Ok(value), _) => Ok(Tree::Scalar(self.scalar(value.trim()))),
            (Err(_), Some(default)) if default.contains("${") => {
                self.check_depth()?;
                // No key is named like that.
                self.active.push(format!("oc.env:{name}"));
                let value = self.text(default, key);
                self.active.pop();
                value
            }
            (Err(_), Some(default)) => Ok(Tree::Scalar(self.scalar(default))),
            (Err(_), None) => Err(format!(
                "the environment variable `{name}` is not set (a default is written ${{oc.env:{name},VALUE}})"
            )),
        }
    }

    /// A text as a YAML scalar. Quotes go; another text stays as it is.
    fn scalar(&self, text: &str) -> Value {
        if text.is_empty() && !self.as_texts {
            return Value::Null;
        }
        match Node::parse_value(text).map(|node| node.value) {
            Ok(Tree::Scalar(value)) if value.is_string() && is_quoted(text) => value,
            Ok(Tree::Scalar(value)) if !value.is_string() && !self.as_texts => value,
            _ => Value::String(text.to_owned()),
        }
    }
}

/// A key or an argument as a message shows it.
pub(super) fn shortened(key: &str) -> String {
    const SHOWN: usize = 80;
    match key.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &key[..end]),
        None => key.to_owned(),
    }
}

/// The inside of a text that is one reference and nothing else.
fn whole_reference(text: &str) -> Option<&str> {
    let inner = text.strip_prefix("${")?;
    let end = closing(inner)?;
    (end + 1 == inner.len()).then(|| &inner[..end])
}

/// Where the brace closes that was opened before `text`.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 1;
    for (index, character) in text.char_indices() {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(index);
        }
    }
    None
}

/// Leading dots climb from the key that holds the reference: one is its own map.
pub(super) fn absolute(reference: &str, key: &str) -> Result<String, String> {
    let dots = reference.len() - reference.trim_start_matches('.').len();
    if dots == 0 {
        return Ok(reference.to_owned());
    }
    let mut parts: Vec<&str> = key.split('.').collect();
    if dots > parts.len() {
        return Err(format!("`${{{reference}}}` climbs out of the file"));
    }
    parts.truncate(parts.len() - dots);
    parts.push(&reference[dots..]);
    Ok(parts.join("."))
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use std::path::Path;

    use super::*;

    fn resolved(text: &str) -> Result<Value, Vec<String>> {
        let node = Node::parse(text, Path::new("a.yaml")).expect("YAML");
        let text = |problem: Problem| problem.to_string();
        resolve(&node).map(|n| n.to_json()).map_err(|p| p.into_iter().map(text).collect())
    }

    #[test]
    fn references_keep_types_and_join_texts() {
        let value = resolved(
            "n: 4\nname: x\na: ${n}\nb: run-${name}-${n}\nc:\n  d: ${..n}\n  e: ${.d}\n  f: '\\${n}'\ng: ${c}\n",
        );
        let value = value.expect("resolved");
        assert_eq!((&value["a"], &value["b"]), (&4.into(), &"run-x-4".into()));
        assert_eq!(value["c"], serde_json::json!({"d": 4, "e": 4, "f": "${n}"}));
        assert_eq!(value["g"], value["c"]);
    }

    #[test]
    fn the_environment_has_defaults() {
        let value = resolved("a: ${oc.env:LONGDRAFT_SURELY_UNSET,7}\nb: ${oc.env:PATH}\n");
        let value = value.expect("resolved");
        assert_eq!(value["a"], 7);
        assert_eq!(value["b"].as_str(), std::env::var("PATH").ok().as_deref());
    }

    #[test]
    fn defaults_may_be_references_and_lose_nothing_as_comments() {
        let value = resolved(
            "n: 4\na: '${oc.env:LONGDRAFT_SURELY_UNSET,${oc.env:LONGDRAFT_NEITHER,${n}}}'\n\
             b: '${oc.env:LONGDRAFT_SURELY_UNSET,retry of #3}'\n\
             c: '${oc.env:LONGDRAFT_SURELY_UNSET,y}'\nd: 'job-${oc.env:LONGDRAFT_SURELY_UNSET,007}'\n\
             e: x${oc.env:LONGDRAFT_SURELY_UNSET,}\nf: '${oc.env:LONGDRAFT_SURELY_UNSET,\"5\"}'\n",
        );
        let expected = serde_json::json!({
            "n": 4, "a": 4, "b": "retry of #3", "c": "y", "d": "job-007", "e": "x", "f": "5",
        });
        assert_eq!(value, Ok(expected));
        let deep = "${oc.env:LONGDRAFT_SURELY_UNSET,".repeat(1000);
        let problems = resolved(&format!("a: '{deep}1{}'\n", "}".repeat(1000)));
        let problems = problems.expect_err("too deep");
        assert!(problems[0].contains("more than 64 references"), "{}", problems[0]);
    }

    #[test]
    fn references_that_double_have_a_limit() {
        for line in ["['${a@}', '${a@}']", "'${a@}-${a@}'", "{x: '${a@}', y: '${a@}'}"] {
            let mut text = "a0: word\n".to_owned();
            for i in 1..=40 {
                let value = line.replace('@', &(i - 1).to_string());
                let _ = writeln!(text, "a{i}: {value}");
            }
            let problems = resolved(&text).expect_err("too much");
            assert!(problems[0].contains("comes to more than 1048576 values"), "{problems:?}");
            assert!(problems[0].starts_with("a.yaml:"), "{problems:?}");
            assert_eq!(problems.len(), 1, "{problems:?}");
        }
    }

    #[test]
    fn chains_of_references_have_a_limit() {
        let mut text = "a0: 1\n".to_owned();
        for i in 1..=20_000 {
            let _ = writeln!(text, "a{i}: ${{a{}}}", i - 1);
        }
        let problems = resolved(&text).expect_err("too long");
        assert!(problems[0].contains("more than 64 references"), "{}", problems[0]);
        assert!(problems[0].starts_with("a.yaml:"), "{}", problems[0]);
        assert_eq!(problems.len(), 1, "{problems:?}");
        // Maps in maps by reference.
        let mut text = "a0: 1\n".to_owned();
        for i in 1..=60 {
            let (open, close) = ("{b: ".repeat(12), "}".repeat(12));
            let _ = writeln!(text, "a{i}: {open}'${{a{}}}'{close}", i - 1);
        }
        let problems = resolved(&text).expect_err("too deep");
        assert!(problems[0].contains("inside of each other"), "{}", problems[0]);
    }

    #[test]
    fn everything_that_cannot_be_resolved_is_named_with_its_line() {
        let problems = resolved(
            "a: ${b}\nb: ${a}\nc: ${nowhere}\nd: ${oc.env:LONGDRAFT_SURELY_UNSET}\ne: x${\nf: ${g:1}\n",
        )
        .expect_err("problems");
        let all = problems.join("\n");
        for part in [
            "refers to itself",
            "a.yaml:3: `c`: there is no key `nowhere`",
            "is not set",
            "not closed",
            "only keys",
        ] {
            assert!(all.contains(part), "{part} not in {all}");
        }
    }
}
