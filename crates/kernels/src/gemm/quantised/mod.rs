//! Products with a right operand of quantised blocks.
//!
//! Blocks are never widened: activations become 8-bit fixed-point numbers, a scale for every 32 of
//! them, and codes are multiplied with them as integers, whose sums are exact. Four products cost one
//! instruction: decoding stays bound by memory with several rows too. An activation is off by at most
//! 1/254 of the largest of its 32, as in llama.cpp.
//!
//! An element's bits depend on its row and column alone: neither on the other rows nor on the
//! instruction set.

mod fixed;
mod format;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use rayon::prelude::*;

use super::SMALLEST_TASK;
use super::blocks::Output;
use super::micro::{Destination, Isa, store};
use super::unpacked::{ROWS, TASK_COLUMNS};
use fixed::FixedBlock;
pub(crate) use fixed::FixedRows;
pub use format::BlockFormat;
use format::copy_row;
pub(crate) use format::{BLOCK, GROUP, side_by_side};

use crate::threads::split;

/// Rows of a task: their fixed-point numbers fit the second-level cache.
const TASK_ROWS: usize = 256;

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

    /// All values, column by column.
    pub(crate) fn widened(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        let columns = out.par_chunks_mut((GROUP * self.rows).max(1));
        columns.zip(self.data.par_chunks(self.stride().max(1))).for_each(|(out, group)| {
            let size = GROUP * self.format.bytes();
            for (block, bytes) in group.chunks_exact(size).enumerate() {
                let apart = self.format.apart(bytes);
                for (row, out) in out.chunks_exact_mut(self.rows).enumerate() {
                    let out = &mut out[block * BLOCK..][..BLOCK];
                    out.iter_mut().enumerate().for_each(|(i, out)| *out = apart.value(i, row));
                }
            }
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
pub(crate) fn matmul_quantised(dst: &mut [f32], a: &FixedRows, b: Blocks<'_>, accumulate: bool) {
    product(Isa::detect(), dst, a, b, accumulate);
}

fn product(isa: Isa, dst: &mut [f32], a: &FixedRows, b: Blocks<'_>, accumulate: bool) {
    assert_eq!(a.cols, b.rows, "inner sizes of a product differ");
    assert!(a.rows * b.cols <= dst.len(), "product leaves its destination");
    let whole = Output { at: dst.as_mut_ptr(), stride: b.cols, accumulate };
    let width = if a.rows * b.cols * a.cols < 2 * SMALLEST_TASK {
        b.cols.next_multiple_of(GROUP).max(GROUP)
    } else {
        TASK_COLUMNS
    };
    let tasks = b.cols.div_ceil(width);
    split(tasks * a.rows.div_ceil(TASK_ROWS), |task| {
        let (first_row, first) = (task / tasks * TASK_ROWS, task % tasks * width);
        let range = first..(first + width).min(b.cols);
        let rows = first_row..(first_row + TASK_ROWS).min(a.rows);
        // SAFETY: the assertions bound the product to `dst`, of which tasks have disjoint parts.
        unsafe {
            let at = whole.pointer().add(first_row * b.cols + first);
            columns(isa, Output { at, ..whole }, (a, rows), b.columns(range));
        }
    });
}

/// One task's product of some rows, on the calling thread.
///
/// # Safety
/// `dst` is writable for the rows x `b.cols` elements, and nobody else touches them; `a` has as many
/// columns as `b` rows.
pub(super) unsafe fn columns(
    isa: Isa,
    dst: Output,
    (a, rows): (&FixedRows, Range<usize>),
    b: Blocks<'_>,
) {
    let blocks = a.cols / BLOCK;
    for first_col in (0..b.cols).step_by(TOGETHER * GROUP) {
        let cols = (TOGETHER * GROUP).min(b.cols - first_col);
        for first_row in rows.clone().step_by(ROWS) {
            let tile = Tile {
                format: b.format,
                codes: &a.codes[first_row * a.cols..],
                scales: &a.blocks[first_row * blocks..],
                blocks,
                right: &b.data[first_col / GROUP * b.stride()..],
                right_stride: b.stride(),
            };
            // SAFETY: row and column lie within the destination, for which the caller vouches; the
            // slices bound both operands.
            unsafe {
                let Output { at, stride, accumulate } =
                    dst.part(first_row - rows.start, first_col, 0);
                let rows = ROWS.min(rows.end - first_row);
                tile.run(isa, Destination { at, stride, rows, cols, accumulate });
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
    /// From the first row on, row after row.
    codes: &'a [i8],
    scales: &'a [FixedBlock],
    /// Blocks of a row, and of a column.
    blocks: usize,
    /// The first group on.
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
                Isa::Avx512 if is_x86_feature_detected!("avx512vnni") => x86::avx512(self, dst),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Avx2 => x86::avx2(self, dst),
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
                let apart = self.format.apart(bytes);
                for (row, sums) in sums.iter_mut().take(dst.rows).enumerate() {
                    let place = row * self.blocks + block;
                    let codes = &self.codes[place * BLOCK..][..BLOCK];
                    let FixedBlock { scale, offset, .. } = self.scales[place];
                    for (col, sum) in sums.iter_mut().enumerate() {
                        let pairs = codes.iter().zip(&apart.codes);
                        let exact: i32 = pairs.map(|(x, y)| i32::from(*x) * y[col]).sum();
                        *sum = (exact as f32).mul_add(apart.scales[col] * scale, *sum);
                        if self.format == BlockFormat::Q4_1 {
                            *sum = apart.least[col].mul_add(offset, *sum);
                        }
                    }
                }
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
