//! Named tensors in files: safetensors (single or sharded), GGUF, PyTorch `.pth`.
//!
//! A [`WeightSource`] answers names and shapes from the header alone, so that every missing or
//! misshapen tensor is known before the first one is read, and reads tensors one by one in the
//! dtype asked for, so that peak memory stays close to the final weights.

pub(crate) mod aliases;
pub mod artifact;
pub mod atomic;
pub(crate) mod file;
pub mod gguf;
pub mod memory;
pub mod pth;
pub mod safetensors;
pub mod streamed;
pub mod temporary;

use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use half::{bf16, f16};
use longdraft_kernels::matrix::QuantisedMatrix;

use crate::error::{ModelError, Problems, Result};

/// What a tensor is to its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorRole {
    /// A part of a layer: it maps, scales or shifts states.
    Layer,
    /// A table with a row for each token of a vocabulary, of which one row is read for a token.
    Embedding,
    /// A table with a row for each token of a vocabulary, whose products are the tokens' logits or a part
    /// of them. An embedding that is tied to the head is one, too.
    Head,
}

impl TensorRole {
    /// Whether this is Muon's kind of tensor, given its dimensions: a matrix of a layer. Rows of tables belong
    /// to tokens, and their directions have no reason to be orthogonal.
    pub fn is_layer_matrix(self, dimensions: usize) -> bool {
        self == Self::Layer && dimensions == 2
    }
}

/// A tensor that a model expects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Published name.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// What it is to the model.
    pub role: TensorRole,
}

impl TensorSpec {
    /// A part of a layer.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec(), role: TensorRole::Layer }
    }

    /// A table of which one row is read for a token, `[V, ..]`.
    pub fn embedding(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { role: TensorRole::Embedding, ..Self::new(name, shape) }
    }

    /// A table whose products are logits, `[V, ..]`.
    pub fn head(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { role: TensorRole::Head, ..Self::new(name, shape) }
    }

    /// What is wrong with a file that holds a tensor of shape `found` for it, or none.
    pub(crate) fn problem(&self, found: Option<Vec<usize>>) -> Option<String> {
        let Self { name, shape, .. } = self;
        match found {
            None => Some(format!("tensor `{name}` {shape:?} is missing")),
            Some(found) if found != *shape => {
                Some(format!("tensor `{name}` has shape {found:?}, {shape:?} expected"))
            }
            Some(_) => None,
        }
    }
}

/// Tensors that can be read by name.
pub trait WeightSource {
    /// The file or folder, for messages.
    fn path(&self) -> &Path;

    /// Every name.
    fn names(&self) -> Vec<String>;

    /// Shape of one tensor, if it exists.
    fn shape(&self, name: &str) -> Option<Vec<usize>>;

    /// Reads one tensor onto the CPU as f32, bf16 or f16.
    ///
    /// # Errors
    /// - the tensor does not exist, is of a type that is no weight, or the dtype is another
    fn load(&self, name: &str, dtype: DType) -> Result<Tensor>;

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

    /// Reads some of a tensor's first dimension.
    ///
    /// # Errors
    /// - as [`Self::load`], or there are fewer
    fn load_rows(&self, name: &str, rows: Range<usize>, dtype: DType) -> Result<Tensor> {
        rows_of(&self.load(name, dtype)?, rows)
    }

    /// Reads the bytes of some of the first dimension of a tensor of u8.
    ///
    /// # Errors
    /// - the tensor does not exist, is of another type, or there are fewer
    fn load_bytes(&self, name: &str, rows: Range<usize>) -> Result<Vec<u8>> {
        let problem = format!("tensor `{name}`: no bytes ({rows:?}) are read from this format");
        Err(ModelError::invalid(self.path(), problem))
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

/// Some of a tensor's first dimension, in memory of their own.
pub(crate) fn rows_of(tensor: &Tensor, rows: Range<usize>) -> Result<Tensor> {
    Ok(tensor.narrow(0, rows.start, rows.len())?.force_contiguous()?)
}

/// Every spec that `source` misses or holds in another shape.
pub fn check_specs(source: &dyn WeightSource, specs: &[TensorSpec]) -> Problems {
    Problems(specs.iter().filter_map(|spec| spec.problem(source.shape(&spec.name))).collect())
}

/// Says that a tensor is not of the type that is wanted.
pub(crate) fn other_type(path: &Path, name: &str, found: impl Debug, wanted: &str) -> ModelError {
    ModelError::invalid(path, format!("tensor `{name}` is {found:?}, {wanted} expected"))
}

/// Whole numbers as they stand in weight files, little-endian; `of` takes the bytes of one.
pub(crate) fn integers<const N: usize, T: Into<i64>>(
    bytes: &[u8],
    of: impl Fn([u8; N]) -> T,
) -> Vec<i64> {
    bytes.as_chunks::<N>().0.iter().map(|bytes| of(*bytes).into()).collect()
}

/// Collects f32 values into a tensor of the dtype asked for, without an f32 copy of the whole.
pub(crate) enum Collector {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Collector {
    /// # Errors
    /// - weights are not held in this type; `path` is said
    pub(crate) fn zeros(path: &Path, dtype: DType, len: usize) -> Result<Self> {
        match dtype {
            DType::F32 => Ok(Self::F32(vec![0.0; len])),
            DType::BF16 => Ok(Self::Bf16(vec![bf16::ZERO; len])),
            DType::F16 => Ok(Self::F16(vec![f16::ZERO; len])),
            _ => Err(ModelError::invalid(path, format!("weights cannot be held as {dtype:?}"))),
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
