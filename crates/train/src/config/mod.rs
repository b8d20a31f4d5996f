//! The configuration of one training stage.

mod check;
mod draft;
mod references;
mod shared_layers;

use std::path::PathBuf;

use longdraft_data::batch::AnchorOffset;
use longdraft_data::packing::{Overlong, Packing};
use longdraft_data::quarantine::MAX_BAD_ROWS;
pub use longdraft_data::source::SourceConfig;
use longdraft_features::FeatureMode;
use longdraft_features::store::{Compression, StoreDtype};
use longdraft_models::target_model::Layers;
use longdraft_models::{DeviceChoice, Precision, StepProducts};
use longdraft_tracking::TrackingConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::method::StageContext;
use crate::objective::TeacherConfig;
use crate::optim::AdamWConfig;
use crate::schedule;
pub use longdraft_parallel::ParallelConfig;

pub use check::interval_rules;
pub use draft::{CompletedDraft, DraftConfig};
pub use references::References;

/// One stage: a draft for a target, data, an objective, a budget.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Hugging Face folder, GGUF file or hub model `org/name` (`org/name:Q4_K_M` for its GGUF file).
    pub target: String,
    /// Run directory.
    pub output: PathBuf,
    /// Where it computes: `auto` (a GPU if there is one), `cpu`, `cuda:0`, `metal:0`.
    #[serde(default)]
    #[schemars(with = "String")]
    pub device: DeviceChoice,
    /// Type of frozen weights and products; `auto` is `bf16` on a GPU, `f32` on the CPU.
    #[serde(default)]
    pub precision: Precision,
    /// Factors of large products on a CPU: `rounded` to integers of 12 to 16 bits where that is faster, or `f32`.
    #[serde(default)]
    pub products: StepProducts,
    /// The draft.
    #[serde(default)]
    pub draft: DraftConfig,
    /// What drafts learn of the target's distribution.
    #[serde(default)]
    pub teacher: TeacherConfig,
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
    /// How `longdraft capture` writes features.
    #[serde(default)]
    pub capture: CaptureConfig,
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

impl TrainConfig {
    /// The configuration as records show it: without the environment's values.
    pub fn record(&self) -> serde_json::Value {
        self.references.record(self)
    }

    /// What the keys of its method must fit to.
    pub(crate) fn context(&self) -> StageContext<'_> {
        StageContext {
            teacher: &self.teacher,
            features: &self.train.features,
            anchor: &self.data.anchor,
            sequence: self.parallel.sequence,
            has_start: self.draft.from.is_some(),
        }
    }

    /// Which of the target's layers a stage needs: with stored features none, but for the last one where
    /// the draft starts from it.
    pub fn needed_layers(&self) -> Layers {
        match self.train.features.store() {
            None => Layers::All,
            Some(_) if self.draft.from.is_none() && self.draft.method.starts_from_last_layer() => {
                Layers::Last
            }
            Some(_) => Layers::None,
        }
    }
}

/// Training and held-out text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// What is trained on.
    pub train: Vec<SourceConfig>,
    /// Held-out text; without it the end of the first training source is held out.
    #[serde(default)]
    pub held_out: Vec<SourceConfig>,
    /// Packed rows held out when there is no held-out source: whole documents, and the end of one where
    /// these do not come out even.
    #[serde(default = "defaults::held_out_rows")]
    pub held_out_rows: usize,
    /// Tokens at the end of the first source that are never trained on, held-out rows included: other trainings hold
    /// them out. By default of a curriculum as many as any of its stages holds out of the same source, else none.
    #[serde(default)]
    pub reserved_tokens: Option<usize>,
    /// Tokens of a packed row.
    #[serde(default = "defaults::row_tokens")]
    pub row_tokens: usize,
    /// How documents share rows.
    #[serde(default)]
    pub packing: Packing,
    /// What becomes of documents longer than a row.
    #[serde(default)]
    pub overlong: Overlong,
    /// Variables of the target's chat template, such as `{enable_thinking: false}`. Those that a row has itself
    /// (`chat_template_kwargs`) win over them.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub chat_template_kwargs: Map<String, Value>,
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

/// How `longdraft capture` writes features, and what is known of those that others captured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CaptureConfig {
    /// How numbers are held; `f32` trains like the target online, bit for bit.
    pub dtype: StoreDtype,
    /// Compression of shards.
    pub compression: Compression,
    /// MiB that make a shard, the unit of work and of repair.
    pub shard_mib: u64,
    /// Layers that another engine's records hold, in the order of their tensors, counted from 0 as
    /// `draft.target_layers` (vLLM's ids are one larger). Without them the records must hold the draft's
    /// layers in its order and, where the final states do not stand by themselves, the target's last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record_layers: Option<Vec<usize>>,
}

impl Default for CaptureConfig {
    fn default() -> Self {
        let (dtype, compression) = (StoreDtype::default(), Compression::default());
        Self { dtype, compression, shard_mib: 64, record_layers: None }
    }
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
    /// Where features come from: `online` (the target runs for every batch), `memory` (once a row),
    /// the folder or URL (`s3://`, `gs://`, `az://`) of a store that `longdraft capture` writes, or a
    /// folder of another engine's records.
    #[schemars(with = "String")]
    pub features: FeatureMode,
    /// Save a checkpoint after every so many steps (and always at the end).
    pub save_every: u64,
    /// Save one also when so many minutes have passed since the last (0: only by steps).
    pub save_minutes: f64,
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
            save_minutes: SAVE_MINUTES,
            evaluate_every: 0,
            patience: None,
            keep_best: true,
            target_loss_every: 0,
            log_every: 1,
        }
    }
}

/// Minutes of work that a kill may cost.
pub const SAVE_MINUTES: f64 = 10.0;

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
