//! How much a training learns in its time: what is newest, as often as drafts gain from it, with a schedule that
//! ends in time.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::state::read_json;
use crate::commands::fit::TrainingSpeed;
use crate::commands::write_json;
use crate::failure::Result;

/// Times that an answer is learned from.
const EPOCHS: usize = 3;
/// Of a training's time, what is left over for checkpoints and for what else the machine does.
const RESERVE: f64 = 0.05;
/// Of the memory that is free, what features may take.
const MEMORY: f64 = 0.4;
/// Name of the file that keeps it.
const FILE: &str = "extent.json";

/// How much a training learns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Extent {
    /// Tokens of texts, the newest ones.
    pub(super) tokens: usize,
    pub(super) steps: usize,
    /// Whether features stay in memory after the first pass.
    pub(super) keeps_features: bool,
}

impl Extent {
    /// Of `tokens` in rows of `row_tokens`, what can be learned in some seconds.
    pub(super) fn of(
        speed: &TrainingSpeed,
        (tokens, row_tokens): (usize, usize),
        seconds: f64,
        free_memory: Option<u64>,
    ) -> Self {
        let affordable = |passes_of_features: usize| {
            let of_token = passes_of_features as f64 * speed.capture + EPOCHS as f64 * speed.step;
            (((1.0 - RESERVE) * seconds / of_token.max(1e-12)) as usize)
                .clamp(row_tokens, tokens.max(row_tokens))
        };
        let kept = affordable(1);
        let bytes = speed.features_of_token * kept as f64;
        let keeps_features = free_memory.is_none_or(|free| bytes <= MEMORY * free as f64);
        let tokens = if keeps_features { kept } else { affordable(EPOCHS) };
        Self { tokens, steps: EPOCHS * tokens.div_ceil(row_tokens), keeps_features }
    }

    /// What an earlier process of the same training found; a training that goes on keeps to it.
    pub(super) fn read(place: &Path) -> Option<Self> {
        read_json(&place.join(FILE))
    }

    pub(super) fn write(&self, place: &Path) -> Result<()> {
        write_json(&place.join(FILE), self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tokens: usize, seconds: f64, free: Option<u64>) -> Extent {
        let speed =
            TrainingSpeed { step: 1e-3, capture: 2e-3, features_of_token: 1000.0, memory: 0 };
        Extent::of(&speed, (tokens, 1000), seconds, free)
    }

    #[test]
    fn all_is_learned_where_there_is_time_and_else_the_newest() {
        let all = Extent { tokens: 50_000, steps: 150, keeps_features: true };
        assert_eq!(of(50_000, 1000.0, None), all);
        // 95 s of 5 ms a token.
        let part = Extent { tokens: 19_000, steps: 57, keeps_features: true };
        assert_eq!(of(50_000, 100.0, Some(1 << 40)), part);
    }

    #[test]
    fn features_that_do_not_fit_are_made_anew() {
        // 95 s of 9 ms a token.
        let anew = Extent { tokens: 10_555, steps: 33, keeps_features: false };
        assert_eq!(of(50_000, 100.0, Some(1 << 20)), anew);
    }

    #[test]
    fn a_row_is_learned_at_least() {
        assert_eq!(of(50_000, 0.0, None).steps, 3);
        assert_eq!(of(10, 60.0, None), Extent { tokens: 1000, steps: 3, keeps_features: true });
        let nothing = Extent::of(&TrainingSpeed::default(), (5000, 1000), 60.0, None);
        assert_eq!(nothing.tokens, 5000);
    }

    #[test]
    fn what_was_found_is_kept() {
        let folder = tempfile::tempdir().expect("folder");
        assert_eq!(Extent::read(folder.path()), None);
        let extent = of(50_000, 100.0, None);
        extent.write(folder.path()).expect("written");
        assert_eq!(Extent::read(folder.path()), Some(extent));
    }
}
