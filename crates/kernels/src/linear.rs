//! Affine map `y = x Wᵀ + b`, or `y = r + x Wᵀ` at the end of a branch; weights `[O, I]` as published.
//!
//! Backward: `dx = g W`, `dW = gᵀ x`, `db = Σ_rows g`; only for arguments that train. Weights
//! may be f32, bf16 or f16 (frozen ones): they are widened tile by tile and every product
//! accumulates in f32. A row's bits do not depend on the rows beside it, however many, unless factors are rounded
//! ([`with_rounded_products`]): large products have other factors than small ones.

mod products;
mod slabs;

use std::cell::RefCell;

use candle_core::{DType, Result, Shape, Tensor, TensorId, bail};
use rayon::prelude::*;

use crate::at_end::AtEnd;
use crate::composed::FULL_ROWS;
use crate::cuda::linear::{Addend as OnGpu, each_row, few_rows};
use crate::cuda::product::{add_product, add_product_to, product_as};
use crate::dispatch::{Products, fused, products_of, with_rounded_products};
use crate::factors::{as_factor, input_factor, kept_factor, kept_input};
use crate::fused_op::{Argument, FusedOp, Input, fuse};
use crate::gemm::{self, Room, written};
use crate::graph::{Gradients, add, differentiable_new};
use crate::storage::{values_like, with_f32};

pub(crate) use products::{
    Weight, add_gradient, add_weight_gradient, product_nn, product_nn_into, product_nt,
    product_nt_into, with_weight,
};
pub use slabs::slab_bytes;

/// `x Wᵀ + b`.
///
/// # Shapes
/// - `x`: `[R, I]`, `weight`: `[O, I]`, `bias`: `[O]` → `[R, O]`
///
/// # Errors
/// - shapes do not fit, or `weight` is neither f32, bf16 nor f16 on the fused path
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    check(x, weight, bias)?;
    if fused(&[x]) { with_optional(x, weight, bias) } else { composed(x, weight, bias) }
}

fn with_optional(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    match bias {
        Some(bias) => apply(x, weight, bias, Addend::Bias),
        None => apply(x, weight, &Tensor::zeros(0, DType::F32, x.device())?, Addend::None),
    }
}

/// Rows of one start of [`linear_exact`] on a GPU.
const EXACT_ROWS: usize = 1 << 18;

/// The same with factors of the type of `x`, whatever [`Products`] the process forms and whether they are rounded: for routers and
/// gates, where rounded factors would change who is chosen. Where nothing trains a row of f32 has the
/// same bits however many rows are beside it, on the CPU and on NVIDIA GPUs.
///
/// # Errors
/// - as [`linear`]
pub fn linear_exact(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    check(x, weight, bias)?;
    if fused(&[x]) {
        return with_rounded_products(false, || with_optional(x, weight, bias));
    }
    let rows = x.dim(0)?;
    let mut parts = Vec::new();
    for first in (0..rows).step_by(EXACT_ROWS) {
        let part = x.narrow(0, first, EXACT_ROWS.min(rows - first))?;
        match each_row(&part, &[(weight, OnGpu::bias(bias))])? {
            Some([part]) => parts.push(part),
            None => return product_in(x.dtype(), x, weight, bias),
        }
    }
    match parts.len() {
        0 => product_in(x.dtype(), x, weight, bias),
        1 => Ok(parts.remove(0)),
        _ => Tensor::cat(&parts, 0),
    }
}

fn check(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    let (_, inputs) = x.dims2()?;
    let (outputs, weight_inputs) = weight.dims2()?;
    if inputs != weight_inputs {
        bail!("linear: input {:?} does not fit weight {:?}", x.shape(), weight.shape());
    }
    if let Some(bias) = bias
        && bias.dims() != [outputs]
    {
        bail!("linear: bias [{outputs}] expected, found {:?}", bias.shape());
    }
    Ok(())
}

/// `residual + x Wᵀ + b`: the end of a branch, without a pass over `[R, O]` for the addition.
///
/// # Shapes
/// - as [`linear`], `residual`: `[R, O]`
///
/// # Errors
/// - as [`linear`]
pub fn linear_onto(
    residual: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let ((rows, inputs), (outputs, weight_inputs)) = (x.dims2()?, weight.dims2()?);
    let fits = inputs == weight_inputs && residual.dims() == [rows, outputs];
    match (bias, fused(&[x])) {
        (None, true) if fits => return apply(x, weight, residual, Addend::Residual),
        (None, true) => bail!(
            "linear: input {:?} and residual {:?} do not fit weight {:?}",
            x.shape(),
            residual.shape(),
            weight.shape()
        ),
        (_, false) if fits && x.dtype() == DType::BF16 => {
            if let Some(out) = halves_onto(residual, x, weight, bias)? {
                return Ok(out);
            }
        }
        (None, false) if fits => {
            if let Some([out]) = few_rows(x, &[(weight, OnGpu::Residual(residual))])? {
                return Ok(out);
            }
        }
        _ => {}
    }
    let out = linear(x, weight, bias)?;
    let nothing = rows == 0 && residual.shape() == out.shape();
    if nothing { Ok(residual.clone()) } else { add(residual, &out) }
}

/// Adds `x Wᵀ` to f32 sums in place, for bf16 rows of a network that does not train. Whoever else holds the sums sees the
/// new ones.
///
/// # Shapes
/// - `sums`: `[R, O]`, as a whole in their memory, `x`: `[R, I]` in bf16, `weight`: `[O, I]`
///
/// # Errors
/// - shapes or types are others, or an argument trains
pub fn add_linear(sums: &Tensor, x: &Tensor, weight: &Tensor) -> Result<()> {
    let trains = [sums, x, weight].into_iter().any(Tensor::track_op);
    if trains || x.dtype() != DType::BF16 || sums.dtype() != DType::F32 {
        bail!("linear: {x:?} by {weight:?} added to {sums:?}");
    }
    add_product(sums, x, &as_factor(weight, DType::BF16)?.t()?)
}

/// `residual + x Wᵀ + b` in f32 for bf16 rows of a network that does not train: the product is added to a copy of the
/// residual while it is formed. `None` where it is another case.
fn halves_onto(
    residual: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let trains = [residual, x, weight].into_iter().chain(bias).any(Tensor::track_op);
    if trains || residual.dtype() != DType::F32 || x.elem_count() == 0 {
        return Ok(None);
    }
    let sum = match bias {
        Some(bias) => residual.broadcast_add(&bias.to_dtype(DType::F32)?)?,
        None => residual.force_contiguous()?,
    };
    add_linear(&sum, x, weight)?;
    Ok(Some(sum))
}

fn apply(x: &Tensor, weight: &Tensor, addend: &Tensor, kind: Addend) -> Result<Tensor> {
    fuse(Linear { addend: kind }, [x, weight, addend])
}

/// Which of a linear map's products is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// `x Wᵀ`
    Forward,
    /// `g W`
    InputGradient,
    /// `gᵀ x`
    WeightGradient,
}

/// Bytes that the calling thread keeps after a map of `rows` rows for its packed left operand; the
/// buffer grows to the largest product and is used again.
pub fn kept_bytes(
    pass: Pass,
    (rows, inputs, outputs): (usize, usize, usize),
    threads: usize,
) -> usize {
    match pass {
        Pass::Forward => gemm::kept_bytes((rows, inputs, outputs), false, threads),
        Pass::InputGradient => gemm::kept_bytes((rows, outputs, inputs), false, threads),
        Pass::WeightGradient => gemm::kept_bytes((outputs, rows, inputs), true, threads),
    }
}

/// The same from plain tensor ops, for any device and float type.
///
/// # Errors
/// - as [`linear`]
pub fn reference(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    with_bias(x.matmul(&weight.to_dtype(x.dtype())?.t()?)?, bias)
}

/// The same on any device: gradients only of what trains, and with [`Products::Half`] 16-bit
/// factors, whose products are summed and kept in f32. The result has the type of `x`.
pub(crate) fn composed(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    product_in(factor_type(x, weight.dtype()), x, weight, bias)
}

/// The type in which `x` and a weight of a type are multiplied.
pub(crate) fn factor_type(x: &Tensor, weight: DType) -> DType {
    match (x.dtype(), products_of(x), weight) {
        (DType::F32, Products::Half, DType::F16) => DType::F16,
        (DType::F32, Products::Half, _) => DType::BF16,
        (own, ..) => own,
    }
}

thread_local! {
    /// A weight that was turned into a factor before, and the factor.
    static KNOWN_FACTOR: RefCell<Option<(TensorId, Tensor)>> = const { RefCell::new(None) };
}

/// Runs `f`, whose products take `factor` for `weight`: a weight that trains in f32 is turned into 16 bits
/// once for all chunks of rows.
pub(crate) fn with_factor<R>(weight: &Tensor, factor: &Tensor, f: impl FnOnce() -> R) -> R {
    KNOWN_FACTOR.set(Some((weight.id(), factor.clone())));
    let _forget = AtEnd(|| KNOWN_FACTOR.set(None));
    f()
}

fn known_factor(weight: &Tensor) -> Option<Tensor> {
    KNOWN_FACTOR.with_borrow(|known| {
        let (_, factor) = known.as_ref().filter(|(id, _)| *id == weight.id())?;
        Some(factor.clone())
    })
}

fn product_in(
    factors: DType,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let (rows, _) = x.dims2()?;
    if rows == 0 {
        // A GPU's driver refuses to start a kernel without blocks.
        return Tensor::zeros((0, weight.dim(0)?), x.dtype(), x.device());
    }
    let as_factor = move |t: &Tensor| as_factor(t, factors);
    let known = match known_factor(weight) {
        None => kept_factor(weight, factors)?,
        known => known,
    };
    let weight_factor = move |weight: &Tensor| known.clone().map_or_else(|| as_factor(weight), Ok);
    let (want_x, want_weight) = (x.track_op(), weight.track_op());
    if let Some([out]) = few_rows(x, &[(weight, OnGpu::bias(bias))])? {
        return Ok(out);
    }
    let is_frozen = !want_x && !want_weight;
    let short = is_frozen && rows < FULL_ROWS;
    let input = input_factor(x, factors)?;
    let padded = short.then(|| input.pad_with_zeros(0, 0, FULL_ROWS - rows)).transpose()?;
    let factor = padded.as_ref().unwrap_or(&input);
    if let Some(bias) = bias.filter(|bias| !short && !bias.track_op())
        && is_frozen
        && x.dtype() == DType::BF16
    {
        let start = bias.to_dtype(DType::BF16)?.broadcast_as((rows, weight.dim(0)?))?;
        let sum = start.force_contiguous()?;
        add_product(&sum, factor, &weight_factor(weight)?.t()?)?;
        return Ok(sum);
    }
    let out = product_as(factor, &weight_factor(weight)?.t()?, x.dtype())?;
    let out = if short { out.narrow(0, 0, rows)?.contiguous()? } else { out };
    let out = with_bias(out, bias.map(Tensor::detach).as_ref())?;
    let trained_bias = bias.filter(|bias| bias.track_op());
    let of_bias = trained_bias.map(Tensor::dtype);
    let arguments = [x, weight, trained_bias.unwrap_or(weight)];
    let kept_x = want_weight.then(|| kept_input(x, &input));
    let kept_weight = weight.detach();
    differentiable_new("linear", arguments, out, move |gradient| {
        let g = as_factor(gradient)?;
        if want_x {
            add_product_to(0, &g, &weight_factor(&kept_weight)?)?;
        }
        if let Some(x) = &kept_x {
            add_product_to(1, &g.t()?, &as_factor(x)?)?;
        }
        let db = of_bias.map(|dtype| gradient.sum(0)?.to_dtype(dtype)).transpose()?;
        Ok([None, None, db])
    })
}

fn with_bias(out: Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    match bias {
        Some(bias) => out.broadcast_add(&bias.to_dtype(out.dtype())?),
        None => Ok(out),
    }
}

/// What the third argument of the op is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Addend {
    /// Nothing, an empty tensor.
    None,
    /// `[O]`, added to every row.
    Bias,
    /// `[R, O]`, the sum's start.
    Residual,
}

struct Linear {
    addend: Addend,
}

impl FusedOp<3> for Linear {
    const NAME: &'static str = "linear";
    const READS: [bool; 3] = [true, true, false];

    fn forward(&self, [x, weight, addend]: [Argument<'_>; 3]) -> Result<(Vec<f32>, Shape)> {
        let (rows, inputs) = x.shape().dims2()?;
        let (outputs, _) = weight.shape().dims2()?;
        let (x, weight) = (x.f32()?, Weight::of(weight)?);
        let mut out = match self.addend {
            Addend::Residual => addend.f32()?.to_vec(),
            Addend::Bias => addend.f32()?.repeat(rows),
            Addend::None => {
                let write = |out: Room<'_>| -> Result<()> {
                    product_nt_into(out, x, weight, (inputs, outputs), false);
                    Ok(())
                };
                // SAFETY: a product that is not added to something writes all of its values.
                let out = unsafe { written(rows * outputs, write) }?;
                return Ok((out, (rows, outputs).into()));
            }
        };
        product_nt_into(&mut out, x, weight, (inputs, outputs), true);
        Ok((out, (rows, outputs).into()))
    }

    fn backward(&self, arguments: [&Input; 3], _: &Tensor, grad: &Tensor) -> Result<Gradients> {
        let [x, weight, addend] = arguments;
        let (_, inputs) = x.tensor.dims2()?;
        let (outputs, _) = weight.tensor.dims2()?;
        let form = |mut dx: Room<'_>, accumulate| {
            let add = |w: Weight<'_>| {
                with_f32(grad, |g| {
                    product_nn_into(dx.from(0), g, w, (inputs, outputs), accumulate);
                    Ok(())
                })
            };
            with_weight(&weight.tensor, add)
        };
        // SAFETY: a product that is not added to something writes all of its values.
        unsafe { add_gradient(0, x, form) }?;
        with_f32(grad, |g| add_weight_gradient(1, &x.tensor, g, weight))?;
        let d_addend = match self.addend {
            Addend::Bias if addend.trains => {
                let db = with_f32(grad, |g| Ok(column_sums(g, outputs)))?;
                Some(values_like(&addend.tensor, db)?)
            }
            Addend::Residual if addend.trains => Some(grad.clone()),
            _ => None,
        };
        Ok([None, None, d_addend])
    }
}

fn column_sums(g: &[f32], columns: usize) -> Vec<f32> {
    let mut sums = vec![0.0_f32; columns];
    sums.par_chunks_mut(256).enumerate().for_each(|(block, sums)| {
        for row in g.chunks_exact(columns) {
            for (sum, g) in sums.iter_mut().zip(&row[block * 256..]) {
                *sum += g;
            }
        }
    });
    sums
}

#[cfg(test)]
mod tests;
