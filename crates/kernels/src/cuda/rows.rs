//! Norms, rotations, gates and sums of rows: one pass over memory each.

use std::sync::LazyLock;

use candle_core::{DType, Device, Result, Shape, Tensor};

use super::{Argument, Launch, Program, aligned, exactly, upload};
use crate::graph::differentiable_new;
use crate::sums::Sums;

/// Pieces of rows that one start sums side by side: what a grid can have in its second direction.
const MOST_PIECES: usize = 65_535;

static PROGRAM: LazyLock<Program> = LazyLock::new(program);

pub(super) fn program() -> Program {
    Program::new("rows", concat!(include_str!("values.cu"), include_str!("rows.cu")), &[])
        .overlapping()
}

pub(super) const THREADS: usize = 256;
/// Values of a row that a thread of a norm keeps: `4 * HELD` of the kernels.
const HELD: usize = 16;
const WARP: usize = 32;
/// Most threads of a block.
const MOST_THREADS: usize = 1024;
/// So many pieces of rows, or more, are not copied by one start.
const MOST_COPIED: usize = 1 << 31;
/// Values that a thread rounds.
const ROUNDED: usize = 8;
/// Values that a thread gates or copies.
const EACH: usize = 4;
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
    let (x, weight) = (aligned(x)?, aligned(weight)?);
    let hidden = weight.elem_count();
    let rows = x.elem_count() / hidden.max(1);
    let launch = Launch {
        program: &PROGRAM,
        kernel: "rms_norm",
        grid: [rows, 1, 1],
        threads: threads_of_row(hidden),
        memory: 0,
        arguments: &[(&x).into(), (&weight).into(), hidden.into(), eps.into()],
        results: &[x.shape().clone()],
    };
    let [out] = exactly(launch.run(x.device())?)?;
    let (of_x, of_weight) = (x.detach(), weight.detach());
    let want = [x.track_op(), weight.track_op()];
    differentiable_new("rms_norm", [&x, &weight, &weight], out, move |gradient| {
        let gradient = aligned(gradient)?;
        let launch = Launch {
            program: &PROGRAM,
            kernel: "rms_norm_backward",
            grid: [rows, 1, 1],
            threads: threads_of_row(hidden),
            memory: 0,
            arguments: &[
                (&of_x).into(),
                (&of_weight).into(),
                (&gradient).into(),
                hidden.into(),
                eps.into(),
            ],
            results: &[of_x.shape().clone(), Shape::from(rows)],
        };
        let [dx, inverse] = exactly(launch.run(of_x.device())?)?;
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

/// Threads of a norm's block, each of which keeps [`HELD`] values of a row.
pub(super) fn threads_of_row(hidden: usize) -> usize {
    hidden.div_ceil(HELD).next_multiple_of(WARP).clamp(WARP, MOST_THREADS)
}

/// [`crate::rope::Rope::table`] made on a device: cos and sin, `[T, R/2]` each, of some positions and frequencies.
pub(crate) fn rope_table(
    positions: &[u32],
    frequencies: &[f32],
    amplitude: f32,
    device: &Device,
) -> Result<[Tensor; 2]> {
    let half = frequencies.len();
    let values = positions.len() * half;
    let (at, frequencies) = (upload(positions, device)?, upload(frequencies, device)?);
    let arguments: [Argument<'_>; 5] =
        [(&at).into(), (&frequencies).into(), values.into(), half.into(), Argument::F32(amplitude)];
    let shape = Shape::from((positions.len(), half));
    let grid = [values.div_ceil(THREADS), 1, 1];
    exactly(run("rope_table", grid, &arguments, &[shape.clone(), shape], &at)?)
}

/// [`crate::rope::rope`] of `[T, N, D]`.
pub(crate) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?;
    let (cos, sin) = (cos.contiguous()?, sin.contiguous()?);
    let out = rotated(&x, &cos, &sin, 1.0)?;
    differentiable_new("rope", [&x; 3], out, move |gradient| {
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
    let grid = [count.div_ceil(EACH * THREADS), 1, 1];
    let arguments = [(&gate).into(), (&up).into(), count.into()];
    let [out] = exactly(run("swiglu", grid, &arguments, &[gate.shape().clone()], &gate)?)?;
    let (of_gate, of_up) = (gate.detach(), up.detach());
    differentiable_new("swiglu", [&gate, &up, &up], out, move |gradient| {
        let [d_gate, d_up] = swiglu_gradients(&of_gate, &of_up, gradient, DType::F32)?;
        Ok([Some(d_gate), Some(d_up), None])
    })
}

/// Gradients of both arguments of [`swiglu`], which lie in order, in f32 or bf16.
pub(crate) fn swiglu_gradients(
    gate: &Tensor,
    up: &Tensor,
    gradient: &Tensor,
    dtype: DType,
) -> Result<[Tensor; 2]> {
    let gradient = gradient.contiguous()?;
    let count = gate.elem_count();
    let half = dtype == DType::BF16;
    let arguments: [Argument<'_>; 5] =
        [gate.into(), up.into(), (&gradient).into(), count.into(), half.into()];
    let shape = gate.shape().clone();
    let launch = Launch {
        program: &PROGRAM,
        kernel: "swiglu_backward",
        grid: [count.div_ceil(EACH * THREADS), 1, 1],
        threads: THREADS,
        memory: 0,
        arguments: &arguments,
        results: &[shape.clone(), shape],
    };
    exactly(launch.run_as(gate.device(), &[dtype, dtype])?)
}

/// The rows `ids` of `x`, `[T, ..]`, without a gradient; `None` if rows are no multiples of 16 bytes, an id
/// lies outside, or it is no case for the kernel otherwise.
pub(crate) fn some_rows(x: &Tensor, ids: &[u32]) -> Result<Option<Tensor>> {
    let (dtype, [of, rest @ ..]) = (x.dtype(), x.dims()) else { return Ok(None) };
    let width: usize = rest.iter().product();
    let (in_16, bytes) = (16 / dtype.size_in_bytes().max(1), width * dtype.size_in_bytes());
    let count = ids.len() * (bytes / 16);
    let lies_well = x.is_contiguous() && x.layout().start_offset().is_multiple_of(in_16.max(1));
    let fits = matches!(dtype, DType::F32 | DType::BF16) && bytes.is_multiple_of(16);
    let inside = ids.iter().all(|id| (*id as usize) < *of);
    if !(fits && lies_well && inside && (1..MOST_COPIED).contains(&count)) {
        return Ok(None);
    }
    let at = upload(ids, x.device())?;
    let launch = Launch {
        program: &PROGRAM,
        kernel: "some_rows",
        grid: [count.div_ceil(THREADS), 1, 1],
        threads: THREADS,
        memory: 0,
        arguments: &[x.into(), (&at).into(), (bytes / 16).into(), count.into()],
        results: &[Shape::from([&[ids.len()], rest].concat())],
    };
    let [out] = exactly(launch.run_as(x.device(), &[dtype])?)?;
    Ok(Some(out))
}

/// Values in bf16.
pub(crate) fn to_halves(x: &Tensor) -> Result<Tensor> {
    let x = aligned(x)?;
    let arguments = [(&x).into(), x.elem_count().into()];
    let results = [x.shape().clone()];
    let launch = rounding(&arguments, &results, x.elem_count());
    let [out] = exactly(launch.run_as(x.device(), &[DType::BF16])?)?;
    Ok(out)
}

/// The same into as many contiguous bf16 values that exist; false if they begin at no multiple of 16 bytes.
pub(crate) fn put_halves(x: &Tensor, into: &Tensor) -> Result<bool> {
    if !into.layout().start_offset().is_multiple_of(ROUNDED) || x.elem_count() != into.elem_count()
    {
        return Ok(false);
    }
    let x = aligned(x)?;
    let arguments = [(&x).into(), x.elem_count().into()];
    rounding(&arguments, &[], x.elem_count()).run_into(into)?;
    Ok(true)
}

fn rounding<'a>(arguments: &'a [Argument<'a>], results: &'a [Shape], count: usize) -> Launch<'a> {
    let grid = [count.div_ceil(ROUNDED * THREADS), 1, 1];
    let (program, kernel) = (&*PROGRAM, "to_halves");
    Launch { program, kernel, grid, threads: THREADS, memory: 0, arguments, results }
}

/// Columns `from` to `from + columns` of `[R, width]` values.
pub(crate) fn some_columns(x: &Tensor, from: usize, columns: usize) -> Result<Tensor> {
    let x = aligned(x)?;
    let (rows, width) = x.dims2()?;
    let count = rows * columns;
    let arguments: [Argument<'_>; 5] =
        [(&x).into(), width.into(), from.into(), columns.into(), count.into()];
    let grid = [count.div_ceil(EACH * THREADS), 1, 1];
    let [out] =
        exactly(run("some_columns", grid, &arguments, &[Shape::from((rows, columns))], &x)?)?;
    Ok(out)
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
mod tests;
