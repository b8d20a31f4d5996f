//! What multiplying stored blocks costs in loss: the same text under a target held as stored and
//! under the same file widened to f32.
//! `cargo bench -p longdraft-models --bench losses -- TARGET TEXT.jsonl [TEXT.jsonl ...]`.
//!
//! Texts are the string fields of each row, one after the other, in windows of [`WINDOW`] tokens
//! that begin with an empty cache. Every token but a window's first is scored. Passes go through the
//! cache as decoding does, so its rounding counts too. The last line is JSON: both mean losses in
//! nats, their difference with its standard error over tokens, and the share of equal first choices.
//!
//! With `LONGDRAFT_CACHE=q8` both are held as stored, and the first keeps keys and values in 8 bits.
//! `LONGDRAFT_TOKENS` limits the tokens that are read of each text. `scripts/check-quants` goes through
//! all types of blocks.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use candle_core::D;
use longdraft_models::target_model::{CacheType, Tap, Taps, Target, TargetOptions};
use serde_json::{Value, json};

/// Tokens that see each other.
const WINDOW: usize = 1024;
/// Tokens of a pass: bounds the memory of its logits.
const PASS: usize = 256;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let Some((path, texts)) = args.split_first().filter(|(_, texts)| !texts.is_empty()) else {
        println!("losses: which target, which texts? `-- TARGET TEXT.jsonl [TEXT.jsonl ...]`");
        return Ok(());
    };
    let limit = std::env::var("LONGDRAFT_TOKENS").ok().map(|limit| limit.parse()).transpose()?;
    let windows = windows(path, texts, limit.unwrap_or(usize::MAX))?;
    let held = |as_stored| TargetOptions { as_stored, ..TargetOptions::default() };
    let [one, other] = if std::env::var_os("LONGDRAFT_CACHE").is_some_and(|cache| cache == "q8") {
        [TargetOptions { cache: CacheType::Q8, ..held(true) }, held(true)]
    } else {
        [held(true), held(false)]
    };
    println!("{}", compared(&measure(path, &one, &windows)?, &measure(path, &other, &windows)?));
    Ok(())
}

/// Tokens of the texts, cut.
fn windows(target: &str, texts: &[String], limit: usize) -> Outcome<Vec<Vec<u32>>> {
    let tokenizer = Target::open_tokenizer(target)?;
    let mut windows = Vec::new();
    for path in texts {
        let mut left = limit;
        for line in std::fs::read_to_string(Path::new(path))?.lines() {
            let row: serde_json::Map<String, Value> = serde_json::from_str(line)?;
            let fields: Vec<&str> = row.values().filter_map(Value::as_str).collect();
            let mut ids = tokenizer.encode(&fields.join("\n"))?.ids;
            ids.truncate(left);
            left -= ids.len();
            windows.extend(ids.chunks(WINDOW).filter(|ids| ids.len() > 1).map(<[u32]>::to_vec));
        }
    }
    Ok(windows)
}

/// What a target says of each scored token: its loss in nats, and its first choice.
type Scores = Vec<(f64, u32)>;

fn measure(path: &str, options: &TargetOptions, windows: &[Vec<u32>]) -> Outcome<Scores> {
    let target = Target::open(path, options)?;
    let held: Vec<String> = target.held().iter().map(|(name, n)| format!("{name} {n}")).collect();
    let started = Instant::now();
    let mut scores = Vec::new();
    for window in windows {
        score(&target, window, &mut scores)?;
    }
    let seconds = started.elapsed().as_secs_f64();
    let (tokens, cache) = (scores.len(), target.cache_type());
    println!("{tokens} tokens in {seconds:.0} s, cache {cache}, bytes held: {}", held.join(", "));
    Ok(scores)
}

fn score(target: &Target, window: &[u32], scores: &mut Scores) -> Outcome<()> {
    let mut cache = target.new_cache()?;
    let (context, next) = (&window[..window.len() - 1], &window[1..]);
    for (at, (ids, next)) in context.chunks(PASS).zip(next.chunks(PASS)).enumerate() {
        let first = (at * PASS) as u32;
        let positions: Vec<u32> = (first..first + ids.len() as u32).collect();
        let taps = Taps::of(&[Tap::FinalHidden]);
        let hidden = target.extend(ids, &positions, &mut cache, &taps)?;
        let logits = target.hold_ends()?.logits(hidden.final_hidden()?)?;
        let choices: Vec<u32> = logits.argmax(D::Minus1)?.to_vec1()?;
        for ((row, id), choice) in logits.to_vec2::<f32>()?.iter().zip(next).zip(choices) {
            scores.push((loss(row, *id), choice));
        }
    }
    Ok(())
}

/// `ln Σ exp(logits) − logits[id]`
fn loss(logits: &[f32], id: u32) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
    largest + sum.ln() - f64::from(logits[id as usize])
}

fn compared(stored: &Scores, widened: &Scores) -> Value {
    let count = stored.len() as f64;
    let mean = |scores: &Scores| scores.iter().map(|(loss, _)| loss).sum::<f64>() / count;
    let differences = stored.iter().zip(widened).map(|((a, _), (b, _))| a - b);
    let difference = differences.clone().sum::<f64>() / count;
    let variance = differences.map(|d| (d - difference).powi(2)).sum::<f64>() / (count - 1.0);
    let equal = stored.iter().zip(widened).filter(|((_, a), (_, b))| a == b).count();
    json!({
        "tokens": stored.len(),
        "stored": mean(stored),
        "f32": mean(widened),
        "difference": difference,
        "standard_error": (variance / count).sqrt(),
        "equal_choices": equal as f64 / count,
    })
}
