//! The configuration of one training stage.

use std::path::PathBuf;

use longdraft_data::batch::AnchorOffset;
use longdraft_data::packing::{Overlong, Packing};
use longdraft_data::quarantine::MAX_BAD_ROWS;
pub use longdraft_data::source::SourceConfig;
use longdraft_models::draft::glide::{Compat, FinalNorm, Init};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::objective::GlideObjectiveConfig;
use crate::optim::AdamWConfig;
use crate::schedule;
use crate::tracking::TrackingConfig;

/// One stage: a draft for a target, data, an objective, a budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Hugging Face folder, GGUF file or hub model `org/name`.
    pub target: String,
    /// Run directory.
    pub output: PathBuf,
    /// The draft.
    #[serde(default)]
    pub draft: DraftConfig,
    /// What is minimised.
    #[serde(default)]
    pub objective: GlideObjectiveConfig,
    /// What it learns from.
    pub data: DataConfig,
    /// AdamW.
    #[serde(default)]
    pub optimizer: AdamWConfig,
    /// Learning rate over the run.
    #[serde(default)]
    pub schedule: ScheduleConfig,
    /// Length of the run and what it does on the way.
    #[serde(default)]
    pub train: RunConfig,
    /// How several processes share the work.
    #[serde(default)]
    pub parallel: ParallelConfig,
    /// Where metrics go.
    #[serde(default)]
    pub tracking: TrackingConfig,
}

/// How several processes share the work; one process alone has nothing to share.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelConfig {
    /// What is spread over the ranks (ZeRO): 0 nothing, 1 the optimizer's state, 3 also draft and
    /// target.
    pub zero: u8,
}

/// The draft layer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DraftConfig {
    /// `longspec` reproduces the published training; none is the default mode.
    pub compat: Option<Compat>,
    /// Norm between the layer and the head.
    pub final_norm: FinalNorm,
    /// Initial values.
    pub init: Init,
    /// Draft length that delays are trained for (default 5; compat 4).
    pub gamma: Option<usize>,
    /// Weight of delay 1, 2, ..., gamma (default: equal).
    pub delay_weights: Option<Vec<f64>>,
    /// Start from this draft file or folder instead of initial values.
    pub from: Option<PathBuf>,
}

/// Training and held-out text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// What is trained on.
    pub train: Vec<SourceConfig>,
    /// Held-out text; without it the last rows of the first training source are held out.
    #[serde(default)]
    pub held_out: Vec<SourceConfig>,
    /// Packed rows held out when there is no held-out source.
    #[serde(default = "defaults::held_out_rows")]
    pub held_out_rows: usize,
    /// Tokens of a packed row.
    #[serde(default = "defaults::row_tokens")]
    pub row_tokens: usize,
    /// How documents share rows.
    #[serde(default)]
    pub packing: Packing,
    /// What becomes of documents longer than a row.
    #[serde(default)]
    pub overlong: Overlong,
    /// Tolerated share of malformed rows of a source (a few always pass unless it is 0).
    #[serde(default = "defaults::max_bad_rows")]
    pub max_bad_rows: f64,
    /// Anchor-offset positions.
    #[serde(default)]
    pub anchor: AnchorOffset,
}

/// Learning rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleConfig {
    /// Curve.
    pub kind: schedule::Kind,
    /// Largest rate.
    pub learning_rate: f64,
    /// Share of steps spent warming up.
    pub warmup_ratio: f64,
    /// Ratio of the last rate to the largest.
    pub floor_ratio: f64,
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self {
            kind: schedule::Kind::WarmupCosine,
            learning_rate: 5e-4,
            warmup_ratio: schedule::WARMUP_RATIO,
            floor_ratio: schedule::FLOOR_RATIO,
        }
    }
}

/// Where features come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FeatureMode {
    /// The target runs for every batch.
    #[default]
    Online,
    /// The target runs once a row; later epochs reuse its features and positions.
    Memory,
}

/// Budget, seeds and saving.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Passes over the data; ignored when `steps` is given.
    pub epochs: f64,
    /// Optimizer steps.
    pub steps: Option<u64>,
    /// Budget in tokens, learned or not, instead of steps or epochs.
    pub tokens: Option<u64>,
    /// Ends the run after so many minutes of training, wherever the schedule stands.
    pub max_minutes: Option<f64>,
    /// Packed rows of one optimizer step.
    pub rows_per_step: usize,
    /// Size of an optimizer step in tokens instead of rows: as many rows as hold them.
    pub tokens_per_step: Option<usize>,
    /// Run key: every random draw follows from it.
    pub seed: u64,
    /// Where features come from.
    pub features: FeatureMode,
    /// Save a checkpoint after every so many steps (and always at the end).
    pub save_every: u64,
    /// Measure the held-out rows after every so many steps (and always at the end; 0: only then).
    pub evaluate_every: u64,
    /// End the run after so many evaluations without a better held-out simulated length.
    pub patience: Option<u64>,
    /// Keep the checkpoint with the best held-out simulated length as `best`.
    pub keep_best: bool,
    /// Compute the target's own loss after every so many steps (0: never).
    pub target_loss_every: u64,
    /// Write metrics after every so many steps.
    pub log_every: u64,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            epochs: 1.0,
            steps: None,
            tokens: None,
            max_minutes: None,
            rows_per_step: 4,
            tokens_per_step: None,
            seed: 0,
            features: FeatureMode::Online,
            save_every: 200,
            evaluate_every: 0,
            patience: None,
            keep_best: true,
            target_loss_every: 0,
            log_every: 1,
        }
    }
}

mod defaults {
    pub(super) fn held_out_rows() -> usize {
        4
    }

    pub(super) fn max_bad_rows() -> f64 {
        super::MAX_BAD_ROWS
    }

    pub(super) fn row_tokens() -> usize {
        1024
    }
}

impl RunConfig {
    /// Packed rows of one optimizer step over rows of `row_tokens` tokens.
    pub fn rows_of_a_step(&self, row_tokens: usize) -> usize {
        let of_tokens = |tokens: usize| tokens.div_ceil(row_tokens.max(1)).max(1);
        self.tokens_per_step.map_or(self.rows_per_step, of_tokens)
    }
}

impl TrainConfig {
    /// Everything that makes no sense, by dotted key.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut require = |holds: bool, problem: &str| {
            if !holds {
                problems.push(problem.to_owned());
            }
        };
        let weight = self.objective.soft_weight;
        require((0.0..=1.0).contains(&weight), "`objective.soft_weight` must be between 0 and 1");
        require(self.objective.top_k > 0, "`objective.top_k` must be at least 1");
        require(!self.data.train.is_empty(), "`data.train` must name at least one source");
        require(self.data.row_tokens >= 2, "`data.row_tokens` must be at least 2");
        require(
            (0.0..=1.0).contains(&self.data.max_bad_rows),
            "`data.max_bad_rows` must be between 0 and 1",
        );
        require(self.train.rows_per_step > 0, "`train.rows_per_step` must be at least 1");
        require(self.train.log_every > 0, "`train.log_every` must be at least 1");
        require(self.train.save_every > 0, "`train.save_every` must be at least 1");
        let run = &self.train;
        require(run.steps != Some(0), "`train.steps` must be above 0");
        require(run.tokens != Some(0), "`train.tokens` must be above 0");
        require(run.epochs > 0.0 && run.epochs.is_finite(), "`train.epochs` must be above 0");
        require(
            run.steps.is_none() || run.tokens.is_none(),
            "`train.tokens` and `train.steps` are two budgets: give one of them",
        );
        require(run.tokens_per_step != Some(0), "`train.tokens_per_step` must be above 0");
        require(
            run.max_minutes.is_none_or(|minutes| minutes > 0.0),
            "`train.max_minutes` must be above 0",
        );
        require(run.patience != Some(0), "`train.patience` must be above 0");
        require(
            run.patience.is_none() || run.evaluate_every > 0,
            "`train.patience` counts evaluations: set `train.evaluate_every`",
        );
        let rate = self.schedule.learning_rate;
        require(rate > 0.0 && rate.is_finite(), "`schedule.learning_rate` must be positive");
        require(
            (0.0..=1.0).contains(&self.schedule.warmup_ratio),
            "`schedule.warmup_ratio` must be between 0 and 1",
        );
        let (beta1, beta2) = self.optimizer.betas;
        let unit = 0.0..1.0;
        require(
            unit.contains(&beta1) && unit.contains(&beta2),
            "`optimizer.betas` must lie in [0, 1)",
        );
        require(matches!(self.parallel.zero, 0 | 1 | 3), "`parallel.zero` is 0, 1 or 3");
        require(self.optimizer.clip_norm > 0.0, "`optimizer.clip_norm` must be positive");
        if let Some(weights) = &self.draft.delay_weights {
            require(
                weights.iter().all(|w| *w >= 0.0 && w.is_finite())
                    && weights.iter().sum::<f64>() > 0.0,
                "`draft.delay_weights` must be non-negative with a positive sum",
            );
            require(
                self.draft.gamma.is_none_or(|gamma| gamma == weights.len()),
                "`draft.delay_weights` needs one weight for each delay 1..gamma",
            );
        }
        require(self.draft.gamma != Some(0), "`draft.gamma` must be at least 1");
        if self.draft.compat.is_some() {
            require(
                self.draft.final_norm == FinalNorm::None,
                "`draft.compat: longspec` has no final norm: set `draft.final_norm: none`",
            );
            require(
                self.objective.soft_weight == 0.0,
                "`draft.compat: longspec` learns hard labels: set `objective.soft_weight: 0`",
            );
            require(
                self.train.features == FeatureMode::Online,
                "`draft.compat: longspec` draws new positions every step: set `train.features: online`",
            );
        }
        require(
            self.train.features == FeatureMode::Online
                || self.objective.soft_weight == 0.0
                || self.objective.soft_targets == crate::objective::SoftTargetKind::TopK,
            "`train.features: memory` keeps no full teacher: set `objective.soft_targets: top_k`",
        );
        let sources = self.data.train.iter().chain(&self.data.held_out);
        problems.extend(sources.flat_map(SourceConfig::problems));
        problems.extend(self.tracking.problems());
        problems
    }
}
