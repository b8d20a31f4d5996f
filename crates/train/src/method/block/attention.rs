//! The keys that say what slots see: windows, which layers have them, and causality inside of a block.

use longdraft_models::draft::block::{BlockConfig, LayerKind};
use longdraft_rules::Rules;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits;

/// Which context a layer sees, by the names of published configurations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LayerType {
    /// All of it.
    FullAttention,
    /// The last tokens of a window.
    SlidingAttention,
}

/// What slots see, in keys that all block drafts share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct BlockAttention {
    /// Tokens of the context that a slot sees in layers with a window (default: all). Where every layer
    /// has it, a round costs the same however long the text is. A draft that goes on keeps its windows where neither
    /// this key nor the two after it are given.
    pub sliding_window: Option<usize>,
    /// The kind of every layer, the first one first: `full_attention` sees all of the context,
    /// `sliding_attention` has the window (default: every layer has it, if there is one).
    pub layer_types: Option<Vec<LayerType>>,
    /// A short form of `layer_types`: with `n` every n-th layer sees all of the context, the others have the
    /// window.
    pub sliding_window_pattern: Option<usize>,
    /// Whether a slot sees no slot after it, in every layer. With `null` this holds only in layers with a window.
    /// Engines assume that where a draft's files do not say it.
    pub causal: Option<bool>,
}

impl Default for BlockAttention {
    fn default() -> Self {
        Self {
            sliding_window: None,
            layer_types: None,
            sliding_window_pattern: None,
            causal: Some(false),
        }
    }
}

impl BlockAttention {
    /// The keys that make the layers of a network.
    pub(super) fn of(network: &BlockConfig) -> Self {
        let slides = network.layers.contains(&LayerKind::Sliding);
        let is_mixed = slides && network.layers.contains(&LayerKind::Full);
        let layer_type = |kind: &LayerKind| match kind {
            LayerKind::Full => LayerType::FullAttention,
            LayerKind::Sliding => LayerType::SlidingAttention,
        };
        let kind = if slides { LayerKind::Sliding } else { LayerKind::Full };
        Self {
            sliding_window: network.sliding_window.filter(|_| slides),
            layer_types: is_mixed.then(|| network.layers.iter().map(layer_type).collect()),
            sliding_window_pattern: None,
            // Layers of one kind agree, whether it is said or not.
            causal: network.is_causal.or((!is_mixed).then(|| network.is_causal_in(kind))),
        }
    }

    /// Sets the layers of a network.
    pub(in crate::method) fn set(&self, network: &mut BlockConfig) {
        let full = |layer: usize| match (&self.layer_types, self.sliding_window_pattern) {
            (Some(listed), _) => listed.get(layer) != Some(&LayerType::SlidingAttention),
            (None, Some(every)) => (layer + 1).is_multiple_of(every),
            (None, None) => self.sliding_window.is_none(),
        };
        let kind = |layer| if full(layer) { LayerKind::Full } else { LayerKind::Sliding };
        network.layers = (0..network.layers.len()).map(kind).collect();
        network.sliding_window = self.sliding_window;
        network.is_causal = self.causal;
    }

    /// What makes no sense of a draft with so many layers.
    pub(in crate::method) fn check(&self, rules: &mut Rules, layers: usize) {
        let window = self.sliding_window;
        rules.require(
            (1..=limits::ROW_TOKENS).contains(&window.unwrap_or(1)),
            "draft.sliding_window",
            format!("must be in 1 to {}", limits::ROW_TOKENS),
        );
        if let Some(listed) = &self.layer_types {
            let (key, count) = ("draft.layer_types", listed.len());
            rules.require_with(
                count == layers,
                key,
                &["draft.layers"],
                format!("names {count} layers, and `draft.layers` is {layers}"),
            );
            let slides = listed.contains(&LayerType::SlidingAttention);
            rules.require_with(
                !slides || window.is_some(),
                key,
                &["draft.sliding_window"],
                "names layers with a window: set `draft.sliding_window`",
            );
            rules.require_with(
                slides || window.is_none(),
                key,
                &["draft.sliding_window"],
                "names no layer that has the window of `draft.sliding_window`",
            );
        }
        let Some(every) = self.sliding_window_pattern else { return };
        let key = "draft.sliding_window_pattern";
        rules.require_with(
            (2..=layers).contains(&every),
            key,
            &["draft.layers"],
            format!(
                "is {every}: with less than 2 no layer has a window, with more than the {layers} of \
                 `draft.layers` all of them"
            ),
        );
        rules.require_with(
            window.is_some(),
            key,
            &["draft.sliding_window"],
            "is about layers with a window: set `draft.sliding_window`",
        );
        rules.require_with(
            self.layer_types.is_none(),
            key,
            &["draft.layer_types"],
            "is a short form of `draft.layer_types`: give one of them",
        );
    }
}

#[cfg(test)]
mod tests {
    use longdraft_models::published::published_config;

    use super::*;

    fn network(attention: &BlockAttention, layers: usize) -> BlockConfig {
        let target = published_config("Qwen/Qwen3-8B").expect("a published target");
        let mut network = BlockConfig::for_target(&target, layers, 4, 7);
        attention.set(&mut network);
        network
    }

    fn listed(kinds: &str) -> Vec<LayerType> {
        let kind =
            |c| if c == 'f' { LayerType::FullAttention } else { LayerType::SlidingAttention };
        kinds.chars().map(kind).collect()
    }

    #[test]
    fn every_nth_layer_is_full_and_a_list_says_the_same() {
        let windowed = BlockAttention { sliding_window: Some(64), ..BlockAttention::default() };
        let kinds = |attention: &BlockAttention| -> String {
            let letter = |kind: &LayerKind| if *kind == LayerKind::Full { 'f' } else { 's' };
            network(attention, 7).layers.iter().map(letter).collect()
        };
        assert_eq!(kinds(&BlockAttention::default()), "fffffff");
        assert_eq!(kinds(&windowed), "sssssss");
        for (every, wanted) in [(2, "sfsfsfs"), (3, "ssfssfs"), (7, "ssssssf")] {
            let short = BlockAttention { sliding_window_pattern: Some(every), ..windowed.clone() };
            let long = BlockAttention { layer_types: Some(listed(wanted)), ..windowed.clone() };
            assert_eq!((kinds(&short).as_str(), kinds(&long).as_str()), (wanted, wanted));
        }
    }

    #[test]
    fn a_network_says_the_keys_of_its_layers() {
        let windowed = BlockAttention { sliding_window: Some(64), ..BlockAttention::default() };
        let mixed = BlockAttention { layer_types: Some(listed("sfs")), ..windowed.clone() };
        for attention in [
            BlockAttention::default(),
            BlockAttention { causal: Some(true), ..windowed.clone() },
            BlockAttention { causal: None, ..mixed.clone() },
            BlockAttention { causal: Some(true), ..mixed.clone() },
            mixed,
            windowed,
        ] {
            let network = network(&attention, 3);
            assert_eq!(BlockAttention::of(&network), attention);
        }
        // Nothing said of layers of one kind is what engines take.
        let silent =
            BlockAttention { sliding_window: Some(64), causal: None, ..Default::default() };
        assert_eq!(BlockAttention::of(&network(&silent, 3)).causal, Some(true));
    }

    #[test]
    fn what_contradicts_itself_is_told_with_the_keys_that_were_read() {
        let windowed = BlockAttention { sliding_window: Some(64), ..BlockAttention::default() };
        let of = |kinds| BlockAttention { layer_types: Some(listed(kinds)), ..windowed.clone() };
        let every = |n| BlockAttention { sliding_window_pattern: Some(n), ..windowed.clone() };
        for (attention, told) in [
            (of("sf"), "names 2 layers, and `draft.layers` is 3"),
            (of("fff"), "names no layer that has the window"),
            (BlockAttention { sliding_window: None, ..of("sff") }, "set `draft.sliding_window`"),
            (BlockAttention { sliding_window: None, ..every(2) }, "set `draft.sliding_window`"),
            (BlockAttention { layer_types: Some(listed("ssf")), ..every(2) }, "give one of them"),
            (every(1), "no layer has a window"),
            (every(4), "more than the 3 of"),
            (BlockAttention { sliding_window: Some(0), ..Default::default() }, "must be in 1 to"),
        ] {
            let mut rules = Rules::default();
            attention.check(&mut rules, 3);
            let problems = rules.into_problems();
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].to_string().contains(told), "{told} not in {}", problems[0]);
        }
        let mut rules = Rules::default();
        for fine in [of("sfs"), every(3), windowed.clone(), BlockAttention::default()] {
            fine.check(&mut rules, 3);
        }
        assert_eq!(rules.into_problems(), []);
    }
}
