//! `longdraft capture`: the target's features into a store, for training without the target.

use std::path::Path;
use std::sync::Arc;

use longdraft_configuration::{
    ConfigurationError, Located, read_located_beside, read_located_stage, stage_input_problems,
};
use longdraft_features::store::Estimate;
use longdraft_models::disk::readable_bytes;
use longdraft_models::target_model::{Layers, Target, TargetOptions};
use longdraft_parallel::{ParallelConfig, World};
use longdraft_report::words::clock;
use longdraft_train::config::TrainConfig;
use longdraft_train::inputs::{Purpose, Reach};
use longdraft_train::stage::{Capture, CaptureOptions, Ending, Reader};
use serde_json::json;

use crate::cli::{CaptureArguments, with_device};
use crate::commands::data::require_folder;
use crate::commands::require_writable;
use crate::commands::train::{placed, shared};
use crate::failure::{Failure, Result};
use crate::interrupts::Interrupts;
use crate::progress::TrainingProgress;
use crate::ranks::{Voice, over_ranks_or_strangers};
use crate::recording::quoted;

/// Captures what is not complete; a second call, or one of another process, goes on.
pub(crate) fn run(arguments: &CaptureArguments, json: bool) -> Result<()> {
    over_ranks_or_strangers(&arguments.ranks, |world| run_on(world, arguments, json))
}

fn run_on(world: &World, arguments: &CaptureArguments, json: bool) -> Result<()> {
    let changes = with_device(&arguments.overrides, arguments.device);
    let name = |path: &Path| path.display().to_string();
    let first = read_located_stage(&arguments.config, &changes)?;
    let mut stages = vec![(name(&arguments.config), first)];
    for path in &arguments.also {
        stages.push((name(path), read_located_beside(path, &changes)?));
    }
    let interrupts = Interrupts::listen();
    let voice = Voice::of(world, &stages[0].1.config.output)?;
    let mut progress = TrainingProgress::new(interrupts.clone(), voice);
    let (records, verify) = (arguments.records.clone(), arguments.verify);
    let options = CaptureOptions { records, verify, free_bytes: None };
    let captured = capture(world, &stages, (&options, arguments.dry_run), &mut progress)?;
    let Captured { place, estimate, shards, ending, seconds } = captured;
    let outcome = if arguments.dry_run { Ok(()) } else { interrupts.outcome(ending, world) };
    if !world.is_first() {
        return outcome;
    }
    if json {
        outjson!({
            "output": place, "finished": ending == Ending::Finished,
            "tokens": estimate.tokens, "bytes": estimate.bytes, "shards": shards,
            "bytes_per_token": estimate.bytes_per_token(), "seconds": seconds,
        });
    } else if arguments.dry_run {
        outln!("no features were written");
    } else if ending == Ending::Finished {
        let command = |(name, _): &(String, _)| format!("`longdraft train {}`", quoted(name));
        let commands: Vec<String> = stages.iter().map(command).collect();
        outln!(
            "done in {}: {place}; train from it with {} and the same arguments",
            clock(seconds),
            commands.join(", ")
        );
    } else {
        outln!("stopped: the same command goes on from there");
    }
    outcome
}

/// What was captured, or was going to be.
pub(crate) struct Captured {
    /// Of the store.
    pub(crate) place: String,
    pub(crate) estimate: Estimate,
    pub(crate) shards: usize,
    pub(crate) ending: Ending,
    pub(crate) seconds: f64,
}

/// Captures what stages, each with its name, need and the first one's store lacks; with `dry_run` it only says how much
/// that is. Every rank calls it.
pub(crate) fn capture(
    world: &World,
    stages: &[(String, Located)],
    (options, dry_run): (&CaptureOptions, bool),
    progress: &mut TrainingProgress<'_>,
) -> Result<Captured> {
    for (_, stage) in stages {
        let problems = stage_input_problems(stage, Reach::All, Purpose::Capturing);
        if !problems.is_empty() {
            return Err(ConfigurationError::from(problems).into());
        }
    }
    let readers = stages.iter().map(|(name, stage)| Reader { name, config: &stage.config });
    let readers: Vec<Reader<'_>> = readers.collect();
    let config = readers[0].config;
    let Some(place) = config.train.features.store() else {
        return Err(Failure::usage("`train.features` names no place for the features")
            .hint("add train.features=FOLDER (or s3://, gs://, az://); `train` then reads it"));
    };
    readers[1..].iter().try_for_each(|other| require_same_source(&readers[0], other))?;
    let records = options.records.as_deref();
    check_shared_layers(config, records.is_some(), world)?;
    if !place.contains("://") && !dry_run {
        require_writable(Path::new(place))
            .map_err(|failure| failure.hint("give another train.features=FOLDER"))?;
    }
    records.map(require_folder).transpose()?;
    // Records take the place of its passes.
    let from_last = |reader: &Reader<'_>| reader.config.needed_layers() == Layers::Last;
    let layers = match records {
        None => Layers::All,
        Some(_) if readers.iter().any(from_last) => Layers::Last,
        Some(_) => config.needed_layers(),
    };
    // Every rank, or group of them, runs whole passes.
    let parallel = ParallelConfig { zero: 0, ..config.parallel.clone() };
    let target = shared(placed(config, world)?, &parallel, world)?;
    let target = TargetOptions { layers, ..target };
    let target = Arc::new(Target::open(&config.target, &target)?);
    let tokenizer = Target::open_tokenizer(&config.target)?;
    let started = std::time::Instant::now();
    let capture = Capture::prepare(&readers, target, &tokenizer, options, world, progress)?;
    let (estimate, shards) = (capture.estimate(), capture.shards());
    progress.voice().say(&describe(&estimate, shards, place));
    let ending = if dry_run { Ending::Stopped } else { capture.run(progress)? };
    // The first rank's answer is that all of the store is written.
    // The others may have shards left when one is stopped.
    let stopped = world.patiently(|world| world.any(ending == Ending::Stopped));
    let ending = if stopped { Ending::Stopped } else { ending };
    let seconds = started.elapsed().as_secs_f64();
    Ok(Captured { place: place.to_owned(), estimate, shards, ending, seconds })
}

/// Refuses a configuration whose features another target computes, or another store or other records hold.
fn require_same_source(one: &Reader<'_>, other: &Reader<'_>) -> Result<()> {
    let of = |config: &TrainConfig| {
        let TrainConfig { train, target, precision, products, device, capture, .. } = config;
        [
            ("train.features", json!(train.features)),
            ("target", json!(target)),
            ("precision", json!(precision)),
            ("products", json!(products)),
            ("device", json!(device)),
            ("capture.record_layers", json!(capture.record_layers)),
        ]
    };
    let pairs = of(one.config).into_iter().zip(of(other.config));
    let differing = pairs.filter(|((_, own), (_, other))| own != other);
    let told: Vec<String> =
        differing.map(|((key, own), (_, other))| format!("`{key}` is {own} and {other}")).collect();
    if told.is_empty() {
        return Ok(());
    }
    let told = told.join("; ");
    Err(Failure::usage(format!("{} and {} cannot share a store: {told}", one.name, other.name))
        .hint("give what differs as KEY=VALUE, which counts for all files"))
}

/// Refuses ranks that cannot share the target's layers, before these are loaded.
fn check_shared_layers(config: &TrainConfig, has_records: bool, world: &World) -> Result<()> {
    let tensor = config.parallel.tensor;
    if tensor > 1 && has_records {
        return Err(Failure::usage(format!(
            "`parallel.tensor: {tensor}` shares the target's layers, and none run where --records take \
             the place of its passes"
        ))
        .hint("set parallel.tensor=1"));
    }
    if tensor > 1 {
        config.parallel.check_tensor(world.size(), &Target::open_config(&config.target)?)?;
    }
    Ok(())
}

/// What is going to be written, before it is.
fn describe(estimate: &Estimate, shards: usize, place: &str) -> String {
    let free = match estimate.free {
        Some(free) => format!("{} free", readable_bytes(free)),
        None => "free space unknown".to_owned(),
    };
    format!(
        "features of {} tokens: {:.0} bytes a token, {} in {shards} shards ({} still to write); \
         {free} at {place}",
        estimate.tokens,
        estimate.bytes_per_token(),
        readable_bytes(estimate.bytes),
        readable_bytes(estimate.bytes_left),
    )
}
