//! The step where values, moments and gradients lie: on a GPU in one pass, elsewhere composed.

use std::sync::LazyLock;

use candle_core::{DType, Result, Shape, Tensor};

use super::{AdamWStep, BLOCK, Factors, square_sums};
use crate::cuda::{self, Argument, Arguments, Launch, Program};
use crate::dispatch::fused;
use crate::storage::host_f64;

static PROGRAM: LazyLock<Program> = LazyLock::new(program);

fn program() -> Program {
    Program::new("adamw", include_str!("gpu.cu"), &[])
}

const THREADS: usize = 256;
/// Values that a thread updates.
const VALUES: usize = 4;

/// To compile it without a device.
#[cfg(all(test, feature = "cuda"))]
pub(crate) fn compiled() -> cuda::Compiled {
    let blocks = ["adamw", "square_sums"].map(|kernel| cuda::Block::plain(kernel, THREADS));
    (program(), blocks.to_vec())
}

/// A tensor's values and moments, of one shape.
#[derive(Debug, Clone)]
pub struct AdamWState {
    /// Values.
    pub theta: Tensor,
    /// Mean of the gradients.
    pub first: Tensor,
    /// Mean of their squares.
    pub second: Tensor,
}

/// Whether a tensor's step is taken on its device: everywhere but on the CPU, whose fused step takes
/// slices.
pub fn stays_on_device(tensor: &Tensor) -> bool {
    !fused(&[tensor])
}

/// As [`super::adamw`], where the tensors lie: the new state.
///
/// # Errors
/// - shapes or devices differ, or the device has no memory for the new state
pub fn adamw_on_device(step: &AdamWStep, state: &AdamWState, g: &Tensor) -> Result<AdamWState> {
    let f = Factors::of(step);
    if !runs_kernel(state, g)? {
        return composed(&f, state, g);
    }
    let (state, _) = by_kernel(&f, state, g, false)?;
    Ok(state)
}

/// The same, and the new values in bf16, written in the same pass.
///
/// # Errors
/// - as [`adamw_on_device`]
pub fn adamw_with_halves(
    step: &AdamWStep,
    state: &AdamWState,
    g: &Tensor,
) -> Result<(AdamWState, Tensor)> {
    let f = Factors::of(step);
    if runs_kernel(state, g)? {
        return by_kernel(&f, state, g, true);
    }
    let state = composed(&f, state, g)?;
    let halves = state.theta.to_dtype(DType::BF16)?;
    Ok((state, halves))
}

/// Whether a kernel takes the step.
fn runs_kernel(state: &AdamWState, g: &Tensor) -> Result<bool> {
    let AdamWState { theta, first, second } = state;
    if [first, second, g].iter().any(|t| t.shape() != theta.shape()) {
        candle_core::bail!("adamw: {:?} against {:?}", g.shape(), theta.shape());
    }
    Ok(cuda::takes(&[theta, first, second, g]))
}

/// The new state, and its values in bf16 or, if they are not asked for, something without a meaning.
fn by_kernel(
    f: &Factors,
    state: &AdamWState,
    g: &Tensor,
    has_halves: bool,
) -> Result<(AdamWState, Tensor)> {
    let AdamWState { theta, first, second } = state;
    let tensors = [theta, first, second, g].map(Tensor::contiguous);
    let [theta, first, second, g] = tensors;
    let (theta, first, second, g) = (theta?.detach(), first?, second?, g?);
    let count = theta.elem_count();
    let of_moments = [f.beta1, f.beta2, f.keep1, f.keep2, f.correct1, f.correct2];
    let of_values = [f.shrink, f.rate, f.eps, f.grad_scale];
    let arguments = Arguments::of([&theta, &first, &second, &g])
        .and([count])
        .and(of_moments.map(Argument::F32))
        .and(of_values.map(Argument::F32))
        .and([has_halves]);
    let shape = theta.shape().clone();
    let of_halves = if has_halves { shape.clone() } else { Shape::from(1) };
    let result = (shape, DType::F32);
    let results = [result.clone(), result.clone(), result, (of_halves, DType::BF16)];
    let blocks = ([count.div_ceil(VALUES * THREADS), 1, 1], THREADS);
    let [theta, first, second, halves] =
        Launch::new(&PROGRAM, "adamw", blocks, &arguments).run_as(theta.device(), &results)?;
    Ok((AdamWState { theta, first, second }, halves))
}

fn composed(f: &Factors, state: &AdamWState, g: &Tensor) -> Result<AdamWState> {
    let times = |t: &Tensor, factor: f32| t.affine(f64::from(factor), 0.0);
    let g = times(g, f.grad_scale)?;
    let first = (times(&state.first, f.beta1)? + times(&g, f.keep1)?)?;
    let second = (times(&state.second, f.beta2)? + times(&g.sqr()?, f.keep2)?)?;
    let root = (times(&second, f.correct2)?.sqrt()? + f64::from(f.eps))?;
    let update = (times(&first, f.correct1)? / root)?;
    let theta = (times(&state.theta.detach(), f.shrink)? - times(&update, f.rate)?)?;
    Ok(AdamWState { theta, first, second })
}

/// As [`super::square_sum`], where the tensor lies; a kernel's sums of blocks are f32.
///
/// # Errors
/// - the values cannot be read
pub fn square_sum_on_device(g: &Tensor) -> Result<f64> {
    if cuda::takes(&[g]) {
        return Ok(square_sums_on_device(g)?.iter().sum());
    }
    Ok(host_f64(&g.sqr()?.sum_all()?)?.iter().sum())
}

/// As [`super::square_sums`], where a kernel takes the tensor there, in f32; in f64 on the host elsewhere.
///
/// # Errors
/// - the values cannot be read
pub fn square_sums_on_device(g: &Tensor) -> Result<Vec<f64>> {
    if !cuda::takes(&[g]) {
        return Ok(square_sums(&g.flatten_all()?.to_vec1::<f32>()?));
    }
    let g = g.contiguous()?;
    let count = g.elem_count();
    let blocks = count.div_ceil(BLOCK);
    if blocks == 0 {
        return Ok(Vec::new());
    }
    let arguments = [(&g).into(), count.into()];
    let [sums] = Launch::new(&PROGRAM, "square_sums", ([blocks, 1, 1], THREADS), &arguments)
        .run(g.device(), [Shape::from(blocks)])?;
    host_f64(&sums)
}

#[cfg(test)]
mod tests {
    use super::super::{adamw, square_sum};
    use super::*;
    use crate::check::optimizer::STEP;
    use crate::cuda::emulator::emulated;
    use crate::test_support::{Noise, assert_close};

    #[test]
    fn a_device_takes_the_steps_of_the_cpu() -> Result<()> {
        let mut noise = Noise::new(6);
        for shape in [vec![1], vec![3, 7], vec![40, 129]] {
            let (start, zeros) = (noise.tensor(&shape), noise.tensor(&shape).zeros_like()?);
            let flat = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
            let mut on_cpu = [flat(&start)?, flat(&zeros)?, flat(&zeros)?];
            let state = AdamWState { theta: start, first: zeros.clone(), second: zeros };
            let (mut of_kernel, mut of_ops) = (state.clone(), state);
            for n in 1..4 {
                let step = AdamWStep { step: n, ..STEP };
                let g = noise.tensor(&shape);
                let [theta, first, second] = &mut on_cpu;
                adamw(&step, theta, first, second, &flat(&g)?);
                let (written, halves) = emulated(|| adamw_with_halves(&step, &of_kernel, &g))?;
                of_kernel = emulated(|| adamw_on_device(&step, &of_kernel, &g))?;
                let (of_both, of_ops_halves) = adamw_with_halves(&step, &of_ops, &g)?;
                of_ops = adamw_on_device(&step, &of_ops, &g)?;
                // The copy is that of the new values, which it does not change.
                for (state, with, halves) in
                    [(&of_kernel, written, halves), (&of_ops, of_both, of_ops_halves)]
                {
                    assert_eq!(flat(&with.theta)?, flat(&state.theta)?);
                    let rounded = state.theta.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
                    assert_eq!(halves.dtype(), DType::BF16);
                    assert_eq!(flat(&halves.to_dtype(DType::F32)?)?, flat(&rounded)?);
                }
            }
            for own in [of_kernel, of_ops] {
                for (own, plain) in [own.theta, own.first, own.second].iter().zip(&on_cpu) {
                    let plain = Tensor::from_slice(plain, shape.clone(), own.device())?;
                    assert_close("state", own, &plain, 2e-6);
                }
            }
        }
        Ok(())
    }

    /// A value's new state by the kernel's formula, with its fused multiply-adds.
    fn fused_step(f: &Factors, [theta, m, v, g]: [f32; 4]) -> [f32; 3] {
        let g = g * f.grad_scale;
        let m = f.beta1.mul_add(m, f.keep1 * g);
        let v = f.beta2.mul_add(v, f.keep2 * g * g);
        let root = (v * f.correct2).sqrt() + f.eps;
        [theta.mul_add(f.shrink, -(f.rate * (m * f.correct1) / root)), m, v]
    }

    #[test]
    fn a_step_has_the_same_bits_wherever_values_lie() -> Result<()> {
        let (mut noise, count) = (Noise::new(9), 1003);
        let [theta, first, second, g] = [(); 4].map(|()| noise.tensor(&[count + 1]));
        let all = [theta, first, second.sqr()?, g];
        // By fours, and beginning where a kernel cannot read four at once.
        for start in [0, 1] {
            let [theta, first, second, g] = all.each_ref().map(|t| t.narrow(0, start, count));
            let (state, g) = (AdamWState { theta: theta?, first: first?, second: second? }, g?);
            let new = emulated(|| adamw_on_device(&STEP, &state, &g))?;
            let values = |t: &Tensor| t.to_vec1::<f32>();
            let of_state = |of: &AdamWState| -> Result<[Vec<f32>; 3]> {
                Ok([values(&of.theta)?, values(&of.first)?, values(&of.second)?])
            };
            let ([theta, m, v], g, new) = (of_state(&state)?, values(&g)?, of_state(&new)?);
            for i in 0..count {
                let want = fused_step(&Factors::of(&STEP), [theta[i], m[i], v[i], g[i]]);
                let own = new.each_ref().map(|values| values[i]);
                assert_eq!(own.map(f32::to_bits), want.map(f32::to_bits), "{i} from {start}");
            }
        }
        Ok(())
    }

    #[test]
    fn sums_of_squares_are_those_of_the_cpu() -> Result<()> {
        for count in [1, 700, 40_000] {
            let parts = emulated(|| square_sums_on_device(&Noise::new(2).tensor(&[count])))?;
            assert_eq!(parts.len(), count.div_ceil(BLOCK));
            let all = emulated(|| square_sum_on_device(&Noise::new(2).tensor(&[count])))?;
            assert_eq!(parts.iter().sum::<f64>().to_bits(), all.to_bits());
            let g = Noise::new(2).tensor(&[count]);
            let want = square_sum(&g.to_vec1::<f32>()?);
            for own in [emulated(|| square_sum_on_device(&g))?, square_sum_on_device(&g)?] {
                assert!((own - want).abs() < 1e-5 * want, "{own} against {want}");
            }
        }
        Ok(())
    }

    #[test]
    fn other_shapes_are_an_error() {
        let mut noise = Noise::new(1);
        let theta = noise.tensor(&[2, 3]);
        let state = AdamWState { first: theta.clone(), second: theta.clone(), theta };
        assert!(adamw_on_device(&STEP, &state, &noise.tensor(&[3, 2])).is_err());
    }
}
