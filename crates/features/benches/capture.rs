//! How long `capture` is held up by a shard of its store:
//! `cargo bench -p longdraft-features --bench capture -- [--rounds N] [--tokens T]`.
//!
//! Features of EAGLE-3 at Llama-3.1-8B's width (three layers and final states, f32 as a target computes
//! them), one row a shard, on the CPU. A shard that the capturing thread casts, encodes, hashes and writes
//! itself, and one that a second thread writes while the first is busy otherwise for as long as that takes:
//! the two take turns, and the ratio of what the capturing thread spends is the median over rounds. The cast,
//! which a GPU does for a target there, is told by itself.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use longdraft_data::Batch;
use longdraft_features::store::{
    BackgroundWriter, Contents, Recipe, Record, StoreWriter, StoredTeacher, Turn, Work,
};
use longdraft_models::TargetConfig;
use longdraft_models::target_model::{Target, TargetOptions};

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

/// Width of the states, and the tapped layers side by side.
const WIDTH: usize = 4096;
const LAYERS: usize = 3;

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str, default: usize| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)?.parse().ok()).unwrap_or(default).max(1)
    };
    let (rounds, tokens) = (number("--rounds", 7), number("--tokens", 2048));
    let features = Features::new(tokens)?;
    let megabytes = 2e-6 * (tokens * WIDTH * (LAYERS + 1)) as f64;
    let mut ratios = Vec::new();
    for round in 0..rounds {
        let folder = tempfile::tempdir()?;
        let store = writer(&folder.path().join("store"), tokens, 3)?;
        let mut all = Vec::new();
        for shard in 0..3 {
            all.push((taken(&store, shard)?, features.batch(shard), features.record()?));
        }
        let mut next = all.into_iter().map(|(mut work, batch, record)| {
            let cast = timed(|| Ok(store.add(&mut work, batch, record).map(|_| ())?))?;
            Outcome::Ok((work, cast))
        });
        let mut next = || next.next().unwrap_or_else(|| Err("no more shards".into()));
        let (work, cast) = next()?;
        let alone = timed(|| Ok(store.complete(work)?))?;
        let (cast_beside, held) = std::thread::scope(|scope| -> Outcome<(f64, f64)> {
            let mut writer = BackgroundWriter::new(&store, scope);
            let (work, _) = next()?;
            writer.complete(work)?;
            std::thread::sleep(Duration::from_secs_f64(2.0 * alone));
            let (work, cast) = next()?;
            let held = timed(|| Ok(writer.complete(work)?))?;
            writer.wait()?;
            Ok((cast, held))
        })?;
        println!(
            "round {round}: {megabytes:.0} MB, cast {:.1} ms, written by itself {:.1} ms, in the background {:.2} ms",
            1e3 * cast,
            1e3 * alone,
            1e3 * held
        );
        ratios.push((cast + alone) / (cast_beside + held));
    }
    println!(
        "capture's time a shard, by itself over in the background: {:.2}",
        median(&mut ratios)
    );
    Ok(())
}

fn timed(run: impl FnOnce() -> Outcome) -> Outcome<f64> {
    let started = Instant::now();
    run()?;
    Ok(started.elapsed().as_secs_f64())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Features {
    target: Target,
    tokens: usize,
    layers: Tensor,
    last: Tensor,
}

impl Features {
    fn new(tokens: usize) -> Outcome<Self> {
        let random = |width| Tensor::randn(0.0_f32, 1.0, (tokens, width), &Device::Cpu);
        // Only its name is asked for.
        let config = TargetConfig::from_json(&serde_json::json!({
            "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 8,
            "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 64
        }))
        .map_err(|problems| problems.to_string())?;
        let target = Target::random(config, 0, &TargetOptions::default())?;
        Ok(Self { target, tokens, layers: random(LAYERS * WIDTH)?, last: random(WIDTH)? })
    }

    fn batch(&self, row: usize) -> Batch {
        Batch { row, ..Batch::of_document(0..self.tokens as u32) }
    }

    fn record(&self) -> Outcome<Record> {
        let rows: Vec<u32> = (0..self.tokens as u32).collect();
        let layers = Some(self.layers.clone());
        Ok(Record::of_states(&self.target, layers, Some(&self.last), &contents(), &rows)?)
    }
}

fn contents() -> Contents {
    Contents { last_kv: false, layers: vec![0, 1, 2], teacher: StoredTeacher::FinalHidden }
}

fn writer(folder: &Path, tokens: usize, shards: usize) -> Outcome<StoreWriter> {
    let recipe = Recipe::of_rows(&contents(), shards, tokens);
    let store = StoreWriter::open(&folder.display().to_string(), recipe, false)?;
    store.begin()?;
    Ok(store)
}

fn taken(store: &StoreWriter, shard: usize) -> Outcome<Work> {
    match store.take(&store.shards()[shard])? {
        Turn::Mine(work) => Ok(work),
        Turn::Complete | Turn::Busy(_) => Err("the shard is taken".into()),
    }
}
