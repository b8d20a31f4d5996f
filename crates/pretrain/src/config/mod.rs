//! The configuration of a pretraining run.

mod check;

use std::path::PathBuf;

use longdraft_data::token_stream::LoaderKind;
use longdraft_models::language_model::LanguageModelConfig;
use longdraft_models::weights::artifact::{Compression, QuantiseConfig};
use longdraft_models::{DeviceChoice, Precision, StepProducts};
use longdraft_parallel::ParallelConfig;
use longdraft_tracking::TrackingConfig;
use longdraft_train::config::{References, SAVE_MINUTES};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::muon::MuonConfig;
use crate::warmdown::{self, Decay};

/// A small language model, token shards, Muon, a budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PretrainConfig {
    /// Run directory.
    pub output: PathBuf,
    /// Where it computes: `auto` (a GPU if there is one), `cpu`, `cuda:0`, `metal:0`.
    #[serde(default)]
    #[schemars(with = "String")]
    pub device: DeviceChoice,
    /// Type of products; `auto` is `bf16` on a GPU, `f32` on the CPU.
    #[serde(default)]
    pub precision: Precision,
    /// Factors of large products on a CPU: `rounded` to integers of 12 to 16 bits where that is faster, or `f32`.
    #[serde(default)]
    pub products: StepProducts,
    /// The decoder.
    #[serde(default)]
    pub model: LanguageModelConfig,
    /// What it learns from.
    pub data: PretrainData,
    /// Muon and Adam.
    #[serde(default)]
    pub optimizer: MuonConfig,
    /// Multiplier of every rate over the run.
    #[serde(default)]
    pub schedule: WarmdownConfig,
    /// Budget, lengths, saving.
    #[serde(default)]
    pub train: PretrainRun,
    /// How bits per byte are measured.
    #[serde(default)]
    pub evaluation: BitsPerByteConfig,
    /// The compressed artifact at the end.
    #[serde(default)]
    pub artifact: ArtifactConfig,
    /// How several processes share the work.
    #[serde(default)]
    pub parallel: ParallelConfig,
    /// Where metrics go.
    #[serde(default)]
    pub tracking: TrackingConfig,
    /// What came from the environment.
    #[serde(skip)]
    pub references: References,
}

/// Token shards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PretrainData {
    /// `.bin` files, names of several (`data/train_*.bin`) or folders of them.
    pub train: Vec<PathBuf>,
    /// Held-out `.bin` files, names of several or folders of them.
    #[serde(default)]
    pub held_out: Vec<PathBuf>,
    /// Tokens of a row, the sequence that the model reads; decides RoPE's base.
    #[serde(default = "row_tokens")]
    pub row_tokens: usize,
    /// SentencePiece `.model`, or folder with a `tokenizer.json`: what bytes are counted with.
    #[serde(default)]
    pub tokenizer: Option<PathBuf>,
    /// Order of the tokens.
    #[serde(default)]
    pub loader: LoaderKind,
    /// Keep attention within documents.
    #[serde(default)]
    pub document_mask: bool,
    /// Hash all documents and warn of those that are trained on and scored.
    #[serde(default = "yes")]
    pub check_overlap: bool,
}

fn yes() -> bool {
    true
}

fn row_tokens() -> usize {
    1024
}

/// What the multiplier follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WarmdownKind {
    /// Steps: 1, then a line to 0 over the last `warmdown_steps`.
    #[default]
    Steps,
    /// Time: the same, steps estimated from the clock; runs cannot be repeated bit for bit.
    WallClock,
    /// The spent fraction of the budget, steps or time: 1, then down over `decay_share` to `floor`.
    Fraction,
}

/// Multiplier of every learning rate. There is no warm-up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WarmdownConfig {
    /// What it follows.
    pub kind: WarmdownKind,
    /// Steps of the way down (`steps`, `wall_clock`).
    pub warmdown_steps: u64,
    /// Share of the budget on the way down (`fraction`).
    pub decay_share: f64,
    /// Last multiplier (`fraction`).
    pub floor_ratio: f64,
    /// Form of the way down (`fraction`).
    pub decay: Decay,
}

impl Default for WarmdownConfig {
    fn default() -> Self {
        Self {
            kind: WarmdownKind::Steps,
            warmdown_steps: 1200,
            decay_share: 0.5,
            floor_ratio: 0.1,
            decay: Decay::Linear,
        }
    }
}

/// A part of the run with its own rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LengthPhase {
    /// Spent fraction of the budget at which the phase ends.
    pub until: f64,
    /// Tokens of a row.
    pub row_tokens: usize,
    /// Tokens of a step (default: as for the run).
    #[serde(default)]
    pub tokens_per_step: Option<usize>,
}

/// Budget, lengths, saving.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PretrainRun {
    /// Optimizer steps.
    pub steps: u64,
    /// Ends the run after the first step at which so many minutes of training have passed.
    pub max_minutes: Option<f64>,
    /// Tokens of an optimizer step.
    pub tokens_per_step: usize,
    /// Tokens that go through the model at once; bounds memory.
    pub micro_batch_tokens: usize,
    /// Earlier parts of the run with rows or steps of other sizes, in order.
    pub phases: Vec<LengthPhase>,
    /// Average the weights over this share of the run and use the average in the end.
    pub ema_share: Option<f64>,
    /// Every random draw follows from it.
    pub seed: u64,
    /// Save a checkpoint after every so many steps (and always at the end).
    pub save_every: u64,
    /// Save one also when so many minutes have passed since the last (0: only by steps).
    pub save_minutes: f64,
    /// Measure the held-out stream after every so many steps (and at the end; 0: only then).
    pub evaluate_every: u64,
    /// Write metrics after every so many steps (and for the first ten).
    pub log_every: u64,
}

impl Default for PretrainRun {
    fn default() -> Self {
        Self {
            steps: 20_000,
            max_minutes: None,
            tokens_per_step: 524_288,
            micro_batch_tokens: 8192,
            phases: Vec::new(),
            ema_share: None,
            seed: 1337,
            save_every: 500,
            save_minutes: SAVE_MINUTES,
            evaluate_every: 1000,
            log_every: 10,
        }
    }
}

/// How bits per byte are measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BitsPerByteConfig {
    /// Tokens of a window (default: as in training).
    pub window: Option<usize>,
    /// Targets that a sliding window moves on by (default: a quarter of the window).
    pub stride: Option<usize>,
    /// Use only the first tokens of the held-out stream.
    pub max_tokens: Option<usize>,
    /// Tokens that go through the model at once.
    pub batch_tokens: usize,
}

impl Default for BitsPerByteConfig {
    fn default() -> Self {
        Self { window: None, stride: None, max_tokens: None, batch_tokens: 8192 }
    }
}

/// The compressed artifact.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ArtifactConfig {
    /// Precision.
    pub quantise: QuantiseConfig,
    /// Compression.
    pub compression: Compression,
    /// Bytes of code that are counted with the file.
    pub code_bytes: u64,
    /// Clip rows so that the file holds at most so many bytes (modern).
    pub budget_bytes: Option<u64>,
}

/// Tokens of a part of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lengths {
    pub(crate) sequence: usize,
    /// Sequences that go through the model at once.
    pub(crate) sequences: usize,
    pub(crate) micro_batches: usize,
}

impl PretrainRun {
    fn lengths(&self, sequence: usize, batch: usize) -> Lengths {
        let wanted = (self.micro_batch_tokens / sequence.max(1)).max(1);
        let all = (batch / sequence.max(1)).max(1);
        // The most sequences that divide the batch and fit.
        let sequences = (1..=wanted.min(all)).rev().find(|n| all.is_multiple_of(*n)).unwrap_or(1);
        Lengths { sequence, sequences, micro_batches: all / sequences }
    }

    /// Spent fraction of the budget after `step` steps in `elapsed_ms`.
    pub(crate) fn progress(&self, step: u64, elapsed_ms: f64) -> f64 {
        let by_time = self.max_minutes.map_or(0.0, |minutes| elapsed_ms / (60_000.0 * minutes));
        (step as f64 / self.steps.max(1) as f64).max(by_time)
    }
}

impl PretrainConfig {
    /// Lengths at a spent fraction of the budget.
    pub(crate) fn lengths_at(&self, progress: f64) -> Lengths {
        let run = &self.train;
        match run.phases.iter().find(|phase| progress < phase.until) {
            Some(phase) => {
                let tokens = phase.tokens_per_step.unwrap_or(run.tokens_per_step);
                run.lengths(phase.row_tokens, tokens)
            }
            None => run.lengths(self.data.row_tokens, run.tokens_per_step),
        }
    }

    /// Tokens that go through the model of one of `ranks` at once, at most over the run, and the length
    /// of their sequences.
    pub fn largest_micro_batch(&self, ranks: usize) -> (usize, usize) {
        let starts = self.train.phases.iter().map(|phase| phase.until);
        let all = std::iter::once(0.0).chain(starts).map(|progress| self.lengths_at(progress));
        let of_rank = |lengths: Lengths| {
            let all = lengths.sequences * lengths.micro_batches;
            let sequences = lengths.sequences.min(all.div_ceil(ranks.max(1)));
            (sequences * lengths.sequence, lengths.sequence)
        };
        all.map(of_rank).max().unwrap_or_default()
    }

    /// Multiplier of the step with 0-based index `step`.
    pub(crate) fn multiplier(&self, step: u64, elapsed_ms: f64) -> f64 {
        let WarmdownConfig { kind, warmdown_steps, decay_share, floor_ratio, decay } =
            self.schedule;
        match (kind, self.train.max_minutes) {
            (WarmdownKind::Fraction, _) => {
                let progress = self.train.progress(step, elapsed_ms);
                warmdown::by_fraction(progress, decay_share, floor_ratio, decay)
            }
            (WarmdownKind::WallClock, Some(minutes)) => {
                let cap = 60_000.0 * minutes;
                warmdown::by_wall_clock(step, elapsed_ms, cap, warmdown_steps)
            }
            _ => warmdown::by_steps(step, self.train.steps, warmdown_steps),
        }
    }

    /// The same run of another length, as an identity tells it.
    pub(crate) fn of_length(&self, steps: Option<&str>, max_minutes: Option<&str>) -> Self {
        let mut other = self.clone();
        let steps = steps.and_then(|text| text.parse().ok());
        other.train.steps = steps.unwrap_or(other.train.steps);
        other.train.max_minutes = max_minutes.and_then(|text| text.parse().ok());
        other
    }

    /// Whether there is a held-out stream, and a tokenizer to count its bytes with.
    pub(crate) fn is_scored(&self) -> bool {
        !self.data.held_out.is_empty() && self.data.tokenizer.is_some()
    }

    /// Window and stride of the evaluation.
    pub fn windows(&self) -> (usize, usize) {
        let window = self.evaluation.window.unwrap_or(self.data.row_tokens).max(1);
        (window, self.evaluation.stride.unwrap_or(window / 4).clamp(1, window))
    }
}

#[cfg(test)]
mod tests {
    use longdraft_rules::Check;

    use super::*;

    fn config() -> PretrainConfig {
        let value = serde_json::json!({"output": "x", "data": {"train": ["a.bin"]}});
        serde_json::from_value(value).expect("a configuration")
    }

    #[test]
    fn defaults_are_sound_and_faults_are_listed_together() {
        assert!(config().problems().is_empty(), "{:?}", config().problems());
        let mut bad = config();
        bad.train.tokens_per_step = 1000;
        bad.schedule.kind = WarmdownKind::WallClock;
        bad.model.num_attention_heads = 7;
        bad.evaluation.stride = Some(5000);
        bad.train.ema_share = Some(0.0);
        bad.optimizer.momentum = 1.0;
        assert!(bad.problems().len() >= 6, "{:?}", bad.problems());
    }

    #[test]
    fn batches_are_cut_into_equal_micro_batches() {
        let mut config = config();
        config.data.row_tokens = 64;
        config.train.tokens_per_step = 12 * 64;
        config.train.micro_batch_tokens = 5 * 64;
        let lengths = Lengths { sequence: 64, sequences: 4, micro_batches: 3 };
        assert_eq!(config.lengths_at(0.5), lengths);
        let phase = LengthPhase { until: 0.4, row_tokens: 32, tokens_per_step: None };
        config.train.phases = vec![phase];
        assert_eq!(config.lengths_at(0.39).sequence, 32);
        assert_eq!(config.lengths_at(0.4), lengths);
        config.train.max_minutes = Some(1.0);
        assert!((config.train.progress(1, 30_000.0) - 0.5).abs() < 1e-12);
    }
}
