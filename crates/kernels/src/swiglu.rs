//! Gated unit of the MLP: `y = silu(gate) ∘ up`, `silu(z) = z / (1 + e^(−z))`.
//!
//! Backward, with `s = 1/(1 + e^(−gate))`: `dgate = g ∘ up ∘ s (1 + gate (1 − s))`,
//! `dup = g ∘ gate ∘ s`. Nothing but the inputs is kept.

use candle_core::{Result, Shape, Tensor, bail};
use rayon::prelude::*;

use crate::cuda;
use crate::dispatch::fused;
use crate::fused_op::{Argument, FusedOp, Input, fuse};
use crate::graph::{Gradients, differentiable};
use crate::simd::{CHUNK, exp, map_two, vectorised, zeros};
use crate::storage::{values_like, with_each_f32};

/// `silu(gate) ∘ up`.
///
/// # Shapes
/// - `gate`, `up`: equal → the same
///
/// # Errors
/// - the shapes differ
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.shape() != up.shape() {
        bail!("swiglu: gate {:?} and up {:?} differ in shape", gate.shape(), up.shape());
    }
    if fused(&[gate, up]) {
        fuse(SwiGlu, [gate, up])
    } else if cuda::takes(&[gate, up]) {
        cuda::rows::swiglu(gate, up)
    } else if cuda::takes_halves(&[gate, up]) {
        cuda::halves::swiglu(gate, up)
    } else {
        composed(gate, up)
    }
}

/// The same on any device, without the intermediate values that a graph would keep.
fn composed(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let (z, u) = (gate.detach(), up.detach());
    let out = reference(&z, &u)?;
    differentiable("swiglu", [gate, up, up], out, move |g| {
        let s = (z.neg()?.exp()? + 1.0)?.recip()?;
        let du = ((g * &z)? * &s)?;
        // s (1 + z (1 − s))
        let slope = (&s * ((&z * (1.0 - &s)?)? + 1.0)?)?;
        Ok([Some(((g * &u)? * slope)?), Some(du), None])
    })
}

/// The same from plain tensor ops, for any device and float type.
///
/// # Errors
/// - as [`swiglu`]
pub fn reference(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    (gate / (gate.neg()?.exp()? + 1.0)?)?.mul(up)
}

/// Numbers of a clamped unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clamped {
    /// Factor in the sigmoid.
    pub alpha: f64,
    /// Largest gate, and largest size of what it multiplies.
    pub limit: f64,
}

/// `(u + 1) · g σ(α g)` with `g = min(gate, L)` and `u = clamp(up, −L, L)` (gpt-oss), without gradients.
///
/// # Shapes
/// - `gate`, `up`: equal → the same
///
/// # Errors
/// - the shapes differ, or an argument trains
pub fn clamped_swiglu(gate: &Tensor, up: &Tensor, bounds: Clamped) -> Result<Tensor> {
    if gate.shape() != up.shape() {
        bail!("swiglu: gate {:?} and up {:?} differ in shape", gate.shape(), up.shape());
    }
    if gate.track_op() || up.track_op() {
        bail!("swiglu: a clamped unit has no gradients");
    }
    if fused(&[gate, up]) {
        return fuse(bounds, [gate, up]);
    }
    let gate = gate.minimum(bounds.limit)?;
    let up = (up.clamp(-bounds.limit, bounds.limit)? + 1.0)?;
    (&gate / ((&gate * -bounds.alpha)?.exp()? + 1.0)?)?.mul(&up)
}

impl FusedOp<2> for Clamped {
    const NAME: &'static str = "clamped-swiglu";

    fn forward(&self, [gate, up]: [Argument<'_>; 2]) -> Result<(Vec<f32>, Shape)> {
        let bounds = (self.alpha as f32, self.limit as f32);
        let unit = |gate: &[f32], up: &[f32], out: &mut [f32]| clamped(gate, up, out, bounds);
        Ok((map_two(gate.f32()?, up.f32()?, unit), gate.shape().clone()))
    }
}

vectorised! {
    fn clamped(gate: &[f32], up: &[f32], out: &mut [f32], bounds: (f32, f32)) {
        let (alpha, limit) = bounds;
        for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
            // Comparisons that are false for NaN let it through.
            let gate = if gate > limit { limit } else { gate };
            let up = if up > limit { limit } else { up };
            let up = if up < -limit { -limit } else { up };
            *out = (up + 1.0) * (gate / (1.0 + exp(-alpha * gate)));
        }
    }
}

struct SwiGlu;

impl FusedOp<2> for SwiGlu {
    const NAME: &'static str = "swiglu";

    fn forward(&self, [gate, up]: [Argument<'_>; 2]) -> Result<(Vec<f32>, Shape)> {
        Ok((product(gate.f32()?, up.f32()?), gate.shape().clone()))
    }

    fn backward(&self, inputs: [&Input; 2], _: &Tensor, grad: &Tensor) -> Result<Gradients<2>> {
        let [gate, up] = inputs.map(|input| &input.tensor);
        let (dgate, dup) = with_each_f32([gate, up, grad], |[gates, ups, grads]| {
            let mut out = (zeros(gates.len()), zeros(gates.len()));
            backward((gates, ups), grads, (&mut out.0, &mut out.1));
            Ok(out)
        })?;
        Ok([Some(values_like(gate, dgate)?), Some(values_like(up, dup)?)])
    }
}

vectorised! {
    fn gated(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            *out = g / (1.0 + exp(-g)) * u;
        }
    }

    fn gradients(gate: &[f32], up: &[f32], grad: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
        let n = gate.len();
        let (up, grad, dgate, dup) = (&up[..n], &grad[..n], &mut dgate[..n], &mut dup[..n]);
        for i in 0..n {
            let s = 1.0 / (1.0 + exp(-gate[i]));
            dgate[i] = grad[i] * up[i] * s * (1.0 + gate[i] * (1.0 - s));
            dup[i] = grad[i] * gate[i] * s;
        }
    }
}

/// `silu(gate) ∘ up`
pub(crate) fn product(gate: &[f32], up: &[f32]) -> Vec<f32> {
    map_two(gate, up, gated)
}

/// Writes the gradients of gate and up.
pub(crate) fn backward(
    (gate, up): (&[f32], &[f32]),
    grad: &[f32],
    (dgate, dup): (&mut [f32], &mut [f32]),
) {
    dgate
        .par_chunks_mut(CHUNK)
        .zip(dup.par_chunks_mut(CHUNK))
        .zip(gate.par_chunks(CHUNK).zip(up.par_chunks(CHUNK)).zip(grad.par_chunks(CHUNK)))
        .for_each(|((dgate, dup), ((gate, up), grad))| {
            gradients(gate, up, grad, dgate, dup);
        });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{Noise, assert_alike, assert_close, gradcheck};

    #[test]
    fn a_clamped_unit_is_bounded_on_both_sides_of_its_product() -> Result<()> {
        let mut noise = Noise::new(12);
        let (gate, up) = ((noise.tensor(&[7, 33]) * 4.0)?, (noise.tensor(&[7, 33]) * 4.0)?);
        let bounds = Clamped { alpha: 1.702, limit: 2.0 };
        let got = clamped_swiglu(&gate, &up, bounds)?.flatten_all()?.to_vec1::<f32>()?;
        let [gates, ups] = [&gate, &up].map(|t| t.flatten_all().and_then(|t| t.to_vec1::<f32>()));
        for ((got, gate), up) in got.iter().zip(gates?).zip(ups?) {
            let (g, u) = (f64::from(gate).min(2.0), f64::from(up).clamp(-2.0, 2.0));
            let want = (u + 1.0) * g / (1.0 + (-1.702 * g).exp());
            assert!((f64::from(*got) - want).abs() < 1e-5, "{gate} {up}: {got} {want}");
        }
        let wide = |t: &Tensor| t.to_dtype(candle_core::DType::F64);
        let by_ops = clamped_swiglu(&wide(&gate)?, &wide(&up)?, bounds)?;
        let own = clamped_swiglu(&gate, &up, bounds)?;
        assert_close("by ops", &own, &by_ops.to_dtype(candle_core::DType::F32)?, 1e-5);
        assert!(clamped_swiglu(&noise.var(&[2]), &noise.tensor(&[2]), bounds).is_err());
        Ok(())
    }

    #[test]
    fn composed_matches_fused_forward_and_backward() -> Result<()> {
        let mut noise = Noise::new(9);
        let (gate, up) = (noise.var(&[7, 19]), noise.var(&[7, 19]));
        let direction = noise.tensor(&[7, 19]);
        for factor in [1.0, 8.0, 500.0] {
            let wide = (gate.as_tensor() * factor)?;
            let (own, fused) = (composed(&wide, &up)?, swiglu(&wide, &up)?);
            let variables = [("gate", &gate), ("up", &up)];
            assert_alike(&variables, &direction, [&own, &fused], (1e-6, 1e-5));
        }
        Ok(())
    }

    #[test]
    fn reference_gradient_matches_differences() {
        let mut noise = Noise::new(5);
        gradcheck(&[noise.tensor(&[2, 5]), noise.tensor(&[2, 5])], |t| reference(&t[0], &t[1]));
    }
}
