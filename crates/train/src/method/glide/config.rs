//! The keys of `draft.method: glide`.

use longdraft_models::TargetConfig;
use longdraft_models::draft::Init;
use longdraft_models::draft::glide::{Compat, FinalNorm, GlideConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::GlideObjectiveConfig;
use crate::objective::TeacherConfig;

/// One layer over the target's last-layer keys and values, trained at several delays.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Glide {
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
    /// Weight λ of the teacher's part, 0 to 1; 0 turns it off.
    pub soft_weight: f64,
    /// Tokens that it learns to propose: the most frequent ones of the text. Training and drafting read that many
    /// rows of the target's head (default: all).
    pub draft_vocab_size: Option<usize>,
}

impl Default for Glide {
    fn default() -> Self {
        Self {
            compat: None,
            final_norm: FinalNorm::default(),
            init: Init::default(),
            gamma: None,
            delay_weights: None,
            soft_weight: 0.9,
            draft_vocab_size: None,
        }
    }
}

impl Glide {
    /// The layer that it asks for.
    pub(super) fn layer(&self, target: &TargetConfig) -> GlideConfig {
        let mut glide = GlideConfig::for_target(target, self.compat);
        glide.final_norm = self.final_norm;
        let weights = self.delay_weights.as_ref().map(Vec::len);
        glide.gamma = self.gamma.or(weights).unwrap_or(glide.gamma);
        glide.draft_vocab_size = self.draft_vocab_size.filter(|size| *size < target.vocab_size);
        glide
    }

    /// What is minimised.
    pub(super) fn objective(&self, teacher: &TeacherConfig) -> GlideObjectiveConfig {
        let TeacherConfig { soft_targets, top_k, tail } = *teacher;
        GlideObjectiveConfig { soft_weight: self.soft_weight, soft_targets, top_k, tail }
    }
}
