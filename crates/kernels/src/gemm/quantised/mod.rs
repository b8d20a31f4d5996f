//! Products with a right operand of quantised blocks.
//!
//! With few rows every block is read once and widened in registers; with more, columns are widened
//! to f32 in parts. Values, and the order in which they are added, are those of the widened
//! matrix: so are the bits of the product.

mod format;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use rayon::prelude::*;

use super::blocks::{Output, block, depth_of};
use super::micro::{Destination, Isa, store};
use super::unpacked::{self, MOST_ROWS, ROWS};
use super::{Mat, SMALLEST_TASK};
pub use format::BlockFormat;
use format::copy_row;
pub(crate) use format::{BLOCK, GROUP, side_by_side};

/// Values that are widened at a time for a product with many rows.
const WIDENED: usize = 1 << 22;

/// A `[steps, columns]` operand: a column is a row of the stored matrix, and 16 columns lie side by
/// side.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'a> {
    data: &'a [u8],
    format: BlockFormat,
    /// Steps, a multiple of [`BLOCK`].
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl<'a> Blocks<'a> {
    /// The transposed view of an `[outputs, inputs]` matrix that went through [`side_by_side`].
    pub(crate) fn transposed(
        data: &'a [u8],
        format: BlockFormat,
        outputs: usize,
        inputs: usize,
    ) -> Self {
        assert!(inputs.is_multiple_of(BLOCK), "a row does not consist of blocks");
        let view = Self { data, format, rows: inputs, cols: outputs };
        assert_eq!(data.len(), outputs.div_ceil(GROUP) * view.stride(), "bytes of a matrix");
        view
    }

    /// Bytes from one group of columns to the next.
    fn stride(&self) -> usize {
        self.rows / BLOCK * self.format.bytes() * GROUP
    }

    /// Some columns, from the first of a group on.
    pub(super) fn columns(self, range: Range<usize>) -> Self {
        assert!(range.start.is_multiple_of(GROUP), "columns begin within a group");
        let groups = range.start / GROUP..range.end.div_ceil(GROUP);
        let data = &self.data[groups.start * self.stride()..groups.end * self.stride()];
        Self { data, cols: range.len(), ..self }
    }

    /// The group that a column lies in, and its place there.
    fn group_of(&self, col: usize) -> (&'a [u8], usize) {
        (&self.data[col / GROUP * self.stride()..][..self.stride()], col % GROUP)
    }

    /// The values of a group's columns, step after step.
    fn each_step(&self, group: &[u8], mut each: impl FnMut(usize, &[f32; GROUP])) {
        let size = GROUP * self.format.bytes();
        for (block, bytes) in group.chunks_exact(size).enumerate() {
            self.format.each_step(bytes, |step, values| each(block * BLOCK + step, values));
        }
    }

    /// All values, column by column.
    pub(crate) fn widened(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        let columns = out.par_chunks_mut((GROUP * self.rows).max(1));
        columns.zip(self.data.par_chunks(self.stride().max(1))).for_each(|(out, group)| {
            self.each_step(group, |step, values| {
                for (out, value) in out.chunks_exact_mut(self.rows).zip(values) {
                    out[step] = *value;
                }
            });
        });
        out
    }

    /// The bytes of some columns, side by side again.
    pub(crate) fn gathered(&self, cols: &[u32]) -> Vec<u8> {
        let mut out = vec![0; cols.len().div_ceil(GROUP) * self.stride()];
        for (out, cols) in out.chunks_exact_mut(self.stride().max(1)).zip(cols.chunks(GROUP)) {
            for (lane, col) in cols.iter().enumerate() {
                copy_row(self.format, self.group_of(*col as usize), out, lane);
            }
        }
        out
    }

    /// One column.
    pub(crate) fn column(&self, col: usize) -> Vec<f32> {
        let (group, row) = self.group_of(col);
        let mut out = vec![0.0; self.rows];
        let blocks = group.chunks_exact(GROUP * self.format.bytes());
        for (block, out) in blocks.zip(out.chunks_exact_mut(BLOCK)) {
            self.format.widen_row(block, row, out);
        }
        out
    }
}

/// `dst = a · b`, or `dst += a · b` with `accumulate`; `dst` is row-major without gaps.
pub(crate) fn matmul_quantised(dst: &mut [f32], a: Mat<'_>, b: Blocks<'_>, accumulate: bool) {
    assert_eq!(a.cols, b.rows, "inner sizes of a product differ");
    assert!(a.rows * b.cols <= dst.len(), "product leaves its destination");
    if a.rows <= MOST_ROWS {
        few_rows(Isa::detect(), dst, a, b, accumulate);
        return;
    }
    let columns = (WIDENED / b.rows.max(1)).next_multiple_of(GROUP);
    for first in (0..b.cols).step_by(columns) {
        let part = b.columns(first..(first + columns).min(b.cols));
        let values = part.widened();
        let right = Mat::rows(&values, part.cols, b.rows, b.rows).t();
        super::matmul(&mut dst[first..], b.cols, a, right, accumulate, super::Threads::Pool);
    }
}

fn few_rows(isa: Isa, dst: &mut [f32], a: Mat<'_>, b: Blocks<'_>, accumulate: bool) {
    let whole = Output { at: dst.as_mut_ptr(), stride: b.cols, accumulate };
    let width = if a.rows * b.cols * a.cols < 2 * SMALLEST_TASK {
        b.cols.next_multiple_of(GROUP).max(GROUP)
    } else {
        unpacked::TASK_COLUMNS
    };
    (0..b.cols.div_ceil(width)).into_par_iter().for_each(|task| {
        let range = task * width..((task + 1) * width).min(b.cols);
        // SAFETY: the caller bounds the product to `dst`, of which tasks have disjoint columns.
        unsafe {
            let part = Output { at: whole.pointer().add(range.start), ..whole };
            columns(isa, part, a, b.columns(range));
        }
    });
}

/// One task's product, on the calling thread.
///
/// # Safety
/// `dst` is writable for `a.rows` x `b.cols` elements, and nobody else touches them; `a` has as
/// many columns as `b` rows, and at most [`MOST_ROWS`] rows.
pub(super) unsafe fn columns(isa: Isa, dst: Output, a: Mat<'_>, b: Blocks<'_>) {
    if a.cols == 0 {
        // SAFETY: passed on to the caller.
        unsafe { block::<f32>(isa, dst, a, Mat::rows(&[], 0, b.cols, b.cols)) };
        return;
    }
    assert_eq!(a.col_stride, 1, "rows of the left operand have gaps");
    let depth = depth_of(a.cols);
    let size = GROUP * b.format.bytes();
    for first_col in (0..b.cols).step_by(TOGETHER * GROUP) {
        let cols = (TOGETHER * GROUP).min(b.cols - first_col);
        for first_step in (0..a.cols).step_by(depth) {
            let steps = first_step..(first_step + depth).min(a.cols);
            let a = a.columns(steps.clone());
            let start = first_col / GROUP * b.stride() + first_step / BLOCK * size;
            for first_row in (0..a.rows).step_by(ROWS) {
                let rows = ROWS.min(a.rows - first_row);
                // SAFETY: row and column lie within the destination.
                let Output { at, stride, accumulate } =
                    unsafe { dst.part(first_row, first_col, first_step) };
                let tile = Tile {
                    format: b.format,
                    left: &a.data[first_row * a.row_stride..],
                    left_stride: a.row_stride,
                    blocks: a.cols / BLOCK,
                    right: &b.data[start..],
                    right_stride: b.stride(),
                };
                // SAFETY: the views bound both operands; the caller vouches for the destination.
                unsafe { tile.run(isa, Destination { at, stride, rows, cols, accumulate }) };
            }
        }
    }
}

/// Groups of columns that are worked on together, so that enough sums are independent.
const TOGETHER: usize = 2;

/// Some rows times the blocks of at most [`TOGETHER`] groups of columns.
#[derive(Clone, Copy)]
struct Tile<'a> {
    format: BlockFormat,
    /// The first row's first step on.
    left: &'a [f32],
    left_stride: usize,
    /// Blocks of a column.
    blocks: usize,
    /// The first group's first block on.
    right: &'a [u8],
    /// From one group to the next.
    right_stride: usize,
}

impl Tile<'_> {
    /// # Safety
    /// The CPU has the instruction set; both operands reach as far as the tile, and `dst` is
    /// writable for its rows and columns.
    unsafe fn run(self, isa: Isa, dst: Destination) {
        // SAFETY: passed on to the caller.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => x86::avx512(self, dst),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => x86::avx2(self, dst),
                Isa::Portable => self.portable(dst),
            }
        }
    }

    /// # Safety
    /// `dst` is writable for its rows and columns.
    unsafe fn portable(self, dst: Destination) {
        let size = GROUP * self.format.bytes();
        for first in (0..dst.cols).step_by(GROUP) {
            let right = &self.right[first / GROUP * self.right_stride..][..self.blocks * size];
            let mut sums = [[0.0_f32; GROUP]; ROWS];
            for (block, bytes) in right.chunks_exact(size).enumerate() {
                self.format.each_step(bytes, |step, values| {
                    for (row, sums) in sums.iter_mut().take(dst.rows).enumerate() {
                        let x = self.left[row * self.left_stride + block * BLOCK + step];
                        for (sum, value) in sums.iter_mut().zip(values) {
                            *sum = x.mul_add(*value, *sum);
                        }
                    }
                });
            }
            for (row, sums) in sums.iter().take(dst.rows).enumerate() {
                // SAFETY: the row lies within the destination.
                unsafe { store(sums, dst, row, first) };
            }
        }
    }
}

#[cfg(test)]
mod tests;
