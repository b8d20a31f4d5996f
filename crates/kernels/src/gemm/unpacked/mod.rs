//! Products with few rows (decoding): the right operand is read once, where it lies.
//!
//! Its columns are stored one after the other (`[O, I]` weights), so squares of some steps of some
//! columns are turned around in registers; what is added in which order is as in the packed kernels.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;

use super::Mat;
use super::blocks::Output;
use super::element::{Element, Storage};
use super::micro::{Destination, Isa};
use super::pack::MAX_DEPTH;

/// Most rows of the left operand for which turning columns in registers beats packing them.
pub(super) const MOST_ROWS: usize = 16;
/// The same where the kernel also widens them, as long as the rows stay in the cache: an attention's tiles.
pub(super) const MOST_ROWS_OF_HALVES: usize = 48;
/// Columns of a task: few, so that a thread that wakes up late finds the rest done.
pub(super) const TASK_COLUMNS: usize = 32;
/// Columns that are worked on together.
pub(super) const GROUP: usize = 16;

/// Whether a product is of this kind.
pub(super) fn fits<T: Element>(isa: Isa, a: Mat<'_>, b: Mat<'_, T>) -> bool {
    a.rows <= isa.most_rows(b) && a.col_stride == 1 && b.row_stride == 1 && b.rows > 1
}

/// A left and a right block as the kernels read them.
#[derive(Clone, Copy)]
pub(super) struct Operands<T> {
    pub(super) depth: usize,
    pub(super) a: *const f32,
    /// From one row of the left operand to the next; steps lie side by side.
    pub(super) a_stride: usize,
    pub(super) b: *const T,
    /// From one column of the right operand to the next.
    pub(super) b_stride: usize,
    /// From a column to the one that is fetched ahead, of the next group.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "of the vector kernels"))]
    pub(super) ahead: usize,
}

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "of the vector kernels"))]
impl<T> Operands<T> {
    /// Column starts; columns that do not exist are read as the last one and never stored.
    pub(super) fn starts<const N: usize>(&self, first: usize, cols: usize) -> [*const T; N] {
        std::array::from_fn(|i| self.b.wrapping_add((first + i).min(cols - 1) * self.b_stride))
    }

    /// A row of the left operand from a step on.
    ///
    /// # Safety
    /// Row and step lie within the left operand.
    #[inline]
    pub(super) unsafe fn left(&self, row: usize, step: usize) -> *const f32 {
        // SAFETY: passed on to the caller.
        unsafe { self.a.add(row * self.a_stride + step) }
    }
}

/// One task's product, on the calling thread, `depth` steps between two visits of the destination.
///
/// # Safety
/// The CPU has the instruction set; `dst` is writable for `a.rows` x `b.cols` elements, and nobody
/// else touches them.
pub(super) unsafe fn block<T: Element>(
    isa: Isa,
    dst: Output,
    a: Mat<'_>,
    b: Mat<'_, T>,
    depth: usize,
    wide: &mut Vec<f32>,
) {
    for first_col in (0..b.cols).step_by(GROUP) {
        let cols = GROUP.min(b.cols - first_col);
        // After a task's last columns stand those that its thread takes next.
        let ahead = GROUP * b.col_stride;
        for first_step in (0..b.rows).step_by(depth) {
            let steps = first_step..(first_step + depth).min(b.rows);
            let a = a.columns(steps.clone());
            let b = b.columns(first_col..first_col + cols).t().columns(steps).t();
            let a_stride = a.row_stride;
            for first_row in (0..a.rows).step_by(MOST_ROWS_OF_HALVES) {
                let rows = MOST_ROWS_OF_HALVES.min(a.rows - first_row);
                let (depth, a) = (a.cols, a.data[first_row * a.row_stride..].as_ptr());
                // SAFETY: row and column lie within the destination; the views bound both
                // operands; the caller vouches for the instruction set.
                unsafe {
                    let Output { at, stride, accumulate, .. } =
                        dst.part(first_row, first_col, first_step);
                    let dst = Destination { at, stride, rows, cols, accumulate };
                    if isa.reads::<T>() {
                        let (b, b_stride) = (b.data.as_ptr(), b.col_stride);
                        tile(isa, Operands { depth, a, a_stride, b, b_stride, ahead }, dst);
                    } else {
                        let (b, b_stride) = (widened(b, wide).as_ptr(), b.rows);
                        let operands = Operands { depth, a, a_stride, b, b_stride, ahead: 0 };
                        tile(isa, operands, dst);
                    }
                }
            }
        }
    }
}

/// The columns as f32, one after the other.
fn widened<'a, T: Element>(b: Mat<'_, T>, wide: &'a mut Vec<f32>) -> &'a [f32] {
    wide.resize(b.cols * b.rows, 0.0);
    for (col, wide) in wide.chunks_mut(b.rows).enumerate() {
        T::widen(&b.data[col * b.col_stride..][..b.rows], wide);
    }
    wide
}

impl Isa {
    /// Most rows of the left operand for a right one.
    pub(super) fn most_rows<T: Element>(self, b: Mat<'_, T>) -> usize {
        if b.rows <= MAX_DEPTH { self.most_rows_of_a_tile::<T>() } else { MOST_ROWS }
    }

    /// The same where the inner sum is short.
    pub(super) fn most_rows_of_a_tile<T: Element>(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 | Self::Avx2 if T::STORAGE != Storage::F32 => MOST_ROWS_OF_HALVES,
            _ => MOST_ROWS,
        }
    }

    /// Whether the kernel widens values of this type itself.
    fn reads<T: Element>(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 | Self::Avx2 => true,
            Self::Portable => T::STORAGE == Storage::F32,
        }
    }
}

/// # Safety
/// The CPU has the instruction set, which reads the type; the operands hold `dst.rows` <= [`MOST_ROWS_OF_HALVES`]
/// rows and `dst.cols` <= [`GROUP`] columns of `depth` steps; `dst` is writable for them.
pub(super) unsafe fn tile<T: Element>(isa: Isa, operands: Operands<T>, dst: Destination) {
    // SAFETY: passed on to the caller.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::tile(operands, dst),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::tile(operands, dst),
            Isa::Portable => portable(operands, dst),
        }
    }
}

/// # Safety
/// As [`tile`].
unsafe fn portable<T: Element>(operands: Operands<T>, dst: Destination) {
    let Operands { depth, b, b_stride, .. } = operands;
    let b = b.cast::<f32>();
    for row in 0..dst.rows {
        let mut sums = [0.0_f32; GROUP];
        for k in 0..depth {
            // SAFETY: row and step lie within the left operand.
            let x = unsafe { *operands.left(row, k) };
            for (col, sum) in sums[..dst.cols].iter_mut().enumerate() {
                // SAFETY: column and step lie within the right operand.
                *sum = x.mul_add(unsafe { *b.add(col * b_stride + k) }, *sum);
            }
        }
        // SAFETY: the row lies within the destination.
        unsafe { super::micro::store(&sums, dst, row, 0) };
    }
}

/// The last values of some columns, zeros after them.
///
/// # Safety
/// `count < N` values from `from` on lie within every column.
#[cfg(target_arch = "x86_64")]
unsafe fn tails<T: Element, const COLUMNS: usize, const N: usize>(
    starts: &[*const T; COLUMNS],
    from: usize,
    count: usize,
) -> [[T; N]; COLUMNS] {
    let mut tails = [[T::ZERO; N]; COLUMNS];
    for (tail, start) in tails.iter_mut().zip(starts) {
        // SAFETY: passed on to the caller.
        unsafe { tail.as_mut_ptr().copy_from_nonoverlapping(start.add(from), count) };
    }
    tails
}
