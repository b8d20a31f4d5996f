//! EAGLE-3 training from a store beside training from features in memory, alternately.
//!
//! ```sh
//! cargo bench --bench offline_speed -- [--rounds N] [--epochs N] [--tokens T] [--json]
//! ```
//!
//! A random target of SmolLM2-135M's width and vocabulary, with six layers: of the target only what
//! it hands over matters. Every run is a process of its own; its speed is the median over steps
//! after the first epoch, in which features come into memory or into the system's cache. The ratio
//! is the store's speed over that of memory, the median over rounds: at least 0.95 is wanted.

#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;

use serde_json::{Value, json};
use support::{succeed, write_target};

const ROWS: usize = 4;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str, default: usize| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1)?.parse().ok()).unwrap_or(default)
    };
    let (rounds, epochs) = (number("--rounds", 1), number("--epochs", 3).max(2));
    let tokens = number("--tokens", 1024);
    let folder = tempfile::tempdir().expect("a folder");
    let shop = Shop::new(folder.path(), tokens, epochs);
    let store = shop.features("store");
    succeed(&["capture", &shop.config, &store]);
    let mut ratios = Vec::new();
    for round in 0..rounds.max(1) {
        let stored = shop.speed(&format!("stored{round}"), &store);
        let memory = shop.speed(&format!("memory{round}"), "train.features=memory");
        eprintln!("tokens a second: stored {stored:.1}, in memory {memory:.1}");
        ratios.push(stored / memory);
    }
    ratios.sort_by(f64::total_cmp);
    let ratio = ratios[ratios.len() / 2];
    if arguments.iter().any(|argument| argument == "--json") {
        println!("{}", json!({ "offline_speed": ratio }));
    } else {
        println!("{:>32}  {ratio:.3}", "offline_speed");
    }
}

/// Target, text and configuration.
struct Shop<'a> {
    folder: &'a Path,
    config: String,
}

impl<'a> Shop<'a> {
    fn new(folder: &'a Path, tokens: usize, epochs: usize) -> Self {
        let target = json!({
            "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 6, "num_attention_heads": 9, "num_key_value_heads": 3,
            "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0,
            "max_position_embeddings": 8192, "tie_word_embeddings": true,
            "bos_token_id": 256, "eos_token_id": 257
        });
        write_target(&folder.join("target"), &target);
        // A token a byte, and one for the end.
        let text = |row: usize| {
            let letter = |i: usize| char::from(b'a' + ((i * 7 + row * 3 + i / 11) % 26) as u8);
            (0..tokens - 1).map(letter).collect::<String>()
        };
        let rows: String =
            (0..ROWS).map(|row| format!("{}\n", json!({ "text": text(row) }))).collect();
        std::fs::write(folder.join("rows.jsonl"), rows).expect("rows");
        let config = json!({
            "target": folder.join("target"), "output": folder.join("run"),
            "data": {
                "train": [{"path": folder.join("rows.jsonl")}], "row_tokens": tokens,
                "held_out_rows": 0, "anchor": {"enabled": false}
            },
            "draft": {
                "method": "eagle3", "draft_vocab_size": 8192, "target_layers": [1, 3, 5],
                "oov_rows": "keep"
            },
            "train": {"rows_per_step": 1, "epochs": epochs, "save_every": 1000}
        });
        // JSON is YAML.
        let path = folder.join("train.yaml");
        std::fs::write(&path, config.to_string()).expect("configuration");
        Self { folder, config: path.display().to_string() }
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    fn features(&self, store: &str) -> String {
        format!("train.features={}", self.path(store))
    }

    /// Tokens a second of a run, after its first epoch.
    fn speed(&self, run: &str, features: &str) -> f64 {
        let output = format!("output={}", self.path(run));
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_longdraft"));
        let done = command
            .args(["train", &self.config, &output, features])
            .args(["--threads", "2"])
            .output()
            .expect("the binary starts");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let records = std::fs::read_to_string(format!("{}/metrics.jsonl", self.path(run)));
        let mut speeds: Vec<f64> = records
            .expect("metrics")
            .lines()
            .filter_map(|line| {
                serde_json::from_str::<Value>(line).ok()?["tokens_per_second"].as_f64()
            })
            .skip(ROWS)
            .collect();
        speeds.sort_by(f64::total_cmp);
        speeds[speeds.len() / 2]
    }
}
