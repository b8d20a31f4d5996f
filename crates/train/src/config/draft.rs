//! The draft and what is minimised.

use std::path::PathBuf;

use longdraft_models::draft::glide::{Compat, FinalNorm, Init};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::method::Method;
use crate::method::eagle3::Eagle3ObjectiveConfig;
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

/// An EAGLE-3 draft. Sizes that are not given are the target's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[allow(clippy::struct_excessive_bools, reason = "independent switches of a file")]
pub struct Eagle3DraftConfig {
    /// Tokens that the draft can propose, the most frequent supervised ones (default: 32000, or
    /// all of a smaller vocabulary). Fixed once a draft has been trained.
    pub draft_vocab_size: Option<usize>,
    /// With `draft.from`: choose the vocabulary anew; head rows of shared tokens move along.
    pub remap: bool,
    /// Three layers of the target whose outputs are read, counted from 0 (default: 1, n/2 − 1 and
    /// n − 4 of n).
    pub target_layers: Option<[usize; 3]>,
    /// A norm for each layer's states before `fc` (EAGLE-3.1).
    pub fc_norm: bool,
    /// The next step reads the normalised state (EAGLE-3.1).
    pub norm_output: bool,
    /// Attention and MLP are added to the normalised state; not every engine computes that.
    pub norm_before_residual: bool,
    /// Width of the draft.
    pub hidden_size: Option<usize>,
    /// Width of its MLP.
    pub intermediate_size: Option<usize>,
    /// Query heads.
    pub num_attention_heads: Option<usize>,
    /// Key-value heads.
    pub num_key_value_heads: Option<usize>,
    /// Size of a head.
    pub head_dim: Option<usize>,
    /// Projects the target's embeddings; a draft of another width needs it.
    pub embed_proj: bool,
    /// Context tokens before its own that a token sees (default: all).
    pub attention_window: Option<usize>,
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
