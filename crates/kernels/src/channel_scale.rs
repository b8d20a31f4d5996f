//! A learned factor a channel: `y = x ∘ w`, and `y = r + x ∘ w` at the end of a branch.
//!
//! Backward: `dx = g ∘ w`, `dw = Σ_rows g ∘ x`, `dr = g`. Residual scales, mixes of two streams
//! and skip connections of a decoder are all made of these two. Nothing but the inputs is kept;
//! `dw` sums chunks of rows in a fixed order.

use candle_core::{D, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use crate::dispatch::fused;
use crate::fused_op::{Argument, FusedOp, Input, fuse};
use crate::graph::{Gradients, add, differentiable_new};
use crate::simd::{by_chunk, vectorised};
use crate::storage::{values_like, with_each_f32};

/// Rows of a parallel task, whose weight gradients are summed together.
const ROWS_PER_CHUNK: usize = 64;

/// `x ∘ w`.
///
/// # Shapes
/// - `x`: `[.., C]`, `weight`: `[C]` → `[.., C]`
///
/// # Errors
/// - `weight` is not `[C]`
pub fn scale_channels(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    check(x, weight)?;
    if x.elem_count() == 0 {
        // A GPU's driver refuses to start a kernel without blocks.
        return Ok(x.clone());
    }
    if !fused(&[x, weight]) {
        return composed(x, weight);
    }
    let none = Tensor::zeros(0, x.dtype(), x.device())?;
    fuse(ChannelScale { residual: false }, [x, weight, &none])
}

/// `residual + x ∘ w`.
///
/// # Shapes
/// - `residual`, `x`: `[.., C]`, `weight`: `[C]` → `[.., C]`
///
/// # Errors
/// - `weight` is not `[C]`, or the streams differ in shape
pub fn add_scaled(residual: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    check(x, weight)?;
    if residual.shape() != x.shape() {
        bail!("add_scaled: {:?} and {:?} differ in shape", residual.shape(), x.shape());
    }
    if x.elem_count() == 0 {
        return Ok(residual.clone());
    }
    if !fused(&[residual, x, weight]) {
        return add(residual, &composed(x, weight)?);
    }
    fuse(ChannelScale { residual: true }, [x, weight, residual])
}

/// [`scale_channels`] on any device, one node of the graph.
fn composed(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (values, factors) = (x.detach(), weight.detach());
    let out = values.broadcast_mul(&factors)?;
    let want = [x.track_op(), weight.track_op()];
    differentiable_new("channel_scale", [x, weight, weight], out, move |gradient| {
        let dx = want[0].then(|| gradient.broadcast_mul(&factors)).transpose()?;
        let sums = || (gradient * &values)?.reshape(((), factors.elem_count()))?.sum(0);
        Ok([dx, want[1].then(sums).transpose()?, None])
    })
}

/// [`add_scaled`] from plain tensor ops, for any device and float type.
pub(crate) fn reference(residual: &Tensor, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    residual + x.broadcast_mul(weight)?
}

fn check(x: &Tensor, weight: &Tensor) -> Result<()> {
    let channels = x.dim(D::Minus1)?;
    if weight.dims() != [channels] {
        bail!("channel scale: weight [{channels}] expected, found {:?}", weight.shape());
    }
    Ok(())
}

struct ChannelScale {
    residual: bool,
}

impl FusedOp<3> for ChannelScale {
    const NAME: &'static str = "channel_scale";
    const READS: [bool; 3] = [true, true, false];

    fn forward(&self, [x, weight, residual]: [Argument<'_>; 3]) -> Result<(Vec<f32>, Shape)> {
        let (shape, x, weight) = (x.shape().clone(), x.f32()?, weight.f32()?);
        let residual = if self.residual { Some(residual.f32()?) } else { None };
        Ok((products(residual, x, weight), shape))
    }

    fn backward(&self, inputs: [&Input; 3], _: &Tensor, grad: &Tensor) -> Result<Gradients> {
        let trains = inputs.map(|input| input.trains);
        let [x, weight, _] = inputs.map(|input| &input.tensor);
        let dx = if trains[0] {
            let dx = with_each_f32([grad, weight], |[g, w]| Ok(products(None, g, w)))?;
            Some(values_like(x, dx)?)
        } else {
            None
        };
        let dw = if trains[1] {
            let channels = weight.elem_count();
            let dw = with_each_f32([grad, x], |[g, x]| Ok(product_sums(g, x, channels)))?;
            Some(values_like(weight, dw)?)
        } else {
            None
        };
        let d_residual = (self.residual && trains[2]).then(|| grad.clone());
        Ok([dx, dw, d_residual])
    }
}

/// `residual + x ∘ w`, `w` a row; zeros where there is no residual.
fn products(residual: Option<&[f32]>, x: &[f32], w: &[f32]) -> Vec<f32> {
    let width = w.len().max(1);
    let chunk = width * ROWS_PER_CHUNK;
    let (out, _) = by_chunk(x.len(), chunk, |index, out| {
        let part = index * chunk..index * chunk + out.len();
        if let Some(residual) = residual {
            out.copy_from_slice(&residual[part.clone()]);
        }
        for (out, x) in out.chunks_mut(width).zip(x[part].chunks(width)) {
            add_products(out, x, w);
        }
    });
    out
}

vectorised! {
    /// `out += a ∘ b`
    fn add_products(out: &mut [f32], a: &[f32], b: &[f32]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out += a * b;
        }
    }
}

/// `Σ_rows a ∘ b`
fn product_sums(a: &[f32], b: &[f32], channels: usize) -> Vec<f32> {
    let chunk = channels.max(1) * ROWS_PER_CHUNK;
    let partials: Vec<Vec<f32>> = a
        .par_chunks(chunk)
        .zip(b.par_chunks(chunk))
        .map(|(a, b)| {
            let mut sums = vec![0.0_f32; channels];
            for (a, b) in a.chunks(channels.max(1)).zip(b.chunks(channels.max(1))) {
                add_products(&mut sums, a, b);
            }
            sums
        })
        .collect();
    let mut total = vec![0.0; channels];
    for partial in partials {
        total.iter_mut().zip(partial).for_each(|(total, part)| *total += part);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{Noise, assert_alike, gradcheck};

    #[test]
    fn reference_gradient_matches_differences() {
        let mut noise = Noise::new(4);
        let inputs = [noise.tensor(&[3, 2]), noise.tensor(&[3, 2]), noise.tensor(&[2])];
        gradcheck(&inputs, |t| reference(&t[0], &t[1], &t[2]));
    }

    #[test]
    fn shapes_that_do_not_fit_are_errors() {
        let mut noise = Noise::new(5);
        let (x, w) = (noise.tensor(&[2, 4]), noise.tensor(&[3]));
        assert!(scale_channels(&x, &w).is_err() && add_scaled(&x, &x, &w).is_err());
        assert!(add_scaled(&noise.tensor(&[1, 4]), &x, &noise.tensor(&[4])).is_err());
    }

    #[test]
    fn other_devices_match_the_reference_forward_and_backward() -> Result<()> {
        let mut noise = Noise::new(31);
        let (r, x, w) = (noise.var(&[3, 5, 8]), noise.var(&[3, 5, 8]), noise.var(&[8]));
        let direction = noise.tensor(&[3, 5, 8]);
        let own = crate::cuda::emulator::emulated(|| add_scaled(&r, &x, &w))?;
        let variables = [("r", &r), ("x", &x), ("w", &w)];
        assert_alike(&variables, &direction, [&own, &reference(&r, &x, &w)?], (1e-6, 1e-5));
        Ok(())
    }
}
