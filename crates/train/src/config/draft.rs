//! The draft and what is minimised.

use std::path::PathBuf;

use longdraft_models::draft::glide::{Compat, FinalNorm, Init};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::method::Method;
use crate::method::eagle3::{Eagle3DraftConfig, Eagle3ObjectiveConfig};
use crate::method::glide::GlideObjectiveConfig;
use crate::objective::{SoftTargetKind, TailKind};

/// The draft. Keys outside of `eagle3` are GLIDE's, but for `method` and `from`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DraftConfig {
    /// Which draft is trained.
    pub method: Method,
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
    /// With `method: eagle3`.
    pub eagle3: Eagle3DraftConfig,
}

/// What is minimised. `soft_weight` is GLIDE's, `eagle3` is EAGLE-3's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ObjectiveConfig {
    /// Weight λ of the teacher's part, 0 to 1; 0 turns it off.
    pub soft_weight: f64,
    /// Form of the teacher's part.
    pub soft_targets: SoftTargetKind,
    /// Entries of a top-k teacher.
    pub top_k: usize,
    /// What becomes of the rest.
    pub tail: TailKind,
    /// With `draft.method: eagle3`.
    pub eagle3: Eagle3ObjectiveConfig,
}

impl Default for ObjectiveConfig {
    fn default() -> Self {
        let GlideObjectiveConfig { soft_weight, soft_targets, top_k, tail } =
            GlideObjectiveConfig::default();
        let eagle3 = Eagle3ObjectiveConfig::default();
        Self { soft_weight, soft_targets, top_k, tail, eagle3 }
    }
}

impl ObjectiveConfig {
    /// GLIDE's part.
    pub fn glide(&self) -> GlideObjectiveConfig {
        let Self { soft_weight, soft_targets, top_k, tail, .. } = *self;
        GlideObjectiveConfig { soft_weight, soft_targets, top_k, tail }
    }
}
