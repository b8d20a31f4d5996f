//! One file per command.

#[cfg(any(test, feature = "bench"))]
mod bench;
mod capture;
mod config;
mod curriculum;
mod data;
mod doctor;
mod eval;
mod export;
mod extract;
mod fetch;
mod fit;
mod generate;
mod kernel_check;
mod learn;
mod parity;
mod plan;
mod pretrain;
mod push;
mod quickstart;
mod recorded;
mod report;
mod serve;
mod train;
mod verify;

use longdraft_kernels::dispatch::{Ops, Simd, set_ops, set_simd};
use longdraft_kernels::memory;

use crate::cli::{Cli, Command, EvalCommand, LearnCommand, OpsChoice, SimdChoice};
use crate::failure::{Failure, Result};

pub(crate) use config::key_problems;

/// Runs what the arguments ask for.
pub(crate) fn run(arguments: Cli) -> Result<()> {
    if !arguments.command.only_prints() {
        crate::terminal::outlive_readers();
    }
    if arguments.json {
        crate::terminal::set_machine_readable();
    }
    if works_in_steps(&arguments.command) {
        memory::keep_freed();
    }
    let threads = arguments.threads.unwrap_or(0);
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
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()
        .map_err(|error| Failure::work(format!("cannot start {threads} threads: {error}")))?;
    // On a thread of the pool, so that a parallel loop starts without waking anybody first.
    rayon::scope(|_| dispatch(arguments))
}

/// Whether a command asks for the same memory step by step.
fn works_in_steps(command: &Command) -> bool {
    match command {
        Command::Train(_) | Command::Capture(_) | Command::Pretrain(_) | Command::Fit(_) => true,
        Command::Learn(LearnCommand::Train { .. }) => true,
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
        Command::Eval(EvalCommand::Bpb(bpb)) => pretrain::bits_per_byte(&bpb, arguments.json),
        Command::Pretrain(pretrain) => pretrain::run(&pretrain, arguments.json),
        Command::Quantize(quantize) => pretrain::quantize(&quantize, arguments.json),
        Command::Experiment(experiment) => pretrain::experiment(&experiment, arguments.json),
        Command::Data(command) => data::run(&command, arguments.json),
        Command::Fetch(fetch) => fetch::run(&fetch, arguments.json),
        Command::Parity(parity) => parity::run(&parity, arguments.json),
        Command::KernelCheck(check) => kernel_check::run(&check, arguments.json),
        Command::Report(report) => report::run(&report, arguments.json),
        #[cfg(any(test, feature = "bench"))]
        Command::Bench(command) => bench::run(&command),
        Command::Doctor(doctor) => doctor::run(&doctor, arguments.json),
    }
}
