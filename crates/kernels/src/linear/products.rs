//! Products of f32 rows on the CPU with weights of any type, and gradients that are added to.

use std::convert::Infallible;

use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, bail};
use half::{bf16, f16};

use super::slabs;
use crate::fused_op::{Argument, Input};
use crate::gemm::{Blocks, Mat, Right, Room, Threads, matmul, written};
use crate::graph::add_to;
use crate::storage::{change_f32, values_like, with_f32};

/// A frozen or trained `[O, I]` matrix in one of the storage types that products accept.
#[derive(Clone, Copy)]
pub(crate) enum Weight<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
    /// Multiplied as the values in f32 that they stand for, some rows at a time.
    Blocks(Blocks<'a>),
}

impl<'a> Weight<'a> {
    pub(crate) fn of(argument: Argument<'a>) -> Result<Self> {
        Self::from_storage(argument.storage, argument.layout)
    }

    pub(crate) fn from_storage(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("linear: contiguous weight expected, found strides {:?}", layout.stride())
        };
        match storage {
            CpuStorage::F32(w) => Ok(Self::F32(&w[start..end])),
            CpuStorage::BF16(w) => Ok(Self::Bf16(&w[start..end])),
            CpuStorage::F16(w) => Ok(Self::F16(&w[start..end])),
            _ => bail!("linear: weight of f32, bf16 or f16 expected"),
        }
    }

    /// `Wᵀ` as the right operand of a product.
    pub(crate) fn transposed(self, inputs: usize) -> Right<'a> {
        let outputs = |values: usize| values / inputs.max(1);
        match self {
            Self::F32(w) => Right::F32(Mat::rows(w, outputs(w.len()), inputs, inputs).t()),
            Self::Bf16(w) => Right::Bf16(Mat::rows(w, outputs(w.len()), inputs, inputs).t()),
            Self::F16(w) => Right::F16(Mat::rows(w, outputs(w.len()), inputs, inputs).t()),
            // Multiplied as they are, by inputs of 8 bits.
            Self::Blocks(blocks) => Right::Quantised(blocks),
        }
    }
}

/// Evaluates a product with the weight's slice, whatever its type, or one with blocks.
macro_rules! for_each_type {
    ($weight:expr, $w:ident => $product:expr, $blocks:ident => $of_blocks:expr) => {
        match $weight {
            Weight::F32($w) => $product,
            Weight::Bf16($w) => $product,
            Weight::F16($w) => $product,
            Weight::Blocks($blocks) => $of_blocks,
        }
    };
}

/// `out[R, O] = x[R, I] · Wᵀ`.
pub(crate) fn product_nt(x: &[f32], weight: Weight<'_>, inputs: usize, outputs: usize) -> Vec<f32> {
    let write = |out: Room<'_>| {
        product_nt_into(out, x, weight, (inputs, outputs), false);
        Ok::<_, Infallible>(())
    };
    // SAFETY: a product that is not added to something writes all of its values.
    let Ok(out) = unsafe { written(x.len() / inputs.max(1) * outputs, write) };
    out
}

/// The same into `out`, added to what is there if asked for.
pub(crate) fn product_nt_into<'o>(
    out: impl Into<Room<'o>>,
    x: &[f32],
    weight: Weight<'_>,
    (inputs, outputs): (usize, usize),
    accumulate: bool,
) {
    let mut out = out.into();
    if inputs == 0 && !accumulate {
        out.clear();
    }
    for_each_type!(
        weight,
        w => {
            let x = Mat::rows(x, x.len() / inputs.max(1), inputs, inputs);
            let w = Mat::rows(w, outputs, inputs, inputs).t();
            matmul(out, outputs, x, w, accumulate, Threads::Pool);
        },
        blocks => slabs::product_nt_into(out, x, blocks, (inputs, outputs), accumulate)
    );
}

/// `out[R, I] = g[R, O] · W`.
pub(crate) fn product_nn(g: &[f32], weight: Weight<'_>, inputs: usize, outputs: usize) -> Vec<f32> {
    let write = |out: Room<'_>| {
        product_nn_into(out, g, weight, (inputs, outputs), false);
        Ok::<_, Infallible>(())
    };
    // SAFETY: as in `product_nt`.
    let Ok(out) = unsafe { written(g.len() / outputs.max(1) * inputs, write) };
    out
}

/// The same into `out`, added to what is there if asked for.
pub(crate) fn product_nn_into<'o>(
    out: impl Into<Room<'o>>,
    g: &[f32],
    weight: Weight<'_>,
    (inputs, outputs): (usize, usize),
    accumulate: bool,
) {
    let mut out = out.into();
    if outputs == 0 && !accumulate {
        out.clear();
    }
    for_each_type!(
        weight,
        w => {
            let g = Mat::rows(g, g.len() / outputs.max(1), outputs, outputs);
            let w = Mat::rows(w, outputs, inputs, inputs);
            matmul(out, inputs, g, w, accumulate, Threads::Pool);
        },
        blocks => slabs::product_nn_into(out, g, blocks, (inputs, outputs), accumulate)
    );
}

/// Adds `gᵀ x` to the gradients of the weight `[O, I]` among a node's arguments, `g`: `[R, O]`, `x`: `[R, I]`.
pub(crate) fn add_weight_gradient(
    argument: usize,
    x: &Tensor,
    g: &[f32],
    weight: &Input,
) -> Result<()> {
    let (rows, inputs) = x.dims2()?;
    let (outputs, _) = weight.tensor.dims2()?;
    let form = |dw: Room<'_>, accumulate| {
        with_f32(x, |x| {
            let g = Mat::rows(g, rows, outputs, outputs).t();
            let x = Mat::rows(x, rows, inputs, inputs);
            matmul(dw, inputs, g, x, accumulate, Threads::Pool);
            Ok(())
        })
    };
    // SAFETY: a product that is not added to something writes all of its values.
    unsafe { add_gradient(argument, weight, form) }
}

/// Adds a gradient of an argument, which `form` writes, or adds to what is there if it is told so.
///
/// # Safety
/// Where `form` is not told so, it writes all values, and adds to none before.
pub(crate) unsafe fn add_gradient(
    argument: usize,
    input: &Input,
    form: impl Fn(Room<'_>, bool) -> Result<()>,
) -> Result<()> {
    add_to(argument, |sum| {
        if let Some(sum) = sum {
            change_f32(sum, |values| form(values.into(), true))?;
            return Ok(sum.clone());
        }
        // SAFETY: the caller's promise.
        let values = unsafe { written(input.tensor.elem_count(), |room| form(room, false)) }?;
        values_like(&input.tensor, values)
    })
}

/// Runs `f` on a weight in the CPU's memory, copying only if it is not contiguous.
pub(crate) fn with_weight<R>(
    weight: &Tensor,
    f: impl FnOnce(Weight<'_>) -> Result<R>,
) -> Result<R> {
    let weight = weight.contiguous()?;
    let (storage, layout) = weight.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("linear: CPU weight expected") };
    f(Weight::from_storage(storage, layout)?)
}
