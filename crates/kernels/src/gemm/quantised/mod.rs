//! Products with a right operand of quantised blocks.
//!
//! Blocks are never widened: activations become 8-bit fixed-point numbers, a scale for every 32 of
//! them, and codes are multiplied with them as integers, whose sums are exact. Four products cost one
//! instruction: decoding stays bound by memory with several rows too. An activation is off by at most
//! 1/254 of the largest of its 32, as in llama.cpp (whose larger blocks take one scale for 256).
//!
//! [`format`] says in what one type differs from another, [`stored`] in which order files hold their
//! numbers, [`side_by_side`] how memory does, [`lanes`] how they are multiplied on any registers. An
//! element is, over a column's blocks of 32 in order and with `Σ` exact,
//!
//! ```text
//! acc ← scale·x_scale · Σ q x + acc,  then  least · (x_scale Σ x) + acc
//! acc ← x_scale · (scale₀ Σ₀ q x + scale₁ Σ₁ q x + least₀ Σ₀ x + least₁ Σ₁ x) + acc
//! ```
//!
//! the latter where 16 values have a scale of their own. Its bits depend on its row and column alone:
//! neither on the other rows nor on the instruction set.

mod fixed;
mod format;
mod gpu;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;
mod side_by_side;
mod stored;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use rayon::prelude::*;

use super::SMALLEST_TASK;
use super::blocks::{Output, depth_of};
use super::micro::Destination;
use super::room::Room;
use super::unpacked::TASK_COLUMNS;
use fixed::FixedBlock;
pub(crate) use fixed::FixedRows;
pub(crate) use format::BLOCK;
pub use format::BlockFormat;
use side_by_side::copy_row;
pub(crate) use side_by_side::{GROUP, held_bytes, put_side_by_side};

use crate::threads::split;

/// Most rows of a tile, which reads the right operand once from beyond the caches.
pub(crate) const MOST_ROWS: usize = 16;
/// Rows of a task, a whole number of tiles: their fixed-point numbers fit the second-level cache.
const TASK_ROWS: usize = 16 * MOST_ROWS;

/// A `[steps, columns]` operand: a column is a row of the stored matrix, and 16 columns lie side by
/// side, as [`put_side_by_side`] leaves them.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'a> {
    data: &'a [u8],
    format: BlockFormat,
    /// Steps, a multiple of [`BLOCK`].
    pub(super) rows: usize,
    pub(super) cols: usize,
}

impl<'a> Blocks<'a> {
    /// The transposed view of an `[outputs, inputs]` matrix whose rows lie side by side.
    pub(crate) fn transposed(
        data: &'a [u8],
        format: BlockFormat,
        outputs: usize,
        inputs: usize,
    ) -> Self {
        assert!(inputs.is_multiple_of(format.values()), "a row does not consist of blocks");
        let view = Self { data, format, rows: inputs, cols: outputs };
        assert_eq!(data.len(), outputs.div_ceil(GROUP) * view.stride(), "bytes of a matrix");
        view
    }

    /// Bytes from one group of columns to the next.
    fn stride(&self) -> usize {
        self.rows / self.format.values() * self.format.layout().size()
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
        self.widen_into(&mut out);
        out
    }

    /// Those of some columns, from the first of a group on, written to `out`.
    pub(crate) fn widen_columns(self, range: Range<usize>, out: &mut [f32]) {
        self.columns(range).widen_into(out);
    }

    fn widen_into(&self, out: &mut [f32]) {
        let columns = out.par_chunks_mut((GROUP * self.rows).max(1));
        columns.zip(self.data.par_chunks(self.stride().max(1))).for_each(|(out, group)| {
            for (lane, out) in out.chunks_exact_mut(self.rows).enumerate() {
                self.widen_row(group, lane, out);
            }
        });
    }

    /// The values of one column of a group.
    fn widen_row(&self, group: &[u8], lane: usize, out: &mut [f32]) {
        let layout = self.format.layout();
        let parts = layout.parts();
        for (part, out) in out.chunks_exact_mut(BLOCK).enumerate() {
            let block = &group[part / parts * layout.size()..][..layout.size()];
            let (factors, codes) = layout.row_of(block, part % parts, lane);
            layout.widen_part(&factors, &codes, out);
        }
    }

    /// The bytes of some columns, side by side again.
    pub(crate) fn gathered(&self, cols: &[u32]) -> Vec<u8> {
        let mut out = vec![0; cols.len().div_ceil(GROUP) * self.stride()];
        for (out, cols) in out.chunks_exact_mut(self.stride().max(1)).zip(cols.chunks(GROUP)) {
            for (lane, col) in cols.iter().enumerate() {
                copy_row(&self.format.layout(), self.group_of(*col as usize), out, lane);
            }
        }
        out
    }

    /// One column.
    pub(crate) fn column(&self, col: usize) -> Vec<f32> {
        let (group, lane) = self.group_of(col);
        let mut out = vec![0.0; self.rows];
        self.widen_row(group, lane, &mut out);
        out
    }
}

/// Steps after which a product of f32 operands adds to its destination, of a sum of `length` steps: whole groups
/// of columns unless they are all. A product of so many steps or fewer adds once.
pub(crate) fn steps_of_a_sum(length: usize) -> usize {
    if length == 0 { GROUP } else { depth_of(length) }
}

/// `dst = a · b`, or `dst += a · b` with `accumulate`; `dst` is row-major without gaps. Without `accumulate` all of its values
/// are written, and none is read.
pub(crate) fn matmul_quantised<'d>(
    dst: impl Into<Room<'d>>,
    a: &FixedRows,
    b: Blocks<'_>,
    accumulate: bool,
) {
    product(Kernel::detect(), dst, a, b, accumulate);
}

fn product<'d>(
    kernel: Kernel,
    dst: impl Into<Room<'d>>,
    a: &FixedRows,
    b: Blocks<'_>,
    accumulate: bool,
) {
    let dst = dst.into();
    assert_eq!(a.cols, b.rows, "inner sizes of a product differ");
    assert!(a.rows * b.cols <= dst.len, "product leaves its destination");
    let whole = Output { at: dst.at, stride: b.cols, accumulate, diagonal: None };
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
            columns(kernel, Output { at, ..whole }, (a, rows), b.columns(range));
        }
    });
}

/// One task's product of some rows, on the calling thread.
///
/// # Safety
/// `dst` is writable for the rows x `b.cols` elements, and nobody else touches them; `a` has as many
/// columns as `b` rows, and `rows` begin and end where tiles do.
pub(super) unsafe fn columns(
    kernel: Kernel,
    dst: Output,
    (a, rows): (&FixedRows, Range<usize>),
    b: Blocks<'_>,
) {
    let blocks = a.cols / BLOCK;
    for first_col in (0..b.cols).step_by(GROUP) {
        let cols = GROUP.min(b.cols - first_col);
        for first_row in rows.clone().step_by(MOST_ROWS) {
            let tile = Tile {
                format: b.format,
                fixed: &a.blocks[first_row * blocks..],
                rows: MOST_ROWS.min(rows.end - first_row),
                blocks,
                right: &b.data[first_col / GROUP * b.stride()..],
                right_stride: b.stride(),
            };
            // SAFETY: row and column lie within the destination, for which the caller vouches; the
            // slices bound both operands.
            unsafe {
                let Output { at, stride, accumulate, .. } =
                    dst.part(first_row - rows.start, first_col, 0);
                tile.run(kernel, Destination { at, stride, rows: tile.rows, cols, accumulate });
            }
        }
    }
}

/// Some rows times the blocks of a group of columns.
#[derive(Clone, Copy)]
struct Tile<'a> {
    format: BlockFormat,
    /// From the first row on, as [`FixedRows`] has them.
    fixed: &'a [FixedBlock],
    /// Rows that lie side by side there.
    rows: usize,
    /// Blocks of 32 of a row, and of a column.
    blocks: usize,
    /// The first group on.
    right: &'a [u8],
    /// From one group to the next.
    right_stride: usize,
}

/// Instruction sets with a kernel of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kernel {
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Plain,
}

impl Kernel {
    /// All that this machine has, the fastest first.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let vectors = {
            use std::arch::is_x86_feature_detected as has;

            use crate::simd::{has_avx2_fma, has_avx512};
            let avx2 = has_avx2_fma() && has!("f16c");
            let avx512 = avx2 && has_avx512() && has!("avx512bw");
            [
                (avx512 && has!("avx512vnni"), Self::Avx512Vnni),
                (avx2 && has!("avxvnni"), Self::AvxVnni),
                (avx512, Self::Avx512),
                (avx2, Self::Avx2),
            ]
        };
        #[cfg(target_arch = "aarch64")]
        let vectors = [(crate::simd::has_neon(), Self::Neon)];
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let vectors: [(bool, Self); 0] = [];
        let vectors = vectors.into_iter().filter(|(has, _)| *has).map(|(_, kernel)| kernel);
        vectors.chain([Self::Plain])
    }

    /// The fastest that this machine has.
    pub(crate) fn detect() -> Self {
        Self::all().next().unwrap_or(Self::Plain)
    }

    /// The instruction set's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => "AVX-512 VNNI",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => "AVX-VNNI",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "AVX2",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "NEON",
            Self::Plain => "no vector instructions",
        }
    }
}

impl Tile<'_> {
    /// The rows from `first` on.
    #[cfg(target_arch = "x86_64")]
    fn from(self, first: usize) -> Self {
        Self { fixed: &self.fixed[first..], ..self }
    }

    /// # Safety
    /// The CPU has the instruction set; both operands reach as far as the tile, and `dst` is
    /// writable for its rows and columns.
    unsafe fn run(self, kernel: Kernel, dst: Destination) {
        // SAFETY: passed on to the caller.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            x86::run(kernel, self, dst);
            #[cfg(not(target_arch = "x86_64"))]
            match kernel {
                #[cfg(target_arch = "aarch64")]
                Kernel::Neon => neon::run(self, dst),
                Kernel::Plain => plain::columns(self, dst),
            }
        }
    }
}

#[cfg(test)]
mod tests;
