//! Frozen `[O, I]` weights: dense tensors, or quantised blocks as GGUF files store them.
//!
//! Products take the blocks apart in registers and multiply their codes with activations of 8-bit
//! fixed-point numbers, which a training or f32 target does not need: its products differ by some
//! 1e-3 of their size. Of blocks of 4 bits a seventh of the bytes is read.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Storage, Tensor, bail};

use crate::cuda::linear::{Addend, few_rows};
use crate::dispatch::fused;
use crate::gemm::quantised::Kernel;
use crate::gemm::{Mat, Product, Right, Room, matmul_each};
use crate::linear::{Weight, linear, linear_onto};
use crate::rows::{select_rows, wide_rows};
use crate::storage::with_f32;

mod head;
mod on_gpu;
mod quantised;

pub use crate::gemm::BlockFormat;
pub use head::Head;
pub use on_gpu::{GpuMatrix, holds_blocks, multiplies_by_kernels};
pub use quantised::QuantisedMatrix;

/// The instruction set that multiplies blocks here, by its name.
pub fn block_products() -> &'static str {
    Kernel::detect().name()
}

/// What multiplies blocks on a device, by its name.
pub fn block_products_on(device: &Device) -> &'static str {
    if multiplies_by_kernels(device) { "kernels for NVIDIA GPUs" } else { block_products() }
}

/// A frozen weight. A clone shares the values.
#[derive(Debug, Clone)]
pub enum Matrix {
    /// f32, bf16 or f16, `[O, I]`
    Dense(Tensor),
    /// Quantised blocks in main memory. Only a [`Head`] of them takes inputs that train.
    Quantised(Arc<QuantisedMatrix>),
    /// Quantised blocks on an NVIDIA GPU, multiplied as on the CPU. Inputs that train are multiplied with the widened values,
    /// which their gradients flow through.
    OnGpu(Arc<GpuMatrix>),
}

impl From<&Tensor> for Matrix {
    fn from(weight: &Tensor) -> Self {
        Self::Dense(weight.clone())
    }
}

impl From<&Matrix> for Matrix {
    fn from(weight: &Self) -> Self {
        weight.clone()
    }
}

impl Matrix {
    /// Outputs and inputs.
    ///
    /// # Errors
    /// - a dense weight is no matrix
    pub fn dims(&self) -> Result<(usize, usize)> {
        match self {
            Self::Dense(weight) => weight.dims2(),
            Self::Quantised(matrix) => Ok((matrix.outputs, matrix.inputs)),
            Self::OnGpu(matrix) => {
                let (_, outputs, inputs) = matrix.layout();
                Ok((outputs, inputs))
            }
        }
    }

    /// Blocks that a device multiplies, there: on the CPU they stay in main memory. Where
    /// [`holds_blocks`] says no they are widened.
    ///
    /// # Errors
    /// - the device has no memory for them
    pub fn of_blocks(matrix: QuantisedMatrix, device: &Device) -> Result<Self> {
        if multiplies_by_kernels(device) {
            return Ok(Self::OnGpu(Arc::new(GpuMatrix::new(&matrix, device)?)));
        }
        let held = Self::Quantised(Arc::new(matrix));
        if holds_blocks(device) {
            return Ok(held);
        }
        Ok(Self::Dense(held.to_dense()?.to_device(device)?))
    }

    /// Where the weight lies.
    pub fn device(&self) -> &Device {
        match self {
            Self::Dense(weight) => weight.device(),
            Self::Quantised(_) => &Device::Cpu,
            Self::OnGpu(matrix) => matrix.device(),
        }
    }

    /// Bytes of the weight as it is held.
    pub fn held_bytes(&self) -> usize {
        match self {
            Self::Dense(weight) => weight.elem_count() * weight.dtype().size_in_bytes(),
            Self::Quantised(matrix) => matrix.side_by_side().len(),
            Self::OnGpu(matrix) => matrix.held_bytes(),
        }
    }

    /// The dense tensor, if it is one.
    pub fn dense(&self) -> Option<&Tensor> {
        match self {
            Self::Dense(weight) => Some(weight),
            Self::Quantised(_) | Self::OnGpu(_) => None,
        }
    }

    /// The values as a tensor `[O, I]`: a dense one itself, else widened to f32, or on a GPU whose products have
    /// such factors to bf16.
    ///
    /// # Errors
    /// - there is no memory for it
    pub fn to_dense(&self) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => Ok(weight.clone()),
            Self::Quantised(matrix) => {
                let shape = (matrix.outputs, matrix.inputs);
                Tensor::from_vec(matrix.blocks().widened(), shape, &Device::Cpu)
            }
            Self::OnGpu(matrix) => matrix.to_dense(),
        }
    }

    /// Some rows in f32 (embeddings).
    ///
    /// # Shapes
    /// - `ids`: `[T]` → `[T, I]`
    ///
    /// # Errors
    /// - an id lies outside the matrix
    pub fn rows(&self, ids: &[u32]) -> Result<Tensor> {
        match self {
            Self::Dense(weight) if ids.is_empty() => {
                Tensor::zeros((0, weight.dim(1)?), DType::F32, weight.device())
            }
            Self::Dense(weight) => wide_rows(weight, ids),
            Self::Quantised(matrix) => {
                matrix.check(ids)?;
                let blocks = matrix.blocks();
                let mut values = Vec::with_capacity(ids.len() * matrix.inputs);
                for id in ids {
                    values.append(&mut blocks.column(*id as usize));
                }
                Tensor::from_vec(values, (ids.len(), matrix.inputs), &Device::Cpu)
            }
            Self::OnGpu(matrix) => matrix.rows(ids),
        }
    }

    /// The matrix of some rows, held as this one.
    ///
    /// # Errors
    /// - a row lies outside the matrix
    pub fn select(&self, rows: &[u32]) -> Result<Self> {
        match self {
            Self::Dense(weight) => Ok(Self::Dense(select_rows(weight, rows)?)),
            Self::Quantised(matrix) => Ok(Self::Quantised(Arc::new(matrix.select(rows)?))),
            Self::OnGpu(matrix) => {
                Ok(Self::OnGpu(Arc::new(matrix.changed(|matrix| matrix.select(rows))?)))
            }
        }
    }

    /// The matrix of some neighbouring inputs, held as this one.
    ///
    /// # Errors
    /// - they lie outside the matrix, or cut its quantised blocks
    pub fn columns(&self, inputs: Range<usize>) -> Result<Self> {
        match self {
            Self::Dense(weight) => {
                let part = weight.narrow(1, inputs.start, inputs.len())?;
                Ok(Self::Dense(part.force_contiguous()?))
            }
            Self::Quantised(matrix) => Ok(Self::Quantised(Arc::new(matrix.columns(inputs)?))),
            Self::OnGpu(matrix) => {
                Ok(Self::OnGpu(Arc::new(matrix.changed(|matrix| matrix.columns(inputs))?)))
            }
        }
    }

    /// `x Wᵀ + b`, as [`linear`].
    ///
    /// # Errors
    /// - as [`linear`]; the weight is quantised and `x` carries a gradient, or is not f32 on the CPU
    pub fn linear(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => linear(x, weight, bias),
            Self::Quantised(_) | Self::OnGpu(_) => {
                let [out] = linear_each(x, [(self, bias)])?;
                Ok(out)
            }
        }
    }

    /// `residual + x Wᵀ + b`, as [`linear_onto`].
    ///
    /// # Errors
    /// - as [`Self::linear`]
    pub fn linear_onto(
        &self,
        residual: &Tensor,
        x: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        match (self, bias) {
            (Self::Dense(weight), _) => linear_onto(residual, x, weight, bias),
            (Self::OnGpu(_), Some(_)) if residual.elem_count() == 0 => Ok(residual.clone()),
            (Self::OnGpu(_), Some(_)) => {
                residual + self.linear(x, bias)?.to_dtype(residual.dtype())?
            }
            (Self::OnGpu(matrix), None) => {
                matrix.linear(x, GpuMatrix::fixed(x)?.as_ref(), Addend::Residual(residual))
            }
            (Self::Quantised(_), Some(_)) => residual + self.linear(x, bias)?,
            (Self::Quantised(_), None) if widens(x) || x.track_op() || residual.track_op() => {
                residual + self.linear(x, None)?
            }
            (Self::Quantised(_), None) => {
                let (rows, _) = x.dims2()?;
                let (outputs, _) = self.dims()?;
                if residual.dims() != [rows, outputs] {
                    bail!("linear: residual {:?} for [{rows}, {outputs}]", residual.shape());
                }
                let start = residual.flatten_all()?.to_vec1::<f32>()?;
                let mut sums = sums_of(x, vec![(self, Some(start))])?;
                let sum = sums.pop().unwrap_or_default();
                Tensor::from_vec(sum, (rows, outputs), x.device())
            }
        }
    }
}

/// Several maps of one input, `x Wᵀ + b` each: one parallel step instead of one a map when there
/// are few rows (decoding) and nothing trains.
///
/// # Shapes
/// - `x`: `[R, I]`, every weight `[O, I]`, every bias `[O]` → `[R, O]` each
///
/// # Errors
/// - as [`Matrix::linear`]
pub fn linear_each<const N: usize>(
    x: &Tensor,
    maps: [(&Matrix, Option<&Tensor>); N],
) -> Result<[Tensor; N]> {
    let simple = |matrix: &Matrix, bias: Option<&Tensor>| {
        bias.is_none_or(|b| b.dtype() == DType::F32)
            && !matches!(matrix, Matrix::OnGpu(_))
            && matrix.dense().is_none_or(|w| !w.track_op() && w.is_contiguous())
    };
    if let Some(outputs) = each_on_gpu(x, &maps)? {
        return Ok(outputs);
    }
    let together = fused(&[x]) && !x.track_op() && maps.iter().all(|(w, bias)| simple(w, *bias));
    let stored: Vec<_> = maps.iter().filter_map(stored_on_gpu).collect();
    let outputs = if together {
        frozen_each(x, &maps)?
    } else if stored.len() == N {
        GpuMatrix::linear_each(x, GpuMatrix::fixed(x)?.as_ref(), &stored)?
    } else {
        let fixed = if stored.is_empty() { None } else { GpuMatrix::fixed(x)? };
        let alone = |(matrix, bias): &(&Matrix, Option<&Tensor>)| match matrix {
            Matrix::Dense(weight) => linear(x, weight, *bias),
            Matrix::OnGpu(matrix) => matrix.linear(x, fixed.as_ref(), Addend::bias(*bias)),
            // Composed ops on a CPU know no blocks.
            Matrix::Quantised(_) if widens(x) => linear(x, &matrix.to_dense()?, *bias),
            Matrix::Quantised(_) => bail!(
                "linear: quantised weights take f32 inputs on the CPU, without gradients and with \
                 f32 biases"
            ),
        };
        maps.iter().map(alone).collect::<Result<Vec<_>>>()?
    };
    outputs.try_into().map_err(|_| candle_core::Error::Msg("linear: an output a map".into()))
}

fn stored_on_gpu<'a>(
    (matrix, bias): &(&'a Matrix, Option<&'a Tensor>),
) -> Option<(&'a GpuMatrix, Addend<'a>)> {
    match matrix {
        Matrix::OnGpu(stored) => Some((stored, Addend::bias(*bias))),
        Matrix::Dense(_) | Matrix::Quantised(_) => None,
    }
}

/// One start for all maps, where our kernel for GPUs takes them.
fn each_on_gpu<const N: usize>(
    x: &Tensor,
    maps: &[(&Matrix, Option<&Tensor>); N],
) -> Result<Option<[Tensor; N]>> {
    let (_, inputs) = x.dims2()?;
    let dense = maps.iter().filter_map(|(matrix, bias)| {
        let weight = matrix.dense()?;
        let fits = weight.dims().get(1) == Some(&inputs)
            && bias.is_none_or(|bias| bias.dims() == &weight.dims()[..1]);
        fits.then(|| (weight, Addend::bias(*bias)))
    });
    match <[_; N]>::try_from(dense.collect::<Vec<_>>()) {
        Ok(maps) => few_rows(x, &maps),
        Err(_) => Ok(None),
    }
}

fn widens(x: &Tensor) -> bool {
    matches!(x.device(), Device::Cpu) && x.dtype() == DType::F32 && !fused(&[x])
}

fn frozen_each(x: &Tensor, maps: &[(&Matrix, Option<&Tensor>)]) -> Result<Vec<Tensor>> {
    let (rows, _) = x.dims2()?;
    let mut started = Vec::with_capacity(maps.len());
    for (matrix, bias) in maps {
        let (outputs, _) = matrix.dims()?;
        if let Some(bias) = bias
            && bias.dims() != [outputs]
        {
            bail!("linear: bias [{outputs}] expected, found {:?}", bias.shape());
        }
        let values = bias.map(Tensor::to_vec1::<f32>).transpose()?;
        started.push((*matrix, values.map(|values| values.repeat(rows))));
    }
    let sums = sums_of(x, started)?;
    let tensor = |(values, (matrix, _)): (Vec<f32>, &(&Matrix, _))| {
        Tensor::from_vec(values, (rows, matrix.dims()?.0), x.device())
    };
    sums.into_iter().zip(maps).map(tensor).collect()
}

/// `x Wᵀ` for every weight, `[R, O]` each, added to what is given.
fn sums_of(x: &Tensor, maps: Vec<(&Matrix, Option<Vec<f32>>)>) -> Result<Vec<Vec<f32>>> {
    let (rows, inputs) = x.dims2()?;
    let mut sums = Vec::with_capacity(maps.len());
    let mut added = Vec::with_capacity(maps.len());
    for (matrix, start) in maps {
        let (outputs, width) = matrix.dims()?;
        if width != inputs {
            bail!("linear: input {:?} does not fit weight [{outputs}, {width}]", x.shape());
        }
        let values = rows * outputs;
        // An empty sum is nothing that a product writes.
        let start = if inputs == 0 { start.or_else(|| Some(vec![0.0; values])) } else { start };
        added.push((matrix, values, start.is_some()));
        sums.push(start.unwrap_or_else(|| Vec::with_capacity(values)));
    }
    let storages: Vec<_> =
        added.iter().map(|(matrix, ..)| matrix.dense().map(Tensor::storage_and_layout)).collect();
    with_f32(x, |x| {
        let mut products = Vec::with_capacity(added.len());
        for ((sum, storage), (matrix, values, accumulate)) in
            sums.iter_mut().zip(&storages).zip(&added)
        {
            let right = match (matrix, storage) {
                (Matrix::Quantised(matrix), _) => Right::Quantised(matrix.blocks()),
                (_, Some((storage, layout))) => match &**storage {
                    Storage::Cpu(storage) => {
                        Weight::from_storage(storage, layout)?.transposed(inputs)
                    }
                    _ => bail!("linear: CPU weight expected"),
                },
                _ => bail!("linear: CPU weight expected"),
            };
            let dst = if *accumulate {
                sum.into()
            } else {
                // SAFETY: a product that is not added to something reads none of its values.
                unsafe { Room::unwritten(&mut sum.spare_capacity_mut()[..*values]) }
            };
            products.push(Product { dst, right, accumulate: *accumulate });
        }
        matmul_each(Mat::rows(x, rows, inputs, inputs), &mut products);
        Ok(())
    })?;
    for (sum, (_, values, _)) in sums.iter_mut().zip(added) {
        // SAFETY: its product has written all of them, or they were given.
        unsafe { sum.set_len(values) };
    }
    Ok(sums)
}

#[cfg(test)]
mod tests;
