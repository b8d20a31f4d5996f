//! How a training begins: short trainings on the same rows, the best of which is taken.
//!
//! What a draft starts from (`draft.init`) is better for one target and worse for another, and neither sizes nor first
//! losses tell (`docs/results/training-choices.md`). Recipes state a learning rate that was best at some widths. So
//! a part of the budget goes into short trainings with whole schedules:
//! 1. every start at the rate that the recipe has for it;
//! 2. if there is time, the best start at half the rate and at twice; where the best of them is at an end, the next
//!    one beyond.
//!
//! Another choice than the recipe's is taken only if its loss on held-out rows is lower by [`CLEAR`]: what a short
//! training prefers by less is chance.
//!
//! A short training keeps the features of its rows in memory where these have room there; else it makes them anew for every
//! step, and is of fewer steps.

use std::path::Path;
use std::time::Instant;

use longdraft_train::TrainError;
use longdraft_train::method::{Recipe, Start};
use longdraft_train::stage::{Ending, Event};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::rules::Plan;
use super::training::{OF_ROW, heard, prepared};
use super::trial::Trial;
use crate::failure::Result;
use crate::interrupts::Interrupts;

/// Share of a training that its search may take.
const SHARE: f64 = 0.12;
/// Rates of a search at most: three, and one beyond the end.
const RATES: usize = 4;
/// Steps below which a short training says nothing, and beyond which it says nothing more.
const STEPS: (usize, usize) = (40, 160);
/// How often a short training reads its rows.
const EPOCHS: usize = 3;
/// Rows that are held out, and share of the loss that makes a difference.
const HELD_OUT: usize = 4;
const CLEAR: f64 = 0.005;

/// How a training begins.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Choice {
    /// `draft.init`; `None` where the method has no such choice, or the draft goes on from another.
    pub(super) init: Option<String>,
    /// Largest learning rate.
    pub(super) rate: f64,
}

/// A choice, and the loss of held-out rows after a short training with it; `None` where it diverged.
pub(super) type Tried = (Choice, Option<f64>);

impl Choice {
    pub(super) fn of(recipe: &Recipe) -> Self {
        let start = recipe.starts.first().map(Self::with);
        start.unwrap_or(Self { init: None, rate: recipe.learning_rate })
    }

    fn with(start: &Start) -> Self {
        Self { init: Some(start.init.to_owned()), rate: start.learning_rate }
    }

    fn with_rate(&self, rate: f64) -> Self {
        Self { rate, ..self.clone() }
    }

    fn is(&self, other: &Self) -> bool {
        self.init == other.init && (self.rate / other.rate - 1.0).abs() < 1e-6
    }
}

/// Trainings of a search at most, and steps of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    trainings: usize,
    steps: usize,
}

impl Size {
    /// The search that a training of some seconds affords; `None` where it affords none, or where there is
    /// nothing to choose.
    pub(super) fn of(training: f64, cost: Cost, starts: usize) -> Option<Self> {
        Self::within(SHARE * training, cost, starts)
    }

    fn within(seconds: f64, cost: Cost, starts: usize) -> Option<Self> {
        let all = starts.max(1) + RATES - 1;
        // Without time for rates the starts alone.
        [all, starts].into_iter().filter(|trainings| *trainings > 1).find_map(|trainings| {
            let steps = seconds / trainings as f64 - cost.around;
            let steps = (steps / cost.of_step.max(1e-9)) as usize;
            let (least, most) = STEPS;
            (steps >= least).then_some(Self { trainings, steps: steps.min(most) })
        })
    }

    pub(super) fn seconds(self, cost: Cost) -> f64 {
        self.trainings as f64 * (cost.around + self.steps as f64 * cost.of_step)
    }

    /// The search that a plan has so many seconds for.
    fn planned(seconds: f64, cost: Cost, starts: usize) -> Option<Self> {
        // A little more, so that rounding takes no step away.
        Self::within(seconds + 0.5 * cost.of_step, cost, starts)
    }
}

/// Seconds of a short training.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cost {
    /// Of a step, with its share of the features.
    of_step: f64,
    /// Of its held-out rows.
    around: f64,
}

impl Cost {
    /// Of trainings that keep features, or make them in every step.
    pub(super) fn of(row_tokens: usize, trial: &Trial, keeps_features: bool) -> Self {
        let held_out = (HELD_OUT * row_tokens) as f64;
        let captures = if keeps_features { 1.0 / EPOCHS as f64 } else { 1.0 };
        Self {
            of_step: row_tokens as f64 * (trial.step + captures * trial.capture),
            around: held_out * (trial.capture + OF_ROW * trial.step),
        }
    }
}

/// Bytes of the features that the longest short training would keep.
pub(super) fn features(row_tokens: usize, trial: &Trial) -> u64 {
    let rows = STEPS.1.div_ceil(EPOCHS);
    (trial.features_of_token * (rows * row_tokens) as f64) as u64
}

/// The next choice to try, `None` where the search is over.
fn next(own: &Choice, starts: &[Start], trainings: usize, found: &[Tried]) -> Option<Choice> {
    let is_new = |choice: &Choice| !found.iter().any(|(other, _)| other.is(choice));
    let first = || [own.clone()].into_iter().chain(starts.iter().map(Choice::with));
    if let Some(choice) = first().find(is_new) {
        return Some(choice);
    }
    if trainings <= starts.len() {
        return None;
    }
    let best = chosen(own, found);
    // The rate that the recipe has for this start.
    let known = first().find(|choice| choice.init == best.init).map_or(own.rate, |own| own.rate);
    let at = |factor: f64| best.with_rate(factor * known);
    if let Some(choice) = [at(0.5), at(2.0)].into_iter().find(is_new) {
        return Some(choice);
    }
    let beyond = best.with_rate(if best.rate > known { 2.0 } else { 0.5 } * best.rate);
    let is_end = (best.rate / known - 1.0).abs() > 1e-6;
    (found.len() < trainings && is_end && is_new(&beyond)).then_some(beyond)
}

/// What is taken: of the choices in the order in which they were tried each one that is clearly better than the
/// one that was taken before.
fn chosen(own: &Choice, found: &[Tried]) -> Choice {
    let mut best: Option<(&Choice, f64)> = None;
    for (choice, loss) in found {
        if let Some(loss) = *loss
            && best.is_none_or(|(_, least)| loss < least * (1.0 - CLEAR))
        {
            best = Some((choice, loss));
        }
    }
    // Where every training diverged, the smallest rate may not.
    let smallest =
        || found.iter().map(|(choice, _)| choice).min_by(|a, b| a.rate.total_cmp(&b.rate));
    best.map(|(choice, _)| choice).or_else(smallest).unwrap_or(own).clone()
}

/// Goes on with a search from what was found; `tell` hears of every training that ended, and how many times the
/// seconds that were planned the ones of this call took.
///
/// `config` is the whole training with the choice `own`, or its first stage. Returns the choice that is best.
pub(super) fn search(
    (config, own, starts): (&Value, Choice, &[Start]),
    (plan, trial): (&Plan, &Trial),
    (work, interrupts): (&Path, &Interrupts),
    mut found: Vec<Tried>,
    tell: &mut dyn FnMut(&[Tried], f64) -> Result<()>,
) -> Result<Choice> {
    let (keeps_features, row) = (plan.search_keeps_features, plan.first_row());
    let cost = Cost::of(row, &trial.in_rows(row), keeps_features);
    let Some(size) = Size::planned(plan.search, cost, starts.len()) else { return Ok(own) };
    let planned = size.seconds(cost) / size.trainings.max(1) as f64;
    let (started, before) = (Instant::now(), found.len());
    while let Some(choice) = next(&own, starts, size.trainings, &found) {
        let _ = std::fs::remove_dir_all(work);
        let config = shortened(config, &choice, (size.steps, keeps_features), work);
        let loss = short(&config, interrupts);
        let _ = std::fs::remove_dir_all(work);
        found.push((choice, loss?));
        let expected = planned * (found.len() - before) as f64;
        tell(&found, started.elapsed().as_secs_f64() / expected.max(1e-9))?;
    }
    Ok(chosen(&own, &found))
}

/// A training's configuration with another choice and for fewer rows.
fn shortened(
    config: &Value,
    choice: &Choice,
    (steps, keeps_features): (usize, bool),
    work: &Path,
) -> Value {
    let mut config = config.clone();
    let row_tokens = config["data"]["row_tokens"].as_u64().unwrap_or(0) as usize;
    if let Some(init) = &choice.init {
        config["draft"]["init"] = json!(init);
    }
    config["output"] = json!(work);
    config["schedule"]["learning_rate"] = json!(choice.rate);
    config["data"]["held_out_rows"] = json!(HELD_OUT);
    let rows = steps.div_ceil(EPOCHS) + HELD_OUT;
    config["data"]["train"][0]["limit_tokens"] = json!(rows * row_tokens);
    config["train"]["steps"] = json!(steps);
    config["train"]["features"] = json!(if keeps_features { "memory" } else { "online" });
    config["train"]["evaluate_every"] = json!(steps);
    config["train"]["save_minutes"] = json!(0);
    config["tracking"] = json!({ "report_to": [] });
    config
}

/// Trains shortly; returns the loss of held-out rows, in nats, or `None` where it diverged.
fn short(config: &Value, interrupts: &Interrupts) -> Result<Option<f64>> {
    let mut last = None;
    let mut watch = heard(interrupts, |event| {
        if let Event::Evaluated(_, metrics) = event {
            last = Some(metrics.loss()).filter(|loss| loss.is_finite());
        }
    });
    let mut stage = prepared(config, &mut watch)?;
    match stage.run(&mut watch) {
        Ok(Ending::Finished) => Ok(last),
        Ok(Ending::Stopped) => Err(interrupts.failure()),
        Err(TrainError::NotFinite { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STARTS: [Start; 2] = [
        Start { init: "last_layer", learning_rate: 1.0 },
        Start { init: "random", learning_rate: 1.0 },
    ];

    fn choice(init: &str, rate: f64) -> Choice {
        Choice { init: Some(init.to_owned()), rate }
    }

    /// What a search tries and what it takes, by what trainings lose.
    fn tried(
        trainings: usize,
        loss: impl Fn(&str, f64) -> Option<f64>,
    ) -> (Vec<(String, f64)>, (String, f64)) {
        let (own, mut found) = (choice("last_layer", 1.0), Vec::<Tried>::new());
        while let Some(choice) = next(&own, &STARTS, trainings, &found) {
            let loss = loss(choice.init.as_deref().unwrap_or_default(), choice.rate);
            found.push((choice, loss));
        }
        let plain = |choice: &Choice| (choice.init.clone().unwrap_or_default(), choice.rate);
        (found.iter().map(|(choice, _)| plain(choice)).collect(), plain(&chosen(&own, &found)))
    }

    /// Rates that are tried with the start that is taken.
    fn rates(loss: impl Fn(f64) -> Option<f64>) -> (Vec<f64>, f64) {
        let (tried, (init, rate)) = tried(5, |_, rate| loss(rate));
        let rates = tried.into_iter().filter(|(other, _)| *other == init);
        (rates.map(|(_, rate)| rate).collect(), rate)
    }

    #[test]
    fn the_better_start_is_taken_and_its_rate_searched() {
        let better = |init: &'static str| {
            move |start: &str, rate: f64| Some(3.0 - f64::from(start == init) - 0.01 * rate)
        };
        let (all, taken) = tried(5, better("random"));
        assert_eq!(taken, ("random".to_owned(), 4.0));
        assert_eq!(all.iter().filter(|(init, _)| init == "last_layer").count(), 1);
        assert_eq!(tried(2, better("random")).1, ("random".to_owned(), 1.0));
        assert_eq!(tried(2, better("last_layer")).1, ("last_layer".to_owned(), 1.0));
        assert_eq!(tried(2, better("random")).0.len(), 2);
    }

    #[test]
    fn every_start_has_its_own_rate() {
        let starts = [STARTS[0], Start { learning_rate: 0.25, ..STARTS[1] }];
        let (own, mut found) = (choice("last_layer", 1.0), Vec::<Tried>::new());
        while let Some(choice) = next(&own, &starts, 5, &found) {
            let is_random = choice.init.as_deref() == Some("random");
            let loss = if is_random { 2.0 + choice.rate.log2().abs() } else { 9.0 };
            found.push((choice, Some(loss)));
        }
        let rates: Vec<f64> = found.iter().map(|(choice, _)| choice.rate).collect();
        assert_eq!(rates, [1.0, 0.25, 0.125, 0.5, 1.0]);
        assert_eq!(chosen(&own, &found), choice("random", 1.0));
    }

    #[test]
    fn a_draft_that_goes_on_from_another_has_only_rates_to_try() {
        let (own, mut found) = (Choice { init: None, rate: 1.0 }, Vec::<Tried>::new());
        while let Some(choice) = next(&own, &[], 4, &found) {
            found.push((choice, Some(2.0)));
        }
        let tried: Vec<_> = found.iter().map(|(choice, _)| (&choice.init, choice.rate)).collect();
        assert_eq!(tried, [(&None, 1.0), (&None, 0.5), (&None, 2.0)]);
    }

    #[test]
    fn a_search_goes_where_losses_fall() {
        let at = |best: f64| move |rate: f64| Some(2.0 + (rate / best).ln().powi(2));
        assert_eq!(rates(at(1.0)), (vec![1.0, 0.5, 2.0], 1.0));
        assert_eq!(rates(at(4.0)), (vec![1.0, 0.5, 2.0, 4.0], 4.0));
        assert_eq!(rates(at(0.2)), (vec![1.0, 0.5, 2.0, 0.25], 0.25));
    }

    #[test]
    fn small_differences_are_chance() {
        let chosen = |slope: f64| rates(move |rate| Some(3.0 - slope * rate)).1;
        assert!((chosen(0.004) - 1.0).abs() < 1e-9 && (chosen(0.02) - 4.0).abs() < 1e-9);
        let (_, taken) = tried(5, |init, _| Some(if init == "random" { 2.995 } else { 3.0 }));
        assert_eq!(taken, ("last_layer".to_owned(), 1.0));
    }

    #[test]
    fn what_diverges_is_not_taken() {
        assert_eq!(rates(|rate| (rate < 1.5).then_some(2.0)), (vec![1.0, 0.5, 2.0], 1.0));
        assert_eq!(rates(|rate| (rate < 0.6).then_some(2.0)), (vec![1.0, 0.5, 2.0, 0.25], 0.5));
        assert_eq!(rates(|_| None), (vec![1.0, 0.5, 2.0, 0.25], 0.25));
        let (_, taken) = tried(2, |init, _| (init == "random").then_some(2.0));
        assert_eq!(taken, ("random".to_owned(), 1.0));
    }

    #[test]
    fn features_that_have_no_room_are_made_anew_which_takes_time() {
        let trial =
            Trial { step: 1e-3, capture: 6e-4, features_of_token: 100.0, ..Trial::default() };
        let (kept, anew) = (Cost::of(1000, &trial, true), Cost::of(1000, &trial, false));
        assert!((kept.of_step - 1.2).abs() < 1e-9 && (anew.of_step - 1.6).abs() < 1e-9);
        assert!((kept.around - anew.around).abs() < 1e-9);
        assert_eq!(features(1000, &trial), 54 * 1000 * 100);
        let config = json!({ "data": { "row_tokens": 1000, "train": [{}] }, "draft": {} });
        let of = |keeps| {
            let short = shortened(&config, &choice("random", 1.0), (60, keeps), Path::new("work"));
            (short["train"]["features"].clone(), short["data"]["train"][0]["limit_tokens"].clone())
        };
        assert_eq!(of(true), (json!("memory"), json!(24_000)));
        assert_eq!(of(false), (json!("online"), json!(24_000)));
    }

    #[test]
    fn short_trainings_have_no_search_and_longer_ones_choose_more() {
        let cost = Cost { of_step: 1.7, around: 7.0 };
        let of = |minutes: f64, starts| Size::of(60.0 * minutes, cost, starts);
        assert_eq!((of(10.0, 2), of(30.0, 1)), (None, None));
        assert_eq!(of(30.0, 2), Some(Size { trainings: 2, steps: 59 }));
        assert_eq!(of(60.0, 2).map(|size| size.trainings), Some(5));
        assert_eq!(of(600.0, 2).map(|size| size.steps), Some(160));
        for size in [of(30.0, 2), of(60.0, 2), of(60.0, 0)] {
            let seconds = size.map_or(0.0, |size| size.seconds(cost));
            assert!(seconds > 0.0 && seconds <= 0.12 * 3600.0, "{size:?}");
        }
        // What a plan says is what is done.
        for (minutes, starts) in [(30.0, 2), (60.0, 2), (60.0, 0), (60.0, 1)] {
            let size = of(minutes, starts).expect("affordable");
            assert_eq!(Size::planned(size.seconds(cost), cost, starts), Some(size));
        }
        assert_eq!(Size::planned(0.0, cost, 2), None);
    }
}
