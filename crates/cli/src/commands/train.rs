//! `longdraft train`: one stage from a configuration file, or all stages of a curriculum.

use std::sync::Arc;

use longdraft_models::device::name_of;
use longdraft_models::target::{Target, TargetOptions};
use longdraft_train::config::TrainConfig;
use longdraft_train::parallel::{Traffic, World};
use longdraft_train::pretrain::peak_memory_mib;
use longdraft_train::stage::{Ending, ResumePolicy, Stage};
use longdraft_train::tracking::{Outcome, Tracked};
use serde_json::json;

use crate::cli::TrainArguments;
use crate::commands::{curriculum, plan};
use crate::configuration::{Composed, read};
use crate::failure::{Failure, Result};
use crate::progress::{TrainingProgress, clock, stop_on_interrupt};
use crate::ranks::{Voice, over_ranks};
use crate::status::Waiting;

/// Trains; a second call with the same configuration goes on where the first one stopped.
pub(crate) fn run(arguments: &TrainArguments, json: bool) -> Result<()> {
    over_ranks(|world| run_on(world, arguments, json))
}

fn run_on(world: &World, arguments: &TrainArguments, json: bool) -> Result<()> {
    let policy = if arguments.force_resume { ResumePolicy::Force } else { ResumePolicy::Strict };
    if arguments.planning.plan {
        return plan::run(world, arguments, json);
    }
    let config = match read(&arguments.config, &arguments.changes())? {
        Composed::Stage(located) => located.config,
        Composed::Curriculum { output, stages } => {
            return curriculum::run(&output, stages, policy, world, json);
        }
    };
    config.check_shared_layers(world.size())?;
    let target = open_target(&config, world)?;
    let voice = Voice::of(world, &config.output)?;
    let mut progress = TrainingProgress::new(stop_on_interrupt(), voice);
    let (ending, stage) = train(config.clone(), &target, policy, world, &mut progress)?;
    if !world.is_first() {
        return Ok(());
    }
    let steps = stage.steps().0;
    let output = config.output.display();
    if json {
        outln!(
            "{}",
            json!({
                "output": config.output, "steps": steps, "finished": ending == Ending::Finished,
                "held_out": progress.held_out.as_ref().map(|m| m.to_json(m.by_delay.len())),
                "median_tokens_per_second": median(&progress.speeds),
                "peak_memory_mib": peak_memory_mib(),
            })
        );
    } else if ending == Ending::Finished {
        outln!("done: {output}; write the draft with `longdraft extract {output}`");
    } else {
        outln!("stopped after step {steps}: the same command goes on from there");
    }
    Ok(())
}

/// Opens the target of a stage: with stored features without its layers, but for the last one where
/// the draft starts from it; under ZeRO-3, and where ranks share its layers, every rank its part.
pub(crate) fn open_target(config: &TrainConfig, world: &World) -> Result<Arc<Target>> {
    let spread = config.parallel.spreads_weights(world).then(|| Arc::new(world.clone()) as _);
    // Ranks that share rows exchange keys and values during a pass.
    let gather_ahead = config.parallel.sequence == 1;
    let layers = config.needed_layers();
    let tensor = config.parallel.tensor_group(world)?.map(|group| group.as_ranks());
    let options = TargetOptions { layers, spread, gather_ahead, tensor, ..placed(config, world)? };
    let _waiting = Waiting::start("opening the target");
    Ok(Arc::new(Target::open(&config.target, &options)?))
}

/// Device and type of a stage's target; the process's products follow them.
pub(crate) fn placed(config: &TrainConfig, world: &World) -> Result<TargetOptions> {
    let device = config.device.open(world.rank())?;
    let dtype = config.precision.apply(&device);
    Ok(TargetOptions { dtype, device, ..TargetOptions::default() })
}

/// Prepares and runs the stage, on every rank; returns how it ended and the stage.
pub(crate) fn train(
    mut config: TrainConfig,
    target: &Arc<Target>,
    policy: ResumePolicy,
    world: &World,
    progress: &mut TrainingProgress,
) -> Result<(Ending, Stage)> {
    let tokenizer = Target::open_tokenizer(&config.target)?;
    if world.is_first() {
        save_config(&config)?;
    } else {
        // The first rank reports for all.
        config.tracking.report_to.clear();
    }
    let voice = progress.voice();
    let started = std::time::Instant::now();
    let mut tracked = Tracked::new(&config, progress);
    let waiting = Waiting::start("reading the data");
    let mut stage =
        Stage::prepare(config, Arc::clone(target), tokenizer, policy, world, &mut tracked)?;
    drop(waiting);
    let (rows, tokens, held_out) = stage.data_sizes();
    let (done, steps) = stage.steps();
    let parameters: usize = stage
        .objective()
        .draft()
        .parameters()
        .iter()
        .map(|parameter| parameter.var.elem_count())
        .sum();
    voice.say(&format!(
        "draft of {:.1} M parameters; {tokens} tokens in {rows} rows ({held_out} held out); \
         {steps} steps, {done} done; {}, {} threads",
        parameters as f64 / 1e6,
        name_of(target.device()),
        rayon::current_num_threads()
    ));
    plan::say(&voice, &stage, world);
    let ending = stage.run(&mut tracked);
    let outcome = match &ending {
        Ok(Ending::Finished) => Outcome::Finished,
        Ok(Ending::Stopped) => Outcome::Stopped,
        Err(_) => Outcome::Failed,
    };
    if ending.is_ok() {
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

/// Keeps the composed configuration and the version beside the run.
fn save_config(config: &TrainConfig) -> Result<()> {
    let fail = |error: &dyn std::fmt::Display| {
        Failure::work(format!("{}: {error}", config.output.display()))
    };
    std::fs::create_dir_all(&config.output).map_err(|error| fail(&error))?;
    let text = serde_saphyr::to_string(config).map_err(|error| fail(&error))?;
    let text = format!("# longdraft {}\n{text}", env!("CARGO_PKG_VERSION"));
    std::fs::write(config.output.join("config.yaml"), text).map_err(|error| fail(&error))
}

/// Median, 0 of nothing.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}
