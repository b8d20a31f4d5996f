//! Gradients of one optimizer step, accumulated over micro-batches.

use std::borrow::Cow;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Shape, Tensor};
use longdraft_kernels::adamw::{square_sum, square_sum_on_device, stays_on_device};
use longdraft_kernels::graph::{Backward, add_each, into_values};
use longdraft_models::draft::Parameter;

use crate::error::Result;
use crate::values::Values;

/// One gradient a parameter, or a run of a parameter's elements where ranks hold different ones;
/// `None` where nothing reached it. Those of parameters on a GPU stay there.
#[derive(Debug)]
pub struct Gradients {
    values: Vec<Option<Values>>,
}

impl Gradients {
    /// No gradients yet.
    pub fn new(parameters: &[Parameter]) -> Self {
        Self { values: parameters.iter().map(|_| None).collect() }
    }

    /// Adds the gradients of one backward pass, which are not copied where they are the first.
    ///
    /// # Errors
    /// - a gradient cannot be read as f32
    pub fn add(&mut self, parameters: &[Parameter], mut store: GradStore) -> Result<()> {
        for (value, parameter) in self.values.iter_mut().zip(parameters) {
            let Some(gradient) = store.remove(parameter.var.as_tensor()) else {
                continue;
            };
            let values = if stays_on_device(&gradient) {
                Values::Device(gradient.to_dtype(DType::F32)?)
            } else {
                Values::Host(into_values(gradient)?)
            };
            accumulate(value, values)?;
        }
        Ok(())
    }

    /// Adds the gradients of a loss. Sums on a device take those of products where they lie: they are added while they are
    /// formed.
    ///
    /// # Errors
    /// - an op has no gradients, or one cannot be read as f32; sums so far are lost then
    pub fn add_of(&mut self, parameters: &[Parameter], loss: &Tensor) -> Result<()> {
        let mut sums = Vec::new();
        for (value, Parameter { var, .. }) in self.values.iter_mut().zip(parameters) {
            let there = |value: &mut Values| {
                let Values::Device(sum) = value else { return false };
                (sum.dtype(), sum.shape()) == (var.dtype(), var.shape())
            };
            if let Some(Values::Device(sum)) = value.take_if(there) {
                sums.push((var.clone(), sum));
            }
        }
        self.add(parameters, loss.gradients_onto(sums)?)
    }

    /// Gradients of parameters or runs, in order.
    pub fn from_values(values: Vec<Option<Vec<f32>>>) -> Self {
        Self { values: values.into_iter().map(|value| value.map(Values::Host)).collect() }
    }

    /// Gradients of parameters where they lie, f32, in order.
    pub fn from_tensors(values: Vec<Option<Tensor>>) -> Self {
        Self { values: values.into_iter().map(|value| value.map(Values::Device)).collect() }
    }

    /// 1 for every parameter or run that has a gradient, else 0.
    pub fn reached(&self) -> Vec<u64> {
        self.values.iter().map(|value| u64::from(value.is_some())).collect()
    }

    /// Gradient of the i-th parameter, of `shape`, on `device`; zeros where nothing reached it.
    ///
    /// # Errors
    /// - the device has no memory for it
    pub fn on(&self, device: &Device, index: usize, shape: &Shape) -> Result<Tensor> {
        Ok(match &self.values[index] {
            None => Tensor::zeros(shape, DType::F32, device)?,
            Some(values) => values.on(device, shape)?,
        })
    }

    /// Gradients of parameters or runs on the host, in order.
    ///
    /// # Errors
    /// - one cannot be read from its device
    pub fn into_values(self) -> Result<Vec<Option<Vec<f32>>>> {
        self.values.into_iter().map(|value| value.map(Values::into_host).transpose()).collect()
    }

    /// Adds other gradients of the same parameters.
    ///
    /// # Errors
    /// - one cannot be read from its device
    pub fn merge(&mut self, other: Self) -> Result<()> {
        for (value, other) in self.values.iter_mut().zip(other.values) {
            if let Some(other) = other {
                accumulate(value, other)?;
            }
        }
        Ok(())
    }

    /// Gradient of the i-th parameter or run, copied to the host if it lies elsewhere.
    ///
    /// # Errors
    /// - it cannot be read from its device
    pub fn get(&self, index: usize) -> Result<Option<Cow<'_, [f32]>>> {
        self.values[index].as_ref().map(Values::on_host).transpose()
    }

    /// The same if it lies on the host.
    pub(crate) fn get_host(&self, index: usize) -> Option<&[f32]> {
        match &self.values[index] {
            Some(Values::Host(values)) => Some(values),
            _ => None,
        }
    }

    /// Gradient of the i-th parameter where it is to be used without a copy to the host.
    pub fn on_device(&self, index: usize) -> Option<&Tensor> {
        match &self.values[index] {
            Some(Values::Device(tensor)) => Some(tensor),
            _ => None,
        }
    }

    /// Gradient of the i-th parameter as a tensor of its shape.
    ///
    /// # Errors
    /// - the tensor cannot be made
    pub fn tensor(&self, index: usize, parameter: &Parameter) -> Result<Option<Tensor>> {
        let (device, shape) = (parameter.var.device(), parameter.var.shape());
        self.values[index].is_some().then(|| self.on(device, index, shape)).transpose()
    }

    /// `‖g‖₂` over all gradients, summed in f64.
    ///
    /// # Errors
    /// - one cannot be read from its device
    pub fn norm(&self) -> Result<f64> {
        let square_sum = |values: &Values| match values {
            Values::Host(values) => Ok(square_sum(values)),
            Values::Device(tensor) => Ok(square_sum_on_device(tensor)?),
        };
        let sums = self.values.iter().flatten().map(square_sum).collect::<Result<Vec<f64>>>()?;
        Ok(sums.iter().sum::<f64>().sqrt())
    }
}

fn accumulate(sum: &mut Option<Values>, values: Values) -> Result<()> {
    *sum = Some(match sum.take() {
        None => values,
        Some(sum) => added(sum, values)?,
    });
    Ok(())
}

fn added(sum: Values, other: Values) -> Result<Values> {
    Ok(match (sum, other) {
        (Values::Device(sum), Values::Device(other)) => (sum + other)?.into(),
        (sum, other) => {
            let mut sum = sum.into_host()?;
            add_each(&mut sum, &other.on_host()?);
            sum.into()
        }
    })
}
