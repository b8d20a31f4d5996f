//! What a validator gathers of a folder: files read whole, and every finding.

pub(crate) mod gguf;
pub(crate) mod json;
mod report;
pub(crate) mod rules;
pub(crate) mod shapes;
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
use rules::{KeyRule, Rule, key_place, tensor_place};
use shapes::Shapes;
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
    pub(crate) fn push(&mut self, problem: Problem) {
        self.problems.push(problem);
    }

    /// Adds the finding that a rule is broken, for the engines of the folder's profile: where, and what was
    /// found.
    pub(crate) fn broken(
        &mut self,
        rule: &Rule,
        place: impl Into<String>,
        found: impl Into<String>,
    ) {
        self.differs(rule, place, found, rule.expected);
    }

    /// The same where what is expected depends on the folder.
    pub(crate) fn differs(
        &mut self,
        rule: &Rule,
        place: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) {
        let problem = rule.finding(place, found, expected);
        self.push(problem.effect_on(self.profile, rule.effect, rule.words));
    }

    /// The same for one engine alone.
    pub(crate) fn differs_in(
        &mut self,
        engine: Engine,
        rule: &Rule,
        place: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) {
        let problem = rule.finding(place, found, expected);
        self.push(problem.effect(engine, rule.effect, rule.words));
    }

    /// Adds the finding that a rule is broken for every problem of a list.
    pub(crate) fn each(
        &mut self,
        rule: &Rule,
        place: &str,
        problems: impl IntoIterator<Item = String>,
    ) {
        problems.into_iter().for_each(|problem| self.broken(rule, place, problem));
    }

    /// Holds `config.json` against rules on its keys.
    pub(crate) fn keys(&mut self, rules: impl IntoIterator<Item = KeyRule>) {
        for KeyRule { path, holds, rule } in rules {
            let found = path.split('.').try_fold(&self.config, |table, key| table.get(key));
            if !holds(found) {
                let found = found.map_or_else(|| "missing".to_owned(), Value::to_string);
                self.broken(&rule, key_place(path), found);
            }
        }
    }

    /// Notes why outputs are compared with nothing, and what would change that.
    pub(crate) fn no_reference(&mut self, found: &str, expected: &str) {
        self.push(Problem::new(Severity::Note, "no-reference", "outputs", found, expected));
    }

    /// Warns where a tensor's values of a hash are not those that were exported.
    pub(crate) fn compare(&mut self, name: &str, hash: &str) {
        let recorded = self.manifest.as_ref().and_then(|manifest| manifest.tensors.get(name));
        if recorded.is_some_and(|recorded| recorded != hash) {
            let (place, found) = (tensor_place(name), "other values than were exported");
            let problem =
                Problem::new(Severity::Warning, "changed", place, found, "the recorded ones");
            self.push(problem.remedy("export again, unless you changed it on purpose"));
        }
    }

    /// Engines that the folder has to work in.
    pub(crate) fn engines(&self) -> &'static [Engine] {
        self.profile.engines()
    }

    /// The network's sizes, if they are usable and of this type.
    pub(crate) fn sizes<S: Clone + 'static>(&self) -> Option<S> {
        self.sizes.as_ref()?.downcast_ref::<S>().cloned()
    }

    /// Shapes of the tensors that were found.
    pub(crate) fn shapes(&self) -> Shapes {
        self.tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shape.clone())).collect()
    }

    /// Outputs of layers that the exported draft reads, if a manifest says them.
    pub(crate) fn exported_layers(&self) -> Option<Vec<i64>> {
        let layers = &self.manifest.as_ref()?.target_layers;
        Some(layers.iter().map(|layer| *layer as i64).collect())
    }

    /// Decoder layers of the target, if anything says them.
    pub(crate) fn target_layers(&self) -> Option<usize> {
        let own = self.target.map(|target| target.config().num_hidden_layers);
        own.or(self.manifest.as_ref().map(|manifest| manifest.target.num_hidden_layers))
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::rules::{is_given, is_list, is_text, is_there, key};
    use super::*;

    fn checks(config: Value) -> Checks<'static> {
        Checks {
            folder: PathBuf::new(),
            profile: Profile::Hf,
            target: None,
            manifest: None,
            config,
            sizes: None,
            tensors: BTreeMap::new(),
            problems: Vec::new(),
        }
    }

    #[test]
    fn a_verdict_names_what_decides_it_once() {
        let mut folder = checks(json!({}));
        let [shape, missing] = ["shape", "missing"].map(|code| Rule::rejects(code, "", "words"));
        for rule in [&shape, &missing, &shape] {
            folder.broken(rule, "place", "found");
        }
        for verdict in Report::of(folder.profile, folder.problems, None).verdicts {
            assert_eq!(verdict.because, ["shape", "missing"]);
        }
    }

    #[test]
    fn keys_are_looked_for_in_inner_tables_and_told_with_what_is_there() {
        let rule = Rule::garbage("code", "a value", "words").doubtful().remedy("do");
        let rules = [
            key("a.text", is_text, rule),
            key("a.list", is_list, rule),
            key("a.null", is_given, rule),
            key("a.b.absent", is_there, rule),
        ];
        let mut right =
            checks(json!({"a": {"text": "x", "list": [1], "null": 0, "b": {"absent": null}}}));
        right.keys(rules);
        assert!(right.problems.is_empty(), "{:?}", right.problems);
        let mut wrong = checks(json!({"a": {"text": "", "list": [], "null": null, "b": 1}}));
        wrong.keys(rules);
        let told: Vec<String> =
            wrong.problems.iter().map(|one| format!("{} {}", one.place, one.found)).collect();
        let place = |key: &str, found: &str| format!("config.json: `a.{key}` {found}");
        let wanted = [("text", "\"\""), ("list", "[]"), ("null", "null"), ("b.absent", "missing")];
        assert_eq!(told, wanted.map(|(key, found)| place(key, found)));
        for problem in &wrong.problems {
            assert_eq!((problem.severity, problem.remedy.as_str()), (Severity::Warning, "do"));
            let engines: Vec<_> = problem.effects.iter().map(|(engine, ..)| *engine).collect();
            assert_eq!(engines, Profile::Hf.engines(), "each engine of the profile");
        }
    }

    #[test]
    fn tensors_that_lie_on_their_side_are_told() {
        let mut checks = checks(json!({}));
        for (found, wanted) in [([2, 3], [2, 3]), ([3, 2], [2, 3]), ([3, 3], [2, 3])] {
            shapes::compare(&mut checks, tensor_place("a"), &found, &wanted);
        }
        let told: Vec<&str> =
            checks.problems.iter().map(|problem| problem.found.as_str()).collect();
        assert_eq!(told, ["shape [3, 2] (transposed: rows are outputs)", "shape [3, 3]"]);
    }
}
