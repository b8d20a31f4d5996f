//! Folders and GGUF files of EAGLE-3 drafts, checked key by key and tensor by tensor.

mod config;
mod gguf;
mod layers;
mod tensors;

use std::path::Path;

use longdraft_models::draft::eagle3::Eagle3Config;

use crate::checks::Checks;
use crate::checks::rules::Rule;
use crate::formats::of_target::Repeated;
use crate::formats::vocabulary;
use crate::profile::Profile;

const SIZES: Rule = Rule::rejects("sizes", "sizes that fit together", "the model cannot be built");
const NOT_THE_TARGET: Rule = Rule::rejects(
    "not-the-target",
    "the target's sizes",
    "features of another width, or tokens of another vocabulary",
);

/// Lists what is wrong; whether there is a network that may be run.
pub(super) fn check(checks: &mut Checks<'_>, path: &Path) -> bool {
    if checks.profile == Profile::Llamacpp {
        return gguf::check(checks, path).is_some();
    }
    config::check(checks);
    layers::check(checks);
    tensors::check(checks);
    if let Some(sizes) = checks.sizes::<Eagle3Config>() {
        vocabulary::check(checks, [sizes.draft_vocab_size, sizes.vocab_size]);
    }
    tensors::check_target(checks);
    true
}

fn repeated(sizes: &Eagle3Config) -> Repeated {
    Repeated {
        rope: sizes.rope.clone(),
        head_dim: sizes.head_dim,
        context: sizes.max_position_embeddings,
        eps: sizes.rms_norm_eps,
    }
}
