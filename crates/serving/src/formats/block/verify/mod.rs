//! Folders and GGUF files of block drafts, checked key by key and tensor by tensor.

mod folder;
mod gguf;
mod network;
mod speculators;

use std::path::Path;

use longdraft_models::draft::block::BlockConfig;

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
    "true for a chain, false for other drafts",
    "slots propose the token beside their own, and nearly nothing is accepted",
);
const MISSING_LAYOUT: &str = "missing: readers differ in what they take for it";

/// The rule that a folder has a key, which some reader takes from another place or has another default for.
const fn written(path: &'static str, words: &'static str) -> KeyRule {
    key(path, is_given).garbage("missing-key", "a value", words)
}

/// Lists what is wrong with a draft of a method; whether there is a network that may be run.
pub(super) fn check(checks: &mut Checks<'_>, method: &str, path: &Path) -> bool {
    if checks.profile == Profile::Llamacpp {
        return gguf::check(checks, path).is_some();
    }
    folder::check(checks, method);
    true
}

fn repeated(config: &BlockConfig) -> Repeated {
    Repeated {
        rope: config.rope.clone(),
        head_dim: config.head_dim,
        context: config.max_position_embeddings,
        eps: config.rms_norm_eps,
    }
}
