//! Training, and the target's features for it.

use std::path::{Path, PathBuf};

use longdraft_configuration::{
    Composed, Located, parse, pick_stage, pick_stage_beside, picked_stage, read, require_inputs,
};
use longdraft_kernels::memory::keep_freed;
use longdraft_parallel::World;
use longdraft_train::config::TrainConfig;
use longdraft_train::inputs::Reach;
use longdraft_train::stage::{self, Ending, Observer, ResumePolicy};
use serde_json::{Value, json};

use super::error::{Result, Stop};
use crate::commands::capture as capturing;
use crate::commands::curriculum::{self, Audience, End};
use crate::commands::recorded::{Figures, FinishedRun};
use crate::commands::train::{
    Resume, check_shared_layers, open_target, require_extension, train as train_stage,
};
use crate::progress::TrainingProgress;
use crate::ranks::Voice;

/// Where a configuration comes from.
#[derive(Debug, Clone)]
pub enum Configuration {
    /// A YAML file.
    File(PathBuf),
    /// YAML or JSON; files that it names lie below this process's directory.
    Text(String),
}

impl Configuration {
    /// Composes it with changes: `key=value`, `+key=value`, `~key`.
    fn compose(&self, changes: &[String]) -> Result<Composed> {
        Ok(match self {
            Self::File(path) => read(path, changes)?,
            Self::Text(text) => parse(text, "configuration", changes)?,
        })
    }

    /// Of one stage; of a curriculum `stage=NAME` picks it.
    fn stage(&self, changes: &[String]) -> Result<Located> {
        let (picked, others) = picked_stage(changes);
        Ok(pick_stage(self.compose(&others)?, picked, &self.name())?)
    }

    /// The same of a configuration beside another one, which may be the one with stages.
    fn stage_beside(&self, changes: &[String]) -> Result<Located> {
        let (picked, others) = picked_stage(changes);
        Ok(pick_stage_beside(self.compose(&others)?, picked, &self.name())?)
    }

    fn name(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Text(_) => "configuration".to_owned(),
        }
    }

    /// The run directory that it names.
    ///
    /// # Errors
    /// - the configuration has problems: all of them, each with its line
    pub fn output(&self, changes: &[String]) -> Result<PathBuf> {
        Ok(match self.compose(changes)? {
            Composed::Stage(located) => located.config.output,
            Composed::Curriculum { output, .. } => output,
        })
    }
}

/// How a run is taken up.
#[derive(Debug, Clone)]
pub struct TrainOptions {
    /// Changes to the configuration: `key=value`, `+key=value`, `~key`.
    pub changes: Vec<String>,
    /// What is done about a run directory of other settings.
    pub policy: ResumePolicy,
}

impl Default for TrainOptions {
    fn default() -> Self {
        Self { changes: Vec::new(), policy: ResumePolicy::Strict }
    }
}

/// What a run left.
#[derive(Debug, Clone)]
pub struct Trained {
    /// Run directory; of a curriculum that of the whole.
    pub output: PathBuf,
    /// Run directory that holds the draft: of a curriculum that of its last stage.
    pub last_run: PathBuf,
    /// Steps that the run has taken, of a curriculum its last stage.
    pub steps: u64,
    /// Whether it came to its end; a later call goes on.
    pub finished: bool,
    /// The last figures on held-out rows, if there are any.
    pub held_out: Option<Value>,
}

/// Trains a stage, or the stages of a curriculum, from where an earlier call stopped. `observer` hears
/// every event and may stop the run; a checkpoint is saved then.
///
/// # Errors
/// - the configuration has problems, the run directory belongs to another run, the work failed
pub fn train(
    configuration: &Configuration,
    options: &TrainOptions,
    observer: &mut dyn Observer,
    stop: &Stop,
) -> Result<Trained> {
    let composed = configuration.compose(&options.changes)?;
    let world = World::single();
    keep_freed();
    check_shared_layers(&composed, &world)?;
    let strict = options.policy == ResumePolicy::Strict;
    let done = match &composed {
        Composed::Stage(located) if strict => FinishedRun::find(&located.config).map(|run| {
            run.end_tracking(&located.config);
            trained(&located.config, run.steps, true, None)
        }),
        Composed::Curriculum { output, stages } if strict => curriculum::left_by(output, stages)
            .map(|finished| of_stages(output, finished.last_run, Some(finished.held_out))),
        _ => None,
    };
    if let Some(done) = done {
        return Ok(done);
    }
    require_inputs(&composed, Reach::All)?;
    match composed {
        Composed::Stage(located) => {
            let config = located.config;
            let target = open_target(&config, &world)?;
            let mut progress =
                TrainingProgress::new(stop.0.clone(), Voice::silent()).heard_by(observer);
            let resume = Resume { policy: options.policy, continued_by: None };
            let (ending, stage) =
                train_stage(config.clone(), &target, &resume, &world, &mut progress)?;
            let no_step = progress.speeds.is_empty();
            require_extension(options.policy, ending, no_step, &config.output)?;
            let held_out = progress.held_out.as_ref();
            let held_out = held_out.map(|m| Value::Object(m.to_json(m.by_delay.len())));
            Ok(trained(&config, stage.steps().0, ending == Ending::Finished, held_out))
        }
        Composed::Curriculum { output, stages } => {
            let last = stages.last().map(|stage| stage.located.config.output.clone());
            let mut audience = Audience::program(stop.0.clone(), observer);
            let policy = options.policy;
            Ok(match curriculum::train_all(&output, stages, policy, &world, &mut audience)? {
                End::Finished(end) => of_stages(&output, end.last_run, Some(end.held_out)),
                End::Stopped(_) | End::OnFirstRank => Trained {
                    finished: false,
                    ..of_stages(&output, last.unwrap_or_default(), None)
                },
            })
        }
    }
}

fn trained(config: &TrainConfig, steps: u64, finished: bool, held_out: Option<Value>) -> Trained {
    let (output, last_run) = (config.output.clone(), config.output.clone());
    let held_out = Figures::of(&output).held_out.or(held_out);
    Trained { output, last_run, steps, finished, held_out }
}

fn of_stages(output: &Path, last_run: PathBuf, held_out: Option<Value>) -> Trained {
    let steps = Figures::of(&last_run).steps;
    Trained { output: output.to_path_buf(), last_run, steps, finished: true, held_out }
}

/// How features are captured.
#[derive(Debug, Clone, Default)]
pub struct CaptureOptions {
    /// Changes to the configuration; of a curriculum `stage=NAME` picks the stage.
    pub changes: Vec<String>,
    /// Further configurations that the store serves; they train on the same rows, and the changes count for them.
    pub also: Vec<Configuration>,
    /// Only tell how much would be written.
    pub dry_run: bool,
    /// Check the hash of every shard in an object store, too.
    pub verify: bool,
    /// Records of another trainer in place of the target's passes.
    pub records: Option<PathBuf>,
}

/// Features in a store.
#[derive(Debug, Clone)]
pub struct Captured {
    /// Where they lie.
    pub place: String,
    /// Whether all are there; a later call goes on.
    pub finished: bool,
    /// Tokens of the whole store.
    pub tokens: u64,
    /// Bytes of the whole store.
    pub bytes: u64,
    /// Files of the whole store.
    pub shards: usize,
}

impl Captured {
    /// The same for programs.
    pub fn to_json(&self) -> Value {
        json!({
            "output": self.place, "finished": self.finished, "tokens": self.tokens,
            "bytes": self.bytes, "shards": self.shards,
        })
    }
}

/// Writes the target's features to the store that `train.features` names; training then runs without
/// the target's passes.
///
/// # Errors
/// - the configuration has problems or names no store, there is no room, the work failed
pub fn capture(
    configuration: &Configuration,
    options: &CaptureOptions,
    observer: &mut dyn Observer,
    stop: &Stop,
) -> Result<Captured> {
    let mut stages = vec![(configuration.name(), configuration.stage(&options.changes)?)];
    for (number, other) in (2..).zip(&options.also) {
        // Two texts have one name.
        let name = match other {
            Configuration::File(_) => other.name(),
            Configuration::Text(_) => format!("configuration {number}"),
        };
        stages.push((name, other.stage_beside(&options.changes)?));
    }
    keep_freed();
    let (records, verify) = (options.records.clone(), options.verify);
    let how = (&stage::CaptureOptions { records, verify, free_bytes: None }, options.dry_run);
    let mut progress = TrainingProgress::new(stop.0.clone(), Voice::silent()).heard_by(observer);
    let captured = capturing::capture(&World::single(), &stages, how, &mut progress)?;
    let (tokens, bytes) = (captured.estimate.tokens as u64, captured.estimate.bytes);
    let finished = captured.ending == Ending::Finished;
    Ok(Captured { place: captured.place, finished, tokens, bytes, shards: captured.shards })
}

impl From<&str> for Configuration {
    fn from(path: &str) -> Self {
        Self::File(path.into())
    }
}
