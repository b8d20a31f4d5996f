//! Switches of the objective.

use longdraft_rules::{Problem, Rules};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limits;

/// Which published behaviour to reproduce number for number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Eagle3Compat {
    /// SpecForge: the mask is not shifted, its last bit of a document is 0, and cross-entropy is
    /// divided by batch rows times the longest document, padding included.
    Specforge,
}

/// What is minimised at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Eagle3Loss {
    /// Cross-entropy with the teacher's distribution over the draft's vocabulary.
    #[default]
    Ce,
    /// `−log α`, α the chance that speculative sampling accepts.
    LkAlpha,
    /// `w · cross-entropy + (1 − w)(1 − α)`, `w = kl_scale · exp(−kl_decay · mean α)`.
    LkLambda,
}

/// Which rows a step learns, by the loss mask `m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MaskRule {
    /// Row `t` at step `i` iff `m_{t+1} = … = m_{t+i+2} = 1` in one document: the chain starts at a
    /// generated token and stays inside the turn.
    #[default]
    Contiguous,
    /// Iff `m_{t+1+i} = 1`, as trainers that shift by one have it.
    Input,
}

/// What becomes of rows whose most likely token the draft cannot propose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OovRows {
    /// They are measured, not learned.
    #[default]
    Skip,
    /// They are learned.
    Keep,
}

/// Switches of the objective; defaults are the default mode's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Eagle3ObjectiveConfig {
    /// Reproduces a published trainer; none is the default mode.
    pub compat: Option<Eagle3Compat>,
    /// Test-time steps `S`.
    pub ttt_steps: usize,
    /// Step `i` weighs `step_decay^i`.
    pub step_decay: f64,
    /// A weight a step, in place of the decay.
    pub step_weights: Option<Vec<f64>>,
    /// What is minimised.
    pub loss: Eagle3Loss,
    /// `lk_lambda` only.
    pub kl_scale: f64,
    /// `lk_lambda` only.
    pub kl_decay: f64,
    /// Which rows are learned (default mode).
    pub mask_rule: MaskRule,
    /// Rows whose most likely token is outside the draft's vocabulary (default mode).
    pub oov_rows: OovRows,
}

impl Default for Eagle3ObjectiveConfig {
    fn default() -> Self {
        Self {
            compat: None,
            ttt_steps: 7,
            step_decay: 0.8,
            step_weights: None,
            loss: Eagle3Loss::Ce,
            kl_scale: 1.0,
            kl_decay: 1.0,
            mask_rule: MaskRule::Contiguous,
            oov_rows: OovRows::Skip,
        }
    }
}

impl Eagle3ObjectiveConfig {
    /// More steps than this are a mistake: every one keeps a layer's activations.
    const MOST_STEPS: usize = 64;

    /// Larger factors leave nothing of the rest of the loss in f32.
    const LARGEST_FACTOR: f64 = 1e6;

    /// Weight of every step's loss, `[S]`.
    pub fn weights(&self) -> Vec<f64> {
        let decayed = |i| self.step_decay.powi(i);
        match &self.step_weights {
            Some(weights) => weights.clone(),
            None => (0..self.ttt_steps as i32).map(decayed).collect(),
        }
    }

    /// What cannot be used.
    pub fn problems(&self) -> Vec<Problem> {
        let mut rules = Rules::default();
        let (steps, most) = (self.ttt_steps, Self::MOST_STEPS);
        let in_range = (1..=most).contains(&steps);
        rules.require(in_range, "ttt_steps", format!("is {steps}, not in 1 to {most}"));
        if let Some(weights) = self.step_weights.as_ref().filter(|w| w.len() != steps) {
            let text = format!("has {} values for {steps} steps", weights.len());
            rules.require_with(false, "step_weights", &["ttt_steps"], text);
        }
        let is_weight = |weight: &f64| weight.is_finite() && *weight >= 0.0;
        let positive = self.step_weights.iter().flatten().all(is_weight);
        rules.require(positive, "step_weights", "must be at least 0 each");
        for (name, value) in [
            ("step_decay", self.step_decay),
            ("kl_scale", self.kl_scale),
            ("kl_decay", self.kl_decay),
        ] {
            let holds = is_weight(&value) && value <= Self::LARGEST_FACTOR;
            rules.require(holds, name, format!("must be in 0 to {}", Self::LARGEST_FACTOR));
        }
        // Weights of steps are factors of losses in f32; with too many steps they are not asked
        // for.
        let problems = rules.into_problems();
        if problems.is_empty() && self.weights().iter().any(|weight| !limits::is_f32(*weight)) {
            let text = "makes a weight beyond f32, or `step_weights` holds one";
            return vec![Problem {
                reads: vec!["step_weights".into()],
                ..Problem::new("step_decay", text)
            }];
        }
        problems
    }
}
