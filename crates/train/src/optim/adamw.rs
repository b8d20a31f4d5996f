//! AdamW with global-norm clipping and two parameter groups (decayed or not).
//!
//! `c = min(1, clip / (‖g‖₂ + 1e-6))` over the trained tensors, then the step of
//! [`longdraft_kernels::adamw`] with gradients `c g`.

use longdraft_kernels::adamw::{AdamWStep, adamw};
use longdraft_models::draft::Parameter;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::gradients::Gradients;
use crate::error::{Result, TrainError};
use crate::parallel::DataParallel;

/// Added to the norm before the clip factor is formed, as DeepSpeed does.
const CLIP_EPS: f64 = 1e-6;

/// What happens to tensors that no gradient ever reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeadParameters {
    /// They keep their values, as in plain PyTorch.
    #[default]
    Untouched,
    /// They shrink by `1 − lr·wd` a step, as under ZeRO, which fills in zero gradients.
    Decay,
}

/// Constants of the optimizer; defaults are those of the published runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Decay of the first and second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of decayed tensors.
    pub weight_decay: f64,
    /// Largest global gradient norm.
    pub clip_norm: f64,
    /// Compat only.
    pub dead_params: DeadParameters,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            betas: (0.9, 0.95),
            eps: 1e-6,
            weight_decay: 0.1,
            clip_norm: 1.0,
            dead_params: DeadParameters::Untouched,
        }
    }
}

/// Moments of every parameter, or of the runs that a rank updates, and the number of steps taken.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AdamWState {
    /// First moments, in the order of [`DataParallel::runs`].
    pub first: Vec<Vec<f32>>,
    /// Second moments, in the same order.
    pub second: Vec<Vec<f32>>,
    /// Steps taken.
    pub step: u64,
}

/// The optimizer.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    state: AdamWState,
}

impl AdamW {
    /// An optimizer of one process with empty moments.
    pub fn new(config: AdamWConfig, parameters: &[Parameter]) -> Self {
        Self::over(config, &DataParallel::single(parameters))
    }

    /// A rank's optimizer with empty moments.
    pub fn over(config: AdamWConfig, parallel: &DataParallel) -> Self {
        let zeros = || parallel.runs().iter().map(|run| vec![0.0; run.len]).collect();
        let state = AdamWState { first: zeros(), second: zeros(), step: 0 };
        Self { config, state }
    }

    /// A rank's optimizer that goes on from a saved state.
    ///
    /// # Errors
    /// - the moments do not fit what the rank updates
    pub fn with_state(
        config: AdamWConfig,
        parallel: &DataParallel,
        state: AdamWState,
    ) -> Result<Self> {
        let runs = parallel.runs();
        let fits = |moments: &[Vec<f32>]| {
            moments.len() == runs.len() && moments.iter().zip(runs).all(|(m, r)| m.len() == r.len)
        };
        if !fits(&state.first) || !fits(&state.second) {
            return Err(TrainError::checkpoint("optimizer state", "moments do not fit the draft"));
        }
        Ok(Self { config, state })
    }

    /// Moments and step count.
    pub fn state(&self) -> &AdamWState {
        &self.state
    }

    /// Updates the parameters of one process in place; returns the gradient norm before clipping.
    ///
    /// # Errors
    /// - a parameter cannot be read or written
    pub fn step(
        &mut self,
        parameters: &[Parameter],
        gradients: &Gradients,
        learning_rate: f64,
    ) -> Result<f64> {
        let norm = gradients.norm();
        let parallel = DataParallel::single(parameters);
        self.update(&parallel, parameters, gradients, norm, learning_rate)?;
        Ok(norm)
    }

    /// Updates the parameters of all ranks in place, with the summed gradients of this rank's runs
    /// and the norm over all.
    ///
    /// # Errors
    /// - a parameter cannot be read or written
    pub fn update(
        &mut self,
        parallel: &DataParallel,
        parameters: &[Parameter],
        gradients: &Gradients,
        norm: f64,
        learning_rate: f64,
    ) -> Result<()> {
        self.state.step += 1;
        let step = AdamWStep {
            learning_rate,
            betas: self.config.betas,
            eps: self.config.eps,
            weight_decay: 0.0,
            step: self.state.step,
            grad_scale: (self.config.clip_norm / (norm + CLIP_EPS)).min(1.0),
        };
        let mut own = Vec::with_capacity(parallel.runs().len());
        for (index, run) in parallel.runs().iter().enumerate() {
            let decay = parameters[run.parameter].decay;
            let weight_decay = if decay { self.config.weight_decay } else { 0.0 };
            let mut values = parallel.read(parameters, run)?;
            match gradients.get(index) {
                Some(gradient) => {
                    let (first, second) =
                        (&mut self.state.first[index], &mut self.state.second[index]);
                    let step = AdamWStep { weight_decay, ..step };
                    adamw(&step, &mut values, first, second, gradient);
                }
                None if self.config.dead_params == DeadParameters::Decay => {
                    let keep = (1.0 - learning_rate * weight_decay) as f32;
                    values.iter_mut().for_each(|value| *value *= keep);
                }
                None => {}
            }
            own.push(parallel.write(parameters, run, values)?);
        }
        parallel.publish(parameters, own)
    }
}
