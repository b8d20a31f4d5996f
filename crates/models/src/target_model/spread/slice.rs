//! A rank's part of one matrix, as its bytes lie in memory.

use std::sync::Arc;

use bytemuck::Pod;
use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use longdraft_kernels::matrix::{BlockFormat, Matrix, QuantisedMatrix};
use longdraft_kernels::transfer::upload_ahead;

use super::Ranks;
use crate::error::{ModelError, Result};

/// Bytes that are gathered at once: MPI counts in 32 bits.
const PIECE: usize = 1 << 30;

/// How the whole is held.
#[derive(Debug, Clone)]
enum Form {
    Dense { dtype: DType, shape: Vec<usize>, device: Device },
    Quantised { format: BlockFormat, outputs: usize, inputs: usize },
}

/// `1/N` of a matrix's bytes.
#[derive(Debug)]
pub(super) struct Slice {
    form: Form,
    /// Bytes of the whole.
    whole: usize,
    /// This rank's part of every piece, the last one filled up with zeros.
    own: Vec<u8>,
}

impl Slice {
    /// This rank's part.
    pub(super) fn of(matrix: &Matrix, ranks: &dyn Ranks) -> Result<Self> {
        let (form, whole, own) = match matrix {
            Matrix::Quantised(matrix) => {
                let (format, outputs, inputs) = matrix.layout();
                let bytes = matrix.side_by_side();
                let form = Form::Quantised { format, outputs, inputs };
                (form, bytes.len(), own_part(bytes, ranks))
            }
            Matrix::Dense(tensor) => {
                let (dtype, shape) = (tensor.dtype(), tensor.dims().to_vec());
                let (whole, own) = match dtype {
                    DType::F32 => part_of::<f32>(tensor, ranks)?,
                    DType::BF16 => part_of::<bf16>(tensor, ranks)?,
                    DType::F16 => part_of::<f16>(tensor, ranks)?,
                    other => return Err(unsupported(other)),
                };
                let device = tensor.device().clone();
                (Form::Dense { dtype, shape, device }, whole, own)
            }
        };
        Ok(Self { form, whole, own })
    }

    /// The whole matrix; all ranks call it.
    pub(super) fn gather(&self, ranks: &dyn Ranks) -> Result<Matrix> {
        match &self.form {
            Form::Quantised { format, outputs, inputs } => {
                let bytes = self.collect::<u8>(ranks);
                let matrix = QuantisedMatrix::from_side_by_side(*format, *outputs, *inputs, bytes)?;
                Ok(Matrix::Quantised(Arc::new(matrix)))
            }
            Form::Dense { dtype, shape, device } => {
                let tensor = match dtype {
                    DType::F32 => self.tensor::<f32>(shape, ranks)?,
                    DType::BF16 => self.tensor::<bf16>(shape, ranks)?,
                    DType::F16 => self.tensor::<f16>(shape, ranks)?,
                    other => return Err(unsupported(*other)),
                };
                // The next layer's weights come beside the kernels of the one before.
                Ok(Matrix::Dense(upload_ahead(&tensor, device)?))
            }
        }
    }

    fn tensor<T: WithDType + Pod>(&self, shape: &[usize], ranks: &dyn Ranks) -> Result<Tensor> {
        Ok(Tensor::from_vec(self.collect::<T>(ranks), shape, &Device::Cpu)?)
    }

    /// The values, gathered where they stay.
    fn collect<T: Pod>(&self, ranks: &dyn Ranks) -> Vec<T> {
        let padded = self.own.len() * ranks.size();
        let mut values = vec![T::zeroed(); padded.div_ceil(size_of::<T>())];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        let step = piece_of_a_rank(ranks);
        let wholes = bytes[..padded].chunks_mut(step * ranks.size());
        for (own, all) in self.own.chunks(step).zip(wholes) {
            ranks.all_gather(own, all);
        }
        values.truncate(self.whole / size_of::<T>());
        values
    }
}

fn unsupported(dtype: DType) -> ModelError {
    ModelError::Tensor(candle_core::Error::Msg(format!("a weight of type {dtype:?}")))
}

fn part_of<T: WithDType + Pod>(tensor: &Tensor, ranks: &dyn Ranks) -> Result<(usize, Vec<u8>)> {
    let values: Vec<T> = tensor.to_device(&Device::Cpu)?.flatten_all()?.to_vec1()?;
    let bytes: &[u8] = bytemuck::cast_slice(&values);
    Ok((bytes.len(), own_part(bytes, ranks)))
}

/// Bytes of a rank in a full piece.
fn piece_of_a_rank(ranks: &dyn Ranks) -> usize {
    (PIECE / ranks.size()).max(1)
}

/// Full pieces are cut evenly; the last one as evenly as its bytes allow.
fn own_part(bytes: &[u8], ranks: &dyn Ranks) -> Vec<u8> {
    let mut own = Vec::with_capacity(bytes.len().div_ceil(ranks.size()));
    for piece in bytes.chunks(piece_of_a_rank(ranks) * ranks.size()) {
        let part = piece.len().div_ceil(ranks.size());
        let end = own.len() + part;
        let start = (part * ranks.rank()).min(piece.len());
        own.extend_from_slice(&piece[start..(start + part).min(piece.len())]);
        own.resize(end, 0);
    }
    own
}
