//! What is wrong with a configuration: problems as values, each with the key that it is about.

#![forbid(unsafe_code)]
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

use std::fmt;
use std::ops::Deref;

/// A dotted place in a configuration, such as `data.train.0.path`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyPath(String);

impl KeyPath {
    /// The same place, seen from outside of `section`.
    #[must_use]
    pub fn under(&self, section: &str) -> Self {
        Self(format!("{section}.{}", self.0))
    }

    /// Whether one of two places is the other, or holds it.
    pub fn touches(&self, other: &Self) -> bool {
        let holds = |outer: &str, inner: &str| {
            inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        holds(&self.0, &other.0) || holds(&other.0, &self.0)
    }

    /// As it is written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl<T: Into<String>> From<T> for KeyPath {
    fn from(key: T) -> Self {
        Self(key.into())
    }
}

impl fmt::Display for KeyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A value of a configuration that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Where it stands.
    pub key: KeyPath,
    /// The rest of a sentence that begins with the key.
    pub text: String,
    /// Other keys that the rule read: where one of these is unusable, the rule says nothing.
    pub reads: Vec<KeyPath>,
}

impl Problem {
    /// A rule about one key.
    pub fn new(key: impl Into<KeyPath>, text: impl Into<String>) -> Self {
        Self { key: key.into(), text: text.into(), reads: Vec::new() }
    }

    /// The same problem of a section that stands at `section`.
    #[must_use]
    pub fn under(self, section: &str) -> Self {
        let reads = self.reads.iter().map(|key| key.under(section)).collect();
        Self { key: self.key.under(section), text: self.text, reads }
    }

    /// Every key that the rule read.
    pub fn keys(&self) -> impl Iterator<Item = &KeyPath> {
        std::iter::once(&self.key).chain(&self.reads)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.key, self.text)
    }
}

/// Something that has rules.
pub trait Check {
    /// What breaks them, all of it.
    fn problems(&self) -> Vec<Problem>;
}

/// A value that breaks none of its rules. Only checking makes one, so what takes it never runs on
/// unchecked input.
#[derive(Debug, Clone, PartialEq)]
pub struct Checked<T>(T);

impl<T: Check> Checked<T> {
    /// Checks a value.
    ///
    /// # Errors
    /// - rules that it breaks: all of them
    pub fn new(value: T) -> Result<Self, Vec<Problem>> {
        let problems = value.problems();
        if problems.is_empty() { Ok(Self(value)) } else { Err(problems) }
    }
}

impl<T> Deref for Checked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// Rules of a configuration, and what breaks them.
#[derive(Debug, Default)]
pub struct Rules(Vec<Problem>);

impl Rules {
    /// A rule about one key.
    pub fn require(&mut self, holds: bool, key: &str, text: impl Into<String>) {
        self.require_with(holds, key, &[], text);
    }

    /// A rule about one key that reads others.
    pub fn require_with(
        &mut self,
        holds: bool,
        key: &str,
        reads: &[&str],
        text: impl Into<String>,
    ) {
        if !holds {
            let reads = reads.iter().map(|key| KeyPath::from(*key)).collect();
            self.0.push(Problem { reads, ..Problem::new(key, text) });
        }
    }

    /// The problems of the part at `section`.
    pub fn add(&mut self, section: &str, problems: Vec<Problem>) {
        self.0.extend(problems.into_iter().map(|problem| problem.under(section)));
    }

    /// What breaks the rules.
    pub fn into_problems(self) -> Vec<Problem> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_move_every_key_of_a_rule() {
        let mut inner = Rules::default();
        inner.require(true, "a", "is fine");
        inner.require_with(false, "b", &["c.d"], "needs `c.d`");
        let mut outer = Rules::default();
        outer.add("part", inner.into_problems());
        let [problem] = &outer.into_problems()[..] else { panic!("one problem") };
        assert_eq!(problem.to_string(), "`part.b` needs `c.d`");
        let touched = |key: &str| problem.keys().any(|read| read.touches(&key.into()));
        assert!(touched("part.c") && touched("part.b.0") && !touched("part.bc"));
    }
}
