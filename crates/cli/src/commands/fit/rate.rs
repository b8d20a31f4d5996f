//! The learning rate: short trainings on the same rows at several rates, the best of which is taken.
//!
//! Recipes state a rate that was best at some widths. How far it holds for another target is not known, so a part
//! of a long budget goes into short trainings with whole schedules: at the recipe's rate, at half of it and at
//! twice; where the best of them is at an end, the next one beyond is tried, too. Another rate is taken only if
//! its loss on held-out rows is lower by [`CLEAR`]: what a short training prefers by less is chance.

use std::path::Path;

use longdraft_configuration::{parse_stages, recheck};
use longdraft_models::target_model::Target;
use longdraft_parallel::World;
use longdraft_train::TrainError;
use longdraft_train::stage::{Ending, Event, Observer, ResumePolicy, Stage};
use serde_json::{Value, json};

use super::measure::Trial;
use super::rules::Plan;
use crate::commands::train;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;

/// Share of a training that its search may take.
const SHARE: f64 = 0.08;
/// Trainings of a search at most: three, and one beyond the end.
const MOST: usize = 4;
/// Steps below which a short training says nothing.
const LEAST_STEPS: usize = 24;
/// Rows that are held out, and share of the loss that makes a difference.
const HELD_OUT: usize = 4;
const CLEAR: f64 = 0.005;

/// Seconds that the search takes of a training, whose steps with their features take some seconds: none where a
/// rate is known, or where too little time is left for a short training.
pub(super) fn seconds(training: f64, of_step: f64, has_rate: bool) -> f64 {
    let search = SHARE * training;
    if has_rate || steps(search, of_step) < LEAST_STEPS { 0.0 } else { search }
}

/// Steps of a short training.
fn steps(search: f64, of_step: f64) -> usize {
    (search / MOST as f64 / of_step.max(1e-9)) as usize
}

/// Seconds of a step that makes its own features.
pub(super) fn of_step(row_tokens: usize, trial: &Trial) -> f64 {
    row_tokens as f64 * (trial.step + trial.capture)
}

/// A rate, and the loss of held-out rows after a short training with it; `None` where it diverged.
pub(super) type Tried = (f64, Option<f64>);

fn same(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-6
}

/// The next rate to try, `None` where the search is over.
fn next(recipe: f64, found: &[Tried]) -> Option<f64> {
    let is_new = |rate: &f64| !found.iter().any(|(other, _)| same(*other, *rate));
    if let Some(rate) = [recipe, 0.5 * recipe, 2.0 * recipe].into_iter().find(is_new) {
        return Some(rate);
    }
    let best = chosen(recipe, found);
    let beyond = if best > recipe { 2.0 * best } else { 0.5 * best };
    (found.len() < MOST && !same(best, recipe) && is_new(&beyond)).then_some(beyond)
}

/// The rate that is taken: that of the recipe, if no other one is clearly better.
fn chosen(recipe: f64, found: &[Tried]) -> f64 {
    let known = found.iter().filter_map(|(rate, loss)| Some((*rate, (*loss)?)));
    let own = known.clone().find(|(rate, _)| same(*rate, recipe)).map(|(_, loss)| loss);
    match (known.min_by(|a, b| a.1.total_cmp(&b.1)), own) {
        (Some((rate, loss)), own) if own.is_none_or(|own| loss < own * (1.0 - CLEAR)) => rate,
        // Where every training diverged, the smallest may not.
        (None, _) => found.iter().map(|(rate, _)| *rate).fold(recipe, f64::min),
        _ => recipe,
    }
}

/// Goes on with a search from what was found; `tell` hears of every training that ended.
///
/// Returns the rate.
pub(super) fn search(
    (config, recipe): (&Value, f64),
    (plan, trial): (&Plan, &Trial),
    (work, interrupts): (&Path, &Interrupts),
    mut found: Vec<Tried>,
    tell: &mut dyn FnMut(&[Tried]) -> Result<()>,
) -> Result<f64> {
    // Every row is read once: its features are made for one step.
    let steps = steps(plan.search, of_step(plan.row_tokens, trial));
    if plan.search <= 0.0 || steps == 0 {
        return Ok(recipe);
    }
    while let Some(rate) = next(recipe, &found) {
        let _ = std::fs::remove_dir_all(work);
        let loss = short(&shortened(config, rate, steps, work), interrupts);
        let _ = std::fs::remove_dir_all(work);
        found.push((rate, loss?));
        tell(&found)?;
    }
    Ok(chosen(recipe, &found))
}

/// A training's configuration at another rate and for fewer rows.
fn shortened(config: &Value, rate: f64, steps: usize, work: &Path) -> Value {
    let mut config = config.clone();
    let row_tokens = config["data"]["row_tokens"].as_u64().unwrap_or(0) as usize;
    config["output"] = json!(work);
    config["schedule"]["learning_rate"] = json!(rate);
    config["data"]["held_out_rows"] = json!(HELD_OUT);
    config["data"]["train"][0]["limit_tokens"] = json!((steps + HELD_OUT) * row_tokens);
    config["train"]["steps"] = json!(steps);
    config["train"]["features"] = json!("online");
    config["train"]["evaluate_every"] = json!(steps);
    config["train"]["save_minutes"] = json!(0);
    config["tracking"] = json!({ "report_to": [] });
    config
}

/// Trains shortly; returns the loss of held-out rows, in nats, or `None` where it diverged.
fn short(config: &Value, interrupts: &Interrupts) -> Result<Option<f64>> {
    let mut stages = parse_stages(&config.to_string(), "fit", &[])?;
    let stage = stages.pop().ok_or_else(|| Failure::work("no stage"))?;
    let (config, world) = (recheck(stage.located.config)?, World::single());
    let target = train::open_target(&config, &world)?;
    let tokenizer = Target::open_tokenizer(&config.target)?;
    let mut watch = Watch { interrupts, loss: None };
    let mut stage =
        Stage::prepare(config, target, tokenizer, ResumePolicy::Strict, &world, &mut watch)?;
    match stage.run(&mut watch) {
        Ok(Ending::Finished) => Ok(watch.loss),
        Ok(Ending::Stopped) => Err(interrupts.failure()),
        Err(TrainError::NotFinite { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Keeps the last loss of held-out rows.
struct Watch<'a> {
    interrupts: &'a Interrupts,
    loss: Option<f64>,
}

impl Observer for Watch<'_> {
    fn on_event(&mut self, event: Event<'_>) {
        if let Event::Evaluated(_, metrics) = event {
            self.loss = Some(metrics.loss()).filter(|loss| loss.is_finite());
        }
    }

    fn should_stop(&self) -> bool {
        self.interrupts.asked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rates that a search tries, by what trainings lose at a rate.
    fn tried(loss: impl Fn(f64) -> Option<f64>) -> (Vec<f64>, f64) {
        let mut found: Vec<Tried> = Vec::new();
        while let Some(rate) = next(1.0, &found) {
            found.push((rate, loss(rate)));
        }
        (found.iter().map(|(rate, _)| *rate).collect(), chosen(1.0, &found))
    }

    #[test]
    fn a_search_goes_where_losses_fall() {
        let at = |best: f64| move |rate: f64| Some(2.0 + (rate / best).ln().powi(2));
        assert_eq!(tried(at(1.0)), (vec![1.0, 0.5, 2.0], 1.0));
        assert_eq!(tried(at(4.0)), (vec![1.0, 0.5, 2.0, 4.0], 4.0));
        assert_eq!(tried(at(0.2)), (vec![1.0, 0.5, 2.0, 0.25], 0.25));
    }

    #[test]
    fn small_differences_are_chance() {
        let chosen = |slope: f64| tried(move |rate| Some(3.0 - slope * rate)).1;
        assert!(same(chosen(0.004), 1.0) && same(chosen(0.02), 4.0));
    }

    #[test]
    fn what_diverges_is_not_taken() {
        assert_eq!(tried(|rate| (rate < 1.5).then_some(2.0)), (vec![1.0, 0.5, 2.0], 1.0));
        assert_eq!(tried(|rate| (rate < 0.6).then_some(2.0)), (vec![1.0, 0.5, 2.0, 0.25], 0.5));
        assert_eq!(tried(|_| None), (vec![1.0, 0.5, 2.0, 0.25], 0.25));
    }

    #[test]
    fn short_trainings_have_no_search() {
        assert_eq!((seconds(600.0, 1.7, false), seconds(7200.0, 1.7, true)), (0.0, 0.0));
        assert!(seconds(3600.0, 1.7, false) > 0.0 && seconds(3600.0, 1.7, false) < 600.0);
        assert!(seconds(3600.0, 60.0, false) <= 0.0);
    }
}
