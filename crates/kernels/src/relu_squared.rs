//! Squared rectifier (So et al. 2021): `y = r²` with `r = max(x, s x)`; slope `s = 0` is ReLU².
//!
//! Backward: `dx = 2 r g` where `x > 0`, `2 s r g` elsewhere. Nothing but the input is kept.

use candle_core::{Result, Shape, Tensor, bail};

use crate::dispatch::fused;
use crate::fused_op::{Argument, FusedOp, Input, fuse};
use crate::graph::{Gradients, differentiable_new};
use crate::simd::{CHUNK, by_chunk, map_two, vectorised};
use crate::storage::{values_like, with_each_f32};

/// `max(x, slope · x)²`.
///
/// # Shapes
/// - any → the same
///
/// # Errors
/// - `slope` lies outside `[0, 1)`
pub fn relu_squared(x: &Tensor, slope: f64) -> Result<Tensor> {
    if !(0.0..1.0).contains(&slope) {
        bail!("relu_squared: slope in [0, 1) expected, found {slope}");
    }
    if x.elem_count() == 0 {
        // A GPU's driver refuses to start a kernel without blocks.
        return Ok(x.clone());
    }
    if fused(&[x]) { fuse(ReluSquared { slope: slope as f32 }, [x]) } else { composed(x, slope) }
}

/// The same on any device, one node of the graph.
fn composed(x: &Tensor, slope: f64) -> Result<Tensor> {
    let values = x.detach();
    let out = reference(&values, slope)?;
    differentiable_new("relu_squared", [x; 3], out, move |gradient| {
        let (above, below) = ((values.relu()? * (1.0 - slope * slope))?, slope * slope);
        let half = (above + (&values * below)?)?;
        Ok([Some(((half * gradient)? * 2.0)?), None, None])
    })
}

/// The same from plain tensor ops, for any device and float type.
pub(crate) fn reference(x: &Tensor, slope: f64) -> Result<Tensor> {
    ((x.relu()? * (1.0 - slope))? + (x * slope)?)?.sqr()
}

struct ReluSquared {
    slope: f32,
}

impl FusedOp<1> for ReluSquared {
    const NAME: &'static str = "relu_squared";

    fn forward(&self, [x]: [Argument<'_>; 1]) -> Result<(Vec<f32>, Shape)> {
        let (shape, x) = (x.shape().clone(), x.f32()?);
        let (out, _) = by_chunk(x.len(), CHUNK, |index, out| {
            squares(&x[index * CHUNK..][..out.len()], out, self.slope);
        });
        Ok((out, shape))
    }

    fn backward(&self, [x]: [&Input; 1], _: &Tensor, grad: &Tensor) -> Result<Gradients<1>> {
        let x = &x.tensor;
        let dx = with_each_f32([x, grad], |[x, g]| {
            Ok(map_two(x, g, |x, g, dx| gradients(x, g, dx, self.slope)))
        })?;
        Ok([Some(values_like(x, dx)?)])
    }
}

vectorised! {
    fn squares(x: &[f32], out: &mut [f32], slope: f32) {
        for (out, &x) in out.iter_mut().zip(x) {
            let r = if x > 0.0 { x } else { slope * x };
            *out = r * r;
        }
    }

    fn gradients(x: &[f32], g: &[f32], dx: &mut [f32], slope: f32) {
        for ((dx, &x), &g) in dx.iter_mut().zip(x).zip(g) {
            let factor = if x > 0.0 { 2.0 } else { 2.0 * slope * slope };
            *dx = factor * x * g;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{Noise, gradcheck};

    #[test]
    fn reference_gradient_matches_differences() {
        gradcheck(&[Noise::new(4).tensor(&[3, 5])], |t| reference(&t[0], 0.5));
    }

    #[test]
    fn a_negative_slope_is_an_error() {
        assert!(relu_squared(&Noise::new(5).tensor(&[2]), -0.1).is_err());
    }
}
