//! Muon (Jordan et al. 2024) on the matrices of a decoder, Adam on the rest.
//!
//! Per matrix, with momentum `μ` in the sum form and Nesterov:
//!
//! ```text
//! buf ← μ buf + c g;  u = c g + μ buf;  X = orthogonalise(u)
//! W ← W − lr sqrt(max(1, rows/columns)) X
//! ```
//!
//! `c = min(1, clip / (‖g‖₂ + 1e-6))` over all tensors of all groups. Options: rows of `u` made
//! unit length first; weight decay by the rate before the update, only where `X ∘ W > 0`. Adam's
//! step count advances also when a gradient is zero. Over several ranks each updates the tensors that
//! fall to it, whole ones, and keeps their state.

#[cfg(test)]
mod tests;

use candle_core::Device;
use longdraft_kernels::adamw::{AdamWStep, adamw};
use longdraft_kernels::dispatch::rounds_products;
use longdraft_kernels::orthogonalise::{Rule, orthogonalise_on};
use longdraft_models::draft::Parameter;
use longdraft_models::language_model::{Group, group_of};
use longdraft_parallel::{DataParallel, Gradients, Run};
use longdraft_rules::{Problem, Rules};
use longdraft_train::optim::{direction, update_cost};
use longdraft_train::{TrainError, limits};
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::warmdown;

/// Added to the norm before the clip factor is formed.
const CLIP_EPS: f64 = 1e-6;

/// Shortest row that is made unit length.
const SHORTEST_ROW: f64 = 1e-7;

/// How matrices are orthogonalised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Orthogonalisation {
    /// Five Newton-Schulz iterations.
    #[default]
    Ns5,
    /// Five Polar Express iterations.
    Polar5,
}

impl From<Orthogonalisation> for Rule {
    fn from(kind: Orthogonalisation) -> Self {
        match kind {
            Orthogonalisation::Ns5 => Self::NewtonSchulz,
            Orthogonalisation::Polar5 => Self::PolarExpress,
        }
    }
}

/// Rates and constants; defaults are the published baseline's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MuonConfig {
    /// Rate of the blocks' matrices (Muon).
    pub matrix_learning_rate: f64,
    /// Rate of gains, scales, mixes and skips (Adam).
    pub scalar_learning_rate: f64,
    /// Rate of the embedding (Adam).
    pub token_learning_rate: f64,
    /// Rate of a head of its own (Adam).
    pub head_learning_rate: f64,
    /// Muon's momentum after its warm-up.
    pub momentum: f64,
    /// Muon's momentum at the first step.
    pub momentum_warmup_start: f64,
    /// Steps from one to the other; 0: none.
    pub momentum_warmup_steps: u64,
    /// How matrices are orthogonalised.
    pub orthogonalisation: Orthogonalisation,
    /// Make rows unit length before orthogonalising.
    pub normalise_rows: bool,
    /// Weight decay of the matrices, only where the update points away from zero.
    pub weight_decay: f64,
    /// Adam's decay of the moments.
    pub betas: (f64, f64),
    /// Added to the root of Adam's second moment.
    pub eps: f64,
    /// Largest global gradient norm; 0: no limit.
    pub clip_norm: f64,
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self {
            matrix_learning_rate: 0.04,
            scalar_learning_rate: 0.04,
            token_learning_rate: 0.05,
            head_learning_rate: 0.008,
            momentum: 0.95,
            momentum_warmup_start: 0.85,
            momentum_warmup_steps: 500,
            orthogonalisation: Orthogonalisation::Ns5,
            normalise_rows: false,
            weight_decay: 0.0,
            betas: (0.9, 0.95),
            eps: 1e-8,
            clip_norm: 0.0,
        }
    }
}

impl MuonConfig {
    /// Momentum of a step, by its 0-based index.
    pub fn momentum_at(&self, step: u64) -> f64 {
        let (start, end) = (self.momentum_warmup_start, self.momentum);
        warmdown::momentum(step, start, end, self.momentum_warmup_steps)
    }

    /// Factor on gradients of a global norm.
    pub fn clip_factor(&self, norm: f64) -> f64 {
        if self.clip_norm > 0.0 { (self.clip_norm / (norm + CLIP_EPS)).min(1.0) } else { 1.0 }
    }

    fn rate(&self, group: Group) -> f64 {
        match group {
            Group::Matrix => self.matrix_learning_rate,
            Group::Token => self.token_learning_rate,
            Group::Head => self.head_learning_rate,
            Group::Scalar => self.scalar_learning_rate,
        }
    }

    /// Everything that makes no sense, by key of this section.
    pub fn problems(&self) -> Vec<Problem> {
        let mut rules = Rules::default();
        let rates = [
            ("matrix_learning_rate", self.matrix_learning_rate),
            ("scalar_learning_rate", self.scalar_learning_rate),
            ("token_learning_rate", self.token_learning_rate),
            ("head_learning_rate", self.head_learning_rate),
            ("weight_decay", self.weight_decay),
            ("clip_norm", self.clip_norm),
            ("eps", self.eps),
        ];
        for (key, value) in rates {
            let holds = value >= 0.0 && limits::is_f32(value);
            rules.require(holds, key, "must be 0 or more, and a number of f32");
        }
        let shares = [
            ("momentum", self.momentum),
            ("momentum_warmup_start", self.momentum_warmup_start),
            ("betas", self.betas.0),
            ("betas", self.betas.1),
        ];
        for (key, value) in shares {
            rules.require((0.0..1.0).contains(&value), key, "must lie in [0, 1)");
        }
        rules.into_problems()
    }
}

/// What one tensor's optimizer keeps.
#[derive(Debug, Clone, PartialEq)]
pub enum TensorState {
    /// Muon's momentum sum.
    Muon(Vec<f32>),
    /// Adam's first and second moment.
    Adam(Vec<f32>, Vec<f32>),
}

/// State of every tensor, or of those that a rank updates, and the number of steps taken.
#[derive(Debug, Clone, PartialEq)]
pub struct MuonState {
    /// In the order of [`DataParallel::runs`].
    pub tensors: Vec<TensorState>,
    /// Steps taken.
    pub step: u64,
}

/// What a step came to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonOutcome {
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Factor on the gradients.
    pub clip_factor: f64,
    /// Muon's momentum.
    pub momentum: f64,
}

/// Muon and Adam over the groups of a decoder.
#[derive(Debug)]
pub struct Muon {
    config: MuonConfig,
    state: MuonState,
}

impl Muon {
    /// An optimizer of one process at its first step.
    pub fn new(config: MuonConfig, parameters: &[Parameter]) -> Self {
        Self::over(config, &DataParallel::single(parameters), parameters)
    }

    /// A rank's optimizer at its first step.
    pub fn over(config: MuonConfig, parallel: &DataParallel, parameters: &[Parameter]) -> Self {
        let tensors = parallel.runs().iter().map(|run| {
            let zeros = || vec![0.0; run.len];
            match group_of(&parameters[run.parameter].name) {
                Group::Matrix => TensorState::Muon(zeros()),
                _ => TensorState::Adam(zeros(), zeros()),
            }
        });
        let state = MuonState { tensors: tensors.collect(), step: 0 };
        Self { config, state }
    }

    /// A rank's optimizer that goes on from a saved state.
    ///
    /// # Errors
    /// - the state does not fit what the rank updates
    pub fn with_state(
        config: MuonConfig,
        parallel: &DataParallel,
        parameters: &[Parameter],
        state: MuonState,
    ) -> Result<Self> {
        let runs = parallel.runs();
        let fits = |(state, run): (&TensorState, &Run)| match (
            state,
            group_of(&parameters[run.parameter].name),
        ) {
            (TensorState::Muon(sum), Group::Matrix) => sum.len() == run.len,
            (TensorState::Adam(first, second), group) => {
                group != Group::Matrix && first.len() == run.len && second.len() == run.len
            }
            (TensorState::Muon(_), _) => false,
        };
        let whole = state.tensors.len() == runs.len();
        if !whole || !state.tensors.iter().zip(runs).all(fits) {
            let problem = "it does not fit the model";
            return Err(TrainError::checkpoint("optimizer state", problem).into());
        }
        Ok(Self { config, state })
    }

    /// Relative work of every parameter's update: products of the iterations for matrices.
    pub fn costs(parameters: &[Parameter]) -> Vec<u64> {
        let matrix = |parameter: &Parameter| {
            let dims = parameter.var.dims2().ok();
            dims.filter(|_| group_of(&parameter.name) == Group::Matrix)
        };
        let cost =
            |parameter: &Parameter| update_cost(parameter.var.elem_count(), matrix(parameter));
        parameters.iter().map(cost).collect()
    }

    /// State of every tensor.
    pub fn state(&self) -> &MuonState {
        &self.state
    }

    /// Updates the parameters of one process in place, every rate times `multiplier`.
    ///
    /// # Errors
    /// - a parameter cannot be read or written
    pub fn step(
        &mut self,
        parameters: &[Parameter],
        gradients: &Gradients,
        multiplier: f64,
    ) -> Result<MuonOutcome> {
        let parallel = DataParallel::single(parameters);
        self.update(&parallel, parameters, gradients, gradients.norm()?, multiplier)
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
        grad_norm: f64,
        multiplier: f64,
    ) -> Result<MuonOutcome> {
        let clip_factor = self.config.clip_factor(grad_norm);
        let momentum = self.config.momentum_at(self.state.step);
        self.state.step += 1;
        let step = self.state.step;
        let config = &self.config;
        // Asked of this thread: those of the pool do not know.
        let rounded = rounds_products();
        let update = |(index, state): (usize, &mut TensorState)| {
            let run = &parallel.runs()[index];
            let parameter = &parameters[run.parameter];
            let mut values = parallel.read(parameters, index)?;
            let gradient = match gradients.get(index)? {
                Some(gradient) => gradient,
                None => vec![0.0; values.len()].into(),
            };
            let gradient = &*gradient;
            let learning_rate = multiplier * config.rate(group_of(&parameter.name));
            match state {
                TensorState::Muon(sum) => {
                    let (rows, columns) = parameter.var.dims2()?;
                    let shape =
                        MatrixStep { rows, columns, learning_rate, momentum, clip_factor, rounded };
                    shape.apply(config, parameter.var.device(), &mut values, sum, gradient)?;
                }
                TensorState::Adam(first, second) => {
                    let step = AdamWStep {
                        learning_rate,
                        betas: config.betas,
                        eps: config.eps,
                        weight_decay: 0.0,
                        step,
                        grad_scale: clip_factor,
                    };
                    adamw(&step, &mut values, first, second, gradient);
                }
            }
            Ok(parallel.write(parameters, index, values)?)
        };
        // What the threads submit to a GPU goes to its one stream: whoever reads weights later finds the new
        // ones.
        let updates = self.state.tensors.par_iter_mut().enumerate().map(update);
        parallel.publish(parameters, updates.collect::<Result<_>>()?)?;
        Ok(MuonOutcome { grad_norm, clip_factor, momentum })
    }
}

/// One matrix's step.
struct MatrixStep {
    rows: usize,
    columns: usize,
    learning_rate: f64,
    momentum: f64,
    clip_factor: f64,
    /// Whether factors of its products are rounded.
    rounded: bool,
}

impl MatrixStep {
    /// The products run on `device`, all else on the host.
    fn apply(
        &self,
        config: &MuonConfig,
        device: &Device,
        values: &mut [f32],
        sum: &mut [f32],
        gradient: &[f32],
    ) -> Result<()> {
        let mut direction = direction(sum, gradient, self.momentum, self.clip_factor);
        if config.normalise_rows {
            for row in direction.chunks_mut(self.columns.max(1)) {
                let norm = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
                let factor = (1.0 / norm.max(SHORTEST_ROW)) as f32;
                row.iter_mut().for_each(|value| *value *= factor);
            }
        }
        let rule = config.orthogonalisation.into();
        let shape = (self.rows, self.columns);
        let update = orthogonalise_on(device, &direction, shape, rule, self.rounded)?;
        let shape = (self.rows as f64 / self.columns.max(1) as f64).max(1.0).sqrt();
        let rate = (self.learning_rate * shape) as f32;
        let shrink = (self.learning_rate * config.weight_decay) as f32;
        for (value, update) in values.iter_mut().zip(update) {
            if shrink > 0.0 && update * *value > 0.0 {
                *value -= shrink * *value;
            }
            *value -= rate * update;
        }
        Ok(())
    }
}
