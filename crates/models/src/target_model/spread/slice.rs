//! A rank's part of one matrix: values on its device, or bytes as they lie in memory.

use bytemuck::Pod;
use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use longdraft_kernels::collectives::DeviceRanks;
use longdraft_kernels::matrix::{BlockFormat, Matrix, QuantisedMatrix};
use longdraft_kernels::transfer::upload_ahead;

use super::Ranks;
use crate::error::{ModelError, Result, refused};

/// Bytes that are gathered at once: MPI counts in 32 bits.
const PIECE: usize = 1 << 30;

/// How the whole is held.
#[derive(Debug, Clone)]
enum Form {
    Dense { dtype: DType, shape: Vec<usize>, device: Device },
    Quantised { format: BlockFormat, outputs: usize, inputs: usize, device: Device },
}

/// `1/N` of a matrix, filled up with zeros.
#[derive(Debug)]
enum Part {
    /// Values on the device, which are gathered there.
    Values(Tensor),
    /// Bytes of every piece.
    Bytes(Vec<u8>),
}

/// A rank's part of a matrix.
#[derive(Debug)]
pub(super) struct Slice {
    form: Form,
    /// Bytes of the whole.
    whole: usize,
    own: Part,
}

impl Slice {
    /// This rank's part.
    pub(super) fn of(matrix: &Matrix, ranks: &dyn Ranks) -> Result<Self> {
        if let (Matrix::Dense(tensor), Some(devices)) = (matrix, ranks.devices())
            && devices.takes(tensor)
        {
            return Self::on_device(tensor, devices);
        }
        let (form, whole, own) = match matrix {
            Matrix::Quantised(matrix) => of_blocks(matrix, Device::Cpu, ranks),
            // Parts of blocks are gathered in main memory.
            Matrix::OnGpu(matrix) => of_blocks(&matrix.to_host()?, matrix.device().clone(), ranks),
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
        Ok(Self { form, whole, own: Part::Bytes(own) })
    }

    fn on_device(tensor: &Tensor, devices: &dyn DeviceRanks) -> Result<Self> {
        let (dtype, shape, device) =
            (tensor.dtype(), tensor.dims().to_vec(), tensor.device().clone());
        let (flat, whole) = (tensor.flatten_all()?, tensor.elem_count());
        let part = whole.div_ceil(devices.size());
        let start = (part * devices.rank()).min(whole);
        let own = match part.min(whole - start) {
            0 => Tensor::zeros(part, dtype, &device)?,
            // A copy: the whole is let go of.
            count => {
                let own = flat.narrow(0, start, count)?.force_contiguous()?;
                own.pad_with_zeros(0, 0, part - count)?
            }
        };
        let form = Form::Dense { dtype, shape, device };
        Ok(Self { form, whole: whole * dtype.size_in_bytes(), own: Part::Values(own) })
    }

    /// The values of this rank's part, if they lie on its device.
    pub(super) fn values(&self) -> Option<&Tensor> {
        match &self.own {
            Part::Values(values) => Some(values),
            Part::Bytes(_) => None,
        }
    }

    /// The whole matrix of everybody's values `[N, ..]`.
    pub(super) fn whole_of(&self, all: &Tensor) -> Result<Matrix> {
        let Form::Dense { dtype, shape, .. } = &self.form else {
            return Err(unsupported(all.dtype()));
        };
        let values = all.flatten_all()?.narrow(0, 0, self.whole / dtype.size_in_bytes())?;
        Ok(Matrix::Dense(values.reshape(shape.as_slice())?))
    }

    /// The whole matrix; all ranks call it.
    pub(super) fn gather(&self, ranks: &dyn Ranks) -> Result<Matrix> {
        let own = match (&self.own, ranks.devices()) {
            (Part::Bytes(own), _) => own,
            (Part::Values(own), Some(devices)) => {
                let all = devices.all_gather(std::slice::from_ref(own))?;
                return self.whole_of(&all[0]);
            }
            (Part::Values(own), None) => return Err(unsupported(own.dtype())),
        };
        match &self.form {
            Form::Quantised { format, outputs, inputs, device } => {
                let bytes = self.collect::<u8>(own, ranks);
                let matrix = QuantisedMatrix::from_side_by_side(*format, *outputs, *inputs, bytes)?;
                Ok(Matrix::of_blocks(matrix, device)?)
            }
            Form::Dense { dtype, shape, device } => {
                let tensor = match dtype {
                    DType::F32 => self.tensor::<f32>(own, shape, ranks)?,
                    DType::BF16 => self.tensor::<bf16>(own, shape, ranks)?,
                    DType::F16 => self.tensor::<f16>(own, shape, ranks)?,
                    other => return Err(unsupported(*other)),
                };
                // The next layer's weights come beside the kernels of the one before.
                Ok(Matrix::Dense(upload_ahead(&tensor, device)?))
            }
        }
    }

    fn tensor<T: WithDType + Pod>(
        &self,
        own: &[u8],
        shape: &[usize],
        ranks: &dyn Ranks,
    ) -> Result<Tensor> {
        Ok(Tensor::from_vec(self.collect::<T>(own, ranks), shape, &Device::Cpu)?)
    }

    /// The values, gathered where they stay.
    fn collect<T: Pod>(&self, own: &[u8], ranks: &dyn Ranks) -> Vec<T> {
        let padded = own.len() * ranks.size();
        let mut values = vec![T::zeroed(); padded.div_ceil(size_of::<T>())];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        let step = piece_of_a_rank(ranks);
        let wholes = bytes[..padded].chunks_mut(step * ranks.size());
        for (own, all) in own.chunks(step).zip(wholes) {
            ranks.all_gather(own, all);
        }
        values.truncate(self.whole / size_of::<T>());
        values
    }
}

/// Form, bytes and this rank's part of a matrix whose blocks lie on `device`.
fn of_blocks(
    matrix: &QuantisedMatrix,
    device: Device,
    ranks: &dyn Ranks,
) -> (Form, usize, Vec<u8>) {
    let (format, outputs, inputs) = matrix.layout();
    let bytes = matrix.side_by_side();
    (Form::Quantised { format, outputs, inputs, device }, bytes.len(), own_part(bytes, ranks))
}

fn unsupported(dtype: DType) -> ModelError {
    refused(format!("a weight of type {dtype:?}"))
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
