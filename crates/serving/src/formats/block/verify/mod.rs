//! Folders and GGUF files of block drafts, checked key by key and tensor by tensor.

mod folder;
mod gguf;
mod network;
mod speculators;

use std::path::Path;

use crate::checks::{Checks, Rule};
use crate::profile::Profile;

const NETWORK: Rule = Rule::rejects(
    "sizes",
    "the network of a block draft",
    "the network cannot be built, or is another one",
);

/// Lists what is wrong with a draft of a method; whether there is a network that may be run.
pub(super) fn check(checks: &mut Checks<'_>, method: &str, path: &Path) -> bool {
    if checks.profile == Profile::Llamacpp {
        return gguf::check(checks, path).is_some();
    }
    folder::check(checks, method);
    true
}
