//! One line of the doctor.

use std::fmt;

use serde::Serialize;

/// How a finding is to be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    /// As it should be.
    Ok,
    /// Works, but something is slower, missing or optional.
    Note,
    /// Something that was asked for will fail.
    Problem,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Something that was looked at.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Finding {
    /// What.
    pub(crate) check: &'static str,
    /// How it is.
    pub(crate) status: Status,
    /// What was found.
    pub(crate) fact: String,
    /// What to do; always there unless all is well.
    pub(crate) remedy: Option<String>,
    /// Whether nothing can be trained or decoded here.
    pub(crate) blocking: bool,
}

impl Finding {
    /// As it should be.
    pub(crate) fn ok(check: &'static str, fact: impl Into<String>) -> Self {
        Self { check, status: Status::Ok, fact: fact.into(), remedy: None, blocking: false }
    }

    /// Works, with a way to make it better.
    pub(crate) fn note(
        check: &'static str,
        fact: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let remedy = Some(remedy.into());
        Self { remedy, status: Status::Note, ..Self::ok(check, fact) }
    }

    /// Will fail.
    pub(crate) fn problem(
        check: &'static str,
        fact: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self { status: Status::Problem, ..Self::note(check, fact, remedy) }
    }

    /// Makes all work impossible.
    pub(crate) fn blocking(mut self) -> Self {
        self.blocking = true;
        self
    }
}
