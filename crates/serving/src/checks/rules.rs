//! Rules as rows of tables: what should be in a folder, and what engines do where it is not.

use serde_json::Value;

use super::report::{Effect, Problem, REMEDY, Severity};

/// What should be there, and what engines do where it is not.
#[derive(Clone, Copy)]
pub(crate) struct Rule {
    code: &'static str,
    severity: Severity,
    /// In words; empty where it depends on the folder.
    pub(crate) expected: &'static str,
    pub(crate) effect: Effect,
    pub(crate) words: &'static str,
    remedy: &'static str,
}

impl Rule {
    /// One without which nothing loads.
    pub(crate) const fn rejects(
        code: &'static str,
        expected: &'static str,
        words: &'static str,
    ) -> Self {
        let (severity, effect) = (Severity::Error, Effect::Rejects);
        Self { code, severity, expected, effect, words, remedy: REMEDY }
    }

    /// One without which it loads and drafts badly.
    pub(crate) const fn garbage(
        code: &'static str,
        expected: &'static str,
        words: &'static str,
    ) -> Self {
        Self::rejects(code, expected, words).effect(Effect::Garbage)
    }

    /// The same with another effect.
    pub(crate) const fn effect(self, effect: Effect) -> Self {
        Self { effect, ..self }
    }

    /// The same as a warning: versions differ in what they do, or it may be meant so.
    pub(crate) const fn doubtful(self) -> Self {
        Self { severity: Severity::Warning, ..self }
    }

    /// The same with a way out of its own.
    pub(crate) const fn remedy(self, remedy: &'static str) -> Self {
        Self { remedy, ..self }
    }

    /// The finding that it is broken, without effects yet.
    pub(crate) fn finding(
        &self,
        place: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Problem {
        Problem::new(self.severity, self.code, place, found, expected).remedy(self.remedy)
    }
}

/// Whether what stands under a key is right; `None` stands for a missing key.
type Holds = fn(Option<&Value>) -> bool;

/// A rule on a key of `config.json`.
#[derive(Clone, Copy)]
pub(crate) struct KeyRule {
    pub(super) path: &'static str,
    pub(super) holds: Holds,
    pub(super) rule: Rule,
}

/// The rule that what stands under a key is right. The tables that it lies in stand before it, with dots between.
pub(crate) const fn key(path: &'static str, holds: Holds, rule: Rule) -> KeyRule {
    KeyRule { path, holds, rule }
}

pub(crate) fn is_there(value: Option<&Value>) -> bool {
    value.is_some()
}

/// There and not null.
pub(crate) fn is_given(value: Option<&Value>) -> bool {
    value.is_some_and(|value| !value.is_null())
}

/// A text that says something.
pub(crate) fn is_text(value: Option<&Value>) -> bool {
    value.and_then(Value::as_str).is_some_and(|text| !text.is_empty())
}

pub(crate) fn is_list(value: Option<&Value>) -> bool {
    value.and_then(Value::as_array).is_some_and(|items| !items.is_empty())
}

pub(crate) fn key_place(key: &str) -> String {
    format!("config.json: `{key}`")
}

pub(crate) fn tensor_place(name: &str) -> String {
    format!("tensor `{name}`")
}
