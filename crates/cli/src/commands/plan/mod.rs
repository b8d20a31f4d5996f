//! `--plan`: what a run needs, before anything is loaded.

mod collectives;
mod disk;
mod machine;
mod sizing;
mod table;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use longdraft_configuration::{
    Composed, ConfigurationError, LocatedStage, input_problems, read, read_located_stage,
};
use longdraft_decode::READ_ALONE;
use longdraft_kernels::dispatch::{has_kernels, multiplies_halves};
use longdraft_kernels::matrix::BlockFormat;
use longdraft_models::device::{free_memory, total_memory};
use longdraft_models::disk::readable_bytes;
use longdraft_models::published::{published_config, published_names};
use longdraft_models::target_model::Target;
use longdraft_models::{Precision, TargetConfig};
use longdraft_parallel::World;
use longdraft_plan::{
    Estimate, Layout, Place, Verdict, Workload, of_pretraining, pretraining_remedies,
};
use longdraft_pretrain::PretrainConfig;
use longdraft_train::TrainError;
use longdraft_train::checkpoint::StartFrom;
use longdraft_train::config::TrainConfig;
use longdraft_train::inputs::{Purpose, Reach};
use longdraft_train::stage::Stage;
use serde_json::{Map, Value, json};

use crate::cli::TrainArguments;
use crate::decoding::SAID_CONTEXT;
use crate::doctor::available_memory;
use crate::failure::{Failure, Result};
use crate::ranks::Voice;
use machine::Machine;

/// Prints what every stage needs, or the one that `stage=NAME` picks; nothing is loaded or written.
pub(crate) fn run(world: &World, arguments: &TrainArguments, json: bool) -> Result<()> {
    let composed = composed(arguments)?;
    let (device, ranks) = (arguments.device, &arguments.ranks);
    let (arguments, wanted) = (&arguments.planning, ranks.wanted());
    let says_bytes = arguments.target_bytes.is_some();
    if !world.is_first() {
        return Ok(());
    }
    check_inputs(&composed)?;
    let stages = stages(composed)?;
    let (mut all, mut too_large) = (Vec::new(), 0);
    for (name, config) in stages {
        let device = ranks.planned_on(device.unwrap_or(config.device));
        let chosen = (device, config.precision, config.products, config.parallel.reduction);
        let machine = Machine::of(arguments, (wanted, world.size()), chosen);
        let target = target_config(&config.target)?;
        if arguments.table {
            out!("{}", sizing::markdown(&config, &target, &machine)?);
            continue;
        }
        let layout = machine.layout_of(&config, &target)?;
        let cache = Cache::of(&config.target, &target, &machine);
        let workload = Workload::new(&config, target, layout)?;
        let types = if says_bytes { None } else { stored_matrices(&config, layout.threads > 0) };
        let is_assumed = config.precision == Precision::Stored && types.is_none() && !says_bytes;
        let workload = workload.with_stored(types).with_documents(machine.document_tokens);
        let estimate = workload.estimate();
        let verdict = workload.verdict(&estimate, machine.free);
        if arguments.collectives {
            out!("{}", collectives::markdown(&config, (&estimate, &verdict), &machine));
            continue;
        }
        too_large += usize::from(verdict.fits == Some(false));
        if json {
            let mut stage = to_json(name.as_deref(), &estimate, &verdict, &machine);
            stage["cache_tokens"] = json!(cache.tokens);
            stage["cache_bytes"] = json!(cache.bytes);
            stage["idle_ranks"] = json!(workload.idle_ranks());
            all.push(stage);
            continue;
        }
        if let Some(name) = name {
            outln!("stage {name}");
        }
        out!("{}", table::text(&estimate, &verdict, &machine));
        tell_rows(&config, (&workload, &estimate), layout.ranks);
        outln!("{cache}");
        if is_assumed {
            outln!("{ASSUMED}");
        }
    }
    if json {
        outjson!({ "stages": all });
    }
    require_fit(too_large)
}

/// What a plan takes for granted where the types of a target's matrices are not known.
const ASSUMED: &str = "the target is counted with one byte a value: `precision: stored` holds what its file holds, \
                       and no file of it was read (--target-bytes gives another number)";

/// Types of the target's matrices where it is held as its file holds it, in main memory, and the file is here.
fn stored_matrices(config: &TrainConfig, on_cpu: bool) -> Option<BTreeMap<String, &'static str>> {
    let is_read = on_cpu && config.precision == Precision::Stored;
    is_read.then(|| Target::stored_matrices(Path::new(&config.target)).ok()).flatten()
}

/// Says which ranks have no row, and what further rows take.
fn tell_rows(config: &TrainConfig, (workload, estimate): (&Workload, &Estimate), ranks: usize) {
    let idle = workload.idle_ranks();
    if idle > 0 {
        let rows = config.train.rows_of_a_step(config.data.row_tokens);
        outln!("{rows} rows a step for {ranks} ranks: {idle} of them idle");
    }
    if workload.lacks_rows() {
        let row = readable_bytes(estimate.features_of_row);
        outln!("{row} more for every further training row: `train.features: memory` keeps all");
    }
}

/// What a sequence takes of a target's cache when it is decoded: keys and values in f16 where a CPU multiplies quantised
/// blocks, in bf16 where an NVIDIA GPU does or the frozen target computes in it, else in f32.
struct Cache {
    tokens: usize,
    bytes: u64,
    /// If no layer had a window.
    without_windows: u64,
}

impl Cache {
    fn of(place: &str, target: &TargetConfig, machine: &Machine) -> Self {
        let tokens = target.max_position_embeddings.min(SAID_CONTEXT);
        let states = 4 * target.cached_state_values();
        let layout = machine.layout;
        let on_cpu = layout.threads > 0;
        let of_blocks = || (on_cpu || machine.has_nvidia_kernels) && has_blocks(place);
        let reads_bf16 = on_cpu || target.reads_half_keys();
        let value = if reads_bf16 && (layout.half_states || of_blocks()) { 2 } else { 4 };
        let bytes = |rows| (value * target.cache_values(tokens, rows) + states) as u64;
        // A pass over everything holds everything.
        Self { tokens, bytes: bytes(READ_ALONE), without_windows: bytes(tokens) }
    }
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tokens, bytes) = (self.tokens, readable_bytes(self.bytes));
        write!(f, "decoding later caches {bytes} of a sequence of {tokens} tokens")?;
        if self.without_windows > self.bytes {
            write!(f, "; without windows {}", readable_bytes(self.without_windows))?;
        }
        Ok(())
    }
}

/// Fails if stages need more memory than is free, as the plan has said of each.
fn require_fit(too_large: usize) -> Result<()> {
    match too_large {
        0 => Ok(()),
        1 => Err(Failure::work("the run does not fit into the memory that is free")),
        _ => Err(Failure::work(format!(
            "{too_large} stages do not fit into the memory that is free"
        ))),
    }
    .map_err(|failure| failure.hint("the plan names what to lower").in_result())
}

/// Prints what a pretraining run needs.
pub(crate) fn pretraining(
    world: &World,
    config: &PretrainConfig,
    arguments: &TrainArguments,
    json: bool,
) -> Result<()> {
    if !world.is_first() {
        return Ok(());
    }
    let device = arguments.ranks.planned_on(config.device);
    let (arguments, wanted) = (&arguments.planning, arguments.ranks.wanted());
    let (layout, parts) = ("has nothing to lay out", "does not know its parts of a step");
    for (is_asked, name, why) in [
        (arguments.table, "--table", layout),
        (arguments.collectives, "--collectives", layout),
        (arguments.gpu.is_some(), "--gpu", parts),
        (arguments.document_tokens.is_some(), "--document-tokens", parts),
    ] {
        if is_asked {
            let failure = Failure::usage(format!("{name} is of `train`: pretraining {why}"));
            return Err(failure.hint("leave it out; --gflops and --memory tell of a machine"));
        }
    }
    let (ranks, reduction) = ((wanted, world.size()), config.parallel.reduction);
    let chosen = (device, config.precision, config.products, reduction);
    let machine = Machine::of(arguments, ranks, chosen);
    let estimate = of_pretraining(config, &machine.layout);
    let remedies = || pretraining_remedies(config, &machine.layout);
    let verdict = Verdict::of(&estimate, machine.free, remedies);
    if json {
        outjson!({ "stages": [to_json(None, &estimate, &verdict, &machine)] });
    } else {
        out!("{}", table::text(&estimate, &verdict, &machine));
    }
    require_fit(usize::from(verdict.fits == Some(false)))
}

fn composed(arguments: &TrainArguments) -> Result<Composed> {
    let TrainArguments { config, overrides, .. } = arguments;
    if overrides.iter().any(|argument| argument.starts_with("stage=")) {
        return Ok(Composed::Stage(Box::new(read_located_stage(config, overrides)?)));
    }
    Ok(read(config, overrides)?)
}

/// The stages, each with what it leaves open from the draft that it starts from: a saved one, or that of the stage
/// before.
fn stages(composed: Composed) -> Result<Vec<(Option<String>, TrainConfig)>> {
    let mut stages: Vec<(Option<String>, StartFrom, TrainConfig)> = match composed {
        Composed::Stage(located) => vec![(None, StartFrom::Scratch, located.config)],
        Composed::Curriculum { stages, .. } => {
            let named =
                |stage: LocatedStage| (Some(stage.name), stage.start_from, stage.located.config);
            stages.into_iter().map(named).collect()
        }
    };
    let mut before: Option<Map<String, Value>> = None;
    for (_, start_from, config) in &mut stages {
        let follows = before.filter(|_| *start_from != StartFrom::Scratch);
        config.draft.method = match follows {
            Some(known) => config.draft.method.with(config.draft.method.left_open(&known))?,
            None => match config.draft.completed() {
                Ok(completed) => completed.method,
                // Where the run would start here it was refused before.
                Err(error) => {
                    errln!("warning: `draft.from`: {error}");
                    config.draft.method.clone()
                }
            },
        };
        before = Some(config.draft.method.keys());
    }
    Ok(stages.into_iter().map(|(name, _, config)| (name, config)).collect())
}

/// Tries what the stages open. Where their targets are on this machine, the run would start here, and
/// what is missing is an error; a plan for another machine only tells it.
fn check_inputs(composed: &Composed) -> Result<()> {
    let targets: Vec<&Path> = match composed {
        Composed::Stage(located) => vec![Path::new(&located.config.target)],
        Composed::Curriculum { stages, .. } => {
            stages.iter().map(|stage| Path::new(&stage.located.config.target)).collect()
        }
    };
    // Without its target here nothing can be tokenised.
    if !targets.iter().all(|target| target.exists()) {
        return Ok(());
    }
    let problems = input_problems(composed, Reach::Small, Purpose::Training);
    if targets.iter().all(|target| has_weights(target)) && !problems.is_empty() {
        return Err(ConfigurationError::from(problems).into());
    }
    problems.iter().for_each(|problem| errln!("warning: {problem}"));
    Ok(())
}

/// Whether a target holds more than its shape.
fn has_weights(target: &Path) -> bool {
    let is_weight = |path: &Path| {
        path.extension().is_some_and(|extension| extension == "safetensors" || extension == "gguf")
    };
    let mut entries = std::fs::read_dir(target).into_iter().flatten().flatten();
    target.is_file() || entries.any(|entry| is_weight(&entry.path()))
}

/// Whether a target on this machine holds quantised blocks that products read.
fn has_blocks(target: &str) -> bool {
    let types = Target::stored_types(Path::new(target)).unwrap_or_default();
    types.iter().any(|of_type| BlockFormat::named(of_type.name).is_some())
}

/// Sizes of a target on this machine, or of a published one that is not.
fn target_config(spec: &str) -> Result<TargetConfig> {
    if Path::new(spec).exists() {
        return Ok(Target::open_config(spec)?);
    }
    published_config(spec).ok_or_else(|| {
        Failure::work(format!("target `{spec}` is not on this machine and its shape is not known"))
            .hint(format!(
                "name a folder with its config.json (weights are not needed), a GGUF file, or one \
                 of {}",
                published_names().join(", ")
            ))
    })
}

fn to_json(name: Option<&str>, estimate: &Estimate, verdict: &Verdict, machine: &Machine) -> Value {
    json!({
        "stage": name,
        "ranks": machine.layout.ranks,
        "place": estimate.place,
        "bytes": estimate.bytes(),
        "host_bytes": estimate.bytes_in(Place::Host),
        "peak": estimate.peak().name,
        "phases": estimate.phases.iter().map(|phase| json!({
            "name": phase.name, "bytes": phase.bytes(estimate.place), "items": phase.items,
        })).collect::<Vec<_>>(),
        "free_bytes": machine.free,
        "fits": verdict.fits,
        "remedies": verdict.remedies,
        "remedies_are_enough": verdict.is_enough,
        "sent_bytes": estimate.sent_bytes(),
        "sent": estimate.sent.iter().map(|sent| {
            let mut term = json!(sent);
            term["seconds"] = json!(machine.links.seconds(sent));
            term
        }).collect::<Vec<_>>(),
        "links": machine.links,
        "tokens_per_step": estimate.tokens,
        "operations_per_token": estimate.operations_per_token,
        "gflops": machine.gflops(),
        "gpu": machine.gpu(),
        "parts": machine.parts(estimate),
        "seconds": machine.speed.map(|speed| estimate.time(&speed)),
        "seconds_per_step": machine.speed.map(|speed| estimate.time(&speed).total()),
        "bytes_of_a_row_of_features": estimate.features_of_row,
    })
}

/// What a prepared stage costs on its device.
fn workload_of(stage: &Stage, world: &World) -> Option<Workload> {
    let (mut config, target) = (stage.config().clone(), stage.target());
    config.draft.method = stage.method().boxed();
    let layout = Layout {
        ranks: world.size(),
        sequence: config.parallel.sequence,
        tensor: config.parallel.tensor,
        threads: if target.device().is_cpu() { rayon::current_num_threads() } else { 0 },
        target_value_bytes: config.precision.frozen_bytes(!target.device().is_cpu()),
        half_states: !target.device().is_cpu() && multiplies_halves(target.device()),
        gpu_memory: total_memory(target.device()).filter(|_| has_kernels(target.device())),
    };
    // A stage that was prepared has sizes that fit.
    let workload = Workload::new(&config, target.config().clone(), layout).ok()?;
    let types = stored_matrices(&config, target.device().is_cpu());
    let workload = workload.with_stored(types);
    Some(workload.with_training_rows(stage.data_sizes().0))
}

/// Bytes of the features of a row of a prepared stage.
pub(crate) fn features_of_row(stage: &Stage, world: &World) -> Option<u64> {
    workload_of(stage, world).map(|workload| workload.estimate().features_of_row)
}

/// A failure of a stage; of a device without memory it says what the stage needs and what to lower.
pub(crate) fn explain(error: TrainError, stage: &Stage, world: &World) -> Failure {
    let workload = workload_of(stage, world);
    match workload.and_then(|workload| longdraft_plan::explain(&error, &workload, None)) {
        Some(told) => {
            let hint = format!("lower one of these: {}", told.remedies.join("; "));
            Failure::work(told).hint(hint).of_device_memory()
        }
        None => error.into(),
    }
}

/// Says in one line what a run that is about to start needs, and warns if that is not free.
pub(crate) fn say(voice: &Voice, stage: &Stage, world: &World) {
    let Some(workload) = workload_of(stage, world) else { return };
    let estimate = workload.estimate();
    let needed = readable_bytes(estimate.bytes());
    let device = stage.target().device();
    // What is loaded already is not taken again.
    let (whose, free) = if device.is_cpu() {
        let loaded = longdraft_train::memory::resident_bytes().unwrap_or(0);
        let neighbours = world.hosts().iter().filter(|host| *host == world.host()).count().max(1);
        ("memory", available_memory().map(|free| loaded + free / neighbours as u64))
    } else {
        let held = ["target weights", "spread target weights", "draft weights"];
        let loaded = estimate.peak().items.iter();
        let loaded =
            loaded.filter(|item| held.contains(&item.name) && item.place == estimate.place);
        let loaded: u64 = loaded.map(|item| item.bytes).sum();
        ("the GPU's memory", free_memory(device).map(|free| loaded + free))
    };
    let of_free =
        free.map_or_else(String::new, |free| format!(" of {} free", readable_bytes(free)));
    voice.say(&format!(
        "about {needed} of {whose} at most{of_free}, in the {} phase",
        estimate.peak().name
    ));
    let verdict = workload.verdict(&estimate, free);
    if verdict.fits == Some(false) {
        let advice = match verdict.is_enough {
            Some(false) => "nothing here makes it fit, but these lower it",
            _ => "one of these makes it fit",
        };
        voice.say(&format!("warning: this may not fit; {advice}: {}", verdict.remedies.join("; ")));
    }
    disk::say(voice, stage);
}
