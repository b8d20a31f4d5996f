//! Norms, rotations, gates and sums of rows: one pass over memory each.

use std::sync::LazyLock;

use candle_core::{Result, Shape, Tensor};

use super::{Argument, Launch, Program, exactly, upload};
use crate::composed::differentiable;
use crate::sums::Sums;

/// Pieces of rows that one start sums side by side: what a grid can have in its second direction.
const MOST_PIECES: usize = 65_535;

static PROGRAM: LazyLock<Program> =
    LazyLock::new(|| Program::new("rows", include_str!("rows.cu"), &[]));

const THREADS: usize = 256;
/// Rows of which a block sums a weight's gradient.
const ROWS_EACH: usize = 128;

fn run(
    kernel: &str,
    grid: [usize; 3],
    arguments: &[Argument<'_>],
    results: &[Shape],
    like: &Tensor,
) -> Result<Vec<Tensor>> {
    let program = &*PROGRAM;
    Launch { program, kernel, grid, threads: THREADS, memory: 0, arguments, results }
        .run(like.device())
}

/// [`crate::rms_norm::rms_norm`] of `[.., H]`.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let hidden = weight.elem_count();
    let rows = x.elem_count() / hidden.max(1);
    let arguments = [(&x).into(), (&weight).into(), hidden.into(), eps.into()];
    let [out] = exactly(run("rms_norm", [rows, 1, 1], &arguments, &[x.shape().clone()], &x)?)?;
    let (of_x, of_weight) = (x.detach(), weight.detach());
    let want = [x.track_op(), weight.track_op()];
    differentiable("rms_norm", [&x, &weight, &weight], out, move |gradient| {
        let gradient = gradient.contiguous()?;
        let arguments: [Argument<'_>; 5] =
            [(&of_x).into(), (&of_weight).into(), (&gradient).into(), hidden.into(), eps.into()];
        let shapes = [of_x.shape().clone(), Shape::from(rows)];
        let results = run("rms_norm_backward", [rows, 1, 1], &arguments, &shapes, &of_x)?;
        let [dx, inverse] = exactly(results)?;
        let dw = if want[1] {
            let rows_each = ROWS_EACH.max(rows.div_ceil(MOST_PIECES));
            let pieces = rows.div_ceil(rows_each);
            let arguments: [Argument<'_>; 6] = [
                (&of_x).into(),
                (&gradient).into(),
                (&inverse).into(),
                rows.into(),
                hidden.into(),
                rows_each.into(),
            ];
            let grid = [hidden.div_ceil(THREADS), pieces, 1];
            let shapes = [Shape::from((pieces, hidden))];
            let [sums] = exactly(run("rms_norm_weight", grid, &arguments, &shapes, &of_x)?)?;
            Some(sums.sum(0)?)
        } else {
            None
        };
        Ok([want[0].then_some(dx), dw, None])
    })
}

/// [`crate::rope::rope`] of `[T, N, D]`.
pub(crate) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?;
    let (cos, sin) = (cos.contiguous()?, sin.contiguous()?);
    let out = rotated(&x, &cos, &sin, 1.0)?;
    differentiable("rope", [&x; 3], out, move |gradient| {
        Ok([Some(rotated(&gradient.contiguous()?, &cos, &sin, -1.0)?), None, None])
    })
}

fn rotated(x: &Tensor, cos: &Tensor, sin: &Tensor, sign: f64) -> Result<Tensor> {
    let (_, heads, head_dim) = x.dims3()?;
    let pairs = x.elem_count() / 2;
    let arguments: [Argument<'_>; 7] = [
        x.into(),
        cos.into(),
        sin.into(),
        pairs.into(),
        heads.into(),
        (head_dim / 2).into(),
        sign.into(),
    ];
    let grid = [pairs.div_ceil(THREADS), 1, 1];
    let [out] = exactly(run("rope", grid, &arguments, &[x.shape().clone()], x)?)?;
    Ok(out)
}

/// [`crate::swiglu::swiglu`].
pub(crate) fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let count = gate.elem_count();
    let grid = [count.div_ceil(THREADS), 1, 1];
    let arguments = [(&gate).into(), (&up).into(), count.into()];
    let [out] = exactly(run("swiglu", grid, &arguments, &[gate.shape().clone()], &gate)?)?;
    let (of_gate, of_up) = (gate.detach(), up.detach());
    differentiable("swiglu", [&gate, &up, &up], out, move |gradient| {
        let gradient = gradient.contiguous()?;
        let arguments: [Argument<'_>; 4] =
            [(&of_gate).into(), (&of_up).into(), (&gradient).into(), count.into()];
        let shapes = [of_gate.shape().clone(), of_gate.shape().clone()];
        let [d_gate, d_up] = exactly(run("swiglu_backward", grid, &arguments, &shapes, &of_gate)?)?;
        Ok([Some(d_gate), Some(d_up), None])
    })
}

/// Sums of rows of `x`, each added to its row of `base`, without a gradient.
pub(crate) fn sum_rows(x: &Tensor, base: Option<&Tensor>, sums: &Sums) -> Result<Tensor> {
    let (x, base) = (x.contiguous()?, base.map(Tensor::contiguous).transpose()?);
    let width: usize = x.dims()[1..].iter().product();
    let rows = sums.rows();
    let device = x.device();
    let (from, places) = (upload(&sums.from, device)?, upload(&sums.places, device)?);
    let weights = sums.weights.as_deref().map(|all| upload(all, device)).transpose()?;
    let arguments: [Argument<'_>; 8] = [
        (&x).into(),
        base.as_ref().unwrap_or(&x).into(),
        (&from).into(),
        (&places).into(),
        weights.as_ref().unwrap_or(&x).into(),
        base.is_some().into(),
        weights.is_some().into(),
        width.into(),
    ];
    let grid = [rows, width.div_ceil(THREADS), 1];
    let shape = Shape::from([&[rows], &x.dims()[1..]].concat());
    let [out] = exactly(run("sum_rows", grid, &arguments, &[shape], &x)?)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Result, Tensor, Var};

    use super::super::emulator::emulated;
    use crate::rms_norm::rms_norm;
    use crate::rope::{Rope, RopeScaling, rope};
    use crate::swiglu::swiglu;
    use crate::test_support::{Noise, assert_close};

    /// The GPU's result and gradients against the CPU's, along a random direction.
    fn assert_same(op: impl Fn() -> Result<Tensor>, variables: &[&Var]) -> Result<()> {
        let plain = op()?;
        let direction = Noise::new(77).tensor(plain.dims());
        let through = |out: &Tensor| (out * &direction)?.sum_all()?.backward();
        let of_plain = through(&plain)?;
        emulated(|| {
            let own = op()?;
            assert_close("forward", &own, &plain, 1e-6);
            let of_own = through(&own)?;
            for (i, variable) in variables.iter().enumerate() {
                let own = of_own.get(variable).expect("a gradient");
                let plain = of_plain.get(variable).expect("a gradient");
                assert_close(&format!("gradient {i}"), own, plain, 1e-5);
            }
            Ok(())
        })
    }

    #[test]
    fn norms_match_the_cpu() -> Result<()> {
        for (seed, shape) in [(1, vec![1, 1]), (2, vec![3, 2, 48]), (3, vec![140, 321])] {
            let mut noise = Noise::new(seed);
            let (x, w) = (noise.var(&shape), noise.var(&shape[shape.len() - 1..]));
            assert_same(|| rms_norm(&x, &w, 1e-5), &[&x, &w])?;
            // Where only one trains.
            assert_same(|| rms_norm(&x, &w.detach(), 1e-5), &[&x])?;
            assert_same(|| rms_norm(&x.detach(), &w, 1e-5), &[&w])?;
        }
        Ok(())
    }

    #[test]
    fn rotations_match_the_cpu() -> Result<()> {
        for (tokens, heads, head_dim) in [(1, 1, 2), (33, 3, 16), (70, 1, 80)] {
            let positions: Vec<u32> = (0..tokens as u32).map(|t| t * 37).collect();
            let table =
                Rope::new(head_dim, 1e4, RopeScaling::None)?.table(&positions, &Device::Cpu)?;
            let x = Noise::new(4).var(&[tokens, heads, head_dim]);
            assert_same(|| rope(&x, &table), &[&x])?;
            let part = x.narrow(1, heads - 1, 1)?;
            assert_same(|| rope(&part, &table), &[&x])?;
        }
        Ok(())
    }

    #[test]
    fn gates_match_the_cpu_at_extremes_also() -> Result<()> {
        let mut noise = Noise::new(9);
        let (gate, up) = (noise.var(&[40, 300]), noise.var(&[40, 300]));
        for factor in [1.0, 8.0, 500.0] {
            let op = || swiglu(&(gate.as_tensor() * factor)?, &up);
            assert_same(op, &[&gate, &up])?;
        }
        Ok(())
    }

    #[test]
    fn nothing_is_computed_for_no_rows() -> Result<()> {
        let empty = Tensor::zeros((0, 4), candle_core::DType::F32, &Device::Cpu)?;
        let out = emulated(|| swiglu(&empty, &empty))?;
        assert_eq!(out.dims(), [0, 4]);
        Ok(())
    }
}
