//! Which part of the teacher's distribution a loss learns; every method may take less than all of it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::TeacherDistribution;
use crate::metrics::Quantities;

/// Form of the teacher's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SoftTargetKind {
    /// The teacher's whole softmax.
    #[default]
    Full,
    /// Its k most likely tokens.
    TopK,
}

/// What becomes of the teacher's mass outside the top k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TailKind {
    /// One bucket for the rest.
    #[default]
    Bucket,
    /// Dropped; the k probabilities are rescaled.
    Renormalise,
}

impl TailKind {
    /// A teacher's k most likely tokens and what becomes of the rest, in words.
    pub(crate) fn in_words(self, k: usize) -> String {
        match self {
            Self::Bucket => format!("{}'s top {k} + tail", Quantities::TARGET),
            Self::Renormalise => format!("{}'s top {k}, rescaled", Quantities::TARGET),
        }
    }
}

/// What drafts learn of the target's distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TeacherConfig {
    /// Form of the teacher's part.
    pub soft_targets: SoftTargetKind,
    /// Entries of a top-k teacher.
    pub top_k: usize,
    /// What becomes of the rest.
    pub tail: TailKind,
}

impl TeacherConfig {
    /// How much of the teacher's distribution is learned.
    pub(crate) fn distribution(&self) -> TeacherDistribution {
        match self.soft_targets {
            SoftTargetKind::Full => TeacherDistribution::Whole,
            SoftTargetKind::TopK => TeacherDistribution::TopK { k: self.top_k, tail: self.tail },
        }
    }
}

impl Default for TeacherConfig {
    fn default() -> Self {
        Self { soft_targets: SoftTargetKind::Full, top_k: 64, tail: TailKind::Bucket }
    }
}

/// A soft part of this weight beside the text, in words.
pub(crate) fn mixed_in_words(soft_weight: f64, soft: &str) -> String {
    let text = Quantities::TEXT;
    // Rounded, because 1 - 0.9 is not 0.1.
    let hard_weight = (1e6 * (1.0 - soft_weight)).round() / 1e6;
    match soft_weight {
        0.0 => text.to_owned(),
        1.0 => soft.to_owned(),
        weight => format!("{weight} × ({soft}) + {hard_weight} × {text}"),
    }
}
