//! Gated unit of the MLP with a GELU: `y = gelu(gate) ∘ up` (Shazeer 2020, <https://arxiv.org/abs/2002.05202>),
//! with the GELU's approximation by tanh.
//!
//! `gelu(z) = z/2 (1 + tanh u) = z σ(2u)`, `u = √(2/π) (z + 0.044715 z³)`. Backward, with `s = σ(2u)`:
//! `dgate = g ∘ up ∘ (s + 2 z s (1 − s) u')`, `u' = √(2/π) (1 + 3 · 0.044715 z²)`, `dup = g ∘ z ∘ s`.

use candle_core::{Result, Shape, Tensor, bail};

use crate::dispatch::fused;
use crate::fused_op::{Argument, FusedOp, fuse};
use crate::graph::differentiable;
use crate::simd::{exp, map_two, vectorised};

/// `√(2/π)`
const SLOPE: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;

/// `gelu(gate) ∘ up`.
///
/// # Shapes
/// - `gate`, `up`: equal → the same
///
/// # Errors
/// - the shapes differ
pub fn geglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.shape() != up.shape() {
        bail!("geglu: gate {:?} and up {:?} differ in shape", gate.shape(), up.shape());
    }
    if fused(&[gate, up]) && !gate.track_op() && !up.track_op() {
        fuse(GeGlu, [gate, up])
    } else {
        composed(gate, up)
    }
}

/// `σ(2u)`
fn share(gate: &Tensor) -> Result<Tensor> {
    let u = (gate * ((gate.sqr()? * (SLOPE * CUBIC))? + SLOPE)?)?;
    ((u * -2.0)?.exp()? + 1.0)?.recip()
}

/// The same on any device, without the intermediate values that a graph would keep.
fn composed(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let (z, up_values) = (gate.detach(), up.detach());
    let out = reference(&z, &up_values)?;
    differentiable("geglu", [gate, up, up], out, move |g| {
        let s = share(&z)?;
        let du = ((g * &z)? * &s)?;
        let inner = ((z.sqr()? * (3.0 * SLOPE * CUBIC))? + SLOPE)?;
        let slope = (&s + ((((&z * &s)? * (1.0 - &s)?)? * inner)? * 2.0)?)?;
        Ok([Some(((g * &up_values)? * slope)?), Some(du), None])
    })
}

/// The same from plain tensor ops, for any device and float type.
pub(crate) fn reference(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    (gate * share(gate)?)?.mul(up)
}

struct GeGlu;

impl FusedOp<2> for GeGlu {
    const NAME: &'static str = "geglu";

    fn forward(&self, [gate, up]: [Argument<'_>; 2]) -> Result<(Vec<f32>, Shape)> {
        Ok((map_two(gate.f32()?, up.f32()?, gated), gate.shape().clone()))
    }
}

vectorised! {
    fn gated(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
            let inner = g * (g * g).mul_add((SLOPE * CUBIC) as f32, SLOPE as f32);
            *out = g / (1.0 + exp(-2.0 * inner)) * u;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{Noise, assert_close, gradcheck};

    #[test]
    fn it_is_the_gelu_with_tanh_times_the_other_factor() -> Result<()> {
        for (seed, rows, width) in [(1, 1, 1), (2, 3, 17), (3, 40, 300)] {
            let mut noise = Noise::new(seed);
            let gate = (noise.tensor(&[rows, width]) * 4.0)?;
            let up = noise.tensor(&[rows, width]);
            let plain = (gate.gelu()? * &up)?;
            assert_close("fused", &geglu(&gate, &up)?, &plain, 1e-5);
            assert_close("composed", &composed(&gate, &up)?, &plain, 1e-5);
        }
        let extreme =
            Tensor::new(&[-500.0_f32, -20.0, 0.0, 20.0, 500.0], &candle_core::Device::Cpu)?;
        for op in [geglu, composed] {
            let got = op(&extreme, &extreme.ones_like()?)?.to_vec1::<f32>()?;
            for (got, want) in got.iter().zip([0.0, 0.0, 0.0, 20.0, 500.0]) {
                assert!((got - want).abs() < 1e-6, "{got} for {want}");
            }
        }
        assert!(geglu(&extreme, &extreme.narrow(0, 0, 2)?).is_err());
        Ok(())
    }

    #[test]
    fn gradients_match_differences() {
        let mut noise = Noise::new(7);
        gradcheck(&[noise.tensor(&[3, 5]), noise.tensor(&[3, 5])], |t| geglu(&t[0], &t[1]));
    }
}
