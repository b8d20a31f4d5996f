//! Quantised blocks in a GPU's memory.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{BlockFormat, QuantisedMatrix};
use crate::cuda::blocks::{self, Fixed, MOST, Stored};
use crate::cuda::linear::Addend;
use crate::cuda::{exactly, runs_on, takes};
use crate::dispatch::multiplies_halves;
use crate::gemm::GROUP;
use crate::linear::{factor_type, linear, linear_onto};
use crate::settings::composed_only;

/// Values that are widened at a time for a product.
const PIECE: usize = 1 << 26;

/// An `[O, I]` matrix of quantised blocks on an NVIDIA GPU, or where its kernels are emulated.
#[derive(Debug)]
pub struct GpuMatrix {
    format: BlockFormat,
    outputs: usize,
    inputs: usize,
    /// Of 16 rows side by side.
    bytes: Tensor,
}

/// Whether quantised blocks stay as they are stored on a device and are multiplied there.
pub fn holds_blocks(device: &Device) -> bool {
    matches!(device, Device::Cpu) || multiplies_by_kernels(device)
}

/// Whether it is kernels for NVIDIA GPUs that multiply them there.
pub fn multiplies_by_kernels(device: &Device) -> bool {
    !composed_only() && runs_on(device)
}

impl GpuMatrix {
    pub(super) fn new(matrix: &QuantisedMatrix, device: &Device) -> Result<Self> {
        let (format, outputs, inputs) = matrix.layout();
        let bytes = crate::cuda::upload(matrix.side_by_side(), device)?;
        Ok(Self { format, outputs, inputs, bytes })
    }

    /// Format, outputs and inputs.
    pub fn layout(&self) -> (BlockFormat, usize, usize) {
        (self.format, self.outputs, self.inputs)
    }

    /// Where the blocks lie.
    pub fn device(&self) -> &Device {
        self.bytes.device()
    }

    pub(super) fn held_bytes(&self) -> usize {
        self.bytes.elem_count()
    }

    /// A copy in main memory.
    ///
    /// # Errors
    /// - the device fails
    pub fn to_host(&self) -> Result<QuantisedMatrix> {
        let &Self { format, outputs, inputs, .. } = self;
        let bytes = if outputs * inputs == 0 { Vec::new() } else { self.bytes.to_vec1()? };
        QuantisedMatrix::from_side_by_side(format, outputs, inputs, bytes)
    }

    /// What `change` makes of a copy in main memory, on the device again.
    pub(super) fn changed(
        &self,
        change: impl FnOnce(&QuantisedMatrix) -> Result<QuantisedMatrix>,
    ) -> Result<Self> {
        Self::new(&change(&self.to_host()?)?, self.device())
    }

    fn stored(&self) -> Stored<'_> {
        let Self { format, outputs, inputs, bytes } = self;
        Stored { bytes, format: *format, outputs: *outputs, inputs: *inputs }
    }

    fn widened(&self, rows: Range<usize>, dtype: DType) -> Result<Tensor> {
        if rows.is_empty() || self.inputs == 0 {
            return Tensor::zeros((rows.len(), self.inputs), dtype, self.device());
        }
        if multiplies_by_kernels(self.device()) {
            return self.stored().widened(rows, dtype);
        }
        let all = self.to_host()?.blocks().widened();
        let own = &all[rows.start * self.inputs..rows.end * self.inputs];
        Tensor::from_slice(own, (rows.len(), self.inputs), &Device::Cpu)?
            .to_dtype(dtype)?
            .to_device(self.device())
    }

    /// The values, in bf16 where products have such factors, else in f32.
    pub(super) fn to_dense(&self) -> Result<Tensor> {
        let dtype = if multiplies_halves(self.device()) { DType::BF16 } else { DType::F32 };
        self.widened(0..self.outputs, dtype)
    }

    /// Some rows in f32.
    pub(super) fn rows(&self, ids: &[u32]) -> Result<Tensor> {
        if let Some(row) = ids.iter().find(|row| **row as usize >= self.outputs) {
            bail!("row {row} lies outside a matrix of {} rows", self.outputs);
        }
        if ids.is_empty() || self.inputs == 0 {
            return Tensor::zeros((ids.len(), self.inputs), DType::F32, self.device());
        }
        if multiplies_by_kernels(self.device()) {
            return self.stored().rows(ids);
        }
        let chosen = self.to_host()?.select(ids)?.blocks().widened();
        Tensor::from_vec(chosen, (ids.len(), self.inputs), self.device())
    }

    /// Inputs as the kernel takes them that multiplies blocks, however many rows they are: a row has the bits that it has alone.
    /// `None` where they are to meet widened weights: they train, or are not f32.
    pub(super) fn fixed(x: &Tensor) -> Result<Option<Fixed>> {
        let (rows, inputs) = x.dims2()?;
        let some = rows > 0 && inputs > 0 && inputs.is_multiple_of(32);
        if some && !x.track_op() && takes(&[x]) { Fixed::of(x).map(Some) } else { Ok(None) }
    }

    /// `x Wᵀ + addend`; `fixed` are inputs from [`fixed`](Self::fixed).
    pub(super) fn linear(
        &self,
        x: &Tensor,
        fixed: Option<&Fixed>,
        addend: Addend<'_>,
    ) -> Result<Tensor> {
        let [product] = exactly(Self::linear_each(x, fixed, &[(self, addend)])?)?;
        Ok(product)
    }

    /// The same of several matrices. Neighbours of one format are multiplied in one start.
    pub(super) fn linear_each(
        x: &Tensor,
        fixed: Option<&Fixed>,
        maps: &[(&Self, Addend<'_>)],
    ) -> Result<Vec<Tensor>> {
        type Map<'a> = (&'a GpuMatrix, Addend<'a>);
        let is_multiplied =
            |(matrix, addend): &Map<'_>| fixed.is_some() && matrix.is_multiplied(x, *addend);
        let together = |one: &Map<'_>, next: &Map<'_>| {
            one.0.format == next.0.format && is_multiplied(one) && is_multiplied(next)
        };
        let mut products = Vec::with_capacity(maps.len());
        for run in maps.chunk_by(together).flat_map(|run| run.chunks(MOST)) {
            // What is not multiplied is a run of its own.
            let Some(fixed) = fixed.filter(|_| run.iter().all(is_multiplied)) else {
                for (matrix, addend) in run {
                    products.push(matrix.by_pieces(x, *addend)?);
                }
                continue;
            };
            let mut stored = Vec::with_capacity(run.len());
            for (matrix, addend) in run {
                matrix.check(x, *addend)?;
                stored.push((matrix.stored(), *addend));
            }
            products.extend(blocks::products(&stored, fixed)?);
        }
        Ok(products)
    }

    /// Whether blocks are multiplied as they are where the inputs are there for it.
    fn is_multiplied(&self, x: &Tensor, addend: Addend<'_>) -> bool {
        let plain = |t: &Tensor| t.dtype() == DType::F32 && !t.track_op();
        x.dims().first() != Some(&0) && self.outputs > 0 && addend.tensor().is_none_or(plain)
    }

    /// Refuses inputs and addends of other shapes.
    fn check(&self, x: &Tensor, addend: Addend<'_>) -> Result<()> {
        let Self { outputs, inputs, .. } = *self;
        let (rows, width) = x.dims2()?;
        if width != inputs {
            bail!("linear: input {:?} does not fit weight [{outputs}, {inputs}]", x.shape());
        }
        let (given, shape) = match addend {
            Addend::None => return Ok(()),
            Addend::Bias(bias) => (bias, vec![outputs]),
            Addend::Residual(residual) => (residual, vec![rows, outputs]),
        };
        if given.dims() == shape.as_slice() {
            return Ok(());
        }
        bail!("linear: {:?} added to {shape:?}", given.shape())
    }

    /// The product with widened weights, some at a time.
    fn by_pieces(&self, x: &Tensor, addend: Addend<'_>) -> Result<Tensor> {
        self.check(x, addend)?;
        if x.dim(0)? == 0 || self.outputs == 0 {
            return Tensor::zeros((x.dim(0)?, self.outputs), x.dtype(), x.device());
        }
        let factors = match factor_type(x, DType::F32) {
            DType::BF16 => DType::BF16,
            _ => DType::F32,
        };
        let each = (PIECE / self.inputs.max(1)).max(GROUP) / GROUP * GROUP;
        let mut parts = Vec::new();
        for first in (0..self.outputs).step_by(each) {
            let rows = first..(first + each).min(self.outputs);
            let weight = self.widened(rows.clone(), factors)?;
            parts.push(match addend {
                Addend::None => linear(x, &weight, None)?,
                Addend::Bias(bias) => {
                    linear(x, &weight, Some(&bias.narrow(0, rows.start, rows.len())?))?
                }
                Addend::Residual(residual) => {
                    let own = residual.narrow(1, rows.start, rows.len())?.contiguous()?;
                    linear_onto(&own, x, &weight, None)?
                }
            });
        }
        if parts.len() == 1 { Ok(parts.remove(0)) } else { Tensor::cat(&parts, 1) }
    }
}
