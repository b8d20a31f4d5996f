//! How a method is set up where only a target and a budget are given, and what is known of such drafts.
//!
//! A method states what a round of its proposals costs and what was measured of it; who chooses among
//! methods needs no names.

use longdraft_models::TargetConfig;
use serde_json::{Map, Value};

/// What a method is set up for.
#[derive(Debug, Clone, Copy)]
pub struct Room<'a> {
    /// The target.
    pub target: &'a TargetConfig,
    /// Seconds of training.
    pub seconds: f64,
    /// Tokens of a packed row.
    pub row_tokens: usize,
}

/// A method set up for a target.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// Keys of `draft`, without `method`.
    pub draft: Map<String, Value>,
    /// `teacher`, where it is not the default.
    pub teacher: Map<String, Value>,
    /// What a fresh draft may begin with, where the method has a choice: short trainings show which is best. The
    /// first is that of `draft`.
    pub starts: Vec<Start>,
    /// Largest learning rate, with the first start.
    pub learning_rate: f64,
    /// What a round costs.
    pub round: Round,
    /// What was measured of such drafts, by the tokens that they learned from.
    pub evidence: &'static [Evidence],
}

/// What a fresh draft begins with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Start {
    /// `draft.init`.
    pub init: &'static str,
    /// The largest learning rate that goes with it.
    pub learning_rate: f64,
}

/// What a round of proposals costs the draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// Proposals that the draft is trained for.
    pub most: usize,
    /// How often its layers and its head run for `n` proposals.
    pub passes: Passes,
    /// Tokens that it can propose, if they are fixed by training.
    pub vocabulary: Option<usize>,
}

/// How often a draft's layers and its head run in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passes {
    /// Once a proposal, one after the other.
    EachToken,
    /// Once for the whole block.
    OneBlock,
}

impl Passes {
    /// How often they run for `proposals`.
    pub fn count(self, proposals: usize) -> usize {
        match self {
            Self::EachToken => proposals,
            Self::OneBlock => 1,
        }
    }
}

/// A draft that was trained and decoded with; figures stand in `docs/results/draft-quality.md`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evidence {
    /// Tokens of its training steps, repeated ones counted.
    pub tokens: f64,
    /// Length of its chains.
    pub draft_len: usize,
    /// Tokens per target pass, the target's own included.
    pub tau: f64,
}

/// A learning rate that goes with the width: 4e-3 at 576 and 1e-2 at 128 were best of those that were tried,
/// 5e-4 at 4096 and more is published.
pub(super) fn rate_at(width: usize, at_576: f64) -> f64 {
    (at_576 * 576.0 / width.max(1) as f64).clamp(at_576 / 8.0, at_576 * 2.5)
}

/// Tokens that are worth proposing, of a large vocabulary: the measured drafts had 8192. `None` for all.
pub fn proposed(vocabulary: usize) -> Option<usize> {
    let size = (vocabulary / 16).max(8192);
    (size * 2 <= vocabulary).then_some(size)
}

/// What a fresh draft may begin with, the likely better one first, with the learning rates of the target's last
/// layer and of random values. Of the two targets that were measured (`docs/results/training-choices.md`) the one
/// with biases of queries and keys learned faster from random values, the other one from its last layer.
pub(super) fn starts(target: &TargetConfig, of_last_layer: f64, of_random: f64) -> Vec<Start> {
    let last_layer = Start { init: "last_layer", learning_rate: of_last_layer };
    let random = Start { init: "random", learning_rate: of_random };
    if target.qkv_bias { vec![random, last_layer] } else { vec![last_layer, random] }
}

pub(super) fn keys(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(keys) => keys,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use longdraft_models::published::published_config;
    use longdraft_rules::Check;

    use super::super::tests;
    use super::*;
    use crate::method::Method;

    #[test]
    fn every_recipe_is_a_configuration_that_fits_its_target() {
        for name in ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"] {
            let Some(target) = published_config(name) else { continue };
            for (method, hours) in Method::all().flat_map(|m| [(m, 0.1), (m, 8.0), (m, 100.0)]) {
                let room = Room { target: &target, seconds: 3600.0 * hours, row_tokens: 1024 };
                let Some(recipe) = method.fresh().recipe(&room) else { continue };
                let mut draft = recipe.draft.clone();
                draft.insert("method".into(), method.name().into());
                let teacher = Value::Object(recipe.teacher.clone());
                let config = tests::configured(&Value::Object(draft), &teacher);
                assert!(config.problems().is_empty(), "{:?}", config.problems());
                let footprint = config.draft.method.footprint(&config.teacher, &target);
                assert!(footprint.is_ok(), "{}: {:?}", method.name(), footprint.err());
                assert_eq!(
                    recipe.draft.get("init").and_then(|init| init.as_str()),
                    recipe.starts.first().map(|start| start.init)
                );
                assert!(recipe.round.most > 0 && recipe.learning_rate > 0.0);
                let rising = recipe.evidence.windows(2);
                assert!(rising.clone().all(|pair| pair[0].tokens < pair[1].tokens));
            }
        }
    }

    #[test]
    fn only_large_vocabularies_are_cut() {
        assert_eq!([258, 16383, 16384].map(proposed), [None, None, Some(8192)]);
        assert_eq!([49152, 262_144].map(proposed), [Some(8192), Some(16384)]);
    }

    #[test]
    fn rates_fall_with_the_width() {
        assert!((rate_at(576, 4e-3) - 4e-3).abs() < 1e-12);
        assert!((rate_at(128, 4e-3) - 1e-2).abs() < 1e-12);
        assert!((rate_at(8192, 4e-3) - 5e-4).abs() < 1e-12);
    }
}
