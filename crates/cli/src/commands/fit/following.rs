//! The run of a training, stage after stage where it has some, and who looks after it.

use longdraft_configuration::{Composed, parse};
use longdraft_parallel::World;
use longdraft_records::events::Events;
use longdraft_train::config::TrainConfig;
use longdraft_train::stage::{Ending, Observer, ResumePolicy};
use serde_json::Value;

use super::divergence::{Diverged, Watch};
use crate::commands::curriculum::{self, Audience, End, Follower};
use crate::commands::train::{self, Resume};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::progress::TrainingProgress;
use crate::ranks::Voice;

/// The way out where a folder holds another training: `fit` has no option that goes on regardless.
const OTHER_RUN: &str =
    "move this folder away, and the same command trains anew; or restore the old values";

/// Trains a round from where it stands; says how it diverged, if it did, and in which stage, from 0.
pub(super) fn run(
    config: &Value,
    policy: ResumePolicy,
    interrupts: &Interrupts,
    events: &Events,
) -> Result<Option<(usize, Diverged)>> {
    let world = World::single();
    let mut following = Following { interrupts, events, watch: None, begun: 0, is_refused: false };
    let stopped = match parse(&config.to_string(), "fit", &[])? {
        Composed::Stage(located) => {
            let config = located.config;
            let target = train::open_target(&config, &world)?;
            let mut progress = following.begin(&config, &world)?;
            let resume = Resume { policy, continued_by: None };
            // The stage, which holds the run directory, ends here.
            let ran = train::train(config, &target, &resume, &world, &mut progress);
            ran.map(|(ending, _)| ending == Ending::Stopped)
        }
        Composed::Curriculum { output, stages } => {
            let mut audience = Audience::command(interrupts.clone(), &mut following);
            let ended = curriculum::train_all(&output, stages, policy, &world, &mut audience);
            ended.map(|end| matches!(end, End::Stopped(_)))
        }
    };
    match stopped {
        Err(failure) if failure.is_divergence() => Ok(following.found(false)),
        Err(_) if following.is_refused => Ok(following.found(true)),
        Err(failure) if failure.is_other_run() => Err(failure.hint(OTHER_RUN)),
        Err(failure) => Err(failure),
        Ok(true) if interrupts.asked() => Err(interrupts.failure()),
        Ok(_) => Ok(following.found(true)),
    }
}

/// Hears the stages of a training, and looks for one that diverges.
struct Following<'a> {
    interrupts: &'a Interrupts,
    events: &'a Events,
    /// Of the stage under way, or of the last one.
    watch: Option<Watch>,
    begun: usize,
    /// Whether a stage was not begun, for the one before it had diverged.
    is_refused: bool,
}

impl Following<'_> {
    fn found(self, is_finite: bool) -> Option<(usize, Diverged)> {
        let diverged = self.watch?.found(is_finite)?;
        Some((self.begun.saturating_sub(1), diverged))
    }
}

impl Follower for Following<'_> {
    fn begin(&mut self, config: &TrainConfig, world: &World) -> Result<TrainingProgress<'_>> {
        // Held-out rows are measured after the last step, too.
        if self.watch.as_ref().is_some_and(Watch::should_stop) {
            self.is_refused = true;
            return Err(Failure::work("the stage before diverged"));
        }
        self.begun += 1;
        let voice = Voice::of(world, &config.output)?;
        let watch = self.watch.insert(Watch::of(config));
        let mut progress = TrainingProgress::new(self.interrupts.clone(), voice).heard_by(watch);
        progress.events = self.events.clone();
        Ok(progress)
    }
}
