//! Folders and GGUF files of block drafts, checked key by key and tensor by tensor.

mod folder;
mod gguf;
mod network;
mod speculators;

use std::path::Path;

use longdraft_models::draft::block::BlockConfig;

use super::compatibility;
use crate::checks::Checks;
use crate::checks::rules::{KeyRule, Rule, is_given, key};
use crate::formats::of_target::Repeated;
use crate::profile::Profile;

const NETWORK: Rule = Rule::rejects(
    "sizes",
    "the network of a block draft",
    "the network cannot be built, or is another one",
);

/// Whether slot 0 proposes is a default that differs by reader.
const LAYOUT: Rule = Rule::garbage(
    "layout",
    "true with the keys of a Markov head, false without",
    "slots propose the token beside their own, and nearly nothing is accepted",
);
/// What the engines of a profile do not compute.
const ENGINE: Rule = Rule::rejects(
    "flag-unsupported",
    "a draft that the engine computes",
    "it refuses the draft, or runs another network without a message",
)
.remedy("train without it, or serve with an engine that computes it");
const MISSING_LAYOUT: &str = "missing: readers differ in what they take for it";

/// The rule that a folder has a key, which some reader takes from another place or has another default for.
const fn written(path: &'static str, words: &'static str) -> KeyRule {
    key(path, is_given, Rule::garbage("missing-key", "a value", words))
}

/// Lists what is wrong with a draft of a method; whether there is a network that may be run.
pub(super) fn check(checks: &mut Checks<'_>, method: &str, path: &Path) -> bool {
    if checks.profile == Profile::Llamacpp {
        return gguf::check(checks, path).is_some();
    }
    folder::check(checks, method);
    true
}

/// Names what of a network the engine of the profile does not compute. A folder for several engines is right for the others.
fn engines(checks: &mut Checks<'_>, config: &BlockConfig, place: &str) {
    if matches!(checks.profile, Profile::Hf | Profile::Speculators) {
        return;
    }
    let fit = compatibility::of_draft(checks.profile, config);
    checks.each(&ENGINE, place, fit.refusals.0);
}

fn repeated(config: &BlockConfig) -> Repeated {
    Repeated {
        rope: config.rope.clone(),
        head_dim: config.head_dim,
        context: config.max_position_embeddings,
        eps: config.rms_norm_eps,
    }
}
