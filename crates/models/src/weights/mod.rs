//! Named tensors in files: safetensors (single or sharded), GGUF, PyTorch `.pth`.
//!
//! A [`WeightSource`] answers names and shapes from the header alone, so that every missing or
//! misshapen tensor is known before the first one is read, and reads tensors one by one in the
//! dtype asked for, so that peak memory stays close to the final weights.

pub mod artifact;
pub mod atomic;
pub(crate) mod file;
pub mod gguf;
pub mod memory;
pub mod pth;
pub mod safetensors;
pub mod streamed;
pub mod temporary;

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use longdraft_kernels::matrix::QuantisedMatrix;

use crate::error::{ModelError, Problems, Result};

/// Name and shape that a model expects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Published name.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A spec.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec() }
    }
}

/// Tensors that can be read by name.
pub trait WeightSource {
    /// The file or folder, for messages.
    fn path(&self) -> &std::path::Path;

    /// Every name.
    fn names(&self) -> Vec<String>;

    /// Shape of one tensor, if it exists.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;

    /// Reads one tensor onto the CPU as f32, bf16 or f16.
    ///
    /// # Errors
    /// - the tensor does not exist, is of a type that is no weight, or the dtype is another
    fn load(&self, name: &str, dtype: DType) -> Result<Tensor>;

    /// Reads one of several equal parts of a tensor, in row-major order, as a vector.
    ///
    /// # Errors
    /// - as [`Self::load`], or the tensor does not consist of so many parts
    fn load_part(&self, name: &str, (part, parts): (usize, usize), dtype: DType) -> Result<Tensor> {
        let whole = self.load(name, dtype)?.flatten_all()?;
        let values = whole.elem_count() / parts.max(1);
        if part >= parts || values * parts != whole.elem_count() {
            let problem = format!("tensor `{name}` has no part {part} of {parts}");
            return Err(ModelError::invalid(self.path(), problem));
        }
        Ok(whole.narrow(0, part * values, values)?.force_contiguous()?)
    }

    /// The file's own name of a tensor's type (`BF16`, `Q4_K`), where the format has such.
    fn stored_type(&self, name: &str) -> Option<&'static str> {
        let _ = name;
        None
    }

    /// Reads a matrix as quantised blocks, if it is stored as such in a format that products read.
    ///
    /// # Errors
    /// - the tensor does not exist or lies outside of the file
    fn load_quantised(&self, name: &str) -> Result<Option<QuantisedMatrix>> {
        let _ = name;
        Ok(None)
    }

    /// Reads one tensor of integers or flags (0 and 1), row-major.
    ///
    /// # Errors
    /// - the tensor does not exist or holds neither
    fn load_integers(&self, name: &str) -> Result<Vec<i64>> {
        let problem = format!("tensor `{name}`: no integers are read from this format");
        Err(ModelError::invalid(self.path(), problem))
    }
}

/// Every spec that `source` misses or holds in another shape.
pub fn check_specs(source: &dyn WeightSource, specs: &[TensorSpec]) -> Problems {
    let mut problems = Problems::default();
    for spec in specs {
        match source.shape(&spec.name) {
            None => problems.push(format!("tensor `{}` {:?} is missing", spec.name, spec.shape)),
            Some(shape) if shape != spec.shape => problems.push(format!(
                "tensor `{}` has shape {shape:?}, {:?} expected",
                spec.name, spec.shape
            )),
            Some(_) => {}
        }
    }
    problems
}

/// Collects f32 values into a tensor of the dtype asked for, without an f32 copy of the whole.
pub(crate) enum Collector {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Collector {
    pub(crate) fn zeros(dtype: DType, len: usize) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32(vec![0.0; len])),
            DType::BF16 => Some(Self::Bf16(vec![bf16::ZERO; len])),
            DType::F16 => Some(Self::F16(vec![f16::ZERO; len])),
            _ => None,
        }
    }

    /// Writes `values` from `start` on.
    pub(crate) fn set(&mut self, start: usize, values: impl Iterator<Item = f32>) {
        match self {
            Self::F32(out) => {
                out[start..].iter_mut().zip(values).for_each(|(out, value)| *out = value);
            }
            Self::Bf16(out) => out[start..]
                .iter_mut()
                .zip(values)
                .for_each(|(out, value)| *out = bf16::from_f32(value)),
            Self::F16(out) => out[start..]
                .iter_mut()
                .zip(values)
                .for_each(|(out, value)| *out = f16::from_f32(value)),
        }
    }

    pub(crate) fn into_tensor(self, shape: &[usize]) -> Result<Tensor> {
        let tensor = match self {
            Self::F32(values) => Tensor::from_vec(values, shape, &Device::Cpu),
            Self::Bf16(values) => Tensor::from_vec(values, shape, &Device::Cpu),
            Self::F16(values) => Tensor::from_vec(values, shape, &Device::Cpu),
        };
        tensor.map_err(ModelError::from)
    }
}
