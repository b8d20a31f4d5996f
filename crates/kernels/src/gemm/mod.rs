//! f32 matrix products of strided operands.
//!
//! The usual three levels (Goto and van de Geijn 2008): the right operand is packed into panels of
//! columns, of which the inner kernel keeps one in the first-level cache, rows of the left one are
//! packed into tiles, and a tile of the destination stays in registers. Panel and tile have the
//! widths of the instruction set ([`micro`]). With few rows (decoding) nothing is packed: the right
//! operand is read once, at the speed of memory. It may be stored in 16 bits: packing widens it.
//! AVX-512 and AVX2 with FMA are chosen at run time, plain Rust elsewhere. Where a training asks for it, factors of large
//! products are [`rounded`] to integers.

mod blocks;
mod element;
mod factors;
mod group;
mod micro;
mod pack;
pub(crate) mod quantised;
mod room;
mod rounded;
mod row_by_row;
mod symmetric;
mod unpacked;

use std::ops::Range;

pub(crate) use blocks::BLOCK_ROWS;
use blocks::{Output, block, shared_rows};
pub(crate) use element::Element;
use factors::Factors;
pub(crate) use group::{Product, Right, matmul_each};
use micro::Isa;
pub use quantised::BlockFormat;
pub(crate) use quantised::{BLOCK, Blocks, GROUP, MOST_ROWS, held_bytes, put_side_by_side};
pub(crate) use room::{Room, written};
pub(crate) use symmetric::matmul_symmetric;

use crate::settings::{least_rows, rounds_products};
use crate::threads::split;

/// A read-only strided matrix: element `(i, j)` is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a, T = f32> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T: Copy> Mat<'a, T> {
    /// A row-major matrix whose rows are `row_stride` values apart.
    pub(crate) fn rows(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        let mat = Self { data, rows, cols, row_stride, col_stride: 1 };
        assert!(mat.last_index() <= data.len(), "matrix view leaves its slice");
        mat
    }

    /// The transposed view of the same memory.
    pub(crate) fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// Some of the columns.
    fn columns(self, range: Range<usize>) -> Self {
        assert!(range.end <= self.cols, "columns leave their matrix");
        let start = (range.start * self.col_stride).min(self.data.len());
        Self { data: &self.data[start..], cols: range.len(), ..self }
    }

    fn last_index(&self) -> usize {
        if self.rows == 0 || self.cols == 0 {
            return 0;
        }
        (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride + 1
    }
}

/// Whether a product may use the thread pool.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// The calling thread only: for tiles inside an already parallel loop.
    One,
    /// The whole rayon pool.
    Pool,
}

/// `dst = a · b`, or `dst += a · b` with `accumulate`; `dst` has rows `dst_stride` apart. Without `accumulate` all values of
/// these rows are written, and none is read.
///
/// An element's bits depend on its row of `a` and its column of `b` alone: neither on the sizes of
/// the product nor on the number of threads. Whether factors are rounded ([`rounds`]) does depend on the sizes.
pub(crate) fn matmul<'d, T: Element>(
    dst: impl Into<Room<'d>>,
    dst_stride: usize,
    a: Mat<'_>,
    b: Mat<'_, T>,
    accumulate: bool,
    threads: Threads,
) {
    let rounded = threads == Threads::Pool && rounds((a.rows, a.cols, b.cols));
    let factors = Factors { rounded, ..Factors::detect() };
    product(factors, dst, dst_stride, (a, b), accumulate, threads);
}

/// [`matmul`] with rounded factors or not, whatever the thread asks for and however large it is.
pub(crate) fn matmul_as<'d, T: Element>(
    rounded: bool,
    dst: impl Into<Room<'d>>,
    dst_stride: usize,
    a: Mat<'_>,
    b: Mat<'_, T>,
    accumulate: bool,
    threads: Threads,
) {
    let factors = Factors { rounded, ..Factors::detect() };
    product(factors, dst, dst_stride, (a, b), accumulate, threads);
}

fn product<'d, T: Element>(
    factors: Factors,
    dst: impl Into<Room<'d>>,
    dst_stride: usize,
    (a, b): (Mat<'_>, Mat<'_, T>),
    accumulate: bool,
    threads: Threads,
) {
    assert_eq!(a.cols, b.rows, "inner sizes of a product differ");
    let (dst, rows, cols) = (dst.into(), a.rows, b.cols);
    if rows == 0 || cols == 0 {
        return;
    }
    assert!((rows - 1) * dst_stride + cols <= dst.len, "product leaves its destination");
    assert!(dst_stride >= cols, "rows of the destination overlap");
    let whole = Output { at: dst.at, stride: dst_stride, accumulate, diagonal: None };
    // SAFETY: the assertions above bound the whole product to `dst`; callers give instructions that were detected.
    unsafe { compute(factors, whole, (a, b), threads) };
}

/// A product that is not empty, in tasks.
///
/// # Safety
/// The CPU has the instruction set; `a.cols` is `b.rows`; `whole` is writable for `a.rows` x `b.cols` elements, and nobody else
/// touches them.
unsafe fn compute<T: Element>(
    factors: Factors,
    whole: Output,
    (a, b): (Mat<'_>, Mat<'_, T>),
    threads: Threads,
) {
    let (rows, cols) = (a.rows, b.cols);
    let tasks = match threads {
        Threads::Pool => tasks_of(factors, a, b, rayon::current_num_threads()),
        Threads::One => 1,
    };
    if tasks == 1 || rows * cols * a.cols < SMALLEST_TASK * 2 {
        // SAFETY: passed on to the caller.
        unsafe { block(factors, whole, a, b) };
        return;
    }
    // Columns are split first: then every part of `b` is packed once.
    let widths = factors.widths();
    let by_cols = cols >= widths.panel * tasks;
    let (length, unit) = if by_cols { (cols, widths.panel) } else { (rows, widths.tile) };
    let tasks = tasks.min(length.div_ceil(unit));
    let units = length.div_ceil(unit);
    if by_cols && a.rows > BLOCK_ROWS && a.cols > 0 {
        // SAFETY: passed on to the caller.
        unsafe { shared_rows(factors, whole, a, b, tasks) };
        return;
    }
    split(tasks, |task| {
        let bound = |task: usize| (task * units / tasks * unit).min(length);
        let range = bound(task)..bound(task + 1);
        // SAFETY: passed on to the caller; the tasks' ranges of columns (or rows) are disjoint.
        unsafe {
            if by_cols {
                block(factors, whole.part(0, range.start, 0), a, b.columns(range));
            } else {
                let part = whole.part(range.start, 0, 0);
                block(factors, part, a.t().columns(range).t(), b);
            }
        }
    });
}

/// Whether a product `[rows, inner] · [inner, cols]` has rounded factors: where the calling thread asked for it, the machine gains by
/// it, and the product is large enough to pay for rounding.
pub(crate) fn rounds((rows, inner, cols): (usize, usize, usize)) -> bool {
    rounds_products() && pays_for_rounding((rows.max(least_rows()), inner, cols))
}

/// Whether this machine computes a product `[rows, inner] · [inner, cols]` faster with rounded factors.
pub(crate) fn pays_for_rounding((rows, inner, cols): (usize, usize, usize)) -> bool {
    rows.min(inner).min(cols) >= SMALLEST_ROUNDED_SIDE
        && rows * inner * cols >= SMALLEST_ROUNDED
        && Isa::detect().gains_by_rounding()
}

/// Most rows of a product with an attention's tile whose columns are read where they lie.
pub(crate) fn rows_of_a_tile<T: Element>() -> usize {
    Isa::detect().most_rows_of_a_tile::<T>()
}

fn tasks_of<T: Element>(factors: Factors, a: Mat<'_>, b: Mat<'_, T>, threads: usize) -> usize {
    let Factors { isa, rounded } = factors;
    if !rounded && unpacked::fits(isa, a, b) {
        let most = 4 * TASKS_PER_THREAD * threads;
        return (b.cols / unpacked::TASK_COLUMNS).clamp(threads, most);
    }
    packed_tasks(isa, a.rows, b.cols, threads)
}

/// Tasks of a product whose operands are packed. With many rows a task reads all of the left operand
/// from beyond the caches, so it gets columns enough to make that worth while.
fn packed_tasks(isa: Isa, rows: usize, cols: usize, threads: usize) -> usize {
    let most = TASKS_PER_THREAD * threads;
    let columns = TASK_PANELS * isa.widths().panel;
    if rows > BLOCK_ROWS { (cols / columns).clamp(threads, most) } else { most }
}

/// Bytes that the thread which begins a product `[rows, inner] · [inner, cols]` keeps for the packed
/// left operand, whose values lie row by row or, `transposed`, column by column. 0 where every task
/// packs a block of its own.
pub(crate) fn kept_bytes(
    (rows, inner, cols): (usize, usize, usize),
    transposed: bool,
    threads: usize,
) -> usize {
    let factors = Factors { rounded: rounds((rows, inner, cols)), ..Factors::detect() };
    let isa = factors.isa;
    let tasks = packed_tasks(isa, rows, cols, threads);
    let alone = tasks == 1 || rows * cols * inner < SMALLEST_TASK * 2;
    if alone || rows <= BLOCK_ROWS || cols < isa.widths().panel * tasks {
        return 0;
    }
    blocks::shared_values(factors, !transposed, rows, inner) * size_of::<f32>()
}

/// Least size and multiplications of a product with rounded factors.
const SMALLEST_ROUNDED_SIDE: usize = 64;
const SMALLEST_ROUNDED: usize = 1 << 24;
/// Tasks for each thread, so that an uneven machine still ends together.
const TASKS_PER_THREAD: usize = 4;
/// Panels of columns of a task of many rows, at least, as far as every thread has one.
const TASK_PANELS: usize = 8;
/// Multiplications below which a task is not worth handing out.
const SMALLEST_TASK: usize = 1 << 17;
#[cfg(test)]
mod tests;
