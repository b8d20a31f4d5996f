//! Names of models on the hub.

use longdraft_models::hub::{is_repository, is_weight_file};

/// Stands for the target's name on the hub where that is not known.
pub const HUB_NAME: &str = "ORG/NAME";

/// `org/name`, not a path on this machine.
pub fn is_hub_name(name: &str) -> bool {
    is_repository(name) && !is_weight_file(name)
}

/// What vLLM and SGLang load as a target of this name: they take no GGUF file beside a draft, so that
/// the file's model on the hub has to be named.
pub fn loaded(name: &str, is_gguf: bool) -> &str {
    if is_gguf && !is_hub_name(name) { HUB_NAME } else { name }
}
