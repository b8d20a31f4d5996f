//! `longdraft train`: one stage from a configuration file, or all stages of a curriculum.

use std::path::Path;
use std::sync::Arc;

use longdraft_configuration::{Composed, read, recheck, require_inputs};
use longdraft_models::device::{free_memory, name_of};
use longdraft_models::target_model::{Target, TargetOptions};
use longdraft_models::{DeviceChoice, Precision};
use longdraft_parallel::{ParallelConfig, TargetRanks, Traffic, World};
use longdraft_records::median;
use longdraft_report::words::clock;
use longdraft_tracking::Outcome;
use longdraft_train::TrainError;
use longdraft_train::config::TrainConfig;
use longdraft_train::inputs::Reach;
use longdraft_train::memory::peak_resident_mib;
use longdraft_train::stage::{Ending, ResumePolicy, Stage, Tracked};
use serde_json::{Value, json};

use crate::cli::TrainArguments;
use crate::commands::curriculum::Audience;
use crate::commands::recorded::{Figures, FinishedRun, config_text, save_config};
use crate::commands::{curriculum, plan, require_writable};
use crate::doctor::available_memory;
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::progress::TrainingProgress;
use crate::ranks::{Voice, over_ranks};
use crate::recording::quoted;
use crate::status::Waiting;
use crate::terminal::counted;

/// Trains; a second call with the same configuration goes on where the first one stopped.
pub(crate) fn run(arguments: &TrainArguments, json: bool) -> Result<()> {
    over_ranks(&arguments.ranks_to_start(), |world| run_on(world, arguments, json))
}

fn run_on(world: &World, arguments: &TrainArguments, json: bool) -> Result<()> {
    let policy = arguments.policy();
    if arguments.planning.plan {
        return plan::run(world, arguments, json);
    }
    let composed = read(&arguments.config, &arguments.changes())?;
    check_shared_layers(&composed, world)?;
    // A finished run needs nothing of what it was made from.
    let done = match &composed {
        Composed::Stage(located) if is_finished(&located.config, policy, world, json) => {
            return Ok(());
        }
        Composed::Stage(_) => None,
        Composed::Curriculum { output, stages } => {
            curriculum::finished(output, stages, policy, world)
        }
    };
    if done.is_none() {
        require_inputs(&composed, Reach::All)?;
        require_output(&composed, world)?;
    }
    let config = match composed {
        Composed::Stage(located) => located.config,
        Composed::Curriculum { output, stages } => {
            let end = if let Some(end) = done {
                end
            } else {
                let mut silence = |_: &str| {};
                let mut audience = Audience::person(&mut silence);
                curriculum::train_all(&output, stages, policy, world, &mut audience)?
            };
            return curriculum::tell(&output, end, world, json);
        }
    };
    let target = open_target(&config, world)?;
    let voice = Voice::of(world, &config.output)?;
    let interrupts = Interrupts::listen();
    let mut progress = TrainingProgress::new(interrupts.clone(), voice);
    let resume = Resume { policy, continued_by: None };
    let (ending, stage) = train(config.clone(), &target, &resume, world, &mut progress)?;
    let outcome = interrupts.outcome(ending, world);
    require_extension(policy, ending, progress.speeds.is_empty(), &config.output)?;
    if !world.is_first() {
        return outcome;
    }
    let steps = stage.steps().0;
    let output = config.output.display();
    if json {
        let recorded = Figures::of(&config.output);
        let held_out = progress.held_out.as_ref().map(|m| m.to_json(m.by_delay.len()).into());
        let speeds = &progress.speeds;
        let speed = if speeds.is_empty() { recorded.speed() } else { Some(median(speeds)) };
        let finished = ending == Ending::Finished;
        let held_out = recorded.held_out.or(held_out);
        outln!("{}", summary(&config, (steps, finished), held_out.as_ref(), speed));
    } else if ending == Ending::Finished {
        let place = quoted(&output.to_string());
        outln!("done: {output}; write the draft with `longdraft extract {place}`");
    } else {
        outln!("stopped after step {steps}: the same command goes on from there");
    }
    outcome
}

/// Refuses an output that cannot be written; the first rank looks.
fn require_output(composed: &Composed, world: &World) -> Result<()> {
    let output = match composed {
        Composed::Stage(located) => &located.config.output,
        Composed::Curriculum { output, .. } => output,
    };
    if !world.is_first() {
        return Ok(());
    }
    require_writable(output).map_err(|failure| failure.hint("give another folder with output=DIR"))
}

pub(crate) fn check_shared_layers(composed: &Composed, world: &World) -> Result<()> {
    let configs: Vec<&TrainConfig> = match composed {
        Composed::Stage(located) => vec![&located.config],
        Composed::Curriculum { stages, .. } => {
            stages.iter().map(|stage| &stage.located.config).collect()
        }
    };
    Ok(configs.into_iter().try_for_each(|config| config.check_shared_layers(world.size()))?)
}

/// Whether nothing is left to do for the run that is asked for; the first rank looks, and tells.
fn is_finished(config: &TrainConfig, policy: ResumePolicy, world: &World, json: bool) -> bool {
    let looks = policy == ResumePolicy::Strict && world.is_first();
    let found = if looks { FinishedRun::find(config) } else { None };
    if let Some(run) = &found {
        tell_finished(config, run, json);
    }
    world.of_first(u64::from(found.is_some())) > 0
}

fn tell_finished(config: &TrainConfig, run: &FinishedRun, json: bool) {
    run.end_tracking(config).iter().for_each(|note| errln!("{note}"));
    let figures = &run.figures;
    if json {
        let held_out = figures.held_out.as_ref();
        outln!("{}", summary(config, (run.steps, true), held_out, figures.speed()));
        return;
    }
    let (output, steps) = (config.output.display(), run.steps);
    let place = quoted(&output.to_string());
    outln!(
        "already finished, after {steps} steps: {output}; write the draft with `longdraft extract \
         {place}`, or train on with --extend and a larger train.steps"
    );
}

/// The last line of `--json`.
fn summary(
    config: &TrainConfig,
    (steps, finished): (u64, bool),
    held_out: Option<&Value>,
    speed: Option<f64>,
) -> Value {
    json!({
        "output": config.output.to_string_lossy(), "steps": steps, "finished": finished,
        "held_out": held_out, "median_tokens_per_second": speed,
        "peak_memory_mib": peak_resident_mib(),
    })
}

/// Fails if a run was to be extended and had nothing left to do either way.
pub(crate) fn require_extension(
    policy: ResumePolicy,
    ending: Ending,
    no_step: bool,
    output: &Path,
) -> Result<()> {
    if policy != ResumePolicy::Extend || ending == Ending::Stopped || !no_step {
        return Ok(());
    }
    Err(Failure::work(format!("{}: nothing to extend: the run ended there", output.display()))
        .hint("raise train.steps, train.epochs, train.tokens or train.max_minutes"))
}

/// Opens the target of a stage: with stored features without its layers, but for the last one where
/// the draft starts from it; under ZeRO-3, and where ranks share its layers, every rank its part.
pub(crate) fn open_target(config: &TrainConfig, world: &World) -> Result<Arc<Target>> {
    // Ranks that share rows exchange keys and values during a pass.
    let gather_ahead = config.parallel.sequence == 1;
    let options = shared(placed(config, world)?, &config.parallel, world)?;
    let options = TargetOptions { layers: config.needed_layers(), gather_ahead, ..options };
    let _waiting = Waiting::start("opening the target");
    Ok(Arc::new(Target::open(&config.target, &options)?))
}

/// The same options for a target that the ranks hold together. What keeps their GPUs from exchanging tensors is told
/// once.
pub(crate) fn shared(
    options: TargetOptions,
    parallel: &ParallelConfig,
    world: &World,
) -> Result<TargetOptions> {
    // Ranks meet while it is opened.
    world.set_timeout(parallel.timeout());
    let TargetRanks { spread, tensor, remark } = parallel.target_ranks(world, &options.device)?;
    if let Some(remark) = remark.filter(|_| world.is_first()) {
        errln!("warning: {remark}");
    }
    Ok(TargetOptions { spread, tensor, ..options })
}

/// Device and type of a stage's target; the process's products follow them.
pub(crate) fn placed(config: &TrainConfig, world: &World) -> Result<TargetOptions> {
    let device = config.device.open(world.local_rank())?;
    let as_stored = config.precision == Precision::Stored;
    if as_stored && !device.is_cpu() {
        return Err(Failure::usage(
            "`precision: stored` holds a target as its file does, for a CPU",
        )
        .hint("set `precision: bf16`, or `device: cpu`"));
    }
    let dtype = config.precision.apply(&device);
    Ok(TargetOptions { dtype, device, as_stored, ..TargetOptions::default() })
}

/// How a target is held that a draft is trained for while it is served from the same files: on a CPU as they hold
/// it, which takes the least time and memory; on a GPU in bf16, since blocks take no gradients.
pub(crate) fn as_served(device: DeviceChoice) -> Result<Precision> {
    Ok(if device.open(0)?.is_cpu() { Precision::Stored } else { Precision::Auto })
}

/// Free memory of the device that keeps features between epochs, in bytes, if it is known.
pub(crate) fn memory_for_features(device: DeviceChoice) -> Option<u64> {
    let of_gpu = match device.open(0) {
        Ok(device) if !device.is_cpu() => free_memory(&device),
        _ => None,
    };
    of_gpu.or_else(available_memory)
}

/// What is done about a run that has begun.
pub(crate) struct Resume {
    pub(crate) policy: ResumePolicy,
    /// A later stage that has begun from this one's draft.
    pub(crate) continued_by: Option<String>,
}

impl Resume {
    /// A stage that another one went on from stays as it ended, whatever ended it.
    fn policy_of_stage(&self) -> ResumePolicy {
        match (self.policy, &self.continued_by) {
            (ResumePolicy::Extend, Some(_)) => ResumePolicy::Strict,
            (policy, _) => policy,
        }
    }

    fn explain(&self, error: TrainError) -> Failure {
        match (&self.continued_by, error) {
            (Some(next), TrainError::OtherLength { path, longer: true, .. })
                if self.policy == ResumePolicy::Extend =>
            {
                let output = path.display();
                Failure::work(format!("{output}: stage `{next}` was trained from its draft"))
                    .hint(format!("extend `{next}` or a later stage, or give another `output`"))
            }
            (_, error) => error.into(),
        }
    }
}

/// Prepares and runs the stage, on every rank; returns how it ended and the stage.
pub(crate) fn train(
    mut config: TrainConfig,
    target: &Arc<Target>,
    resume: &Resume,
    world: &World,
    progress: &mut TrainingProgress<'_>,
) -> Result<(Ending, Stage)> {
    let tokenizer = Target::open_tokenizer(&config.target)?;
    if !world.is_first() {
        // The first rank reports for all.
        config.tracking.report_to.clear();
    }
    let voice = progress.voice();
    progress.limit(&config);
    let started = std::time::Instant::now();
    let mut tracked = Tracked::new(&config, progress);
    let config = recheck(config)?;
    let waiting = Waiting::start("reading the data");
    let policy = resume.policy_of_stage();
    let prepared =
        Stage::prepare(config, Arc::clone(target), tokenizer, policy, world, &mut tracked);
    let mut stage = prepared.map_err(|error| resume.explain(error))?;
    drop(waiting);
    if world.is_first() {
        // Not before: a refused run keeps the configuration that it was made with.
        let config = stage.config();
        save_config(&config.output, &config_text(config, &config.references, &config.output)?)?;
    }
    let was_finished = stage.is_finished();
    let (rows, tokens, held_out) = stage.data_sizes();
    let (done, steps) = stage.steps();
    let parameters = stage.objective().draft().parameter_count();
    voice.say(&format!(
        "draft of {:.1} M parameters; {tokens} tokens in {} ({held_out} held out); {}, {done} \
         done; {}, {}",
        parameters as f64 / 1e6,
        counted(rows, "row"),
        counted(steps as usize, "step"),
        name_of(target.device()),
        counted(rayon::current_num_threads(), "thread")
    ));
    plan::say(&voice, &stage, world);
    let ending = stage.run(&mut tracked);
    let outcome = match &ending {
        Ok(Ending::Finished) => Outcome::Finished,
        Ok(Ending::Stopped) => Outcome::Stopped,
        Err(_) => Outcome::Failed,
    };
    if was_finished {
        voice.say("already finished");
    } else if ending.is_ok() {
        let seconds = started.elapsed().as_secs_f64();
        voice.say(&format!("trained for {}", clock(seconds)));
        if world.size() > 1 {
            let Traffic { sent_bytes, seconds: exchanging } = world.traffic();
            let mib = sent_bytes as f64 / f64::from(1 << 20);
            voice.say(&format!("sent {mib:.0} MiB to other ranks, {exchanging:.1} s"));
        }
    }
    for note in tracked.finish(outcome) {
        voice.say(&note);
    }
    let ending = ending.map_err(|error| plan::explain(error, &stage, world))?;
    Ok((ending, stage))
}
