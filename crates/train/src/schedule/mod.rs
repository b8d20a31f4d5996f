//! Learning rate by optimizer step `n = 1..T`.

mod deepspeed;
mod eagle3_cosine;
pub mod warmdown;
mod warmup_cosine;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Ratio of the last rate to the base rate.
pub const FLOOR_RATIO: f64 = 1e-4;

/// Share of steps spent warming up.
pub const WARMUP_RATIO: f64 = 0.1;

/// Which curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Linear warm-up from `base/W` at step 1, cosine down to the floor at step T.
    #[default]
    WarmupCosine,
    /// DeepSpeed's WarmupCosineLR as the published runs used it, with two steps at rate 0.
    DeepspeedWarmupCosine,
    /// EAGLE-3's public trainer: warm-up, then cosine down to 0; the floor is not used.
    Eagle3Cosine,
    /// The same warm-up, then the base rate.
    ConstantAfterWarmup,
    /// The base rate always.
    Constant,
}

/// A schedule over a known number of steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Curve.
    pub kind: Kind,
    /// Largest rate.
    pub base: f64,
    /// T
    pub steps: u64,
    /// Share of steps spent warming up.
    pub warmup_ratio: f64,
    /// Ratio of the last rate to the base rate.
    pub floor_ratio: f64,
}

impl Schedule {
    /// A schedule with the published warm-up and floor.
    pub fn new(kind: Kind, base: f64, steps: u64) -> Self {
        Self { kind, base, steps, warmup_ratio: WARMUP_RATIO, floor_ratio: FLOOR_RATIO }
    }

    /// Rate of optimizer step `n`, from 1.
    pub fn learning_rate(&self, n: u64) -> f64 {
        self.base
            * match self.kind {
                Kind::Constant => 1.0,
                Kind::Eagle3Cosine => eagle3_cosine::factor(self, n),
                Kind::ConstantAfterWarmup => eagle3_cosine::flat_factor(self, n),
                Kind::WarmupCosine => warmup_cosine::factor(self, n),
                Kind::DeepspeedWarmupCosine => deepspeed::factor(self, n),
            }
    }
}

/// `f + (1−f) · ½(1 + cos(π x))` for progress `x` in 0..1.
fn cosine(floor: f64, progress: f64) -> f64 {
    let progress = progress.clamp(0.0, 1.0);
    floor + (1.0 - floor) * 0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
}
