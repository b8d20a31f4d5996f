//! Which values of a composed configuration came from environment variables.
//!
//! Folder names and labels show what a variable holds, such as a job's number: that is what they are
//! for. So what would show a secret there is refused, by the variable's name and by its value.

use std::collections::HashSet;
use std::ffi::OsString;

use longdraft_train::config::References;
use serde_json::Value;

use super::Problem;
use super::interpolate::absolute;
use super::tree::{Node, Tree};

const VARIABLE: &str = "oc.env:";
/// Keys whose values go out by their nature: as folder names, and onto trackers' pages.
const SHOWN: [&str; 2] = ["output", "tracking"];
/// Words in the names of variables that hold secrets.
const SECRET: [&str; 6] = ["TOKEN", "SECRET", "PASSW", "CREDENTIAL", "API_KEY", "ACCESS_KEY"];
/// How tokens begin that services hand out: Hugging Face, GitHub, GitLab, Slack, AWS, Google, OpenAI,
/// Anthropic; signed tokens (JWT) and keys in PEM.
const TOKENS: [&str; 13] = [
    "hf_",
    "ghp_",
    "gho_",
    "ghs_",
    "github_pat_",
    "glpat-",
    "xox",
    "AKIA",
    "AIza",
    "sk-proj-",
    "sk-ant-",
    "eyJ",
    "-----BEGIN",
];
/// Letters of a secret at least: shorter values of secret variables stand in many texts by chance.
const SHORTEST_SECRET: usize = 8;
/// Letters of a token at least.
const SHORTEST_TOKEN: usize = 16;

/// The references of `root` that lead to the environment; `resolved` is what it came to.
/// It fails with all variables that look like a secret, or whose values do, where they would be shown.
pub(super) fn references(root: &Node, resolved: &Node) -> Result<References, Vec<Problem>> {
    let mut found = Found { root, references: References::default(), problems: Vec::new() };
    found.walk(root, resolved, &mut Vec::new());
    if found.problems.is_empty() { Ok(found.references) } else { Err(found.problems) }
}

struct Found<'a> {
    root: &'a Node,
    references: References,
    problems: Vec<Problem>,
}

impl Found<'_> {
    fn walk(&mut self, node: &Node, resolved: &Node, path: &mut Vec<String>) {
        if let Tree::Scalar(Value::String(text)) = &node.value {
            self.text(text, node, resolved, path);
        }
        for (key, node) in node.children() {
            let Some(resolved) = resolved.child(&key) else { continue };
            path.push(key);
            self.walk(node, resolved, path);
            path.pop();
        }
    }

    fn text(&mut self, text: &str, node: &Node, resolved: &Node, path: &[String]) {
        let key = path.join(".");
        let mut variables = Vec::new();
        variables_of(self.root, node, &key, &mut HashSet::new(), &mut variables);
        if variables.is_empty() {
            return;
        }
        let is_shown = path.first().is_some_and(|first| SHOWN.contains(&first.as_str()));
        let secret = variables.iter().filter(|_| is_shown).find_map(|name| why_secret(name));
        if let Some(why) = secret {
            let problem = format!("`{key}` is shown to others, and {why}");
            self.problems.push(Problem::at(&node.origin, problem));
        }
        self.references.push(path.to_vec(), text.to_owned(), resolved.to_json());
    }
}

/// Why a variable's value is not for others, if so.
fn why_secret(name: &str) -> Option<String> {
    if looks_secret(name) {
        return Some(format!("`{name}` looks like a secret"));
    }
    let value = std::env::var(name).ok()?;
    let text = |(name, value): (OsString, OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    why_secret_value(&value, std::env::vars_os().filter_map(text))
        .map(|why| format!("the value of `{name}` {why}"))
}

/// Why a value is not for others, by its form and by the other variables.
fn why_secret_value(
    value: &str,
    mut variables: impl Iterator<Item = (String, String)>,
) -> Option<String> {
    let value = value.trim();
    let has_login = value.split_once("://").is_some_and(|(_, rest)| rest.contains('@'));
    if has_login {
        return Some("is an address with a login".to_owned());
    }
    let is_token = TOKENS.iter().any(|start| value.starts_with(start));
    if is_token && value.chars().count() >= SHORTEST_TOKEN {
        return Some("looks like a token".to_owned());
    }
    let holds = |(name, secret): &(String, String)| {
        let secret = secret.trim();
        looks_secret(name) && secret.chars().count() >= SHORTEST_SECRET && value.contains(secret)
    };
    variables.find(holds).map(|(name, _)| format!("holds that of `{name}`"))
}

fn looks_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    SECRET.iter().any(|word| name.contains(word))
}

/// Names of the variables that references at and below a node lead to. Every key is followed once.
fn variables_of(
    root: &Node,
    node: &Node,
    key: &str,
    seen: &mut HashSet<String>,
    out: &mut Vec<String>,
) {
    let text = match &node.value {
        Tree::Scalar(Value::String(text)) => text.as_str(),
        _ => "",
    };
    for reference in text.split("${").skip(1) {
        let reference = reference.split('}').next().unwrap_or_default().trim();
        if let Some(name) = reference.strip_prefix(VARIABLE) {
            out.push(name.split(',').next().unwrap_or_default().trim().to_owned());
        } else if let Ok(wanted) = absolute(reference, key)
            && seen.insert(wanted.clone())
            && let Some(node) = root.at(&wanted)
        {
            variables_of(root, node, &wanted, seen, out);
        }
    }
    for (name, item) in node.children() {
        variables_of(root, item, &format!("{key}.{name}"), seen, out);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::super::interpolate::resolve;
    use super::*;

    fn record(text: &str) -> Result<Value, String> {
        let root = Node::parse(text, Path::new("a.yaml")).expect("YAML");
        let resolved = resolve(&root).expect("resolved");
        let references = references(&root, &resolved);
        let references = references.map_err(|problems| problems[0].to_string())?;
        Ok(references.record(&resolved.to_json()))
    }

    #[test]
    fn what_the_environment_gave_is_recorded_as_its_reference() {
        let text = "a: ${oc.env:PATH}\nb: x-${.a}\nc: {d: '${a}', n: 4}\ne: ${c}\nf: ${c.n}\n\
                    g: [1, '${oc.env:LONGDRAFT_SURELY_UNSET,7}']\nstages: [{name: base, x: '${e}'}]\n";
        let record = record(text).expect("no secret");
        let want = json!({
            "a": "${oc.env:PATH}", "b": "x-${.a}", "c": {"d": "${a}", "n": 4}, "e": "${c}", "f": 4,
            "g": [1, "${oc.env:LONGDRAFT_SURELY_UNSET,7}"],
            "stages": [{"name": "base", "x": "${e}"}],
        });
        assert_eq!(record, want);
    }

    #[test]
    fn secrets_do_not_go_where_everybody_looks() {
        let secret = "${oc.env:MY_TOKEN,x}";
        for key in ["output", "tracking"] {
            let problem = record(&format!("a: {secret}\n{key}: ['${{a}}']\n")).expect_err(key);
            assert!(problem.starts_with("a.yaml:2: ") && problem.contains("MY_TOKEN"), "{problem}");
        }
        assert!(record(&format!("target: {secret}\n")).is_ok());
        assert!(record("tracking: {name: 'job-${oc.env:JOB_ID,1}'}\n").is_ok());
    }

    #[test]
    fn secrets_of_innocent_names_are_known_by_their_values() {
        let variables =
            [("MY_TOKEN", "correct horse\n"), ("PIN_TOKEN", "4711"), ("HOME", "/home/me/x")];
        let why = |value: &str| {
            let variables = variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            why_secret_value(value, variables)
        };
        for (value, says) in [
            ("hf_abcdefghijklmnopqrst", "looks like a token"),
            ("eyJhbGciOi.eyJzdWIi.c2ln", "looks like a token"),
            ("https://me:s3cret@host/path", "address with a login"),
            ("the correct horse", "that of `MY_TOKEN`"),
        ] {
            assert!(why(value).is_some_and(|why| why.contains(says)), "{value}");
        }
        for value in ["job-4711", "/home/me/x", "hf_small", "s3://bucket/runs", "", "2026-11-23"] {
            assert_eq!(why(value), None, "{value}");
        }
    }
}
