//! Verification passes beside plain steps, on a real target:
//! `cargo bench -p longdraft-models --bench passes -- TARGET [stored|f32|bf16] [CONTEXT ...]`.
//!
//! The least of many passes that take turns, because other work on the machine only adds.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::error::Error;
use std::time::Instant;

use candle_core::{DType, Tensor};
use longdraft_kernels::threads::awake;
use longdraft_models::target_model::{KvCache, Tap, Taps, Target, TargetOptions};

/// Tokens of a pass, one after the other.
const ROWS: [usize; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 16];
/// Passes of each.
const PASSES: usize = 40;
/// Threads of ours.
const THREADS: usize = 2;

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

fn main() -> Outcome {
    rayon::ThreadPoolBuilder::new().num_threads(THREADS).build_global()?;
    rayon::scope(|_| run())
}

fn run() -> Outcome {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let Some(path) = args.next() else {
        println!("passes: which target? `-- TARGET [stored|f32|bf16] [CONTEXT ...]`");
        return Ok(());
    };
    let weights = args.next().unwrap_or_else(|| "stored".into());
    let options = TargetOptions {
        dtype: if weights == "bf16" { DType::BF16 } else { DType::F32 },
        as_stored: weights == "stored",
        ..TargetOptions::default()
    };
    let mut contexts = args.map(|arg| arg.parse()).collect::<Result<Vec<usize>, _>>()?;
    if contexts.is_empty() {
        contexts = vec![200];
    }
    let target = Target::open(&path, &options)?;
    for context in contexts {
        measure(&target, &weights, context)?;
    }
    Ok(())
}

fn measure(target: &Target, weights: &str, context: usize) -> Outcome {
    let mut cache = target.new_cache()?;
    for first in (0..context).step_by(512) {
        append(target, &mut cache, first, 512.min(context - first), 0)?;
    }
    let mut least = [(f64::INFINITY, f64::INFINITY); ROWS.len()];
    for pass in 0..PASSES {
        for (least, rows) in least.iter_mut().zip(ROWS) {
            awake(|| -> Outcome {
                let started = Instant::now();
                let hidden = append(target, &mut cache, context, rows, pass)?;
                let layers = started.elapsed().as_secs_f64();
                target.hold_ends()?.logits(&hidden)?;
                let all = started.elapsed().as_secs_f64();
                *least = (least.0.min(layers), least.1.min(all));
                Ok(())
            })?;
            cache.truncate(context);
        }
    }
    for ((layers, all), rows) in least.iter().zip(ROWS) {
        println!(
            "{weights}, {context} tokens before: {rows} rows: {:.2} ms, of which {:.2} the head; x {:.2}",
            1e3 * all,
            1e3 * (all - layers),
            all / least[0].1
        );
    }
    Ok(())
}

/// Final hidden states `[rows, H]` of tokens that differ from pass to pass.
fn append(
    target: &Target,
    cache: &mut KvCache,
    first: usize,
    rows: usize,
    pass: usize,
) -> longdraft_models::Result<Tensor> {
    let ids: Vec<u32> =
        (first..first + rows).map(|at| (1000 + (37 * at + pass) % 40_000) as u32).collect();
    let positions: Vec<u32> = (first as u32..(first + rows) as u32).collect();
    let taps = Taps::of(&[Tap::FinalHidden]);
    let features = target.extend(&ids, &positions, cache, &taps)?;
    Ok(features.final_hidden()?.clone())
}
