//! Gradients of one optimizer step, accumulated over micro-batches.

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use longdraft_kernels::adamw::square_sum;
use longdraft_models::draft::Parameter;

use crate::error::Result;

/// One gradient a parameter, or a run of a parameter's elements where ranks hold different ones;
/// `None` where nothing reached it.
#[derive(Debug)]
pub struct Gradients {
    values: Vec<Option<Vec<f32>>>,
}

impl Gradients {
    /// No gradients yet.
    pub fn new(parameters: &[Parameter]) -> Self {
        Self { values: parameters.iter().map(|_| None).collect() }
    }

    /// Adds the gradients of one backward pass.
    ///
    /// # Errors
    /// - a gradient cannot be read as f32
    pub fn add(&mut self, parameters: &[Parameter], store: &GradStore) -> Result<()> {
        for (value, parameter) in self.values.iter_mut().zip(parameters) {
            let Some(grad) = store.get(parameter.var.as_tensor()) else {
                continue;
            };
            let grad: Vec<f32> = grad.flatten_all()?.to_vec1()?;
            accumulate(value, grad);
        }
        Ok(())
    }

    /// Gradients of parameters or runs, in order.
    pub fn from_values(values: Vec<Option<Vec<f32>>>) -> Self {
        Self { values }
    }

    /// Gradients of parameters or runs, in order.
    pub fn into_values(self) -> Vec<Option<Vec<f32>>> {
        self.values
    }

    /// Adds other gradients of the same parameters.
    pub fn merge(&mut self, other: Self) {
        for (value, other) in self.values.iter_mut().zip(other.values) {
            if let Some(other) = other {
                accumulate(value, other);
            }
        }
    }

    /// Gradient of the i-th parameter or run.
    pub fn get(&self, index: usize) -> Option<&[f32]> {
        self.values[index].as_deref()
    }

    /// Gradient of the i-th parameter as a tensor of its shape.
    ///
    /// # Errors
    /// - the tensor cannot be made
    pub fn tensor(&self, index: usize, parameter: &Parameter) -> Result<Option<Tensor>> {
        let Some(values) = self.get(index) else {
            return Ok(None);
        };
        let device = parameter.var.device();
        Ok(Some(Tensor::from_slice(values, parameter.var.shape(), device)?))
    }

    /// `‖g‖₂` over all gradients, summed in f64.
    pub fn norm(&self) -> f64 {
        self.values.iter().flatten().map(|g| square_sum(g)).sum::<f64>().sqrt()
    }
}

fn accumulate(sum: &mut Option<Vec<f32>>, values: Vec<f32>) {
    match sum {
        None => *sum = Some(values),
        Some(sum) => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value),
    }
}
