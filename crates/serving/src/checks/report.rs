//! What was found, and what it means in each engine.

use std::fmt;

use serde::Serialize;

use crate::Profile;
use crate::parity::Difference;
use crate::profile::Engine;

/// What helps where nothing better is known.
pub(super) const REMEDY: &str = "export again with `longdraft export`";

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing.
    Note,
    /// Depends on versions, or is rarely meant so.
    Warning,
    /// The folder does not do what it is for.
    Error,
}

/// What an engine does with a faulty folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// Nothing that is known of its loader speaks against it.
    Works,
    /// A part is left out without harm.
    Ignores,
    /// It loads and drafts badly: low acceptance, no message.
    Garbage,
    /// It does not load.
    Rejects,
}

impl Effect {
    fn words(self) -> &'static str {
        match self {
            Self::Works => "works",
            Self::Ignores => "ignores a part",
            Self::Garbage => "serves garbage",
            Self::Rejects => "rejects it",
        }
    }
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Problem {
    /// Stable short name.
    pub code: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// File, with key or tensor.
    pub place: String,
    /// What is there.
    pub found: String,
    /// What should be.
    pub expected: String,
    /// What engines do with it.
    pub effects: Vec<(Engine, Effect, String)>,
    /// The way out.
    pub remedy: String,
}

impl Problem {
    /// A finding without effects yet.
    pub(crate) fn new(
        severity: Severity,
        code: &'static str,
        place: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self {
            code,
            severity,
            place: place.into(),
            found: found.into(),
            expected: expected.into(),
            effects: Vec::new(),
            remedy: REMEDY.into(),
        }
    }

    /// What an engine does with it.
    pub(crate) fn effect(
        mut self,
        engine: Engine,
        effect: Effect,
        words: impl Into<String>,
    ) -> Self {
        self.effects.push((engine, effect, words.into()));
        self
    }

    /// What every engine of a profile does with it.
    pub(crate) fn effect_on(self, profile: Profile, effect: Effect, words: &str) -> Self {
        profile
            .engines()
            .iter()
            .fold(self, |problem, engine| problem.effect(*engine, effect, words))
    }

    /// The way out.
    pub(crate) fn remedy(mut self, words: impl Into<String>) -> Self {
        self.remedy = words.into();
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        };
        write!(f, "{severity}[{}]: {}: {}", self.code, self.place, self.found)?;
        if !self.expected.is_empty() {
            write!(f, "\n    expected: {}", self.expected)?;
        }
        for (engine, effect, words) in &self.effects {
            write!(f, "\n    {}: {}: {words}", engine.name(), effect.words())?;
        }
        if self.severity != Severity::Note && !self.remedy.is_empty() {
            write!(f, "\n    hint: {}", self.remedy)?;
        }
        Ok(())
    }
}

/// An engine's verdict over the whole folder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// Which engine.
    pub engine: Engine,
    /// The worst that it does.
    pub effect: Effect,
    /// Codes of the findings that decide it.
    pub because: Vec<&'static str>,
}

/// Everything about one folder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// What the folder was checked as.
    pub profile: Profile,
    /// Every finding, errors first.
    pub problems: Vec<Problem>,
    /// For every engine of the profile.
    pub verdicts: Vec<Verdict>,
    /// The re-loaded network against the one that was exported.
    pub parity: Option<Difference>,
}

impl Report {
    pub(crate) fn of(
        profile: Profile,
        mut problems: Vec<Problem>,
        parity: Option<Difference>,
    ) -> Self {
        problems.sort_by_key(|problem| std::cmp::Reverse(problem.severity));
        let verdict = |engine: &Engine| {
            let effects = problems.iter().filter(|problem| problem.severity == Severity::Error);
            let of_engine = effects.flat_map(|problem| {
                let own = problem.effects.iter().filter(|(at, ..)| at == engine);
                own.map(|(_, effect, _)| (*effect, problem.code))
            });
            let of_engine: Vec<(Effect, &'static str)> = of_engine.collect();
            let effect = of_engine.iter().map(|(effect, _)| *effect).max().unwrap_or(Effect::Works);
            let mut because: Vec<&'static str> = Vec::new();
            for (own, code) in of_engine {
                if own == effect && own != Effect::Works && !because.contains(&code) {
                    because.push(code);
                }
            }
            Verdict { engine: *engine, effect, because }
        };
        let verdicts = profile.engines().iter().map(verdict).collect();
        Self { profile, problems, verdicts, parity }
    }

    /// Findings of a severity.
    pub fn count(&self, severity: Severity) -> usize {
        self.problems.iter().filter(|problem| problem.severity == severity).count()
    }

    /// Whether the folder may be served: no errors, and with `strict` no warnings.
    pub fn is_clean(&self, strict: bool) -> bool {
        self.count(Severity::Error) == 0 && (!strict || self.count(Severity::Warning) == 0)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.problems {
            writeln!(f, "{problem}")?;
        }
        for verdict in &self.verdicts {
            let engine = verdict.engine.name();
            if verdict.effect == Effect::Works {
                writeln!(f, "{engine}: passes our reading of its loader; {engine} was not run")?;
            } else {
                let because = verdict.because.join(", ");
                writeln!(f, "{engine}: {} ({because})", verdict.effect.words())?;
            }
        }
        if let Some(parity) = &self.parity {
            writeln!(
                f,
                "re-loaded network: {} of {} rows propose the same token, largest relative \
                 difference {:.1e}",
                parity.rows - parity.other_tokens,
                parity.rows,
                parity.relative
            )?;
        }
        Ok(())
    }
}
