//! f32 matrix products of strided operands.
//!
//! The usual three levels (Goto and van de Geijn 2008): blocks of the right operand are packed into
//! panels that stay in the second-level cache, rows of the left one into tiles for the first, and
//! the inner kernel keeps a tile of the destination in registers. With few rows (decoding) nothing
//! is packed: the right operand is read once, at the speed of memory. The right operand may be stored in 16 bits: packing widens it. AVX-512 and AVX2 with
//! FMA are chosen at run time, plain Rust elsewhere.

mod element;
mod micro;
mod pack;
mod unpacked;

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

pub(crate) use element::Element;
use micro::{Destination, Isa};
use pack::{Buffer, LeftOrder, MAX_DEPTH, PANEL, ROW_STRIDE, STEP_STRIDE};

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

/// `dst = a · b`, or `dst += a · b` with `accumulate`; `dst` has rows `dst_stride` apart.
///
/// An element's bits depend on its row of `a` and its column of `b` alone: neither on the sizes of
/// the product nor on the number of threads.
pub(crate) fn matmul<T: Element>(
    dst: &mut [f32],
    dst_stride: usize,
    a: Mat<'_>,
    b: Mat<'_, T>,
    accumulate: bool,
    threads: Threads,
) {
    product(Isa::detect(), dst, dst_stride, (a, b), accumulate, threads);
}

fn product<T: Element>(
    isa: Isa,
    dst: &mut [f32],
    dst_stride: usize,
    (a, b): (Mat<'_>, Mat<'_, T>),
    accumulate: bool,
    threads: Threads,
) {
    assert_eq!(a.cols, b.rows, "inner sizes of a product differ");
    let (rows, cols) = (a.rows, b.cols);
    if rows == 0 || cols == 0 {
        return;
    }
    assert!((rows - 1) * dst_stride + cols <= dst.len(), "product leaves its destination");
    assert!(dst_stride >= cols, "rows of the destination overlap");
    let whole = Output { at: dst.as_mut_ptr(), stride: dst_stride, accumulate };
    let tasks = match threads {
        Threads::Pool => TASKS_PER_THREAD * rayon::current_num_threads(),
        Threads::One => 1,
    };
    if tasks == 1 || rows * cols * a.cols < SMALLEST_TASK * 2 {
        // SAFETY: the assertions above bound the whole product to `dst`.
        unsafe { block(isa, whole, a, b) };
        return;
    }
    // Columns are split first: then every part of `b` is packed once.
    let by_cols = cols >= PANEL * tasks;
    let (length, unit) = if by_cols { (cols, PANEL) } else { (rows, isa.tile_rows()) };
    let tasks = tasks.min(length.div_ceil(unit));
    let units = length.div_ceil(unit);
    (0..tasks).into_par_iter().for_each(|task| {
        let bound = |task: usize| (task * units / tasks * unit).min(length);
        let range = bound(task)..bound(task + 1);
        // SAFETY: the assertions above bound the whole product to `dst`; the tasks' ranges of
        // columns (or rows) are disjoint.
        unsafe {
            if by_cols {
                let part = Output { at: whole.pointer().add(range.start), ..whole };
                block(isa, part, a, b.columns(range));
            } else {
                let at = whole.pointer().add(range.start * dst_stride);
                block(isa, Output { at, ..whole }, a.t().columns(range).t(), b);
            }
        }
    });
}

/// Tasks for each thread, so that an uneven machine still ends together.
const TASKS_PER_THREAD: usize = 4;
/// Multiplications below which a task is not worth handing out.
const SMALLEST_TASK: usize = 1 << 17;
/// Rows of a left block.
const BLOCK_ROWS: usize = 168;
/// Values of a right block: half of a usual second-level cache.
const RIGHT_BLOCK: usize = 1 << 17;

/// The destination of a block, shared between tasks that write disjoint parts of it.
#[derive(Clone, Copy)]
struct Output {
    at: *mut f32,
    stride: usize,
    accumulate: bool,
}

impl Output {
    /// The pointer, through a method so that closures capture the whole (shareable) value.
    fn pointer(&self) -> *mut f32 {
        self.at
    }

    /// The part from an element on, for the sum from `first_step` on.
    ///
    /// # Safety
    /// The element lies within the destination.
    unsafe fn part(self, row: usize, col: usize, first_step: usize) -> Self {
        // SAFETY: passed on to the caller.
        let at = unsafe { self.at.add(row * self.stride + col) };
        Self { at, accumulate: self.accumulate || first_step > 0, ..self }
    }
}

// SAFETY: tasks write disjoint elements only, see `product`.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

/// Packed blocks of both operands, and a panel's values while they are widened.
#[derive(Default)]
struct Scratch {
    left: Buffer,
    right: Buffer,
    wide: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// One task's product, on the calling thread.
///
/// # Safety
/// `dst` is writable for `a.rows` x `b.cols` elements, and nobody else touches them.
unsafe fn block<T: Element>(isa: Isa, dst: Output, a: Mat<'_>, b: Mat<'_, T>) {
    if a.cols == 0 {
        for row in (0..a.rows).filter(|_| !dst.accumulate) {
            // SAFETY: the caller vouches for the row.
            unsafe { dst.at.add(row * dst.stride).write_bytes(0, b.cols) };
        }
        return;
    }
    // The split of the inner sum depends on its length only.
    let depth = a.cols.div_ceil(a.cols.div_ceil(MAX_DEPTH));
    SCRATCH.with_borrow_mut(|scratch| {
        // SAFETY: passed on to the caller.
        unsafe {
            if unpacked::fits(a, b) {
                unpacked::block(isa, dst, a, b, depth, &mut scratch.wide);
            } else if a.rows <= BLOCK_ROWS {
                few_rows(isa, dst, a, b, depth, scratch);
            } else {
                many_rows(isa, dst, a, b, depth, scratch);
            }
        }
    });
}

/// One left block: every panel is used as soon as it is packed.
///
/// # Safety
/// As [`block`].
unsafe fn few_rows<T: Element>(
    isa: Isa,
    dst: Output,
    a: Mat<'_>,
    b: Mat<'_, T>,
    depth: usize,
    Scratch { left, right, wide }: &mut Scratch,
) {
    for first_step in (0..a.cols).step_by(depth) {
        let steps = first_step..(first_step + depth).min(a.cols);
        let order = pack::left(a.columns(steps.clone()), isa.tile_rows(), left);
        for first_col in (0..b.cols).step_by(PANEL) {
            let cols = first_col..(first_col + PANEL).min(b.cols);
            let b = b.columns(cols).t().columns(steps.clone()).t();
            let right = right.get(PANEL * b.rows);
            pack::right(b, right, wide);
            let sizes = (a.rows, b.cols, b.rows);
            // SAFETY: the column lies within the destination; both blocks were just packed for
            // these sizes.
            unsafe {
                let dst = dst.part(0, first_col, first_step);
                tiles(isa, dst, order, sizes, left.all(), right);
            }
        }
    }
}

/// Right blocks in the second-level cache, each for all left blocks.
///
/// # Safety
/// As [`block`].
unsafe fn many_rows<T: Element>(
    isa: Isa,
    dst: Output,
    a: Mat<'_>,
    b: Mat<'_, T>,
    depth: usize,
    Scratch { left, right, wide }: &mut Scratch,
) {
    let width = (RIGHT_BLOCK / depth / PANEL * PANEL).max(PANEL);
    for first_col in (0..b.cols).step_by(width) {
        let cols = first_col..(first_col + width).min(b.cols);
        for first_step in (0..a.cols).step_by(depth) {
            let steps = first_step..(first_step + depth).min(a.cols);
            let b = b.columns(cols.clone()).t().columns(steps.clone()).t();
            let right = right.get(b.cols.div_ceil(PANEL) * PANEL * b.rows);
            pack::right(b, right, wide);
            for first_row in (0..a.rows).step_by(BLOCK_ROWS) {
                let rows = first_row..(first_row + BLOCK_ROWS).min(a.rows);
                let a = a.columns(steps.clone()).t().columns(rows).t();
                let order = pack::left(a, isa.tile_rows(), left);
                let sizes = (a.rows, b.cols, b.rows);
                // SAFETY: row and column lie within the destination; both blocks were just packed
                // for these sizes.
                unsafe {
                    let dst = dst.part(first_row, first_col, first_step);
                    tiles(isa, dst, order, sizes, left.all(), right);
                }
            }
        }
    }
}

/// All tiles of a packed left block times a packed right block.
///
/// # Safety
/// `left` and `right` hold packed blocks of `rows` x `depth` and `depth` x `cols`; `dst` is writable
/// for `rows` x `cols`.
unsafe fn tiles(
    isa: Isa,
    dst: Output,
    order: LeftOrder,
    (rows, cols, depth): (usize, usize, usize),
    left: &[f32],
    right: &[f32],
) {
    let tile = isa.tile_rows();
    for row in (0..rows).step_by(tile) {
        let start = match order {
            LeftOrder::Rows => row * ROW_STRIDE,
            LeftOrder::Steps => row / tile * depth * STEP_STRIDE,
        };
        for col in (0..cols).step_by(PANEL) {
            // SAFETY: `row < rows` and `col < cols`, and both blocks reach that far.
            unsafe {
                let part = Destination {
                    at: dst.at.add(row * dst.stride + col),
                    stride: dst.stride,
                    rows: tile.min(rows - row),
                    cols: PANEL.min(cols - col),
                    accumulate: dst.accumulate,
                };
                let (a, b) = (left.as_ptr().add(start), right.as_ptr().add(col * depth));
                isa.tile(order, depth, a, b, part);
            }
        }
    }
}

#[cfg(test)]
mod tests;
