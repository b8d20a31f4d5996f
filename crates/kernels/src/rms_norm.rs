//! Root-mean-square layer norm (Zhang and Sennrich 2019).
//!
//! Forward, per row of `H` values: `y = w ∘ (x · r)` with `r = 1/sqrt(mean(x²) + eps)`; the mean
//! and `r` are taken in f32, `x · r` is rounded to the activation type before the weight.
//! Backward: with `g' = g ∘ w`, `dx = r g' − x r³ mean(g' ∘ x)` and `dw = Σ_rows g ∘ x r`.
//! Nothing but the inputs is kept; `r` is recomputed.

use candle_core::{D, DType, Result, Shape, Tensor, bail};

use crate::cuda;
use crate::dispatch::fused;
use crate::fused_op::{Argument, FusedOp, Input, fuse};
use crate::graph::{Gradients, differentiable};
use crate::simd::{by_chunk, vectorised};
use crate::storage::{values_like, with_each_f32};

/// Rows whose weight gradients are summed together before partial sums are added in order.
const ROWS_PER_CHUNK: usize = 64;

/// Normalises the last dimension of `x` and scales it by `weight`.
///
/// # Shapes
/// - `x`: `[.., H]`, `weight`: `[H]` → `[.., H]`
///
/// # Errors
/// - `weight` is not `[H]`
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let hidden = x.dim(D::Minus1)?;
    if weight.dims() != [hidden] {
        bail!("rms_norm: weight of shape [{hidden}] expected, found {:?}", weight.shape());
    }
    if fused(&[x, weight]) {
        fuse(RmsNorm { eps: eps as f32 }, [x, weight])
    } else if cuda::takes(&[x, weight]) {
        cuda::rows::rms_norm(x, weight, eps)
    } else if cuda::takes_halves(&[x]) && cuda::takes(&[weight]) && !weight.track_op() {
        cuda::halves::rms_norm(x, weight, eps)
    } else if x.dtype() == DType::F32 && weight.dtype() == DType::F32 {
        composed(x, weight, eps)
    } else {
        reference(x, weight, eps)
    }
}

/// The same in a type: where nothing trains, NVIDIA GPUs write bf16 in the same pass.
///
/// # Errors
/// - as [`rms_norm`]
pub fn rms_norm_as(x: &Tensor, weight: &Tensor, eps: f64, dtype: DType) -> Result<Tensor> {
    let is_frozen = !x.track_op() && !weight.track_op();
    let fits = x.dim(D::Minus1)? == weight.elem_count() && weight.rank() == 1;
    if dtype == DType::BF16 && is_frozen && fits && cuda::takes(&[x, weight]) {
        return cuda::halves::rms_norm(x, weight, eps);
    }
    rms_norm(x, weight, eps)?.to_dtype(dtype)
}

/// The same on any device for f32, without the intermediate values that a graph would keep.
fn composed(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let (rows, scale) = (x.detach(), weight.detach());
    let out = reference(&rows, &scale, eps)?;
    let want = [x.track_op(), weight.track_op()];
    differentiable("rms_norm", [x, weight, weight], out, move |g| {
        let r = ((rows.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?).recip()?;
        let normed = rows.broadcast_mul(&r)?;
        let dx = if want[0] {
            let scaled = g.broadcast_mul(&scale)?;
            let pull = (&scaled * &normed)?.mean_keepdim(D::Minus1)?;
            Some((scaled - normed.broadcast_mul(&pull)?)?.broadcast_mul(&r)?)
        } else {
            None
        };
        let dw = if want[1] {
            let width = scale.elem_count();
            Some((g * normed)?.reshape(((), width))?.sum(0)?)
        } else {
            None
        };
        Ok([dx, dw, None])
    })
}

/// The same from plain tensor ops, for any device and float type.
///
/// # Errors
/// - as [`rms_norm`]
pub fn reference(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let wide = match x.dtype() {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    };
    let x_wide = x.to_dtype(wide)?;
    let mean_square = x_wide.sqr()?.mean_keepdim(D::Minus1)?;
    let normed = x_wide.broadcast_div(&(mean_square + eps)?.sqrt()?)?;
    normed.to_dtype(x.dtype())?.broadcast_mul(&weight.to_dtype(x.dtype())?)
}

struct RmsNorm {
    eps: f32,
}

/// `1/sqrt(mean(x²) + eps)` of one row, summed in f32 lanes of fixed order.
fn inverse_rms(row: &[f32], eps: f32) -> f32 {
    1.0 / (crate::simd::dot(row, row) / row.len() as f32 + eps).sqrt()
}

impl FusedOp<2> for RmsNorm {
    const NAME: &'static str = "rms_norm";

    fn forward(&self, [x, w]: [Argument<'_>; 2]) -> Result<(Vec<f32>, Shape)> {
        let (shape, x, w) = (x.shape().clone(), x.f32()?, w.f32()?);
        let hidden = w.len().max(1);
        let chunk = hidden * 16;
        let (out, _) = by_chunk(x.len(), chunk, |index, out| {
            let x = &x[index * chunk..][..out.len()];
            for (out, x) in out.chunks_mut(hidden).zip(x.chunks(hidden)) {
                normed(x, inverse_rms(x, self.eps), w, out);
            }
        });
        Ok((out, shape))
    }

    fn backward(&self, inputs: [&Input; 2], _: &Tensor, grad: &Tensor) -> Result<Gradients<2>> {
        let [x, w] = inputs.map(|input| &input.tensor);
        let hidden = w.elem_count().max(1);
        let (dx, dw) =
            with_each_f32([x, w, grad], |[xs, ws, gs]| Ok(backward(xs, ws, gs, hidden, self.eps)))?;
        let dx = inputs[0].trains.then(|| values_like(x, dx)).transpose()?;
        Ok([dx, Some(values_like(w, dw)?)])
    }
}

fn backward(x: &[f32], w: &[f32], g: &[f32], hidden: usize, eps: f32) -> (Vec<f32>, Vec<f32>) {
    let chunk = hidden * ROWS_PER_CHUNK;
    let (dx, partials) = by_chunk(x.len(), chunk, |index, dx| {
        let part = index * chunk..index * chunk + dx.len();
        let mut dw = vec![0.0_f32; hidden];
        let rows = x[part.clone()].chunks(hidden).zip(g[part].chunks(hidden));
        for (dx, (x, g)) in dx.chunks_mut(hidden).zip(rows) {
            let r = inverse_rms(x, eps);
            of_weight(x, g, r, w, &mut dw, dx);
            let mean = crate::simd::dot(dx, x) / hidden as f32;
            pulled(x, r, r * r * r * mean, dx);
        }
        dw
    });
    let mut dw = vec![0.0; hidden];
    for partial in partials {
        for (total, part) in dw.iter_mut().zip(partial) {
            *total += part;
        }
    }
    (dx, dw)
}

vectorised! {
    fn normed(x: &[f32], r: f32, w: &[f32], out: &mut [f32]) {
        for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
            *out = (x * r) * w;
        }
    }

    /// Adds a row's gradient of the weight, and begins that of the row.
    fn of_weight(x: &[f32], g: &[f32], r: f32, w: &[f32], dw: &mut [f32], dx: &mut [f32]) {
        for ((((dx, dw), x), g), w) in dx.iter_mut().zip(dw).zip(x).zip(g).zip(w) {
            *dw += g * x * r;
            *dx = g * w;
        }
    }

    fn pulled(x: &[f32], r: f32, pull: f32, dx: &mut [f32]) {
        for (dx, x) in dx.iter_mut().zip(x) {
            *dx = r * *dx - x * pull;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Backward;
    use crate::test_support::{Noise, assert_alike, assert_close, gradcheck};

    #[test]
    fn composed_matches_fused_forward_and_backward() -> Result<()> {
        for (seed, shape) in [(1, vec![1, 3]), (2, vec![3, 2, 16]), (3, vec![70, 33])] {
            let mut noise = Noise::new(seed + 20);
            let (x, w) = (noise.var(&shape), noise.var(&shape[shape.len() - 1..]));
            let direction = noise.tensor(&shape);
            let (own, fused) = (composed(&x, &w, 1e-5)?, rms_norm(&x, &w, 1e-5)?);
            let variables = [("x", &x), ("weight", &w)];
            assert_alike(&variables, &direction, [&own, &fused], (1e-6, 2e-5));
        }
        Ok(())
    }

    #[test]
    fn reference_gradient_matches_differences() {
        let mut noise = Noise::new(5);
        gradcheck(&[noise.tensor(&[3, 5]), noise.tensor(&[5])], |t| reference(&t[0], &t[1], 1e-5));
    }

    #[test]
    fn non_contiguous_input_is_normalised_and_keeps_its_gradient() -> Result<()> {
        let x = Noise::new(6).var(&[8, 6]);
        let w = Noise::new(7).var(&[8]);
        let out = rms_norm(&x.t()?, &w, 1e-5)?;
        assert_close("forward", &out, &reference(&x.t()?.contiguous()?, &w, 1e-5)?, 1e-6);
        assert!(out.sum_all()?.gradients()?.get(&x).is_some());
        Ok(())
    }

    #[test]
    fn wrong_weight_shape_is_an_error() {
        let mut noise = Noise::new(8);
        assert!(rms_norm(&noise.tensor(&[2, 4]), &noise.tensor(&[3]), 1e-5).is_err());
    }
}
