//! Norms, rotations, gates and sums of rows: one pass over memory each.

use std::sync::{LazyLock, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Shape, Tensor, bail};

use super::{Argument, Arguments, Launch, Program, aligned, upload, upload_words};
use crate::graph::{differentiable_new, differentiable_rounded};
use crate::sums::Sums;

/// Pieces of rows that one start sums side by side: what a grid can have in its second direction.
const MOST_PIECES: usize = 65_535;

static PROGRAM: LazyLock<Program> = LazyLock::new(program);

pub(super) fn program() -> Program {
    Program::new("rows", concat!(include_str!("values.cu"), include_str!("rows.cu")), &[])
        .overlapping()
}

/// What blocks of its kernels have, where rows are 4096 wide.
#[cfg(all(test, feature = "cuda"))]
pub(super) fn kernel_blocks() -> Vec<super::Block> {
    let norms = ["rms_norm", "rms_norm_backward"].map(|kernel| (kernel, threads_of_row(4096)));
    let rest = [
        "rms_norm_weight",
        "rope_table",
        "rope",
        "rope_to_halves",
        "swiglu",
        "swiglu_backward",
        "some_rows",
        "some_wide_rows",
        "to_halves",
        "put_halves",
        "some_columns",
        "sum_rows",
    ];
    let all = norms.into_iter().chain(rest.map(|kernel| (kernel, THREADS)));
    all.map(|(kernel, threads)| super::Block::plain(kernel, threads)).collect()
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
/// Sets of frequencies that are kept on devices.
const MOST_FREQUENCIES: usize = 16;
/// Rows of which a block sums a weight's gradient.
const ROWS_EACH: usize = 128;

/// Blocks of which every thread has so many of `count` values.
fn blocks(count: usize, each: usize) -> ([usize; 3], usize) {
    ([count.div_ceil(each * THREADS), 1, 1], THREADS)
}

/// [`crate::rms_norm::rms_norm`] of `[.., H]`.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let (x, weight) = (aligned(x)?, aligned(weight)?);
    let hidden = weight.elem_count();
    let rows = x.elem_count() / hidden.max(1);
    let block_a_row = ([rows, 1, 1], threads_of_row(hidden));
    let arguments = [(&x).into(), (&weight).into(), hidden.into(), eps.into()];
    let [out] = Launch::new(&PROGRAM, "rms_norm", block_a_row, &arguments)
        .run(x.device(), [x.shape().clone()])?;
    let (of_x, of_weight) = (x.detach(), weight.detach());
    let want = [x.track_op(), weight.track_op()];
    differentiable_new("rms_norm", [&x, &weight, &weight], out, move |gradient| {
        let gradient = aligned(gradient)?;
        let arguments = Arguments::of([&of_x, &of_weight, &gradient]).and([hidden]).and([eps]);
        let [dx, inverse] = Launch::new(&PROGRAM, "rms_norm_backward", block_a_row, &arguments)
            .run(of_x.device(), [of_x.shape().clone(), Shape::from(rows)])?;
        let dw = if want[1] {
            let rows_each = ROWS_EACH.max(rows.div_ceil(MOST_PIECES));
            let pieces = rows.div_ceil(rows_each);
            let arguments =
                Arguments::of([&of_x, &gradient, &inverse]).and([rows, hidden, rows_each]);
            let blocks = ([hidden.div_ceil(THREADS), pieces, 1], THREADS);
            let [sums] = Launch::new(&PROGRAM, "rms_norm_weight", blocks, &arguments)
                .run(of_x.device(), [Shape::from((pieces, hidden))])?;
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
    let (at, frequencies) = (upload_words(positions, device)?, kept(frequencies, device)?);
    let arguments =
        [(&at).into(), (&frequencies).into(), values.into(), half.into(), Argument::F32(amplitude)];
    let shape = Shape::from((positions.len(), half));
    Launch::new(&PROGRAM, "rope_table", blocks(values, 1), &arguments)
        .run(device, [shape.clone(), shape])
}

/// Frequencies on a device. A process has few, and passes find them at the same place.
fn kept(frequencies: &[f32], device: &Device) -> Result<Tensor> {
    static KEPT: Mutex<Vec<(Vec<u32>, Tensor)>> = Mutex::new(Vec::new());
    let bits: Vec<u32> = frequencies.iter().map(|value| value.to_bits()).collect();
    let mut all = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let same = |(own, on): &&(Vec<u32>, Tensor)| *own == bits && on.device().same_device(device);
    if let Some((_, known)) = all.iter().find(same) {
        return Ok(known.clone());
    }
    let new = upload(frequencies, device)?;
    all.truncate(MOST_FREQUENCIES - 1);
    all.insert(0, (bits, new.clone()));
    Ok(new)
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

/// The same rounded to bf16, for heads of a multiple of 8 values; its gradient is f32.
pub(crate) fn rope_to_halves(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let [x, cos, sin] = [aligned(x)?, aligned(cos)?, aligned(sin)?];
    let (_, heads, head_dim) = x.dims3()?;
    let count = x.elem_count() / (2 * EACH);
    let arguments = Arguments::of([&x, &cos, &sin]).and([count, heads, head_dim / (2 * EACH)]);
    let [out] = Launch::new(&PROGRAM, "rope_to_halves", blocks(count, 1), &arguments)
        .run_as(x.device(), &[(x.shape().clone(), DType::BF16)])?;
    differentiable_rounded("rope", [&x; 3], out, move |gradient| {
        Ok([Some(rotated(&gradient.contiguous()?, &cos, &sin, -1.0)?), None, None])
    })
}

fn rotated(x: &Tensor, cos: &Tensor, sin: &Tensor, sign: f64) -> Result<Tensor> {
    let (_, heads, head_dim) = x.dims3()?;
    let pairs = x.elem_count() / 2;
    let arguments = Arguments::of([x, cos, sin]).and([pairs, heads, head_dim / 2]).and([sign]);
    let [out] = Launch::new(&PROGRAM, "rope", blocks(pairs, 1), &arguments)
        .run(x.device(), [x.shape().clone()])?;
    Ok(out)
}

/// [`crate::swiglu::swiglu`].
pub(crate) fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let (gate, up) = (gate.contiguous()?, up.contiguous()?);
    let count = gate.elem_count();
    let arguments = [(&gate).into(), (&up).into(), count.into()];
    let [out] = Launch::new(&PROGRAM, "swiglu", blocks(count, EACH), &arguments)
        .run(gate.device(), [gate.shape().clone()])?;
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
    let arguments = [gate.into(), up.into(), (&gradient).into(), count.into(), half.into()];
    let result = (gate.shape().clone(), dtype);
    Launch::new(&PROGRAM, "swiglu_backward", blocks(count, EACH), &arguments)
        .run_as(gate.device(), &[result.clone(), result])
}

/// The rows `ids` of `x`, `[T, ..]`, without a gradient; `None` if rows are no multiples of 16 bytes, an id
/// lies outside, or it is no case for the kernel otherwise.
pub(crate) fn some_rows(x: &Tensor, ids: &[u32]) -> Result<Option<Tensor>> {
    rows_as(x, ids, x.dtype())
}

/// The same of bf16 rows in f32.
pub(crate) fn some_wide_rows(x: &Tensor, ids: &[u32]) -> Result<Option<Tensor>> {
    if x.dtype() == DType::BF16 { rows_as(x, ids, DType::F32) } else { Ok(None) }
}

fn rows_as(x: &Tensor, ids: &[u32], wanted: DType) -> Result<Option<Tensor>> {
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
    let at = upload_words(ids, x.device())?;
    let arguments = [x.into(), (&at).into(), (bytes / 16).into(), count.into()];
    let shape = Shape::from([&[ids.len()], rest].concat());
    let kernel = if wanted == dtype { "some_rows" } else { "some_wide_rows" };
    let [out] = Launch::new(&PROGRAM, kernel, blocks(count, 1), &arguments)
        .run_as(x.device(), &[(shape, wanted)])?;
    Ok(Some(out))
}

/// Values in bf16.
pub(crate) fn to_halves(x: &Tensor) -> Result<Tensor> {
    let x = aligned(x)?;
    let arguments = [(&x).into(), x.elem_count().into()];
    let [out] = Launch::new(&PROGRAM, "to_halves", blocks(x.elem_count(), ROUNDED), &arguments)
        .run_as(x.device(), &[(x.shape().clone(), DType::BF16)])?;
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
    Launch::new(&PROGRAM, "to_halves", blocks(x.elem_count(), ROUNDED), &arguments)
        .run_into(into)?;
    Ok(true)
}

/// The same over rows of `into`, `[C, ..]` in bf16, from a row on that lies on the device as a u32; the rows have as many values as
/// those of `x`, a multiple of 8, and `into` has room for all of them.
pub(crate) fn put_halves_at(x: &Tensor, into: &Tensor, place: &Tensor) -> Result<()> {
    let x = aligned(x)?;
    let width: usize = into.dims().iter().skip(1).product();
    if width == 0 || !width.is_multiple_of(ROUNDED) || !x.elem_count().is_multiple_of(width) {
        bail!("put_halves: {:?} over rows of {:?}", x.shape(), into.shape());
    }
    let arguments = Arguments::of([&x, place]).and([width, x.elem_count()]);
    Launch::new(&PROGRAM, "put_halves", blocks(x.elem_count(), ROUNDED), &arguments).run_into(into)
}

/// Columns `from` to `from + columns` of `[R, width]` values.
pub(crate) fn some_columns(x: &Tensor, from: usize, columns: usize) -> Result<Tensor> {
    let x = aligned(x)?;
    let (rows, width) = x.dims2()?;
    let count = rows * columns;
    let arguments = [(&x).into(), width.into(), from.into(), columns.into(), count.into()];
    let [out] = Launch::new(&PROGRAM, "some_columns", blocks(count, EACH), &arguments)
        .run(x.device(), [Shape::from((rows, columns))])?;
    Ok(out)
}

/// Sums of rows of `x`, each added to its row of `base`, without a gradient.
pub(crate) fn sum_rows(x: &Tensor, base: Option<&Tensor>, sums: &Sums) -> Result<Tensor> {
    let device = x.device();
    let (from, places) = (upload(&sums.from, device)?, upload(&sums.places, device)?);
    let weights = sums.weights.as_deref().map(|all| upload(all, device)).transpose()?;
    sum_rows_by(x, base, [&from, &places], weights.as_ref())
}

/// The same where [`Sums`] lie on the device; weights are f32, or u32 of their bits.
pub(crate) fn sum_rows_by(
    x: &Tensor,
    base: Option<&Tensor>,
    [from, places]: [&Tensor; 2],
    weights: Option<&Tensor>,
) -> Result<Tensor> {
    let (x, base) = (x.contiguous()?, base.map(Tensor::contiguous).transpose()?);
    let width: usize = x.dims()[1..].iter().product();
    let rows = from.elem_count() - 1;
    let of_rows = base.as_ref().unwrap_or(&x);
    let arguments = Arguments::of([&x, of_rows, from, places, weights.unwrap_or(&x)])
        .and([base.is_some(), weights.is_some()])
        .and([width]);
    let blocks = ([rows, width.div_ceil(THREADS), 1], THREADS);
    let shape = Shape::from([&[rows], &x.dims()[1..]].concat());
    let [out] = Launch::new(&PROGRAM, "sum_rows", blocks, &arguments).run(x.device(), [shape])?;
    Ok(out)
}

#[cfg(test)]
mod tests;
