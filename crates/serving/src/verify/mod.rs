//! The offline validator: what is wrong with an exported folder, and what each engine would do.
//!
//! Everything is read, nothing is run, and every finding is listed: with its place, what was
//! expected, the engines' behaviour and the way out. Files come first, then keys, tensors,
//! vocabulary, layers, the target's side, and last the network itself on a fixed input.

mod config;
mod files;
mod gguf;
mod json;
mod layers;
mod longspec;
mod report;
mod round_trip;
mod speculators;
mod target_keys;
mod tensors;
mod values;
mod vocabulary;
mod weights_file;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use longdraft_models::draft::eagle3::Eagle3Config;
use serde_json::Value;

pub use report::{Effect, Problem, Report, Severity, Verdict};

use crate::engine::Engine;
use crate::error::{Result, ServingError};
use crate::manifest::{MANIFEST_FILE, Manifest};
use crate::parity::{Difference, ParityVector};
use crate::profile::Profile;
use crate::target::TargetFacts;
use weights_file::FoundTensor;

/// What to check a folder against.
#[derive(Default)]
pub struct VerifyOptions<'a> {
    /// What it is for; by default what its manifest or its files say.
    pub profile: Option<Profile>,
    /// The target that it drafts for.
    pub target: Option<&'a TargetFacts>,
    /// What the checkpoint that it was made from computes, weights rounded likewise.
    pub checkpoint: Option<ParityVector>,
}

/// Everything known about the folder while it is checked.
pub(crate) struct Checks<'a> {
    folder: PathBuf,
    profile: Profile,
    target: Option<&'a TargetFacts>,
    manifest: Option<Manifest>,
    /// Parsed `config.json`.
    config: Value,
    /// Its sizes, where they are usable.
    sizes: Option<Eagle3Config>,
    tensors: BTreeMap<String, FoundTensor>,
    problems: Vec<Problem>,
}

impl Checks<'_> {
    fn push(&mut self, problem: Problem) {
        self.problems.push(problem);
    }

    fn error(
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

    fn engines(&self) -> &'static [Engine] {
        self.profile.engines()
    }

    /// Decoder layers of the target, if anything says them.
    fn target_layers(&self) -> Option<usize> {
        let own = self.target.map(|target| target.config().num_hidden_layers);
        own.or(self.manifest.as_ref().map(|manifest| manifest.target.num_hidden_layers))
    }
}

/// Checks a folder, or a GGUF file.
///
/// # Errors
/// - there is nothing to read; whatever is wrong with what is there stands in the report
pub fn verify(path: &Path, options: &VerifyOptions<'_>) -> Result<Report> {
    let folder = if path.is_file() { path.parent().unwrap_or(path) } else { path };
    std::fs::read_dir(folder).map_err(ServingError::io(folder))?;
    let manifest = std::fs::read_to_string(folder.join(MANIFEST_FILE)).ok();
    let parsed = manifest.as_ref().map(|text| serde_json::from_str::<Manifest>(text));
    let (manifest, unusable) = match parsed {
        Some(Ok(manifest)) => (Some(manifest), None),
        Some(Err(error)) => (None, Some(error.to_string())),
        None => (None, None),
    };
    let config = files::peek(folder);
    let profile = options
        .profile
        .or(manifest.as_ref().map(|manifest| manifest.profile))
        .unwrap_or_else(|| files::guess(path, &config));
    let mut checks = Checks {
        folder: folder.to_path_buf(),
        profile,
        target: options.target,
        manifest,
        config,
        sizes: None,
        tensors: BTreeMap::new(),
        problems: Vec::new(),
    };
    if let Some(reason) = unusable {
        let problem =
            Problem::new(Severity::Warning, "manifest", MANIFEST_FILE, reason, "a manifest");
        checks
            .push(problem.remedy("export again: layers and outputs cannot be compared without it"));
    }
    let parity = if profile == Profile::Llamacpp {
        gguf::check(&mut checks, path, options)
    } else {
        folder_of_tensors(&mut checks, options)
    };
    Ok(Report::of(profile, checks.problems, parity))
}

fn folder_of_tensors(checks: &mut Checks<'_>, options: &VerifyOptions<'_>) -> Option<Difference> {
    files::check(checks);
    if checks.profile == Profile::Longspec || longspec::is_layer(&checks.config) {
        longspec::check(checks);
    } else {
        config::check(checks);
        layers::check(checks);
        tensors::check(checks);
        vocabulary::check(checks);
        tensors::check_target(checks);
    }
    round_trip::check(checks, options)
}

/// The word of a list that is most like another, if one is alike.
fn nearest<'a>(word: &str, among: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = among.map(|known| (known, strsim::normalized_damerau_levenshtein(word, known)));
    let best = scored.max_by(|a, b| a.1.total_cmp(&b.1))?;
    (best.1 > 0.8).then_some(best.0)
}
