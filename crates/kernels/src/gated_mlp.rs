//! Gated MLP with a residual: `y = r + Wd (silu(Wg x) ∘ Wu x)`.
//!
//! On the fused path the graph keeps both projections and not their gated product, which the backward pass
//! forms again: a third less of what the MLP keeps for one elementwise pass. With `z = Wg x`, `u = Wu x`,
//! `h = silu(z) ∘ u`: `dWd = gᵀ h`, `dh = g Wd`, `(dz, du)` as in [`crate::swiglu`],
//! `dx = dz Wg + du Wu`, `dWg = dzᵀ x`, `dWu = duᵀ x`, `dr = g`.

use candle_core::{DType, Result, Shape, Tensor, bail};

use crate::cuda::product::{add_product_to, product};
use crate::cuda::{self, takes};
use crate::dispatch::fused;
use crate::factors::{as_factor, input_factor, kept_input, weight_factor};
use crate::fused_op::{Argument, FusedOp, Input, fuse};
use crate::gemm::{Room, written};
use crate::graph::{Gradients, differentiable_new};
use crate::linear::{
    Weight, add_gradient, add_weight_gradient, factor_type, linear, linear_onto, product_nn,
    product_nn_into, product_nt_into, reference as linear_reference, with_weight,
};
use crate::simd::zeros;
use crate::storage::{values_like, with_f32};
use crate::swiglu::{self, swiglu};

/// Weights of a gated MLP, f32, bf16 or f16.
#[derive(Debug, Clone, Copy)]
pub struct GatedMlp<'a> {
    /// `[I, H]`
    pub gate: &'a Tensor,
    /// `[I, H]`
    pub up: &'a Tensor,
    /// `[O, I]`
    pub down: &'a Tensor,
}

impl GatedMlp<'_> {
    fn check(&self, residual: &Tensor, x: &Tensor) -> Result<()> {
        let (rows, width) = x.dims2()?;
        let (outputs, inner) = self.down.dims2()?;
        let fits = self.gate.dims() == [inner, width]
            && self.up.dims() == [inner, width]
            && residual.dims() == [rows, outputs];
        if !fits {
            bail!(
                "gated MLP: input {:?} and residual {:?} do not fit gate {:?}, up {:?}, down {:?}",
                x.shape(),
                residual.shape(),
                self.gate.shape(),
                self.up.shape(),
                self.down.shape()
            );
        }
        Ok(())
    }
}

/// `residual + Wd (silu(Wg x) ∘ Wu x)`.
///
/// # Shapes
/// - `residual`: `[R, O]`, `x`: `[R, H]` → `[R, O]`
///
/// # Errors
/// - shapes do not fit, or a weight is neither f32, bf16 nor f16 on the fused path
pub fn gated_mlp_onto(residual: &Tensor, x: &Tensor, mlp: &GatedMlp<'_>) -> Result<Tensor> {
    mlp.check(residual, x)?;
    if !fused(&[residual, x]) {
        let gated = match gated_on_gpu(x, mlp)? {
            Some(gated) => gated,
            None => swiglu(&linear(x, mlp.gate, None)?, &linear(x, mlp.up, None)?)?,
        };
        return linear_onto(residual, &gated, mlp.down, None);
    }
    let both = fuse(GateAndUp, [x, mlp.gate, mlp.up])?;
    fuse(GatedDown, [&both, mlp.down, residual])
}

/// `silu(Wg x) ∘ Wu x` on a GPU as one node of the graph: `x` and the gradients of both projections are turned
/// into factors once, and no gradient of a projection is added to zeros. `None` where nothing trains, or where
/// it is no case for the kernels.
fn gated_on_gpu(x: &Tensor, mlp: &GatedMlp<'_>) -> Result<Option<Tensor>> {
    let weights = [mlp.gate, mlp.up];
    let want = [x, mlp.gate, mlp.up].map(Tensor::track_op);
    let factors = factor_type(x, mlp.gate.dtype());
    let alike =
        factors == factor_type(x, mlp.up.dtype()) && matches!(factors, DType::F32 | DType::BF16);
    if !want.contains(&true) || !alike || x.elem_count() == 0 || !takes(&[x]) {
        return Ok(None);
    }
    let of_weight = move |weight: &Tensor| weight_factor(weight, factors);
    let input = input_factor(x, factors)?;
    let projected = |weight: &Tensor| product(&input, &of_weight(weight)?.t()?);
    let (gate, up) = (projected(mlp.gate)?, projected(mlp.up)?);
    let out = cuda::rows::swiglu(&gate, &up)?;
    let kept = (want[1] || want[2]).then(|| kept_input(x, &input));
    let weights = weights.map(Tensor::clone);
    let node = differentiable_new("gated", [x, mlp.gate, mlp.up], out, move |gradient| {
        let [dz, du] = cuda::rows::swiglu_gradients(&gate, &up, gradient, factors)?;
        if want[0] {
            add_product_to(0, &dz, &of_weight(&weights[0])?)?;
            add_product_to(0, &du, &of_weight(&weights[1])?)?;
        }
        if let Some(kept) = &kept {
            let input = as_factor(kept, factors)?;
            add_product_to(1, &dz.t()?, &input)?;
            add_product_to(2, &du.t()?, &input)?;
        }
        Ok([None, None, None])
    });
    node.map(Some)
}

/// The same from plain tensor ops, for any device and float type.
pub(crate) fn reference(residual: &Tensor, x: &Tensor, mlp: &GatedMlp<'_>) -> Result<Tensor> {
    mlp.check(residual, x)?;
    let [gate, up] = [mlp.gate, mlp.up].map(|weight| linear_reference(x, weight, None));
    residual + linear_reference(&swiglu::reference(&gate?, &up?)?, mlp.down, None)?
}

/// `[R, H]`, `[I, H]`, `[I, H]` → `[2, R, I]`: `x Wgᵀ`, then `x Wuᵀ`.
struct GateAndUp;

impl FusedOp<3> for GateAndUp {
    const NAME: &'static str = "gate and up";

    fn forward(&self, [x, gate, up]: [Argument<'_>; 3]) -> Result<(Vec<f32>, Shape)> {
        let (rows, width) = x.shape().dims2()?;
        let (inner, _) = gate.shape().dims2()?;
        let x = x.f32()?;
        let write = |mut both: Room<'_>| -> Result<()> {
            for (first, weight) in [(0, gate), (rows * inner, up)] {
                let out = both.from(first);
                product_nt_into(out, x, Weight::of(weight)?, (width, inner), false);
            }
            Ok(())
        };
        // SAFETY: either product writes all of its half.
        let both = unsafe { written(2 * rows * inner, write) }?;
        Ok((both, (2, rows, inner).into()))
    }

    fn backward(&self, inputs: [&Input; 3], _: &Tensor, grad: &Tensor) -> Result<Gradients> {
        let [x, gate, up] = inputs;
        let (rows, width) = x.tensor.dims2()?;
        let inner = gate.tensor.dim(0)?;
        with_f32(grad, |grad| {
            let (of_gate, of_up) = grad.split_at(rows * inner);
            let form = |mut dx: Room<'_>, accumulate| {
                for (weight, grad, add) in [(gate, of_gate, accumulate), (up, of_up, true)] {
                    with_weight(&weight.tensor, |w| {
                        product_nn_into(dx.from(0), grad, w, (width, inner), add);
                        Ok(())
                    })?;
                }
                Ok(())
            };
            // SAFETY: the first product writes all of its values where it is not added to something.
            unsafe { add_gradient(0, x, form) }?;
            add_weight_gradient(1, &x.tensor, of_gate, gate)?;
            add_weight_gradient(2, &x.tensor, of_up, up)?;
            Ok([None, None, None])
        })
    }
}

/// `[2, R, I]`, `[O, I]`, `[R, O]` → `[R, O]`: the gated product through `Wd`, onto the residual.
struct GatedDown;

impl FusedOp<3> for GatedDown {
    const NAME: &'static str = "gated MLP";
    const READS: [bool; 3] = [true, true, false];

    fn forward(&self, [both, down, residual]: [Argument<'_>; 3]) -> Result<(Vec<f32>, Shape)> {
        let (gate, up) = halves(both.f32()?);
        let (outputs, inner) = down.shape().dims2()?;
        let gated = swiglu::product(gate, up);
        let mut out = residual.f32()?.to_vec();
        product_nt_into(&mut out, &gated, Weight::of(down)?, (inner, outputs), true);
        Ok((out, residual.shape().clone()))
    }

    fn backward(&self, inputs: [&Input; 3], _: &Tensor, grad: &Tensor) -> Result<Gradients> {
        let [both, down, residual] = inputs;
        let (outputs, inner) = down.tensor.dims2()?;
        let d_both = with_f32(&both.tensor, |values| {
            let (gate, up) = halves(values);
            let gated = swiglu::product(gate, up);
            let shape = (gated.len() / inner.max(1), inner);
            let gated = Tensor::from_vec(gated, shape, both.tensor.device())?;
            with_f32(grad, |grad| add_weight_gradient(1, &gated, grad, down))?;
            drop(gated);
            if !both.trains {
                return Ok(None);
            }
            let d_gated = with_weight(&down.tensor, |w| {
                with_f32(grad, |grad| Ok(product_nn(grad, w, inner, outputs)))
            })?;
            let mut d_both = zeros(values.len());
            let (d_gate, d_up) = d_both.split_at_mut(gate.len());
            swiglu::backward((gate, up), &d_gated, (d_gate, d_up));
            Ok(Some(values_like(&both.tensor, d_both)?))
        })?;
        Ok([d_both, None, residual.trains.then(|| grad.clone())])
    }
}

fn halves(both: &[f32]) -> (&[f32], &[f32]) {
    both.split_at(both.len() / 2)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::graph::{Backward, scale};
    use candle_core::{DType, Var};

    use super::*;
    use crate::cuda::emulator::emulated;
    use crate::dispatch::with_half_products;
    use crate::test_support::{Noise, assert_alike, assert_close, bits, gradcheck};

    /// Residual, input, gate, up, down; the result is one wider than the input.
    fn arguments(noise: &mut Noise, rows: usize, width: usize, inner: usize) -> [Var; 5] {
        let out = width + 1;
        [[rows, out], [rows, width], [inner, width], [inner, width], [out, inner]]
            .map(|shape| noise.var(&shape))
    }

    fn weights(arguments: &[Var; 5]) -> GatedMlp<'_> {
        GatedMlp { gate: &arguments[2], up: &arguments[3], down: &arguments[4] }
    }

    fn named(arguments: &[Var; 5]) -> [(&str, &Var); 5] {
        let [residual, x, gate, up, down] = arguments;
        [("residual", residual), ("x", x), ("gate", gate), ("up", up), ("down", down)]
    }

    #[test]
    fn fused_matches_reference_forward_and_backward() -> Result<()> {
        for (seed, rows, width, inner) in [(1, 1, 1, 1), (2, 3, 7, 17), (3, 90, 33, 70)] {
            let mut noise = Noise::new(seed);
            let arguments = arguments(&mut noise, rows, width, inner);
            let direction = noise.tensor(&[rows, width + 1]);
            let mlp = weights(&arguments);
            let fused = gated_mlp_onto(&arguments[0], &arguments[1], &mlp)?;
            let plain = reference(&arguments[0], &arguments[1], &mlp)?;
            assert_alike(&named(&arguments), &direction, [&fused, &plain], (1e-6, 1e-5));
        }
        Ok(())
    }

    #[test]
    fn a_gpus_node_matches_the_reference_forward_and_backward() -> Result<()> {
        for (seed, rows, width, inner) in [(11, 1, 1, 1), (12, 3, 7, 17), (13, 70, 24, 36)] {
            let mut noise = Noise::new(seed);
            let arguments = arguments(&mut noise, rows, width, inner);
            let direction = noise.tensor(&[rows, width + 1]);
            let mlp = weights(&arguments);
            let plain = reference(&arguments[0], &arguments[1], &mlp)?;
            let compare = |tolerances: (f64, f64)| -> Result<()> {
                let own = gated_mlp_onto(&arguments[0], &arguments[1], &mlp)?;
                assert_alike(&named(&arguments), &direction, [&own, &plain], tolerances);
                Ok(())
            };
            emulated(|| compare((1e-6, 1e-5)))?;
            emulated(|| with_half_products(|| compare((2e-2, 3e-2))))?;
        }
        Ok(())
    }

    /// The node keeps its input as a factor where the graph lets go of it, with the bits of one that is kept in f32.
    #[test]
    fn a_gpus_node_keeps_the_factor_of_its_input() -> Result<()> {
        let mut noise = Noise::new(14);
        let arguments = arguments(&mut noise, 70, 24, 36);
        let step = |x: &Tensor, frozen: bool| -> Result<(usize, Vec<Option<Vec<u32>>>)> {
            let of = |w: &Var| if frozen { w.detach() } else { w.as_tensor().clone() };
            let [gate, up, down] = [&arguments[2], &arguments[3], &arguments[4]].map(of);
            let mlp = GatedMlp { gate: &gate, up: &up, down: &down };
            let out = gated_mlp_onto(&arguments[0], x, &mlp)?;
            // All but the one that is asked for here.
            let keep = Arc::strong_count(&input_factor(x, DType::BF16)?) - 1;
            let gradients = out.sqr()?.sum_all()?.gradients()?;
            let of_each = arguments.iter().map(|variable| gradients.get(variable).map(bits));
            Ok((keep, of_each.collect()))
        };
        let both = |frozen: bool| -> Result<usize> {
            let (keep, own) = step(&scale(&arguments[1], 2.0)?, frozen)?;
            let (none, want) = step(&(arguments[1].as_tensor() * 2.0)?, frozen)?;
            assert_eq!(none, 0, "f32 values are kept");
            assert_eq!(own, want, "frozen: {frozen}");
            Ok(keep)
        };
        emulated(|| {
            with_half_products(|| -> Result<()> {
                assert_eq!(both(false)?, 1);
                assert_eq!(both(true)?, 0);
                Ok(())
            })?;
            assert_eq!(both(false)?, 0, "factors of f32");
            Ok(())
        })
    }

    #[test]
    fn no_rows_give_no_rows() -> Result<()> {
        let arguments = arguments(&mut Noise::new(9), 0, 3, 5);
        let out = gated_mlp_onto(&arguments[0], &arguments[1], &weights(&arguments))?;
        assert_eq!(out.dims(), [0, 4]);
        out.sum_all()?.gradients()?;
        Ok(())
    }

    #[test]
    fn has_the_bits_of_its_parts() -> Result<()> {
        let mut noise = Noise::new(4);
        let arguments = arguments(&mut noise, 40, 65, 130);
        let mlp = weights(&arguments);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let [gate, up, down] = [mlp.gate, mlp.up, mlp.down].map(|w| w.to_dtype(dtype));
            let (gate, up, down) = (gate?, up?, down?);
            let mlp = GatedMlp { gate: &gate, up: &up, down: &down };
            let whole = gated_mlp_onto(&arguments[0], &arguments[1], &mlp)?;
            let [z, u] = [&gate, &up].map(|w| linear(&arguments[1], w, None));
            let parts = linear_onto(&arguments[0], &swiglu(&z?, &u?)?, &down, None)?;
            assert_close("parts", &whole, &parts, 0.0);
            let one = |t: &Var| t.narrow(0, 7, 1);
            let alone = gated_mlp_onto(&one(&arguments[0])?, &one(&arguments[1])?, &mlp)?;
            assert_close("one row", &alone, &whole.narrow(0, 7, 1)?, 0.0);
        }
        Ok(())
    }

    #[test]
    fn views_and_frozen_16_bit_weights_train_what_lies_below() -> Result<()> {
        let mut noise = Noise::new(8);
        let (below, residual) = (noise.var(&[12, 9]), noise.var(&[9, 10]));
        let arguments = arguments(&mut noise, 9, 12, 20);
        let [gate, up, down] =
            [&arguments[2], &arguments[3], &arguments[4]].map(|w| w.detach().to_dtype(DType::BF16));
        let (gate, up, down) = (gate?, up?, down?);
        let down = down.narrow(0, 0, 10)?;
        let mlp = GatedMlp { gate: &gate, up: &up, down: &down };
        // Columns as rows, without a copy.
        let x = below.t()?;
        let own = gated_mlp_onto(&residual, &x, &mlp)?.sqr()?.sum_all()?.gradients()?;
        let want = reference(&residual, &x, &mlp)?.sqr()?.sum_all()?.gradients()?;
        for var in [&below, &residual] {
            assert_close("below", own.get(var).expect("own"), want.get(var).expect("plain"), 1e-5);
        }
        assert!(own.get(&gate).is_none() && own.get(&down).is_none());
        Ok(())
    }

    #[test]
    fn only_what_trains_gets_a_gradient() -> Result<()> {
        let mut noise = Noise::new(5);
        let arguments = arguments(&mut noise, 5, 8, 12);
        for trained in 0..arguments.len() {
            let given: Vec<Tensor> = arguments
                .iter()
                .enumerate()
                .map(|(i, var)| if i == trained { var.as_tensor().clone() } else { var.detach() })
                .collect();
            let mlp = GatedMlp { gate: &given[2], up: &given[3], down: &given[4] };
            let loss = || gated_mlp_onto(&given[0], &given[1], &mlp)?.sqr()?.sum_all();
            let want = reference(&given[0], &given[1], &mlp)?.sqr()?.sum_all()?.gradients()?;
            let want = want.get(&arguments[trained]).expect("plain");
            for own in [loss()?.gradients()?, emulated(|| loss()?.gradients())?] {
                for (i, var) in arguments.iter().enumerate() {
                    assert_eq!(own.get(var).is_some(), i == trained, "argument {i}");
                }
                assert_close("trained", own.get(&arguments[trained]).expect("own"), want, 1e-5);
            }
        }
        Ok(())
    }

    #[test]
    fn reference_gradient_matches_differences() {
        let mut noise = Noise::new(6);
        let shapes = [[2, 3], [2, 3], [4, 3], [4, 3], [3, 4]];
        gradcheck(&shapes.map(|shape| noise.tensor(&shape)), |t| {
            reference(&t[0], &t[1], &GatedMlp { gate: &t[2], up: &t[3], down: &t[4] })
        });
    }

    #[test]
    fn wrong_shapes_are_errors() {
        let mut noise = Noise::new(7);
        let shapes = [[3, 4], [3, 4], [6, 4], [6, 4], [4, 6]];
        for wrong in 0..shapes.len() {
            let mut shapes = shapes;
            shapes[wrong][1] += 1;
            let t = shapes.map(|shape| noise.tensor(&shape));
            let mlp = GatedMlp { gate: &t[2], up: &t[3], down: &t[4] };
            assert!(gated_mlp_onto(&t[0], &t[1], &mlp).is_err(), "argument {wrong}");
        }
    }
}
