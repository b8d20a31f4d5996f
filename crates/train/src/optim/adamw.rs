//! AdamW with global-norm clipping and two parameter groups (decayed or not), on request with Muon
//! on the matrices inside of layers.
//!
//! `c = min(1, clip / (‖g‖₂ + 1e-6))` over the trained tensors, then the step of
//! [`longdraft_kernels::adamw`] with gradients `c g`. Muon's step is
//! `W ← (1 − lr wd) W − 0.2 lr sqrt(max(rows, columns)) X` with its orthogonal direction `X`: the
//! root mean square of AdamW's updates, so that one rate serves both (Liu et al. 2025).

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::path::Path;

use candle_core::{Device, Shape, Tensor};
use longdraft_kernels::adamw::{AdamWState, AdamWStep, adamw, adamw_on_device, adamw_with_halves};
use longdraft_kernels::dispatch::{multiplies_halves, rounds_products};
use longdraft_kernels::factors::Written;
use longdraft_kernels::orthogonalise::{Rule, orthogonalise_on};
use longdraft_models::draft::Parameter;
use longdraft_models::weights::TensorRole;
use longdraft_parallel::{DataParallel, Gradients, ParallelConfig, Run, World};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::matrices::{direction, update_cost};
use super::run_values::RunValues;
use crate::error::{Result, TrainError};

/// Added to the norm before the clip factor is formed, as DeepSpeed does.
const CLIP_EPS: f64 = 1e-6;

/// Root mean square of AdamW's updates, in units of the rate.
const UPDATE_RMS: f64 = 0.2;

/// What updates the matrices inside of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MatrixUpdate {
    /// `AdamW`, as for every other tensor.
    #[default]
    Adamw,
    /// Muon: orthogonal updates of the same size; each step takes longer.
    Muon,
}

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
    /// What updates the matrices inside of layers.
    pub matrices: MatrixUpdate,
    /// Muon's momentum.
    pub momentum: f64,
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
            matrices: MatrixUpdate::Adamw,
            momentum: 0.95,
            dead_params: DeadParameters::Untouched,
        }
    }
}

/// One of the two moments of a run that a rank updates. A matrix under Muon keeps its momentum sum as
/// first moment, and zeros as second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MomentKind {
    /// Mean of the gradients.
    First,
    /// Mean of their squares.
    Second,
}

impl MomentKind {
    /// Both.
    pub const ALL: [Self; 2] = [Self::First, Self::Second];

    /// What names of saved tensors begin with.
    pub fn name(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Second => "second",
        }
    }
}

/// The optimizer.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    /// First and second moments, in the order of [`DataParallel::runs`].
    moments: [RunValues; 2],
    step: u64,
    /// Weights as products multiply them, of those that it updated where they lie.
    written: Written,
}

impl AdamWConfig {
    /// How ranks share out the update: Muon needs whole matrices.
    pub fn spread(
        &self,
        world: &World,
        parallel: &ParallelConfig,
        parameters: &[Parameter],
    ) -> DataParallel {
        match self.matrices {
            MatrixUpdate::Adamw => DataParallel::by_blocks(world, parallel, parameters),
            MatrixUpdate::Muon => {
                let cost = |parameter: &Parameter| {
                    let shape = parameter.var.shape();
                    update_cost(shape.elem_count(), layer_matrix(parameter, shape))
                };
                let costs: Vec<u64> = parameters.iter().map(cost).collect();
                DataParallel::by_cost(world, parallel, parameters, &costs)
            }
        }
    }
}

impl AdamW {
    /// An optimizer of one process with empty moments.
    pub fn new(config: AdamWConfig, parameters: &[Parameter]) -> Self {
        Self::over(config, &DataParallel::single(parameters))
    }

    /// A rank's optimizer with empty moments in memory.
    pub fn over(config: AdamWConfig, parallel: &DataParallel) -> Self {
        let lengths: Vec<usize> = parallel.runs().iter().map(|run| run.len).collect();
        let moments = [RunValues::zeros(&lengths), RunValues::zeros(&lengths)];
        Self { config, moments, step: 0, written: Written::default() }
    }

    /// The same with the moments in files without names in `folder`.
    ///
    /// # Errors
    /// - the folder cannot be written or is full
    pub fn over_files(config: AdamWConfig, parallel: &DataParallel, folder: &Path) -> Result<Self> {
        let lengths: Vec<usize> = parallel.runs().iter().map(|run| run.len).collect();
        let [first, second] = [(); 2].map(|()| RunValues::zeros_in(folder, &lengths));
        Ok(Self { config, moments: [first?, second?], step: 0, written: Written::default() })
    }

    /// Goes on from a saved state, which `read` gives run by run.
    ///
    /// # Errors
    /// - of `read`, or the moments do not fit what the rank updates
    pub fn restore(
        &mut self,
        step: u64,
        (parallel, parameters): (&DataParallel, &[Parameter]),
        read: impl Fn(MomentKind, &Run) -> Result<Vec<f32>>,
    ) -> Result<()> {
        for (kind, moments) in MomentKind::ALL.into_iter().zip(&mut self.moments) {
            for (index, run) in parallel.runs().iter().enumerate() {
                let saved = read(kind, run)?;
                if saved.len() != run.len {
                    let problem = "moments do not fit the draft";
                    return Err(TrainError::checkpoint("optimizer state", problem));
                }
                moments.change(index, |values| {
                    values.copy_from_slice(&saved);
                    Ok(())
                })?;
            }
        }
        self.step = step;
        self.written.clear();
        self.forget_momentum_sums(parallel, parameters)
    }

    /// What Muon updated may be `AdamW`'s now: a run may be forced on under another configuration. A momentum sum beside
    /// second moments of 0 is no first moment of `AdamW`, which would step too far.
    fn forget_momentum_sums(
        &mut self,
        parallel: &DataParallel,
        parameters: &[Parameter],
    ) -> Result<()> {
        let has_muon = self.config.matrices == MatrixUpdate::Muon;
        let [first, second] = &mut self.moments;
        for (index, run) in parallel.runs().iter().enumerate() {
            let matrix = layer_matrix(&parameters[run.parameter], parallel.shape_of(run));
            let by_muon = has_muon && matrix.is_some();
            if !by_muon && second.get(index)?.iter().all(|value| *value == 0.0) {
                first.change(index, |first| {
                    first.fill(0.0);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// A moment of the run at a place of [`DataParallel::runs`].
    ///
    /// # Errors
    /// - it lies in a file that cannot be read
    pub fn moment(&self, kind: MomentKind, index: usize) -> Result<Cow<'_, [f32]>> {
        self.moments[kind as usize].get(index)
    }

    /// The weights as products multiply them that the last update wrote, for the next step. They are those of the
    /// parameters as long as nobody else gives these other values.
    pub fn written(&self) -> &Written {
        &self.written
    }

    /// Whether moments of a run lie on a device.
    #[cfg(test)]
    pub(super) fn lies_on_devices(&self) -> bool {
        self.moments.iter().all(RunValues::lies_on_device)
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.step
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
        let norm = gradients.norm()?;
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
        self.step += 1;
        self.written.clear();
        let step = AdamWStep {
            learning_rate,
            betas: self.config.betas,
            eps: self.config.eps,
            weight_decay: 0.0,
            step: self.step,
            grad_scale: (self.config.clip_norm / (norm + CLIP_EPS)).min(1.0),
        };
        let mut own = Vec::with_capacity(parallel.runs().len());
        for (index, run) in parallel.runs().iter().enumerate() {
            let parameter = &parameters[run.parameter];
            let shape = parallel.shape_of(run);
            let weight_decay = if parameter.decay { self.config.weight_decay } else { 0.0 };
            let step = AdamWStep { weight_decay, ..step };
            let by_muon = layer_matrix(parameter, shape)
                .filter(|_| self.config.matrices == MatrixUpdate::Muon);
            // Beside Muon a rank's part is updated in main memory.
            let beside_muon = self.config.matrices == MatrixUpdate::Muon && parallel.is_sharded();
            let on_device = by_muon.is_none() && !beside_muon;
            if let Some(gradient) = gradients.on_device(index).filter(|_| on_device) {
                let theta = parallel.read_on_device(parameters, index)?;
                // Of a part of the weights others have the rest.
                let halved = Some(parameter).filter(|_| !parallel.is_sharded());
                if let Some(theta) = self.step_on_device(&step, index, (theta, halved), gradient)? {
                    own.push(parallel.write(parameters, index, theta)?);
                    continue;
                }
            }
            let mut values = parallel.read(parameters, index)?;
            match gradients.get(index)?.as_deref() {
                Some(gradient) => {
                    let matrix = by_muon.map(|shape| (parameter.var.device(), shape));
                    self.step_on_host(&step, index, matrix, &mut values, gradient)?;
                }
                None if self.config.dead_params == DeadParameters::Decay => {
                    let keep = (1.0 - learning_rate * weight_decay) as f32;
                    values.iter_mut().for_each(|value| *value *= keep);
                }
                None => {}
            }
            own.push(parallel.write(parameters, index, values)?);
        }
        Ok(parallel.publish(parameters, own)?)
    }

    /// Updates a run's values: by Muon, its direction formed on a device, if they are a matrix.
    fn step_on_host(
        &mut self,
        step: &AdamWStep,
        index: usize,
        matrix: Option<(&Device, (usize, usize))>,
        values: &mut [f32],
        gradient: &[f32],
    ) -> Result<()> {
        let momentum = self.config.momentum;
        let [first, second] = &mut self.moments;
        first.change(index, |first| {
            let Some((device, shape)) = matrix else {
                return second.change(index, |second| {
                    adamw(step, values, first, second, gradient);
                    Ok(())
                });
            };
            let sum = direction(first, gradient, momentum, step.grad_scale);
            let update =
                orthogonalise_on(device, &sum, shape, Rule::NewtonSchulz, rounds_products())?;
            muon(step, shape, values, &update);
            Ok(())
        })
    }

    /// New values of a run where it lies, where its moments stay; `None` if they are kept in a file. Values of the
    /// parameter `halved` are written in bf16 as well, if products multiply it so.
    fn step_on_device(
        &mut self,
        step: &AdamWStep,
        index: usize,
        (theta, halved): (Tensor, Option<&Parameter>),
        gradient: &Tensor,
    ) -> Result<Option<Tensor>> {
        let [first, second] = &mut self.moments;
        let (Some(own_first), Some(own_second)) =
            (first.on_device_of(index, &theta)?, second.on_device_of(index, &theta)?)
        else {
            return Ok(None);
        };
        let state = AdamWState { theta, first: own_first, second: own_second };
        let state = match halved.filter(|parameter| is_multiplied_in_halves(parameter)) {
            Some(parameter) => {
                let (state, halves) = adamw_with_halves(step, &state, gradient)?;
                self.written.put(&parameter.var, halves);
                state
            }
            None => adamw_on_device(step, &state, gradient)?,
        };
        first.keep(index, state.first);
        second.keep(index, state.second);
        Ok(Some(state.theta))
    }
}

/// Whether products turn a parameter into bf16 factors.
fn is_multiplied_in_halves(parameter: &Parameter) -> bool {
    let is_matrix = parameter.var.rank() == 2 && parameter.role != TensorRole::Embedding;
    is_matrix && multiplies_halves(parameter.var.device())
}

/// Rows and columns of a matrix inside of a layer.
fn layer_matrix(parameter: &Parameter, shape: &Shape) -> Option<(usize, usize)> {
    shape.dims2().ok().filter(|_| parameter.role.is_layer_matrix(shape.rank()))
}

fn muon(step: &AdamWStep, (rows, columns): (usize, usize), values: &mut [f32], update: &[f32]) {
    let rate = (step.learning_rate * UPDATE_RMS * (rows.max(columns) as f64).sqrt()) as f32;
    let keep = (1.0 - step.learning_rate * step.weight_decay) as f32;
    for (value, update) in values.iter_mut().zip(update) {
        *value = *value * keep - rate * update;
    }
}
