//! Training steps beside the same steps in PyTorch, alternately, threads pinned equal.
//!
//! ```sh
//! cargo bench --features bench -p longdraft --bench against_pytorch -- --python PY [--baselines DIR] [--rounds N] [--only NAME] [--json]
//! ... --only eagle3_16k      (needs no Python; also long_32k, dflash_32k, decode_bandwidth)
//! ```
//!
//! `DIR` (default: `../shared/bench`) holds `pytorch_glide.py`, `pytorch_eagle3.py`,
//! `pytorch_dflash.py` and `pytorch_pretrain.py`, which print one JSON line with `tokens_per_s` and `peak_rss_mib`; our side is
//! `longdraft bench`. Every measurement is a process of its own: one warm-up step, then the median
//! of the timed ones. Ratios are ours over PyTorch's, the median over rounds. Beside them:
//! `long_32k_*`, steps over one document of 32768 tokens over those of 1024; `eagle3_16k_*`, peak
//! memory of EAGLE-3 steps over one of 16384; `dflash_32k_mib`, that of a DFlash step over one of 32768
//! with a block for every 8 tokens; `matmul`, the smallest ratio to numpy's BLAS over
//! training shapes; `decode_bandwidth`, the share of the machine's read bandwidth that plain decoding
//! reaches. On GPUs `scripts/gpu-check` measures, at 8B shapes and beside `benches/gpu`.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::process::{Command, Output};

use serde_json::{Map, Value, json};

const THREADS: usize = 2;
const STEPS: usize = 5;

/// A training step that both sides know.
struct Case {
    /// Name of the ratio.
    name: &'static str,
    program: &'static str,
    /// Subcommand of `longdraft bench` with the flags that make it the same step.
    ours: &'static str,
    tokens: usize,
    /// Timed steps.
    steps: usize,
    /// Flags of the PyTorch program.
    flags: &'static [&'static str],
}

const fn case(
    name: &'static str,
    (program, ours): (&'static str, &'static str),
    (tokens, steps): (usize, usize),
    flags: &'static [&'static str],
) -> Case {
    Case { name, program, ours, tokens, steps, flags }
}

const GLIDE: &str = "pytorch_glide.py";
const EAGLE3: &str = "pytorch_eagle3.py";
const DFLASH: &str = "pytorch_dflash.py";
const PRETRAIN: &str = "pytorch_pretrain.py";

const CASES: [Case; 11] = [
    case("glide_online_1024", (GLIDE, "glide"), (1024, STEPS), &[]),
    case("glide_llm_loss_1024", (GLIDE, "glide --llm-loss"), (1024, STEPS), &["--llm-loss"]),
    case("glide_cached_1024", (GLIDE, "glide --cached"), (1024, STEPS), &["--cached"]),
    case("glide_online_8192", (GLIDE, "glide"), (8192, STEPS), &[]),
    case("eagle3_1024", (EAGLE3, "eagle3"), (1024, STEPS), &["--all-rows"]),
    case("eagle3_2048", (EAGLE3, "eagle3"), (2048, STEPS), &["--all-rows"]),
    case("dflash_1024", (DFLASH, "dflash"), (1024, STEPS), &[]),
    case("dflash_2048", (DFLASH, "dflash"), (2048, STEPS), &[]),
    case("dflash_online_1024", (DFLASH, "dflash --online"), (1024, STEPS), &["--online"]),
    case("pretrain_1024", (PRETRAIN, "pretrain"), (1024, 3), &[]),
    case("pretrain_2048", (PRETRAIN, "pretrain"), (2048, 3), &[]),
];

/// Steps of ours alone, timed once: a long document.
const LONG: [Case; 5] = [
    case("glide_cached_32768", (GLIDE, "glide --cached"), (32_768, 1), &[]),
    case("glide_online_32768", (GLIDE, "glide"), (32_768, 1), &[]),
    case("eagle3_16384", (EAGLE3, "eagle3"), (16_384, 1), &[]),
    case("eagle3_online_16384", (EAGLE3, "eagle3 --online"), (16_384, 1), &[]),
    case("dflash_32768", (DFLASH, "dflash"), (32_768, 1), &[]),
];

/// Figures that need no Python.
const ALONE: [&str; 4] = ["long_32k", "eagle3_16k", "dflash_32k", "decode_bandwidth"];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|a| a == name)?;
        arguments.get(at + 1).cloned()
    };
    let only = value("--only");
    let alone = only.as_ref().is_some_and(|only| ALONE.contains(&only.as_str()));
    let Some(python) = value("--python").or_else(|| alone.then(String::new)) else {
        println!(
            "usage: against_pytorch --python PY [--baselines DIR] [--rounds N] [--only NAME] [--json]"
        );
        return;
    };
    let baselines = from_root(&value("--baselines").unwrap_or_else(|| "../shared/bench".into()));
    let rounds: usize = value("--rounds").and_then(|n| n.parse().ok()).unwrap_or(1);
    let wanted = |name: &str| only.as_ref().is_none_or(|only| only == name);
    let mut report = Map::new();
    for case in CASES.iter().filter(|case| wanted(case.name)) {
        beside(case, &python, &baselines, rounds, &mut report);
    }
    for (memory, case) in [
        ("memory_glide", "memory_glide_online_1024"),
        ("memory_eagle3", "memory_eagle3_2048"),
        ("memory_dflash", "memory_dflash_2048"),
        ("memory_pretrain", "memory_pretrain_1024"),
    ] {
        if let Some(ratio) = report.get(case).cloned() {
            report.insert(memory.to_owned(), ratio);
        }
    }
    if wanted("long_32k") {
        long(&mut report);
    }
    for (figure, case, memory) in [
        ("eagle3_16k", "eagle3_16384", "eagle3_16k_mib"),
        ("eagle3_16k", "eagle3_online_16384", "eagle3_16k_online_mib"),
        ("dflash_32k", "dflash_32768", "dflash_32k_mib"),
    ] {
        if wanted(figure) {
            let figures = ours_by_name(case);
            eprintln!("{case}: {figures}");
            report.insert(memory.to_owned(), figures["peak_rss_mib"].clone());
        }
    }
    if wanted("matmul") {
        matmul(&python, &mut report);
    }
    if wanted("decode_bandwidth") {
        let figures = ours("decode --read-bandwidth --shape smollm2-135m --warm-ups 1 --steps 64");
        eprintln!("decode_bandwidth: {figures}");
        let figure = |key: &str| figures[key].as_f64().unwrap_or(f64::NAN);
        let share = figure("weights_gb_s") / figure("read_gb_s");
        report.insert("decode_bandwidth".to_owned(), json!(share));
    }
    if arguments.iter().any(|a| a == "--json") {
        println!("{}", Value::Object(report));
    } else {
        report.iter().for_each(|(name, figure)| println!("{name:>32}  {figure:.3}"));
    }
}

/// One case on both sides, alternately.
fn beside(
    case: &Case,
    python: &str,
    baselines: &str,
    rounds: usize,
    report: &mut Map<String, Value>,
) {
    let (mut speed, mut memory) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let ours = ours_of(case);
        let theirs = theirs(python, baselines, case);
        eprintln!("{}: ours {ours} PyTorch {theirs}", case.name);
        let ratio = |key: &str| Some(ours[key].as_f64()? / theirs[key].as_f64()?);
        speed.extend(ratio("tokens_per_s"));
        memory.extend(ratio("peak_rss_mib"));
    }
    report.insert(case.name.to_owned(), json!(median(&mut speed)));
    report.insert(format!("memory_{}", case.name), json!(median(&mut memory)));
}

/// Long documents beside short ones, ours alone.
fn long(report: &mut Map<String, Value>) {
    let pairs = [
        ("glide_cached_32768", "glide_cached_1024", "long_32k_speed", "long_32k_mib"),
        ("glide_online_32768", "glide_online_1024", "long_32k_online_speed", "long_32k_online_mib"),
    ];
    for (long, short, speed, memory) in pairs {
        let (short, long) = (ours_by_name(short), ours_by_name(long));
        eprintln!("{speed}: 1024 {short} 32768 {long}");
        let tokens = |figures: &Value| figures["tokens_per_s"].as_f64().unwrap_or(f64::NAN);
        report.insert(speed.to_owned(), json!(tokens(&long) / tokens(&short)));
        report.insert(memory.to_owned(), long["peak_rss_mib"].clone());
    }
}

/// Our products beside numpy's, whose wheels carry OpenBLAS.
fn matmul(python: &str, report: &mut Map<String, Value>) {
    let ours = ours("products");
    let program = format!(
        "import numpy as np, time, json\n\
         def speed(m, k, n):\n\
         \x20   a, b = np.random.rand(m, k).astype('f'), np.random.rand(n, k).astype('f')\n\
         \x20   times = []\n\
         \x20   for _ in range(7):\n\
         \x20       t = time.perf_counter(); a @ b.T; times.append(time.perf_counter() - t)\n\
         \x20   return 2e-9 * m * k * n / sorted(times)[3]\n\
         print(json.dumps([speed(*s) for s in {}]))",
        ours["shapes"]
    );
    let output = pinned(python).args(["-c", &program]).output();
    let theirs = last_line(&output.expect("python starts"));
    eprintln!("matmul: ours {ours} numpy {theirs}");
    let ours = ours["gflop_s"].as_array().map(Vec::as_slice).unwrap_or_default();
    let ratios =
        ours.iter().enumerate().filter_map(|(i, ours)| Some(ours.as_f64()? / theirs[i].as_f64()?));
    report.insert("matmul".to_owned(), json!(ratios.fold(f64::INFINITY, f64::min)));
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

fn last_line(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.trim_end().lines().last().unwrap_or_default();
    let errors = String::from_utf8_lossy(&output.stderr);
    serde_json::from_str(line).unwrap_or_else(|_| panic!("no figures: {text}{errors}"))
}

fn ours_by_name(name: &str) -> Value {
    let case = CASES.iter().chain(&LONG).find(|case| case.name == name).expect("a case");
    ours_of(case)
}

fn ours_of(case: &Case) -> Value {
    let Case { ours: command, tokens, steps, .. } = case;
    let shape = if case.program == PRETRAIN { "" } else { " --shape smollm2-135m" };
    ours(&format!("{command}{shape} --tokens {tokens} --warm-ups 1 --steps {steps}"))
}

/// The line of `longdraft bench`.
fn ours(arguments: &str) -> Value {
    let mut program = Command::new(env!("CARGO_BIN_EXE_longdraft"));
    program.args(["--threads", &THREADS.to_string(), "bench"]).args(arguments.split(' '));
    last_line(&program.output().expect("longdraft starts"))
}

fn pinned(python: &str) -> Command {
    let mut command = Command::new(python);
    let threads = THREADS.to_string();
    command.envs([("OMP_NUM_THREADS", &threads), ("OPENBLAS_NUM_THREADS", &threads)]);
    command
}

fn theirs(python: &str, baselines: &str, case: &Case) -> Value {
    let output = pinned(python)
        .arg(format!("{baselines}/{}", case.program))
        .args(["--seq", &case.tokens.to_string(), "--threads", &THREADS.to_string()])
        .args(["--steps", &case.steps.to_string()])
        .args(case.flags)
        .output()
        .expect("python starts");
    last_line(&output)
}
