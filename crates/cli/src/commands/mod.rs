//! One file per command.

#[cfg(any(test, feature = "bench"))]
mod bench;
pub(crate) mod capture;
mod config;
pub(crate) mod curriculum;
mod data;
mod doctor;
pub(crate) mod eval;
pub(crate) mod export;
mod extract;
mod fetch;
mod fit;
mod generate;
mod habits;
mod init;
mod kernel_check;
mod learn;
mod parity;
mod plan;
mod pretrain;
mod push;
mod quickstart;
pub(crate) mod recorded;
mod report;
mod runs;
mod serve;
pub(crate) mod train;
pub(crate) mod verify;
mod watch;

use std::path::Path;

use longdraft_kernels::dispatch::{Ops, Simd, set_ops, set_simd};
use longdraft_kernels::memory;

use crate::cli::{Cli, Command, EvalCommand, LearnCommand, LmCommand, OpsChoice, SimdChoice};
use crate::failure::{Failure, Result};
use crate::terminal::Verbosity;

pub(crate) use config::key_problems;

/// Runs what the arguments ask for.
pub(crate) fn run(arguments: Cli) -> Result<()> {
    let verbosity = match (arguments.quiet, arguments.verbose) {
        (true, _) => Verbosity::Quiet,
        (_, true) => Verbosity::Verbose,
        _ => Verbosity::Normal,
    };
    crate::terminal::set_manners(verbosity, arguments.color);
    if let Some(path) = &arguments.log_file {
        log(path)?;
    }
    if !arguments.command.only_prints() {
        crate::terminal::outlive_readers();
    }
    if arguments.json {
        crate::terminal::set_machine_readable();
    }
    if let Some(name) = arguments.command.new_name() {
        errln!("note: this command is now called `longdraft {name}`; the old name still works");
    }
    if works_in_steps(&arguments.command) {
        memory::keep_freed();
    }
    let threads = arguments.threads.unwrap_or_else(|| threads_of(&arguments.command));
    if let Ok(processors) = std::thread::available_parallelism()
        && threads > processors.get()
    {
        errln!("warning: {threads} threads share {processors} processors, which slows them down");
    }
    set_ops(match arguments.ops {
        OpsChoice::Fused => Ops::Fused,
        OpsChoice::Composed => Ops::Composed,
        #[cfg(feature = "emulate-cuda")]
        OpsChoice::Emulated => Ops::Emulated,
    });
    set_simd(match arguments.simd {
        SimdChoice::None => Simd::None,
        SimdChoice::Avx2 => Simd::Avx2,
        SimdChoice::Widest => Simd::Widest,
    });
    start_threads(threads)?;
    detail!("longdraft {}, {} threads", env!("CARGO_PKG_VERSION"), rayon::current_num_threads());
    let started = std::time::Instant::now();
    // On a thread of the pool, so that a parallel loop starts without waking anybody first.
    let ended = rayon::scope(|_| dispatch(arguments));
    detail!("took {:.2} s", started.elapsed().as_secs_f64());
    ended
}

/// Threads of a process that shares its machine with others of the same work; 0: as many as it has cores.
fn threads_of(command: &Command) -> usize {
    let Some(ranks) = command.ranks_to_start() else { return 0 };
    let launched = longdraft_parallel::Launch::read().map_or(1, |launch| launch.local_size());
    let neighbours = if launched > 1 { launched } else { ranks.wanted().unwrap_or(1) };
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if neighbours > 1 { (cores / neighbours).max(1) } else { 0 }
}

/// Has a file hold what is told.
fn log(path: &Path) -> Result<()> {
    crate::terminal::log::open(path).map_err(|error| {
        let failure = Failure::file(format!("--log-file {}: {error}", path.display()), &error);
        failure.hint("give a file that can be written, in a folder that is there")
    })
}

/// Removes a folder with what it holds, if it is there.
fn remove_folder(folder: &Path) -> Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::work(format!("{}: {error}", folder.display())))
        }
        _ => Ok(()),
    }
}

/// Starts this process's threads; 0 are as many as it has cores.
pub(crate) fn start_threads(threads: usize) -> Result<()> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()
        .map_err(|error| Failure::work(format!("cannot start {threads} threads: {error}")))
}

/// Whether a command asks for the same memory step by step.
fn works_in_steps(command: &Command) -> bool {
    match command {
        Command::Train(_)
        | Command::Capture(_)
        | Command::Pretrain(_)
        | Command::Lm(LmCommand::Train(_))
        | Command::Fit(_)
        | Command::Learn(LearnCommand::Train { .. }) => true,
        #[cfg(any(test, feature = "bench"))]
        Command::Bench(_) => true,
        _ => false,
    }
}

fn dispatch(arguments: Cli) -> Result<()> {
    match arguments.command {
        Command::Quickstart(quickstart) => quickstart::run(&quickstart, arguments.json),
        Command::Fit(fit) => fit::run(&fit, arguments.json),
        Command::Train(train) => train::run(&train, arguments.json),
        Command::Capture(capture) => capture::run(&capture, arguments.json),
        Command::Init(init) => init::run(&init, arguments.json),
        Command::Config(command) => config::run(&command, arguments.json),
        Command::Extract(extract) => extract::run(&extract, arguments.json),
        Command::Export(export) => export::run(&export, arguments.json),
        Command::Verify(verify) => verify::run(&verify, arguments.json),
        Command::Push(push) => push::run(&push, arguments.json),
        Command::Generate(generate) => generate::run(&generate, arguments.json),
        Command::Serve(serve) => serve::run(&serve, arguments.json),
        Command::Learn(command) => learn::run(&command),
        Command::Eval(EvalCommand::Decode(decode)) => eval::run(&decode, arguments.json),
        Command::Eval(EvalCommand::HeldOut(held_out)) => {
            eval::held_out::run(&held_out, arguments.json)
        }
        Command::Lm(LmCommand::Train(train)) | Command::Pretrain(train) => {
            pretrain::run(&train, arguments.json)
        }
        Command::Lm(LmCommand::Quantize(model)) | Command::Quantize(model) => {
            pretrain::quantize(&model, arguments.json)
        }
        Command::Lm(LmCommand::Score(model)) | Command::Eval(EvalCommand::Bpb(model)) => {
            pretrain::bits_per_byte(&model, arguments.json)
        }
        Command::Lm(LmCommand::Grid(grid)) | Command::Experiment(grid) => {
            pretrain::experiment(&grid, arguments.json)
        }
        Command::Data(command) => data::run(&command, arguments.json),
        Command::Fetch(fetch) => fetch::run(&fetch, arguments.json),
        Command::Parity(parity) => parity::run(&parity, arguments.json),
        Command::KernelCheck(check) => kernel_check::run(&check, arguments.json),
        Command::Report(report) => report::run(&report, arguments.json),
        Command::Watch(watch) => watch::run(&watch, arguments.json),
        Command::Runs(command) => runs::run(&command, arguments.json),
        Command::Completions(completions) => {
            habits::completions(&completions);
            Ok(())
        }
        Command::Man(man) => habits::man(&man),
        #[cfg(any(test, feature = "bench"))]
        Command::Bench(command) => bench::run(&command),
        Command::Doctor(doctor) => doctor::run(&doctor, arguments.json),
    }
}
