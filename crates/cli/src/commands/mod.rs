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

use longdraft_kernels::dispatch::{set_ops, set_simd};
use longdraft_kernels::memory;
use longdraft_models::weights::atomic::write_atomically;
use serde::Serialize;

use crate::cli::{Cli, Command, EvalCommand, LearnCommand, LmCommand};
use crate::failure::{Failure, Result};
use crate::terminal::{Verbosity, counted};
use crate::threads::{cores, start_threads};

pub(crate) use config::check as check_configuration;

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
    set_ops(arguments.ops);
    set_simd(arguments.simd);
    start_threads(threads)?;
    if threads > cores() {
        let cores = cores();
        errln!("warning: {threads} threads share {cores} processors, which slows them down");
    }
    let running = counted(rayon::current_num_threads(), "thread");
    detail!("longdraft {}, {running}", env!("CARGO_PKG_VERSION"));
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
    if neighbours > 1 { (cores() / neighbours).max(1) } else { 0 }
}

/// Has a file hold what is told.
fn log(path: &Path) -> Result<()> {
    crate::terminal::log::open(path).map_err(|error| {
        let failure = Failure::file(format!("--log-file {}: {error}", path.display()), &error);
        failure.hint("give a file that can be written, in a folder that is there")
    })
}

/// Refuses a folder that no configuration can name, for these are text.
fn require_text(folder: &Path, option: &str) -> Result<()> {
    if folder.to_str().is_some() {
        return Ok(());
    }
    Err(Failure::usage(format!("{option} {}: this name is not UTF-8", folder.display()))
        .hint("give a folder whose name is UTF-8: the configurations of trainings name it"))
}

/// Refuses a folder in which nothing can be written, before anything large is read. It need not be there yet, and is
/// not made.
pub(crate) fn require_writable(folder: &Path) -> Result<()> {
    let absolute = std::path::absolute(folder).map_err(Failure::unwritable(folder))?;
    let existing = absolute.ancestors().find(|path| path.exists()).unwrap_or(&absolute);
    // Never a file or a link that is there already.
    let trial = existing.join(format!(".longdraft-trial-{}", std::process::id()));
    let made = std::fs::OpenOptions::new().write(true).create_new(true).open(&trial);
    match made {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Ok(()),
        made => made.map_err(Failure::unwritable(folder))?,
    };
    let _ = std::fs::remove_file(&trial);
    Ok(())
}

/// Writes a value as JSON, whole or not at all.
fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(Failure::work)?;
    Ok(write_atomically(path, format!("{text}\n").as_bytes())?)
}

/// Removes a folder with what it holds, if it is there.
fn remove_folder(folder: &Path) -> Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::at(folder)(error))
        }
        _ => Ok(()),
    }
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

fn dispatch(Cli { command, json, .. }: Cli) -> Result<()> {
    match command {
        Command::Quickstart(quickstart) => quickstart::run(&quickstart, json),
        Command::Fit(fit) => fit::run(&fit, json),
        Command::Train(train) => train::run(&train, json),
        Command::Capture(capture) => capture::run(&capture, json),
        Command::Init(init) => init::run(&init, json),
        Command::Config(command) => config::run(&command, json),
        Command::Extract(extract) => extract::run(&extract, json),
        Command::Export(export) => export::run(&export, json),
        Command::Verify(verify) => verify::run(&verify, json),
        Command::Push(push) => push::run(&push, json),
        Command::Generate(generate) => generate::run(&generate, json),
        Command::Serve(serve) => serve::run(&serve, json),
        Command::Learn(command) => learn::run(&command, json),
        Command::Eval(EvalCommand::Decode(decode)) => eval::run(&decode, json),
        Command::Eval(EvalCommand::HeldOut(held_out)) => eval::held_out::run(&held_out, json),
        Command::Lm(LmCommand::Train(train)) | Command::Pretrain(train) => {
            pretrain::run(&train, json)
        }
        Command::Lm(LmCommand::Quantize(model)) | Command::Quantize(model) => {
            pretrain::quantize(&model, json)
        }
        Command::Lm(LmCommand::Score(model)) | Command::Eval(EvalCommand::Bpb(model)) => {
            pretrain::bits_per_byte(&model, json)
        }
        Command::Lm(LmCommand::Grid(grid)) | Command::Experiment(grid) => {
            pretrain::experiment(&grid, json)
        }
        Command::Data(command) => data::run(&command, json),
        Command::Fetch(fetch) => fetch::run(&fetch, json),
        Command::Parity(parity) => parity::run(&parity, json),
        Command::KernelCheck(check) => kernel_check::run(&check, json),
        Command::Report(report) => report::run(&report, json),
        Command::Watch(watch) => watch::run(&watch, json),
        Command::Runs(command) => runs::run(&command, json),
        Command::Completions(completions) => {
            habits::completions(&completions, json);
            Ok(())
        }
        Command::Man(man) => habits::man(&man, json),
        #[cfg(any(test, feature = "bench"))]
        Command::Bench(command) => bench::run(&command),
        Command::Doctor(doctor) => doctor::run(&doctor, json),
    }
}
