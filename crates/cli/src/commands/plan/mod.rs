//! `--plan`: what a run needs, before anything is loaded.

mod sizing;
mod table;

use std::path::Path;

use longdraft_models::TargetConfig;
use longdraft_models::published::{published_config, published_names};
use longdraft_models::target::Target;
use longdraft_train::config::TrainConfig;
use longdraft_train::parallel::World;
use longdraft_train::plan::{Estimate, Layout, Speed, Workload};
use serde_json::{Value, json};

use crate::cli::PlanArguments;
use crate::configuration::Composed;
use crate::doctor::{available_memory, readable_bytes};
use crate::failure::{Failure, Result};
use crate::ranks::Voice;

/// 10⁹ bytes a second of a 10 Gbit/s network.
const BANDWIDTH: f64 = 1.25;

/// Prints what every stage needs; nothing is loaded or written.
pub(crate) fn run(
    world: &World,
    composed: Composed,
    arguments: &PlanArguments,
    json: bool,
) -> Result<()> {
    if !world.is_first() {
        return Ok(());
    }
    let machine = Machine::of(arguments, world.size());
    let stages = match composed {
        Composed::Stage(located) => vec![(None, located.config)],
        Composed::Curriculum { stages, .. } => {
            stages.into_iter().map(|stage| (Some(stage.name), stage.located.config)).collect()
        }
    };
    let mut all = Vec::new();
    for (name, config) in stages {
        let target = target_config(&config.target)?;
        if arguments.table {
            print!("{}", sizing::markdown(&config, &target, &machine)?);
            continue;
        }
        let workload = Workload::new(&config, target, machine.layout)?;
        let estimate = workload.estimate();
        if json {
            all.push(to_json(name.as_deref(), &workload, &estimate, &machine));
            continue;
        }
        if let Some(name) = name {
            println!("stage {name}");
        }
        print!("{}", table::text(&workload, &estimate, &machine));
    }
    if json {
        println!("{}", json!({ "stages": all }));
    }
    Ok(())
}

/// What a plan is held against.
pub(super) struct Machine {
    pub(super) layout: Layout,
    /// Free bytes of a rank.
    pub(super) free: Option<u64>,
    pub(super) speed: Speed,
    /// Whether the operations a second were measured here.
    measured: bool,
}

impl Machine {
    fn of(arguments: &PlanArguments, started: usize) -> Self {
        let ranks = arguments.ranks.map_or(started, |ranks| ranks as usize);
        let threads = rayon::current_num_threads();
        let free = match arguments.memory {
            Some(gib) => Some((gib * (1_u64 << 30) as f64) as u64),
            // Ranks that were started here share this machine.
            None => available_memory().map(|free| free / started.max(1) as u64),
        };
        let gigabytes_per_second = arguments.bandwidth.unwrap_or(BANDWIDTH);
        let gflops = arguments.gflops.unwrap_or_else(Speed::measured_gflops);
        Self {
            layout: Layout {
                target_value_bytes: usize::from(arguments.target_bytes),
                ..Layout::of(ranks, threads)
            },
            free,
            speed: Speed { gflops, gigabytes_per_second },
            measured: arguments.gflops.is_none(),
        }
    }
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

fn to_json(
    name: Option<&str>,
    workload: &Workload,
    estimate: &Estimate,
    machine: &Machine,
) -> Value {
    let verdict = workload.verdict(estimate, machine.free);
    json!({
        "stage": name,
        "ranks": machine.layout.ranks,
        "bytes": estimate.bytes(),
        "peak": estimate.peak().name,
        "phases": estimate.phases.iter().map(|phase| json!({
            "name": phase.name, "bytes": phase.bytes(), "items": phase.items,
        })).collect::<Vec<_>>(),
        "free_bytes": machine.free,
        "fits": verdict.fits,
        "remedies": verdict.remedies,
        "sent_bytes": estimate.sent_bytes(),
        "sent": estimate.sent,
        "tokens_per_step": estimate.tokens,
        "operations_per_token": estimate.operations_per_token,
        "gflops": machine.speed.gflops,
        "gigabytes_per_second": machine.speed.gigabytes_per_second,
        "seconds_per_step": estimate.seconds(&machine.speed),
        "bytes_of_a_row_of_features": estimate.features_of_row,
    })
}

/// Says in one line what a run that is about to start needs, and warns if that is not free.
pub(crate) fn say(voice: &Voice, config: &TrainConfig, target: &TargetConfig, world: &World) {
    let layout = Layout::of(world.size(), rayon::current_num_threads());
    let Ok(workload) = Workload::new(config, target.clone(), layout) else { return };
    let estimate = workload.estimate();
    let needed = readable_bytes(estimate.bytes());
    // What is loaded already is not taken again.
    let loaded = longdraft_train::resident_bytes().unwrap_or(0);
    let neighbours = world.hosts().iter().filter(|host| *host == world.host()).count().max(1);
    let free = available_memory().map(|free| loaded + free / neighbours as u64);
    let of_free =
        free.map_or_else(String::new, |free| format!(" of {} free", readable_bytes(free)));
    voice.say(&format!(
        "about {needed} of memory at most{of_free}, in the {} phase",
        estimate.peak().name
    ));
    let verdict = workload.verdict(&estimate, free);
    if verdict.fits == Some(false) {
        voice.say(&format!(
            "warning: this may not fit; lower one of these: {}",
            verdict.remedies.join("; ")
        ));
    }
}
