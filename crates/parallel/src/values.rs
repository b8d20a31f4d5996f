//! Values of parameters or runs where they lie.

use std::borrow::Cow;

use candle_core::{Device, Shape, Tensor};

use crate::error::Result;

/// f32 values of a parameter, or of a run of its elements.
#[derive(Debug, Clone)]
pub enum Values {
    /// In main memory.
    Host(Vec<f32>),
    /// f32, in the parameter's shape, or flat if it is a run of one.
    Device(Tensor),
}

impl Default for Values {
    fn default() -> Self {
        Self::Host(Vec::new())
    }
}

impl From<Vec<f32>> for Values {
    fn from(values: Vec<f32>) -> Self {
        Self::Host(values)
    }
}

impl From<Tensor> for Values {
    fn from(values: Tensor) -> Self {
        Self::Device(values)
    }
}

impl Values {
    /// Copied if they lie elsewhere. It fails where they cannot be read.
    pub(crate) fn on_host(&self) -> Result<Cow<'_, [f32]>> {
        Ok(match self {
            Self::Host(values) => Cow::Borrowed(values),
            Self::Device(tensor) => Cow::Owned(tensor.flatten_all()?.to_vec1()?),
        })
    }

    pub(crate) fn into_host(self) -> Result<Vec<f32>> {
        match self {
            Self::Host(values) => Ok(values),
            device @ Self::Device(_) => Ok(device.on_host()?.into_owned()),
        }
    }

    /// On a device, in this shape. It fails where that has no memory for them, or another number of values.
    pub(crate) fn on(&self, device: &Device, shape: impl Into<Shape>) -> Result<Tensor> {
        Ok(match self {
            Self::Host(values) => Tensor::from_slice(values, shape, device)?,
            Self::Device(tensor) => tensor.to_device(device)?.reshape(shape)?,
        })
    }

    pub(crate) fn count(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Device(tensor) => tensor.elem_count(),
        }
    }
}
