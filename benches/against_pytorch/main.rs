//! Training steps beside the same steps in PyTorch, alternately, threads pinned equal.
//!
//! ```sh
//! cargo bench --bench against_pytorch -- --python PY [--baselines DIR] [--rounds N] [--json]
//! ```
//!
//! `DIR` (default: `../shared/bench`) holds `pytorch_glide.py`, which prints one JSON line with `tokens_per_s` and
//! `peak_rss_mib`. Every measurement is a process of its own: one warm-up step, then the median of
//! five. Ratios are ours over PyTorch's, the median over rounds.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use longdraft_data::Batch;
use longdraft_kernels::linear_cross_entropy::{Inputs, SoftTargets, linear_cross_entropy};
use longdraft_models::TargetConfig;
use longdraft_models::draft::glide::{Compat, GlideConfig, GlideDraft, Init};
use longdraft_models::target::{Tap, Taps, Target, TargetOptions};
use longdraft_train::features::{BatchFeatures, TeacherFeatures, sequence_of};
use longdraft_train::objective::{GlideObjective, GlideObjectiveConfig, Objective};
use longdraft_train::optim::{AdamW, AdamWConfig, Gradients};
use serde_json::{Value, json};

const THREADS: usize = 2;
const STEPS: usize = 5;
const DELAY: u32 = 2;

/// Name of the ratio, tokens, flag of the PyTorch side.
const CASES: [(&str, usize, &[&str]); 4] = [
    ("glide_online_1024", 1024, &[]),
    ("glide_llm_loss_1024", 1024, &["--llm-loss"]),
    ("glide_cached_1024", 1024, &["--cached"]),
    ("glide_online_8192", 8192, &[]),
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|a| a == name)?;
        arguments.get(at + 1).cloned()
    };
    if let Some(case) = value("--worker") {
        rayon::ThreadPoolBuilder::new().num_threads(THREADS).build_global().expect("pool");
        let line = rayon::scope(|_| worker(&case));
        println!("{line}");
        return;
    }
    let baselines = value("--baselines").map_or_else(default_baselines, |given| from_root(&given));
    let Some(python) = value("--python") else {
        println!(
            "usage: against_pytorch --python PY [--baselines DIR] [--rounds N] [--only CASE] [--json]"
        );
        return;
    };
    let rounds: usize = value("--rounds").and_then(|n| n.parse().ok()).unwrap_or(1);
    let only = value("--only");
    let mut report = serde_json::Map::new();
    for (name, tokens, flags) in CASES {
        if only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        let (mut speed, mut memory) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let ours = ours(name);
            let theirs = theirs(&python, &baselines, tokens, flags);
            eprintln!("{name}: ours {ours} PyTorch {theirs}");
            let ratio = |key: &str| Some(ours[key].as_f64()? / theirs[key].as_f64()?);
            speed.extend(ratio("tokens_per_s"));
            memory.extend(ratio("peak_rss_mib"));
        }
        report.insert(name.to_owned(), json!(median(&mut speed)));
        report.insert(format!("memory_{name}"), json!(median(&mut memory)));
    }
    if let Some(memory) = report.get("memory_glide_online_1024").cloned() {
        report.insert("memory_glide".to_owned(), memory);
    }
    if arguments.iter().any(|a| a == "--json") {
        println!("{}", Value::Object(report));
    } else {
        report.iter().for_each(|(name, ratio)| println!("{name:>32}  {ratio:.3}"));
    }
}

/// Where a development checkout has the PyTorch programs beside it.
fn default_baselines() -> String {
    from_root("../shared/bench")
}

/// A path as given from the root of the project, where `cargo bench` is called.
fn from_root(path: &str) -> String {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.join(path).display().to_string()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn last_line(output: &std::process::Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.trim_end().lines().last().unwrap_or_default();
    let errors = String::from_utf8_lossy(&output.stderr);
    serde_json::from_str(line).unwrap_or_else(|_| panic!("no figures: {text}{errors}"))
}

fn ours(case: &str) -> Value {
    let program = std::env::current_exe().expect("own path");
    let output = Command::new(program).args(["--worker", case]).output().expect("worker starts");
    last_line(&output)
}

fn theirs(python: &str, baselines: &str, tokens: usize, flags: &[&str]) -> Value {
    let output = Command::new(python)
        .arg(format!("{baselines}/pytorch_glide.py"))
        .args(["--seq", &tokens.to_string(), "--threads", &THREADS.to_string()])
        .args(["--steps", &STEPS.to_string()])
        .args(flags)
        .env("OMP_NUM_THREADS", THREADS.to_string())
        .output()
        .expect("python starts");
    last_line(&output)
}

/// SmolLM2-135M's shape with random weights.
fn target() -> Arc<Target> {
    let config = json!({
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0,
        "max_position_embeddings": 8192, "tie_word_embeddings": true
    });
    let config = TargetConfig::from_json(&config).expect("valid");
    Arc::new(Target::random(config, 0, &TargetOptions::default()).expect("target"))
}

fn batch(tokens: usize, step: usize) -> Batch {
    let id = |t: usize| ((t * 7919 + step * 104_729) % 49_152) as u32;
    Batch {
        ids: (0..tokens).map(id).collect(),
        position_ids: (0..tokens as u32).collect(),
        document_ids: vec![0; tokens],
        delays: vec![DELAY; tokens],
        learned: (0..tokens as u32 - 1).collect(),
        origins: Vec::new(),
        row: 0,
    }
}

fn worker(case: &str) -> Value {
    let (_, tokens, flags) = CASES.into_iter().find(|(name, ..)| *name == case).expect("a case");
    let (cached, llm_loss) = (flags.contains(&"--cached"), flags.contains(&"--llm-loss"));
    let target = target();
    let glide = GlideConfig::for_target(target.config(), Some(Compat::Longspec));
    let draft = GlideDraft::initialise(&glide, &target, Init::Random, 1).expect("draft");
    let config = GlideObjectiveConfig { soft_weight: 0.0, ..Default::default() };
    let objective = GlideObjective::new(Arc::clone(&target), draft, config);
    let parameters = objective.draft().parameters().to_vec();
    let mut optimizer = AdamW::new(AdamWConfig::default(), &parameters);
    let mut kept: Option<BatchFeatures> = None;
    let mut times = Vec::new();
    for step in 0..=STEPS {
        let batch = batch(tokens, step);
        let started = Instant::now();
        let features = match kept.take().filter(|_| cached) {
            Some(features) => features,
            None => features(&target, &batch, llm_loss),
        };
        let loss = objective.loss(&batch, &features, true).expect("loss");
        let numerator = loss.numerator.expect("learned");
        let mean = (numerator / loss.denominator as f64).expect("mean");
        let mut gradients = Gradients::new(&parameters);
        gradients.add(&parameters, &mean.backward().expect("backward")).expect("gradients");
        optimizer.step(&parameters, &gradients, 5e-4).expect("step");
        if step > 0 {
            times.push(started.elapsed().as_secs_f64());
        }
        kept = Some(features);
    }
    let seconds = median(&mut times);
    json!({"impl": "longdraft", "tokens_per_s": tokens as f64 / seconds, "peak_rss_mib": peak_mib()})
}

fn features(target: &Target, batch: &Batch, llm_loss: bool) -> BatchFeatures {
    let sequence = sequence_of(batch);
    let taps: &[Tap] = if llm_loss { &[Tap::LastKv, Tap::FinalHidden] } else { &[Tap::LastKv] };
    let features = target.forward(&sequence, &Taps::of(taps)).expect("forward");
    if llm_loss {
        let hidden = features.final_hidden().expect("tapped");
        let inputs = Inputs {
            hidden: &hidden.narrow(0, 0, batch.learned.len()).expect("rows"),
            head: target.head(),
            labels: &batch.labels(),
            soft: SoftTargets::None,
            soft_weight: 0.0,
            teacher: None,
        };
        linear_cross_entropy(&inputs).expect("the target's own loss");
    }
    let last_kv = features.last_kv().expect("tapped").clone();
    BatchFeatures { last_kv, teacher: TeacherFeatures::None }
}

/// Largest resident set of this process so far, in MiB (Linux).
fn peak_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib / 1024)
}
