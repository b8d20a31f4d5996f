//! Training steps beside the same steps in PyTorch, alternately, threads pinned equal.
//!
//! ```sh
//! cargo bench --bench against_pytorch -- --python PY [--baselines DIR] [--rounds N] [--only NAME] [--json]
//! cargo bench --bench against_pytorch -- --only eagle3_16k      (needs no Python; also long_32k, decode_bandwidth)
//! cargo bench --features cuda --bench against_pytorch -- --device cuda --dtype bfloat16 [--compile] ...
//! ```
//!
//! `DIR` (default: `../shared/bench`) holds `pytorch_glide.py`, `pytorch_eagle3.py` and
//! `pytorch_pretrain.py`, which print one JSON line with `tokens_per_s` and `peak_rss_mib`. Every measurement is a process of its own:
//! one warm-up step, then the median of the timed ones. Ratios are ours over PyTorch's, the median
//! over rounds. Beside them: `long_32k_*`, steps over one document of 32768 tokens over those of
//! 1024; `eagle3_16k_*`, peak memory of EAGLE-3 steps over one of 16384; `matmul`, the smallest ratio to numpy's BLAS over training shapes; `decode_bandwidth`, the
//! share of the machine's read bandwidth that plain decoding reaches.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

mod eagle3;
mod glide;
mod machine;
mod pretrain;

use std::process::{Command, Output};
use std::sync::OnceLock;

use candle_core::Device;
use longdraft_models::target::TargetOptions;
use longdraft_models::{DeviceChoice, Precision};
use serde_json::{Map, Value, json};

/// Both sides compute there; `--compile` is PyTorch's.
struct Place {
    device: Device,
    precision: Precision,
    /// As given.
    arguments: Vec<String>,
}

static PLACE: OnceLock<Place> = OnceLock::new();

impl Place {
    fn of(arguments: &[String]) -> Self {
        let value = |name: &str| {
            let at = arguments.iter().position(|a| a == name)?;
            arguments.get(at + 1).map(String::as_str)
        };
        let device: DeviceChoice = value("--device").unwrap_or("cpu").parse().expect("a device");
        let precision = match value("--dtype") {
            Some("bfloat16") => Precision::Bf16,
            _ => Precision::F32,
        };
        let mut given = Vec::new();
        for name in ["--device", "--dtype"] {
            given.extend(value(name).map(|value| [name.to_owned(), value.to_owned()]));
        }
        let mut given = given.concat();
        given.extend(arguments.iter().find(|a| *a == "--compile").cloned());
        Self { device: device.open(0).expect("the device"), precision, arguments: given }
    }

    fn get() -> &'static Self {
        PLACE.get().expect("set at the start")
    }

    /// Device and type of a frozen target.
    fn target() -> TargetOptions {
        let Self { device, precision, .. } = Self::get();
        let dtype = precision.apply(device);
        TargetOptions { dtype, device: device.clone(), ..TargetOptions::default() }
    }
}

const THREADS: usize = 2;
const STEPS: usize = 5;

/// A training step that both sides know.
struct Case {
    /// Name of the ratio.
    name: &'static str,
    program: &'static str,
    tokens: usize,
    /// Timed steps.
    steps: usize,
    flags: &'static [&'static str],
}

const GLIDE: &str = "pytorch_glide.py";
const EAGLE3: &str = "pytorch_eagle3.py";
const PRETRAIN: &str = "pytorch_pretrain.py";

const CASES: [Case; 8] = [
    Case { name: "glide_online_1024", program: GLIDE, tokens: 1024, steps: STEPS, flags: &[] },
    Case {
        name: "glide_llm_loss_1024",
        program: GLIDE,
        tokens: 1024,
        steps: STEPS,
        flags: &["--llm-loss"],
    },
    Case {
        name: "glide_cached_1024",
        program: GLIDE,
        tokens: 1024,
        steps: STEPS,
        flags: &["--cached"],
    },
    Case { name: "glide_online_8192", program: GLIDE, tokens: 8192, steps: STEPS, flags: &[] },
    Case {
        name: "eagle3_1024",
        program: EAGLE3,
        tokens: 1024,
        steps: STEPS,
        flags: &["--all-rows"],
    },
    Case {
        name: "eagle3_2048",
        program: EAGLE3,
        tokens: 2048,
        steps: STEPS,
        flags: &["--all-rows"],
    },
    Case { name: "pretrain_1024", program: PRETRAIN, tokens: 1024, steps: 3, flags: &[] },
    Case { name: "pretrain_2048", program: PRETRAIN, tokens: 2048, steps: 3, flags: &[] },
];

/// Steps of ours alone, timed once: a long document.
const LONG: [Case; 4] = [
    Case {
        name: "glide_cached_32768",
        program: GLIDE,
        tokens: 32_768,
        steps: 1,
        flags: &["--cached"],
    },
    Case { name: "glide_online_32768", program: GLIDE, tokens: 32_768, steps: 1, flags: &[] },
    Case { name: "eagle3_16384", program: EAGLE3, tokens: 16_384, steps: 1, flags: &[] },
    Case {
        name: "eagle3_online_16384",
        program: EAGLE3,
        tokens: 16_384,
        steps: 1,
        flags: &["--online"],
    },
];

/// Figures that need no Python.
const ALONE: [&str; 3] = ["long_32k", "eagle3_16k", "decode_bandwidth"];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|a| a == name)?;
        arguments.get(at + 1).cloned()
    };
    let place = PLACE.get_or_init(|| Place::of(&arguments));
    if !matches!(place.device, Device::Cpu) {
        eprintln!("on {}", place.arguments.join(" "));
    }
    if let Some(case) = value("--worker") {
        rayon::ThreadPoolBuilder::new().num_threads(THREADS).build_global().expect("pool");
        let line = rayon::scope(|_| worker(&case));
        println!("{line}");
        return;
    }
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
        ("memory_pretrain", "memory_pretrain_1024"),
    ] {
        if let Some(ratio) = report.get(case).cloned() {
            report.insert(memory.to_owned(), ratio);
        }
    }
    if wanted("long_32k") {
        long(&mut report);
    }
    if wanted("eagle3_16k") {
        for (case, memory) in
            [("eagle3_16384", "eagle3_16k_mib"), ("eagle3_online_16384", "eagle3_16k_online_mib")]
        {
            let figures = ours(case);
            eprintln!("{case}: {figures}");
            report.insert(memory.to_owned(), figures["peak_rss_mib"].clone());
        }
    }
    if wanted("matmul") {
        matmul(&python, &mut report);
    }
    if wanted("decode_bandwidth") {
        let figures = ours("decode_bandwidth");
        eprintln!("decode_bandwidth: {figures}");
        report.insert("decode_bandwidth".to_owned(), figures["ratio"].clone());
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
        let ours = ours(case.name);
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
        let (short, long) = (ours(short), ours(long));
        eprintln!("{speed}: 1024 {short} 32768 {long}");
        let tokens = |figures: &Value| figures["tokens_per_s"].as_f64().unwrap_or(f64::NAN);
        report.insert(speed.to_owned(), json!(tokens(&long) / tokens(&short)));
        report.insert(memory.to_owned(), long["peak_rss_mib"].clone());
    }
}

fn matmul(python: &str, report: &mut Map<String, Value>) {
    let output = pinned(python).args(["-c", &machine::products_in_numpy()]).output();
    let (ours, theirs) = (ours("matmul"), last_line(&output.expect("python starts")));
    eprintln!("matmul {:?}: ours {ours} numpy {theirs}", machine::PRODUCTS);
    let pair = |i: usize| Some(ours[i].as_f64()? / theirs[i].as_f64()?);
    let ratios = (0..machine::PRODUCTS.len()).filter_map(pair);
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

fn ours(case: &str) -> Value {
    let program = std::env::current_exe().expect("own path");
    let mut worker = Command::new(program);
    worker.args(["--worker", case]).args(&Place::get().arguments);
    let output = worker.output().expect("worker starts");
    last_line(&output)
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
        .args(&Place::get().arguments)
        .output()
        .expect("python starts");
    last_line(&output)
}

fn worker(name: &str) -> Value {
    match name {
        "matmul" => return json!(machine::products()),
        "decode_bandwidth" => {
            let (decoding, bandwidth) = machine::decode_over_bandwidth();
            let ratio = decoding / bandwidth;
            return json!({"decoding_gb_s": decoding, "read_gb_s": bandwidth, "ratio": ratio});
        }
        _ => {}
    }
    let case = CASES.iter().chain(&LONG).find(|case| case.name == name).expect("a case");
    let tokens = if case.program == PRETRAIN { pretrain::SEQUENCES } else { 1 } * case.tokens;
    let seconds = match case.program {
        PRETRAIN => pretrain::step(case.tokens, case.steps),
        EAGLE3 => eagle3::step(case.tokens, case.steps, case.flags),
        _ => glide::step(case.tokens, case.steps, case.flags),
    };
    let tokens_per_s = tokens as f64 / seconds;
    json!({"impl": "longdraft", "tokens_per_s": tokens_per_s, "peak_rss_mib": peak_mib()})
}

/// Largest resident set of this process so far, in MiB (Linux).
fn peak_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib / 1024)
}
