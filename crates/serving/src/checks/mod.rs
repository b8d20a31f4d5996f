//! What a validator gathers of a folder: files read whole, and every finding.

pub(crate) mod gguf;
pub(crate) mod json;
mod report;
pub(crate) mod values;
pub(crate) mod weights;
pub(crate) mod weights_file;

use std::any::Any;
use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;

pub use report::{Effect, Problem, Report, Severity, Verdict};

use crate::manifest::Manifest;
use crate::profile::{Engine, Profile};
use crate::target::TargetFacts;
use weights_file::FoundTensor;

/// Everything known about the folder while it is checked.
pub struct Checks<'a> {
    pub(crate) folder: PathBuf,
    pub(crate) profile: Profile,
    pub(crate) target: Option<&'a TargetFacts>,
    pub(crate) manifest: Option<Manifest>,
    /// Parsed `config.json`.
    pub(crate) config: Value,
    /// What its format found of the network's sizes, where they are usable.
    pub(crate) sizes: Option<Box<dyn Any>>,
    pub(crate) tensors: BTreeMap<String, FoundTensor>,
    pub(crate) problems: Vec<Problem>,
}

impl Checks<'_> {
    /// Adds a finding.
    pub fn push(&mut self, problem: Problem) {
        self.problems.push(problem);
    }

    /// Adds an error of the folder's profile: where, what was found and expected, what engines do.
    pub fn error(
        &mut self,
        code: &'static str,
        place: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
        effect: Effect,
        words: &str,
    ) {
        let problem = Problem::new(Severity::Error, code, place, found, expected);
        self.push(problem.effect_on(self.profile, effect, words));
    }

    /// Adds an error of the folder's profile: a rule that is broken, where, and what was found.
    pub(crate) fn broken(
        &mut self,
        rule: &Rule,
        place: impl Into<String>,
        found: impl Into<String>,
    ) {
        self.error(rule.code, place, found, rule.expected, rule.effect, rule.words);
    }

    /// Adds a warning of the folder's profile likewise: versions differ in what they do.
    pub(crate) fn doubtful(
        &mut self,
        rule: &Rule,
        place: impl Into<String>,
        found: impl Into<String>,
    ) {
        let problem = Problem::new(Severity::Warning, rule.code, place, found, rule.expected);
        self.push(problem.effect_on(self.profile, rule.effect, rule.words));
    }

    /// Notes why outputs are compared with nothing, and what would change that.
    pub(crate) fn no_reference(&mut self, found: &str, expected: &str) {
        self.push(Problem::new(Severity::Note, "no-reference", "outputs", found, expected));
    }

    /// Warns where a tensor's values of a hash are not those that were exported.
    pub(crate) fn compare(&mut self, name: &str, hash: &str) {
        let recorded = self.manifest.as_ref().and_then(|manifest| manifest.tensors.get(name));
        if recorded.is_some_and(|recorded| recorded != hash) {
            let (place, found) = (format!("tensor `{name}`"), "other values than were exported");
            let problem =
                Problem::new(Severity::Warning, "changed", place, found, "the recorded ones");
            self.push(problem.remedy("export again, unless you changed it on purpose"));
        }
    }

    /// Engines that the folder has to work in.
    pub fn engines(&self) -> &'static [Engine] {
        self.profile.engines()
    }

    /// The network's sizes, if they are usable and of this type.
    pub fn sizes<S: Clone + 'static>(&self) -> Option<S> {
        self.sizes.as_ref()?.downcast_ref::<S>().cloned()
    }

    /// Decoder layers of the target, if anything says them.
    pub fn target_layers(&self) -> Option<usize> {
        let own = self.target.map(|target| target.config().num_hidden_layers);
        own.or(self.manifest.as_ref().map(|manifest| manifest.target.num_hidden_layers))
    }
}

/// What should be in a folder, and what engines do where it is not.
pub(crate) struct Rule {
    code: &'static str,
    expected: &'static str,
    effect: Effect,
    words: &'static str,
}

impl Rule {
    /// One without which nothing loads.
    pub(crate) const fn rejects(
        code: &'static str,
        expected: &'static str,
        words: &'static str,
    ) -> Self {
        Self { code, expected, effect: Effect::Rejects, words }
    }

    /// One without which it loads and drafts badly.
    pub(crate) const fn garbage(
        code: &'static str,
        expected: &'static str,
        words: &'static str,
    ) -> Self {
        Self { code, expected, effect: Effect::Garbage, words }
    }
}

/// A name that was meant, in words; nothing where none is near.
pub(crate) fn meant(near: Option<&str>) -> String {
    near.map(|near| format!(" (is `{near}` meant?)")).unwrap_or_default()
}

/// The word of a list that is most like another, if one is alike.
pub(crate) fn nearest<'a>(word: &str, among: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = among.map(|known| (known, strsim::normalized_damerau_levenshtein(word, known)));
    let best = scored.max_by(|a, b| a.1.total_cmp(&b.1))?;
    (best.1 > 0.8).then_some(best.0)
}
