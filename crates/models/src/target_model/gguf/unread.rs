//! Tensors of a file that change what a model computes, and that no part of it reads.

use std::collections::HashSet;
use std::ops::Range;

use super::source::GgufSource;
use crate::config::TargetConfig;
use crate::error::Problems;
use crate::weights::TensorSpec;

/// Names every bias, norm and scale that `specs` leave out, which are the tensors of a model of the layers `loaded`.
pub(in crate::target_model) fn unread(
    source: &GgufSource,
    loaded: &Range<usize>,
    specs: &[TensorSpec],
) -> Problems {
    let read = specs.iter().filter_map(|spec| source.stored_name(&spec.name));
    let read: HashSet<&str> = read.collect();
    let is_unread = |name: &&String| {
        !read.contains(name.as_str()) && changes_results(name, source.config(), loaded)
    };
    let unread = source.header().tensors.keys().filter(is_unread).map(|name| {
        format!(
            "tensor `{name}` is not read, and the model computes something else without it: take a \
             file that has none"
        )
    });
    Problems(unread.collect())
}

/// Whether a tensor is one of these kinds, and of a part that is loaded. Files may hold encoders of images beside the
/// model.
fn changes_results(name: &str, config: &TargetConfig, loaded: &Range<usize>) -> bool {
    let in_layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let (is_loaded, module) = match in_layer {
        Some((layer, module)) => {
            let is_loaded = layer.parse::<usize>().is_ok_and(|layer| {
                // A layer that reads another one's keys may have some, too.
                let is_of_keys = module.starts_with("attn_k");
                loaded.contains(&layer) && !(is_of_keys && config.keys_owner(layer).is_some())
            });
            (is_loaded, module)
        }
        None => (name.starts_with("output") || name.starts_with("token_embd"), name),
    };
    let kind = module.rsplit('.').next().unwrap_or(module);
    let changes = kind == "bias" || kind.ends_with("scale") || module.contains("norm");
    is_loaded && changes
}
