//! The stages of a curriculum: run in order, finished ones skipped, drafts handed on.

mod held_out;
mod opened;

use std::path::{Path, PathBuf};

use longdraft_configuration::LocatedStage;
use longdraft_models::weights::atomic::write_atomically;
use longdraft_parallel::World;
use longdraft_train::checkpoint::{CURRICULUM_FILE, CurriculumFile, LAST, StageEntry, StartFrom};
use longdraft_train::config::TrainConfig;
use longdraft_train::stage::{Ending, Evaluator, Observer, ResumePolicy};
use serde_json::{Value, json};

use crate::commands::recorded::{FinishedRun, last_change};
use crate::commands::train::Resume;
use crate::commands::{report, train};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::progress::TrainingProgress;
use crate::ranks::Voice;
use held_out::HeldOutTable;
use opened::{OpenTarget, is_held_together};

/// Held-out figures of every stage's draft (rows) on every stage's text (columns).
const TABLE_FILE: &str = "held_out.json";

/// Says how the stages ended, and draws their page.
pub(crate) fn tell(output: &Path, end: End, world: &World, json: bool) -> Result<()> {
    let finished = match end {
        End::Stopped(stopped) => {
            if world.is_first() {
                stopped.tell(output, json);
            }
            return Err(stopped.failure);
        }
        End::OnFirstRank => return Ok(()),
        End::Finished(finished) => finished,
    };
    let page = report::write_page(output)?;
    if json {
        let (held_out, output) = (&finished.held_out, output.to_string_lossy());
        let page = page.to_string_lossy();
        outjson!({ "output": output, "finished": true, "report": page, "held_out": held_out });
    } else {
        outln!(
            "done, plots: {}; write the draft with `longdraft extract {}`",
            page.display(),
            finished.last_run.display()
        );
    }
    Ok(())
}

pub(crate) enum End {
    /// A signal stopped them.
    Stopped(Stopped),
    /// All of them are trained, and the first rank compares them.
    OnFirstRank,
    /// All of them are trained.
    Finished(Finished),
}

/// Who hears of stages as they are trained.
pub(crate) struct Audience<'a> {
    interrupts: Interrupts,
    hears: Hears<'a>,
}

enum Hears<'a> {
    /// Somebody at a terminal, who is told the name of each stage as it starts.
    Person(&'a mut dyn FnMut(&str)),
    /// Somebody who hears every event, in place of the terminal.
    Program(&'a mut dyn Observer),
    Command(&'a mut dyn Follower),
}

/// A command that trains stages as a part of its work. It looks after each of them, and judges their drafts in its own way.
pub(crate) trait Follower {
    /// Who hears of a stage that starts. It fails where it shall not start.
    fn begin(&mut self, config: &TrainConfig, world: &World) -> Result<TrainingProgress<'_>>;
}

impl<'a> Audience<'a> {
    /// A person at a terminal; `before_stage` hears the name of each stage as it starts.
    pub(crate) fn person(before_stage: &'a mut dyn FnMut(&str)) -> Self {
        Self { interrupts: Interrupts::listen(), hears: Hears::Person(before_stage) }
    }

    /// A program, which hears every event and may stop the stages.
    pub(crate) fn program(interrupts: Interrupts, observer: &'a mut dyn Observer) -> Self {
        Self { interrupts, hears: Hears::Program(observer) }
    }

    /// A command that stages are a part of.
    pub(crate) fn command(interrupts: Interrupts, follower: &'a mut dyn Follower) -> Self {
        Self { interrupts, hears: Hears::Command(follower) }
    }

    /// For a stage that starts.
    fn begin(
        &mut self,
        name: &str,
        config: &TrainConfig,
        world: &World,
    ) -> Result<TrainingProgress<'_>> {
        let interrupts = self.interrupts.clone();
        match &mut self.hears {
            Hears::Person(before_stage) => {
                (**before_stage)(name);
                Ok(TrainingProgress::new(interrupts, Voice::of(world, &config.output)?))
            }
            Hears::Program(program) => {
                Ok(TrainingProgress::new(interrupts, Voice::silent()).heard_by(&mut **program))
            }
            Hears::Command(follower) => follower.begin(config, world),
        }
    }

    /// Whether the stages' drafts are compared in the end.
    fn compares(&self) -> bool {
        !matches!(self.hears, Hears::Command(_))
    }
}

/// Stages that a signal stopped.
pub(crate) struct Stopped {
    /// In which of them.
    stage: String,
    /// With the signal's exit code.
    pub(crate) failure: Failure,
}

impl Stopped {
    /// Says where they stand.
    pub(crate) fn tell(&self, output: &Path, json: bool) {
        let stage = &self.stage;
        if json {
            let output = output.to_string_lossy();
            outjson!({ "output": output, "finished": false, "stage": stage });
        } else {
            outln!("stopped in stage {stage}: the same command goes on from there");
        }
    }
}

/// What trained stages leave.
pub(crate) struct Finished {
    /// Run directory of the last stage.
    pub(crate) last_run: PathBuf,
    /// Every stage's draft on every stage's held-out text, as written to `held_out.json`; nothing where a command judges.
    pub(crate) held_out: Value,
}

/// The end of stages of which nothing is left to do; the first rank looks, and tells.
pub(crate) fn finished(
    output: &Path,
    stages: &[LocatedStage],
    policy: ResumePolicy,
    world: &World,
) -> Option<End> {
    let looks = policy == ResumePolicy::Strict && world.is_first();
    let done = if looks { all_finished(output, stages) } else { None };
    (world.of_first(u64::from(done.is_some())) > 0)
        .then(|| done.map_or(End::OnFirstRank, End::Finished))
}

/// Trains all stages from where an earlier call stopped, and compares their drafts where the audience does not do so.
pub(crate) fn train_all(
    output: &Path,
    stages: Vec<LocatedStage>,
    policy: ResumePolicy,
    world: &World,
    audience: &mut Audience<'_>,
) -> Result<End> {
    for stage in &stages {
        stage.located.config.check_shared_layers(world.size())?;
    }
    let described = description(output, &stages);
    if world.is_first() && !output.join(CURRICULUM_FILE).exists() {
        described.write(output)?;
    }
    let mut target = OpenTarget::default();
    let (mut names, mut evaluators) = (Vec::new(), Vec::new());
    let mut before: Option<PathBuf> = None;
    let mut no_step = true;
    let count = stages.len();
    let begun: Vec<Option<String>> = (1..=count).map(|next| begun(&stages[next..])).collect();
    for (index, (stage, continued_by)) in stages.into_iter().zip(begun).enumerate() {
        let config = configured(&stage, before.as_deref())?;
        let LocatedStage { name, start_from, .. } = stage;
        let opened = target.of(&config, world)?;
        let from = match (&before, start_from) {
            (Some(_), StartFrom::Last) => "from the last draft of the stage before",
            (Some(_), StartFrom::Best) => "from the best draft of the stage before",
            _ => "from its own start",
        };
        let (interrupts, compares) = (audience.interrupts.clone(), audience.compares());
        let mut progress = audience.begin(&name, &config, world)?;
        progress.voice().say(&format!("[stage {}/{count}] {name}, {from}", index + 1));
        let run = config.output.clone();
        let resume = Resume { policy, continued_by };
        let (ending, trained) = train::train(config, &opened, &resume, world, &mut progress)?;
        if let Err(failure) = interrupts.outcome(ending, world) {
            return Ok(End::Stopped(Stopped { stage: name, failure }));
        }
        if world.is_first() && index == 0 {
            // Not before the first stage was let through: a refused call changes no stages.
            described.write(output)?;
        }
        no_step &= progress.speeds.is_empty();
        if compares {
            names.push(name);
            evaluators.push(trained.into_evaluator());
        }
        before = Some(run);
    }
    train::require_extension(policy, Ending::Finished, no_step, output)?;
    if !audience.compares() {
        let last_run = before.unwrap_or_default();
        return Ok(End::Finished(Finished { last_run, held_out: Value::Null }));
    }
    let table = measure(names, &evaluators, target, world)?;
    let Some(table) = table.filter(|_| world.is_first()) else {
        return Ok(End::OnFirstRank);
    };
    if matches!(audience.hears, Hears::Person(_)) {
        table.print();
    }
    let held_out = json!(table);
    write_atomically(&output.join(TABLE_FILE), format!("{held_out:#}\n").as_bytes())?;
    Ok(End::Finished(Finished { last_run: before.unwrap_or_default(), held_out }))
}

/// Every stage's draft on every stage's text, on the ranks that measure: all where any of them needs the others, else
/// the first alone, as if it had no others.
fn measure(
    names: Vec<String>,
    stages: &[Evaluator],
    target: OpenTarget,
    world: &World,
) -> Result<Option<HeldOutTable>> {
    let needs_others =
        |stage: &Evaluator| is_held_together(stage.config(), world) || stage.shares_rows();
    if stages.iter().any(needs_others) {
        return HeldOutTable::measure(names, stages, target, world).map(Some);
    }
    let alone = World::single();
    world.is_first().then(|| HeldOutTable::measure(names, stages, target, &alone)).transpose()
}

/// A stage's configuration, with the draft that it starts from.
fn configured(stage: &LocatedStage, before: Option<&Path>) -> Result<TrainConfig> {
    let mut config = stage.located.config.clone();
    if let Some(before) = before
        && let Some(checkpoint) = stage.start_from.checkpoint(before)?
    {
        config.draft.from = Some(checkpoint);
    }
    Ok(config)
}

/// The first of some stages that has a checkpoint.
fn begun(stages: &[LocatedStage]) -> Option<String> {
    let has_begun =
        |stage: &&LocatedStage| stage.located.config.output.join("checkpoints").join(LAST).is_dir();
    stages.iter().find(has_begun).map(|stage| stage.name.clone())
}

/// What a curriculum left whose every stage is finished and compared; it is told here.
fn all_finished(output: &Path, stages: &[LocatedStage]) -> Option<Finished> {
    let (table, found) = finished_stages(output, stages)?;
    let named = stages.iter().map(|stage| &stage.name);
    for (number, (name, (config, run))) in (1..).zip(named.zip(&found)) {
        let (count, steps) = (stages.len(), run.steps);
        errln!("stage {number}/{count} {name}: already finished, after {steps} steps");
        run.end_tracking(config).iter().for_each(|note| errln!("{note}"));
    }
    table.print();
    Some(Finished::of(&table, &found))
}

/// The same without a word.
pub(crate) fn left_by(output: &Path, stages: &[LocatedStage]) -> Option<Finished> {
    finished_stages(output, stages).map(|(table, found)| Finished::of(&table, &found))
}

impl Finished {
    fn of(table: &HeldOutTable, found: &[(TrainConfig, FinishedRun)]) -> Self {
        let last_run = found.last().map(|(config, _)| config.output.clone()).unwrap_or_default();
        Self { last_run, held_out: json!(table) }
    }
}

/// The comparison of all stages and each one's run, if all of them are finished.
fn finished_stages(
    output: &Path,
    stages: &[LocatedStage],
) -> Option<(HeldOutTable, Vec<(TrainConfig, FinishedRun)>)> {
    let path = output.join(TABLE_FILE);
    let table: HeldOutTable = serde_json::from_str(&std::fs::read_to_string(&path).ok()?).ok()?;
    let compared = last_change(&path)?;
    let mut before: Option<PathBuf> = None;
    let mut found = Vec::new();
    for stage in stages {
        let config = configured(stage, before.as_deref()).ok()?;
        let finished = FinishedRun::find(&config).filter(|run| run.saved <= compared)?;
        before = Some(config.output.clone());
        found.push((config, finished));
    }
    Some((table, found))
}

/// Names and folders of the stages, relative where they lie inside.
pub(crate) fn description(output: &Path, stages: &[LocatedStage]) -> CurriculumFile {
    let entry = |stage: &LocatedStage| {
        let folder = &stage.located.config.output;
        let inside = folder.strip_prefix(output).unwrap_or(folder);
        StageEntry { name: stage.name.clone(), output: inside.to_path_buf() }
    };
    CurriculumFile { stages: stages.iter().map(entry).collect() }
}
