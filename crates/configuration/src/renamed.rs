//! Keys of earlier versions in a tree that is checked.

use serde_json::Value;

use super::place::keys_at;
use super::tree::{Node, Tree};

/// Where a dotted key of an earlier version stands now in what a schema says of an instance.
pub(crate) fn renamed(key: &str, (schema, instance): (&Value, &Value)) -> Option<String> {
    // Of drafts and of pretraining alike: the schema says which of the two it describes.
    let is_known = |new: &String| {
        let (outer, name) = new.rsplit_once('.').unwrap_or(("", new.as_str()));
        keys_at(schema, outer, instance).iter().any(|known| known == name)
    };
    let of_pretraining = || longdraft_pretrain::renamed(key).filter(is_known);
    longdraft_train::config::renamed(key).or_else(of_pretraining)
}

/// Keys of an earlier version at and below a dotted key, each with its new name.
pub(crate) fn moved_keys(node: &Node, key: &str, place: (&Value, &Value)) -> Vec<(String, String)> {
    if let Some(new) = renamed(key, place) {
        return vec![(key.to_owned(), new)];
    }
    let Tree::Map(entries) = &node.value else { return Vec::new() };
    let inner =
        entries.iter().map(|(name, node)| moved_keys(node, &format!("{key}.{name}"), place));
    inner.flatten().collect()
}

/// Whether a key that is missing in the map at a dotted place stands there under its name of an
/// earlier version.
pub(crate) fn stands_under_an_old_name(
    missing: &str,
    key: &str,
    node: &Node,
    schema: &Value,
) -> bool {
    let Some(Tree::Map(entries)) = node.at(key).map(|node| &node.value) else { return false };
    let instance = node.to_json();
    let new = |old: &str| renamed(&format!("{key}.{old}"), (schema, &instance));
    entries.iter().any(|(old, _)| new(old).is_some_and(|new| new == missing))
}
