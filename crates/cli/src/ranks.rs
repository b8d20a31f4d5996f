//! A command over several ranks, by whatever they were started: who speaks, and how an error ends all.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use longdraft_parallel::{Launch, ParallelError, World, mpi_library, set_teller};

use crate::cli::RankArguments;
use crate::doctor::processors;
use crate::failure::{Failure, Result};
use crate::recording::again;

/// Rank logs in a run directory.
const LOGS: &str = "logs";

/// What a rank waits before it tells of an error: what all ranks meet, the first one tells alone.
const FIRST_SPEAKS: Duration = Duration::from_millis(1500);

/// Processes that are started on one machine at most.
const MOST_HERE: usize = 1024;

/// How ranks are started.
const WAYS_TO_START: &str = "`--ranks N` starts ranks on this machine; torchrun, srun, or the variables RANK, \
    WORLD_SIZE and MASTER_ADDR on several; MPI's launchers need a build with `--features mpi`";

/// Exit code after a panic, as Rust's own.
const PANICKED: u8 = 101;

/// The ranks that a launcher started with this process, or that this one is to start.
fn world_of(wanted: &RankArguments) -> Result<World> {
    let failed = |error| match error {
        ParallelError::Meeting { problem } => Failure::work(problem)
            .hint("docs/guides/cluster.md names the variables by which ranks meet"),
        ParallelError::Ranks { problem } => Failure::usage(problem).hint(WAYS_TO_START),
        other => other.into(),
    };
    let launch = Launch::read().map_err(failed)?;
    let (started, option) = (launch.size(), if wanted.gpus.is_some() { "gpus" } else { "ranks" });
    let Some(count) = wanted.wanted() else {
        launch.require_rank().map_err(failed)?;
        return World::of(&launch).map_err(failed);
    };
    if started > 1 && started != count {
        return Err(Failure::usage(format!(
            "--{option} {count}, but a launcher started {started} processes"
        ))
        .hint(format!("leave out --{option}, or the launcher")));
    }
    if let Some(gpus) = wanted.gpus.filter(|_| started == 1) {
        longdraft_models::device::require_gpus(gpus as usize)?;
    }
    if count > MOST_HERE {
        return Err(Failure::usage(format!(
            "--{option} {count} would start {count} processes here"
        ))
        .hint(format!("at most {MOST_HERE}; with --plan any number")));
    }
    let world = if started > 1 { World::of(&launch) } else { World::launch(count, &again) };
    world.map_err(failed)
}

/// Runs a command on every rank, of those that a launcher started or those that are wanted. An error of one of them
/// is printed and ends all with its exit code; a process alone is a world of one.
pub(crate) fn over_ranks(
    wanted: &RankArguments,
    command: impl FnOnce(&World) -> Result<()>,
) -> Result<()> {
    set_teller(|problem, hint| {
        Failure::work(problem).hint(hint).print();
        crate::terminal::flush();
    });
    let world = world_of(wanted)?;
    if world.size() == 1 {
        return command(&world);
    }
    if !world.is_first() {
        // They share a terminal with the first one, which tells what all do.
        crate::terminal::set_quiet();
    }
    // A rank that leaves because nobody reads its output would leave the others waiting.
    crate::terminal::outlive_readers();
    if world.is_first() {
        errln!("{}", describe(world.hosts()));
        let neighbours = world.hosts().iter().filter(|host| *host == world.host()).count();
        if let Some(warning) = crowded(neighbours, rayon::current_num_threads(), processors()) {
            errln!("warning: {warning}");
        }
    }
    // A rank that unwinds would wait in its end for others, which wait for it.
    let Ok(outcome) = catch_unwind(AssertUnwindSafe(|| command(&world))) else {
        world.abort(PANICKED);
    };
    match outcome {
        Err(failure) if !failure.is_interruption() => {
            if !world.is_first() {
                std::thread::sleep(FIRST_SPEAKS);
            }
            let (rank, size, host) = (world.rank(), world.size(), world.host());
            crate::terminal::print_aside(format_args!("rank {rank} of {size} on {host}:\n"));
            failure.print();
            crate::terminal::flush();
            world.abort(failure.code())
        }
        // What interrupts one rank interrupts all.
        ended => {
            // Nobody leaves while another one may still fail; the first may have more to do. The
            // launcher ends all when the first of them leaves with another code than 0.
            crate::terminal::flush();
            world.patiently(World::barrier);
            ended
        }
    }
}

/// The same for a command whose processes may also work side by side as strangers: those that MPI starts of a build
/// without it do.
pub(crate) fn over_ranks_or_strangers(
    wanted: &RankArguments,
    command: impl FnOnce(&World) -> Result<()>,
) -> Result<()> {
    match Launch::read() {
        Ok(Launch::Mpi(_)) if mpi_library().is_none() => command(&World::single()),
        _ => over_ranks(wanted, command),
    }
}

/// What to do about more threads than processors.
fn crowded(ranks: usize, threads: usize, processors: usize) -> Option<String> {
    (processors > 0 && threads > 1 && ranks * threads > processors).then(|| {
        format!(
            "{ranks} ranks of {threads} threads share {processors} processors: give --threads {}",
            (processors / ranks).max(1)
        )
    })
}

/// Ranks by machine: `4 ranks on 2 hosts: a 0-1, b 2-3`.
fn describe(hosts: &[String]) -> String {
    let mut places: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, host) in hosts.iter().enumerate() {
        match places.iter_mut().find(|(known, _)| known == host) {
            Some((_, ranks)) => ranks.push(rank),
            None => places.push((host, vec![rank])),
        }
    }
    let place = |(host, ranks): &(&str, Vec<usize>)| {
        let (first, last) = (ranks[0], ranks[ranks.len() - 1]);
        if ranks.len() > 1 && last - first + 1 == ranks.len() {
            return format!("{host} {first}-{last}");
        }
        let ranks: Vec<String> = ranks.iter().map(ToString::to_string).collect();
        format!("{host} {}", ranks.join(" "))
    };
    let listed: Vec<String> = places.iter().map(place).collect();
    let plural = if places.len() == 1 { "" } else { "s" };
    format!("{} ranks on {} host{plural}: {}", hosts.len(), places.len(), listed.join(", "))
}

/// Where a rank's lines go: the first one's to the terminal, every one's to its log.
#[derive(Clone)]
pub(crate) struct Voice {
    is_shown: bool,
    log: Option<Arc<Mutex<File>>>,
    start: Instant,
}

impl Voice {
    /// Of one process: the terminal alone.
    pub(crate) fn alone() -> Self {
        Self { is_shown: true, log: None, start: Instant::now() }
    }

    /// Of one process that tells its caller in place of the terminal.
    pub(crate) fn silent() -> Self {
        Self { is_shown: false, ..Self::alone() }
    }

    /// Of a rank: `logs/rank-N.log` in the run directory, which begins with who it is.
    pub(crate) fn of(world: &World, output: &Path) -> Result<Self> {
        if world.size() == 1 {
            return Ok(Self::alone());
        }
        let folder = output.join(LOGS);
        let path = folder.join(format!("rank-{}.log", world.rank()));
        let open = || {
            std::fs::create_dir_all(&folder)?;
            OpenOptions::new().create(true).append(true).open(&path)
        };
        let file = open().map_err(Failure::at(&path))?;
        let voice = Self {
            is_shown: world.is_first(),
            log: Some(Arc::new(Mutex::new(file))),
            start: Instant::now(),
        };
        voice.log(&format!(
            "rank {} of {} on {}, process {}, {} threads",
            world.rank(),
            world.size(),
            world.host(),
            std::process::id(),
            rayon::current_num_threads()
        ));
        Ok(voice)
    }

    /// Whether the user sees this rank.
    pub(crate) fn is_shown(&self) -> bool {
        self.is_shown
    }

    /// A line for user and log.
    pub(crate) fn say(&self, line: &str) {
        if self.is_shown {
            errln!("{line}");
        }
        self.log(line);
    }

    /// A line for the log, with the seconds since this process took the run up.
    pub(crate) fn log(&self, line: &str) {
        let Some(Ok(mut file)) = self.log.as_ref().map(|file| file.lock()) else { return };
        let line = format!("{:9.2} {line}\n", self.start.elapsed().as_secs_f64());
        // A log that cannot be written is no reason to lose the run.
        let _ = file.write_all(line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_threads_than_processors_are_told() {
        let warning = crowded(4, 16, 16).expect("a warning");
        assert!(warning.ends_with("give --threads 4"), "{warning}");
        assert!(crowded(40, 2, 16).expect("a warning").ends_with("--threads 1"));
        assert!(crowded(4, 4, 16).is_none() && crowded(40, 1, 16).is_none());
        assert!(crowded(4, 4, 0).is_none());
    }

    #[test]
    fn ranks_are_listed_by_host() {
        let text = |hosts: &[&str]| {
            describe(&hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(text(&["a", "a"]), "2 ranks on 1 host: a 0-1");
        assert_eq!(text(&["a", "a", "b"]), "3 ranks on 2 hosts: a 0-1, b 2");
        assert_eq!(text(&["a", "b", "a", "b"]), "4 ranks on 2 hosts: a 0 2, b 1 3");
    }

    #[test]
    fn the_manifest_in_the_docs_is_a_valid_mpi_job() {
        let page = include_str!("../../../docs/guides/cluster.md");
        let (_, rest) = page.split_once("```yaml\n").expect("a manifest");
        let (text, _) = rest.split_once("```").expect("its end");
        let job: serde_json::Value = serde_saphyr::from_str(text).expect("YAML");
        assert_eq!(
            (&job["apiVersion"], &job["kind"]),
            (&"kubeflow.org/v2beta1".into(), &"MPIJob".into())
        );
        assert!(job["metadata"]["name"].is_string());
        let spec = &job["spec"];
        let workers = spec["mpiReplicaSpecs"]["Worker"]["replicas"].as_u64().expect("workers");
        let slots = spec["slotsPerWorker"].as_u64().expect("slots");
        for role in ["Launcher", "Worker"] {
            let replica = &spec["mpiReplicaSpecs"][role];
            assert!(replica["replicas"].as_u64() > Some(0), "{role}");
            let pod = &replica["template"]["spec"];
            let containers = pod["containers"].as_array().expect("containers");
            let sound = |c: &serde_json::Value| c["name"].is_string() && c["image"].is_string();
            assert!(containers.iter().all(sound), "{role}");
            // Every mount has its volume.
            for mount in containers.iter().filter_map(|c| c["volumeMounts"].as_array()).flatten() {
                let volumes = pod["volumes"].as_array().expect("volumes");
                assert!(volumes.iter().any(|volume| volume["name"] == mount["name"]), "{mount}");
            }
        }
        let launcher = &spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0];
        let words: Vec<&str> = ["command", "args"]
            .iter()
            .flat_map(|key| launcher[key].as_array().expect("words"))
            .map(|word| word.as_str().expect("words are quoted where YAML reads numbers"))
            .collect();
        let ranks = words.iter().position(|word| *word == "-n").and_then(|at| words.get(at + 1));
        assert_eq!(ranks, Some(&(workers * slots).to_string().as_str()));
        // What follows is a command line of this program.
        let start = words.iter().position(|word| *word == "longdraft").expect("the program");
        <crate::cli::Cli as clap::Parser>::try_parse_from(&words[start..]).expect("arguments");
    }
}
