//! Frozen `[O, I]` weights: dense tensors, or quantised blocks as GGUF files store them.
//!
//! Products take the blocks apart in registers and multiply their codes with activations of 8-bit
//! fixed-point numbers, which a training or f32 target does not need: its products differ by some
//! 1e-3 of their size. Of blocks of 4 bits a seventh of the bytes is read.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Storage, Tensor, bail};
use rayon::prelude::*;

use crate::cuda::linear::{Addend, few_rows};
use crate::dispatch::fused;
use crate::gemm::quantised::{FixedRows, Kernel, matmul_quantised};
use crate::gemm::{
    BLOCK, Blocks, GROUP, Mat, Product, Right, held_bytes, matmul_each, put_side_by_side,
};
use crate::large_pages::WeightBytes;
use crate::linear::{Weight, linear, linear_onto};
use crate::rows::select_rows;
use crate::storage::with_f32;

pub use crate::gemm::BlockFormat;

/// An `[O, I]` matrix of quantised blocks.
#[derive(Debug)]
pub struct QuantisedMatrix {
    format: BlockFormat,
    outputs: usize,
    inputs: usize,
    /// Of 16 rows side by side.
    bytes: WeightBytes,
}

/// Bytes of stored rows that are put side by side at a time.
const PIECE: usize = 1 << 20;

impl QuantisedMatrix {
    /// From blocks as a file holds them, row after row.
    ///
    /// # Errors
    /// - a row does not consist of whole blocks, or the bytes are not those of the shape
    pub fn new(format: BlockFormat, outputs: usize, inputs: usize, bytes: &[u8]) -> Result<Self> {
        let row = inputs / format.values() * format.bytes();
        if outputs.checked_mul(row) != Some(bytes.len()) {
            bail!("{} bytes are no [{outputs}, {inputs}] matrix of {}", bytes.len(), format.name());
        }
        Self::read(format, outputs, inputs, |rows| {
            Ok(Cow::Borrowed(&bytes[rows.start * row..rows.end * row]))
        })
    }

    /// From rows as a file holds them, some at a time on every thread, so that the whole is never held
    /// twice.
    ///
    /// # Errors
    /// - those of `read`, which gives the blocks of a range of rows; a row does not consist of whole
    ///   blocks, or the bytes are not those of its rows
    pub fn read<'a, E: From<candle_core::Error> + Send>(
        format: BlockFormat,
        outputs: usize,
        inputs: usize,
        read: impl Fn(Range<usize>) -> std::result::Result<Cow<'a, [u8]>, E> + Sync,
    ) -> std::result::Result<Self, E> {
        let wrong = |what: String| E::from(candle_core::Error::Msg(what));
        let Some(held) = held_bytes(format, outputs, inputs) else {
            let name = format.name();
            return Err(wrong(format!("[{outputs}, {inputs}] is no matrix of blocks of {name}")));
        };
        let row = inputs / format.values() * format.bytes();
        let mut bytes = WeightBytes::zeroed(held);
        let groups = outputs.div_ceil(GROUP);
        let together = (PIECE / (GROUP * row).max(1)).max(1);
        let pieces = bytes.par_chunks_mut((together * held / groups.max(1)).max(1)).enumerate();
        pieces.try_for_each(|(piece, out)| {
            let first = piece * together * GROUP;
            let rows = first..(first + together * GROUP).min(outputs);
            let stored = read(rows.clone())?;
            if stored.len() != rows.len() * row {
                let found = stored.len();
                return Err(wrong(format!("{found} bytes for {} rows of {row}", rows.len())));
            }
            put_side_by_side(format, inputs, &stored, out);
            Ok(())
        })?;
        Ok(Self { format, outputs, inputs, bytes })
    }

    /// From the bytes of [`Self::side_by_side`].
    ///
    /// # Errors
    /// - the bytes are not those of the shape
    pub fn from_side_by_side(
        format: BlockFormat,
        outputs: usize,
        inputs: usize,
        bytes: Vec<u8>,
    ) -> Result<Self> {
        if held_bytes(format, outputs, inputs) != Some(bytes.len()) {
            bail!("{} bytes are no [{outputs}, {inputs}] matrix of {}", bytes.len(), format.name());
        }
        Ok(Self { format, outputs, inputs, bytes: WeightBytes::Own(bytes) })
    }

    /// The blocks as they lie in memory, for [`Self::from_side_by_side`].
    pub fn side_by_side(&self) -> &[u8] {
        &self.bytes
    }

    /// Format, outputs and inputs.
    pub fn layout(&self) -> (BlockFormat, usize, usize) {
        (self.format, self.outputs, self.inputs)
    }

    /// `W x` for activations that were rounded before: `x = code · scale`, with a scale for every 32
    /// codes. What [`Matrix::linear`] computes after its own rounding.
    ///
    /// # Shapes
    /// - `codes`: `[I]`, `scales`: `[I / 32]` → `[O]`
    ///
    /// # Errors
    /// - the lengths are others, or a code is -128
    pub fn of_codes(&self, codes: &[i8], scales: &[f32]) -> Result<Vec<f32>> {
        if codes.len() != self.inputs || codes.len() != scales.len() * BLOCK {
            let (codes, scales) = (codes.len(), scales.len());
            bail!("{codes} codes and {scales} scales for a matrix of {} inputs", self.inputs);
        }
        if codes.contains(&i8::MIN) {
            bail!("codes of activations are -127 and more");
        }
        let mut out = vec![0.0; self.outputs];
        matmul_quantised(&mut out, &FixedRows::of_codes(codes, scales), self.blocks(), false);
        Ok(out)
    }

    fn blocks(&self) -> Blocks<'_> {
        Blocks::transposed(&self.bytes, self.format, self.outputs, self.inputs)
    }

    fn check(&self, rows: &[u32]) -> Result<()> {
        match rows.iter().find(|row| **row as usize >= self.outputs) {
            Some(row) => bail!("row {row} lies outside a matrix of {} rows", self.outputs),
            None => Ok(()),
        }
    }

    fn select(&self, rows: &[u32]) -> Result<Self> {
        self.check(rows)?;
        let &Self { format, inputs, .. } = self;
        let bytes = WeightBytes::Own(self.blocks().gathered(rows));
        Ok(Self { format, outputs: rows.len(), inputs, bytes })
    }

    fn columns(&self, inputs: Range<usize>) -> Result<Self> {
        let &Self { format, outputs, inputs: width, .. } = self;
        let values = format.values();
        let cut = [inputs.start, inputs.end].iter().any(|end| !end.is_multiple_of(values));
        if cut || inputs.start > inputs.end || inputs.end > width {
            bail!("inputs {inputs:?} of {width} are no whole blocks of {values} of a matrix");
        }
        let groups = outputs.div_ceil(GROUP);
        let group = self.bytes.len() / groups.max(1);
        let size = group / (width / values).max(1);
        let part = inputs.start / values * size..inputs.end / values * size;
        let mut bytes = Vec::with_capacity(groups * part.len());
        for group in self.bytes.chunks_exact(group.max(1)) {
            bytes.extend_from_slice(&group[part.clone()]);
        }
        let bytes = WeightBytes::Own(bytes);
        Ok(Self { format, outputs, inputs: inputs.len(), bytes })
    }
}

/// The instruction set that multiplies blocks here, by its name.
pub fn block_products() -> &'static str {
    Kernel::detect().name()
}

/// A frozen weight.
#[derive(Debug, Clone)]
pub enum Matrix {
    /// f32, bf16 or f16, `[O, I]`
    Dense(Tensor),
    /// Quantised blocks; inference on the CPU only.
    Quantised(Arc<QuantisedMatrix>),
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
        }
    }

    /// The dense tensor, if it is one.
    pub fn dense(&self) -> Option<&Tensor> {
        match self {
            Self::Dense(weight) => Some(weight),
            Self::Quantised(_) => None,
        }
    }

    /// The values as a tensor `[O, I]`: a dense one itself, else widened to f32.
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
            Self::Dense(weight) => select_rows(weight, ids)?.to_dtype(DType::F32),
            Self::Quantised(matrix) => {
                matrix.check(ids)?;
                let blocks = matrix.blocks();
                let values = ids.iter().flat_map(|id| blocks.column(*id as usize)).collect();
                Tensor::from_vec(values, (ids.len(), matrix.inputs), &Device::Cpu)
            }
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
        }
    }

    /// `x Wᵀ + b`, as [`linear`].
    ///
    /// # Errors
    /// - as [`linear`]; the weight is quantised and `x` carries a gradient, or is not f32 on the CPU
    pub fn linear(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => linear(x, weight, bias),
            Self::Quantised(_) => {
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
            (Self::Quantised(_), Some(_)) => residual + self.linear(x, bias)?,
            (Self::Quantised(_), None) if widens(x) => residual + self.linear(x, None)?,
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
            && matrix.dense().is_none_or(|w| !w.track_op() && w.is_contiguous())
    };
    if let Some(outputs) = each_on_gpu(x, &maps)? {
        return Ok(outputs);
    }
    let together = fused(&[x]) && !x.track_op() && maps.iter().all(|(w, bias)| simple(w, *bias));
    let outputs = if together {
        frozen_each(x, &maps)?
    } else {
        let alone = |(matrix, bias): &(&Matrix, Option<&Tensor>)| match matrix {
            Matrix::Dense(weight) => linear(x, weight, *bias),
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
        added.push((matrix, start.is_some()));
        sums.push(start.unwrap_or_else(|| vec![0.0; rows * outputs]));
    }
    let storages: Vec<_> =
        added.iter().map(|(matrix, _)| matrix.dense().map(Tensor::storage_and_layout)).collect();
    with_f32(x, |x| {
        let mut products = Vec::with_capacity(added.len());
        for ((dst, storage), (matrix, accumulate)) in sums.iter_mut().zip(&storages).zip(&added) {
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
            products.push(Product { dst, right, accumulate: *accumulate });
        }
        matmul_each(Mat::rows(x, rows, inputs, inputs), &mut products);
        Ok(())
    })?;
    Ok(sums)
}

#[cfg(test)]
mod tests;
