//! The stages of a training whose rows are long, as the curricula of `conf/` have them.
//!
//! Where prompts with their answers fill [`LONG`] short rows and more, the draft learns in stages, each from the draft of
//! the one before:
//! 1. `base`: all text, cut into short rows. A token takes least time there, and most is learned there.
//! 2. `long`: all text in whole rows, so that the draft learns to read far back.
//! 3. `answers`: whole rows of which the answers alone are learned, for these are proposed. A target without a chat
//!    template has no such stage: its text does not tell answers from prompts.
//!
//! Each stage reads a share of the tokens. Its time follows from what a token takes in its rows, as a trial measured it.
//! Only the first stage reads its text several times, so it alone keeps features. Positions are those of the text:
//! offsets brought nothing in short trainings (`docs/results/training-choices.md`).

use longdraft_train::method::{Method, Room};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::trial::Trial;

/// Times a short row that whole rows have at least.
const LONG: usize = 4;
/// Shares of the tokens, with a stage of answers and without.
const SHARES: [f64; 3] = [0.6, 0.2, 0.2];
const SHARES_OF_TWO: [f64; 2] = [0.6, 0.4];
/// Learning rate of later stages, of the first one's: a draft that goes on learned best at a quarter
/// (`docs/results/training-choices.md`).
const LATER_RATE: f64 = 0.25;
const NAMES: [&str; 3] = ["base", "long", "answers"];

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Stage {
    /// Names its folder, too.
    pub(super) name: String,
    pub(super) row_tokens: usize,
    /// Whether answers alone are learned.
    pub(super) answers_only: bool,
    /// Share of the tokens that all stages read.
    pub(super) share: f64,
    /// Times the learning rate that was found best.
    pub(super) rate: f64,
    /// What is planned.
    pub(super) steps: u64,
    pub(super) seconds: f64,
}

/// The stages of a training with such rows at most, where short ones have so many tokens; none where these are as good.
pub(super) fn of(whole: usize, short: usize, is_chat: bool) -> Vec<Stage> {
    if whole < LONG * short {
        return Vec::new();
    }
    let shares = if is_chat { &SHARES[..] } else { &SHARES_OF_TWO[..] };
    let stage = |(index, (name, share)): (usize, (&str, &f64))| Stage {
        name: name.to_owned(),
        row_tokens: if index == 0 { short } else { whole },
        answers_only: index == 2,
        share: *share,
        rate: if index == 0 { 1.0 } else { LATER_RATE },
        steps: 0,
        seconds: 0.0,
    };
    NAMES.into_iter().zip(shares).enumerate().map(stage).collect()
}

/// Seconds of a token.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct OfToken {
    /// Of its features, where they are kept.
    pub(super) once: f64,
    /// Whenever it is learned.
    pub(super) each: f64,
}

impl OfToken {
    /// Features are made once where they are kept, else whenever a token is learned.
    pub(super) fn of(trial: &Trial, keeps_features: bool) -> Self {
        if keeps_features {
            Self { once: trial.capture, each: trial.step }
        } else {
            Self { once: 0.0, each: trial.capture + trial.step }
        }
    }

    /// Over all stages, or of a training that has none.
    pub(super) fn over(stages: &[Stage], trial: &Trial, keeps_features: bool) -> Self {
        if stages.is_empty() {
            return Self::of(trial, keeps_features);
        }
        stages.iter().enumerate().fold(Self::default(), |sum, (index, stage)| {
            let of = of_stage(index, stage, trial, keeps_features);
            Self { once: sum.once + of.once, each: sum.each + stage.share * of.each }
        })
    }
}

fn of_stage(index: usize, stage: &Stage, trial: &Trial, keeps_features: bool) -> OfToken {
    OfToken::of(&trial.in_rows(stage.row_tokens), keeps_features && index == 0)
}

/// The stages with their steps over a text, and the seconds of a training parted among them.
pub(super) fn planned(
    stages: &[Stage],
    (trial, keeps_features): (&Trial, bool),
    (text_tokens, epochs): (f64, f64),
    seconds: f64,
) -> Vec<Stage> {
    let all = stages.iter().enumerate();
    let costs = all.map(|(index, stage)| {
        let OfToken { once, each } = of_stage(index, stage, trial, keeps_features);
        text_tokens * (once + epochs * stage.share * each)
    });
    let costs: Vec<f64> = costs.collect();
    let whole = costs.iter().sum::<f64>().max(1e-9);
    let stage = |(stage, cost): (&Stage, f64)| {
        let rows = stage.share * epochs * text_tokens / stage.row_tokens as f64;
        let (steps, seconds) = (rows.ceil().max(1.0) as u64, seconds * cost / whole);
        Stage { steps, seconds, ..stage.clone() }
    };
    stages.iter().zip(costs).map(stage).collect()
}

/// Keys of a method's draft that depend on the length of rows: of stages with such rows, for rows of each of them.
pub(super) fn keys_of_rows(
    method: &Method,
    room: &Room<'_>,
    stages: &[Stage],
) -> Vec<Map<String, Value>> {
    let keys = |row_tokens: usize| {
        let recipe = method.fresh().recipe(&Room { row_tokens, ..*room });
        recipe.map_or_else(Map::new, |recipe| recipe.draft)
    };
    let all: Vec<Map<String, Value>> = stages.iter().map(|stage| keys(stage.row_tokens)).collect();
    let differs = |key: &String| all.iter().any(|keys| keys.get(key) != all[0].get(key));
    let own = |keys: &Map<String, Value>| {
        let own = keys.iter().filter(|(key, _)| differs(key));
        own.map(|(key, value)| (key.clone(), value.clone())).collect()
    };
    all.iter().map(own).collect()
}

#[cfg(test)]
mod tests {
    use super::super::trial::LongRows;
    use super::*;

    fn trial() -> Trial {
        let long = LongRows { short: 1024, row_tokens: 8192, step: 3e-3, capture: 1e-3 };
        Trial { step: 1e-3, capture: 5e-4, long: Some(long), ..Trial::default() }
    }

    #[test]
    fn only_long_rows_have_stages() {
        assert!(of(1024, 1024, true).is_empty() && of(4095, 1024, true).is_empty());
        let all = of(8192, 1024, true);
        let rows: Vec<(&str, usize, bool)> = all
            .iter()
            .map(|stage| (stage.name.as_str(), stage.row_tokens, stage.answers_only))
            .collect();
        assert_eq!(rows, [("base", 1024, false), ("long", 8192, false), ("answers", 8192, true)]);
        // Nothing tells answers from prompts.
        let two = of(2048, 512, false);
        let names: Vec<&str> = two.iter().map(|stage| stage.name.as_str()).collect();
        assert_eq!(names, ["base", "long"]);
        for stages in [all, two] {
            let shares: f64 = stages.iter().map(|stage| stage.share).sum();
            assert!((shares - 1.0).abs() < 1e-9, "{stages:?}");
        }
    }

    #[test]
    fn stages_part_the_time_by_what_their_tokens_take() {
        let stages = of(8192, 1024, true);
        let planned = planned(&stages, (&trial(), false), (1e6, 3.0), 3600.0);
        let seconds: Vec<f64> = planned.iter().map(|stage| stage.seconds).collect();
        assert!((seconds.iter().sum::<f64>() - 3600.0).abs() < 1e-6);
        // A token takes 1.5 ms in short rows and 4 ms in long ones; three of five are read in short ones.
        assert!((seconds[0] / seconds[1] - 3.0 * 1.5 / 4.0).abs() < 1e-6, "{seconds:?}");
        assert!((seconds[1] - seconds[2]).abs() < 1e-6);
        assert_eq!((planned[0].steps, planned[1].steps), (1758, 74));
    }

    #[test]
    fn a_token_takes_the_mean_of_all_stages() {
        let stages = of(8192, 1024, true);
        let anew = OfToken::over(&stages, &trial(), false);
        assert!(anew.once.abs() < 1e-12);
        assert!((anew.each - (0.6 * 1.5e-3 + 0.4 * 4e-3)).abs() < 1e-12, "{anew:?}");
        // The first stage alone keeps features.
        let kept = OfToken::over(&stages, &trial(), true);
        assert!((kept.once - 5e-4).abs() < 1e-12);
        assert!((kept.each - (0.6 * 1e-3 + 0.4 * 4e-3)).abs() < 1e-12, "{kept:?}");
        assert_eq!(OfToken::over(&[], &trial(), true), OfToken::of(&trial(), true));
    }

    #[test]
    fn keys_that_go_with_rows_are_those_of_each_stage() {
        let target =
            longdraft_models::published::published_config("meta-llama/Llama-3.1-8B-Instruct");
        let target = target.expect("it is listed");
        let room = Room { target: &target, seconds: 7200.0, row_tokens: 8192 };
        let stages = of(8192, 1024, true);
        let mut found = 0;
        for method in Method::all() {
            let keys = keys_of_rows(method, &room, &stages);
            assert!(keys.len() == 3 && keys[1] == keys[2], "{}: {keys:?}", method.name());
            if let Some(blocks) = keys[0].get("blocks_per_row").and_then(Value::as_u64) {
                found += 1;
                assert_eq!(keys[1]["blocks_per_row"].as_u64(), Some(8 * blocks), "{keys:?}");
            }
        }
        assert!(found > 0, "block drafts have as many blocks as go with a row");
    }
}
