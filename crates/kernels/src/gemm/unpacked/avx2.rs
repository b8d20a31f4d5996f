//! Squares of 8 steps of 8 columns, in registers of AVX2.

use std::arch::x86_64::{
    __m256, _MM_HINT_T1, _mm_loadu_si128, _mm_prefetch, _mm256_castsi256_ps, _mm256_cvtepu16_epi32,
    _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_slli_epi32, _mm256_storeu_ps,
};
use std::mem::MaybeUninit;

use super::super::element::{Element, Storage};
use super::super::micro::{Destination, store};
use super::super::pack::x86::transposed_8x8;
use super::{GROUP, MOST_ROWS_OF_HALVES, Operands, tails};

/// # Safety
/// As [`super::tile`], with AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn tile<T: Element>(operands: Operands<T>, dst: Destination) {
    // SAFETY: passed on to the caller.
    unsafe {
        match dst.rows {
            1 => at_once::<1, T>(operands, dst),
            2 => at_once::<2, T>(operands, dst),
            3 => at_once::<3, T>(operands, dst),
            _ => by_panels(operands, dst),
        }
    }
}

/// Few rows: each square is used as soon as it is turned.
///
/// # Safety
/// As [`tile`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn at_once<const ROWS: usize, T: Element>(operands: Operands<T>, dst: Destination) {
    let mut acc = [[_mm256_setzero_ps(); 2]; ROWS];
    let starts: [*const T; GROUP] = operands.starts(0, dst.cols);
    for k in (0..operands.depth).step_by(8) {
        let count = (operands.depth - k).min(8);
        for (octet, columns) in starts.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: `count` steps from `k` on lie within every column and row.
            unsafe {
                let turned = turned(columns, k, count, operands.ahead);
                // A known number of steps is unrolled.
                if count == 8 {
                    add_256(&operands, k, &turned, octet, &mut acc);
                } else {
                    add_256(&operands, k, &turned[..count], octet, &mut acc);
                }
            }
        }
    }
    // SAFETY: passed on to the caller.
    unsafe { put(&acc, dst) };
}

/// Steps of columns that are turned before rows are multiplied.
const PANEL_STEPS: usize = 64;
/// Rows that are multiplied at a time: their sums fill the registers.
const PANEL_ROWS: usize = 6;

/// More rows: steps of all columns are turned once, and rows pass over them.
///
/// # Safety
/// As [`tile`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn by_panels<T: Element>(operands: Operands<T>, dst: Destination) {
    // Zeros for the most rows and steps would take as long as the products of a few.
    let mut sums = [const { MaybeUninit::<[__m256; 2]>::uninit() }; MOST_ROWS_OF_HALVES];
    let mut panel = [const { MaybeUninit::<[__m256; 2]>::uninit() }; PANEL_STEPS];
    let sums = &mut sums[..dst.rows];
    for sum in &mut *sums {
        sum.write([_mm256_setzero_ps(); 2]);
    }
    // SAFETY: all were written.
    let sums = unsafe { sums.assume_init_mut() };
    let starts: [*const T; GROUP] = operands.starts(0, dst.cols);
    let [left, right] =
        [0, 8].map(|first| std::array::from_fn::<_, 8, _>(|column| starts[first + column]));
    for first in (0..operands.depth).step_by(PANEL_STEPS) {
        let steps = PANEL_STEPS.min(operands.depth - first);
        for k in (0..steps).step_by(8) {
            let count = (steps - k).min(8);
            // SAFETY: `count` steps from `first + k` on lie within every column.
            let turned = unsafe {
                [&left, &right].map(|columns| turned(columns, first + k, count, operands.ahead))
            };
            for (i, step) in panel[k..k + count].iter_mut().enumerate() {
                step.write([turned[0][i], turned[1][i]]);
            }
        }
        // SAFETY: the steps were written, and lie within every row.
        unsafe { add_panel(&operands, first, panel[..steps].assume_init_ref(), sums) };
    }
    // SAFETY: passed on to the caller.
    unsafe { put(sums, dst) };
}

/// Adds steps of 16 columns to every row's sums.
///
/// # Safety
/// The steps lie within every row.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_panel<T>(
    operands: &Operands<T>,
    first_step: usize,
    panel: &[[__m256; 2]],
    acc: &mut [[__m256; 2]],
) {
    let mut row = 0;
    macro_rules! take {
        ($count:expr) => {
            while let Some(sums) = acc[row..].first_chunk_mut::<{ $count }>() {
                // SAFETY: passed on to the caller.
                unsafe {
                    panel_rows(operands.left(row, first_step), operands.a_stride, panel, sums);
                }
                row += $count;
            }
        };
    }
    take!(PANEL_ROWS);
    take!(5);
    take!(4);
    take!(3);
    take!(2);
    take!(1);
}

/// The same for a number of rows that is known.
///
/// # Safety
/// As [`add_panel`].
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn panel_rows<const COUNT: usize>(
    left: *const f32,
    stride: usize,
    panel: &[[__m256; 2]],
    acc: &mut [[__m256; 2]; COUNT],
) {
    let mut sums = *acc;
    for (step, turned) in panel.iter().enumerate() {
        for (row, sum) in sums.iter_mut().enumerate() {
            // SAFETY: passed on to the caller.
            let x = _mm256_set1_ps(unsafe { *left.add(row * stride + step) });
            sum[0] = _mm256_fmadd_ps(x, turned[0], sum[0]);
            sum[1] = _mm256_fmadd_ps(x, turned[1], sum[1]);
        }
    }
    *acc = sums;
}

/// Writes sums of rows into the destination.
///
/// # Safety
/// The destination has these rows.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn put(acc: &[[__m256; 2]], dst: Destination) {
    for (row, acc) in acc.iter().enumerate() {
        if dst.cols == GROUP && !dst.accumulate {
            // SAFETY: the row has two vectors of columns.
            unsafe {
                let at = dst.at.add(row * dst.stride);
                _mm256_storeu_ps(at, acc[0]);
                _mm256_storeu_ps(at.add(8), acc[1]);
            }
            continue;
        }
        let mut values = [0.0; GROUP];
        // SAFETY: two vectors fill the values; the row lies within the destination.
        unsafe {
            _mm256_storeu_ps(values.as_mut_ptr(), acc[0]);
            _mm256_storeu_ps(values.as_mut_ptr().add(8), acc[1]);
            store(&values, dst, row, 0);
        }
    }
}

/// Asks for what the next group of columns has at the same steps, once a line.
#[inline]
fn fetch<T>(starts: &[*const T; 8], step: usize, ahead: usize) {
    if (step * size_of::<T>()).is_multiple_of(64) {
        for start in starts {
            // SAFETY: a hint; no address can make it fail.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(step + ahead).cast()) };
        }
    }
}

/// 8 values of every column as f32.
///
/// # Safety
/// The values from `step` on lie within every column.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn loaded<T: Element>(starts: &[*const T; 8], step: usize) -> [__m256; 8] {
    let mut columns = [_mm256_setzero_ps(); 8];
    for (column, start) in columns.iter_mut().zip(starts) {
        // SAFETY: passed on to the caller.
        *column = unsafe { load_8(start.add(step)) };
    }
    columns
}

/// 8 values as f32.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(in super::super) unsafe fn load_8<T: Element>(from: *const T) -> __m256 {
    // SAFETY: passed on to the caller; the storage names the type.
    unsafe {
        match T::STORAGE {
            Storage::F32 => _mm256_loadu_ps(from.cast()),
            Storage::F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
            Storage::Bf16 => {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            }
        }
    }
}

/// Up to 8 steps of 8 columns, turned, zeros after them. What stands `ahead` of a line is fetched.
///
/// # Safety
/// `count <= 8` values from `step` on lie within every column.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn turned<T: Element>(
    starts: &[*const T; 8],
    step: usize,
    count: usize,
    ahead: usize,
) -> [__m256; 8] {
    // SAFETY: passed on to the caller; tails are 8 values.
    unsafe {
        if count == 8 {
            fetch(starts, step, ahead);
            return transposed_8x8(&loaded(starts, step));
        }
        let tails: [[T; 8]; 8] = tails(starts, step, count);
        transposed_8x8(&loaded(&tails.each_ref().map(|tail| tail.as_ptr()), 0))
    }
}

/// Adds some steps of 8 columns to every row's sums.
///
/// # Safety
/// The steps lie within every row.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_256<const ROWS: usize, T>(
    operands: &Operands<T>,
    first_step: usize,
    turned: &[__m256],
    octet: usize,
    acc: &mut [[__m256; 2]; ROWS],
) {
    for (step, turned) in turned.iter().enumerate() {
        for (row, acc) in acc.iter_mut().enumerate() {
            // SAFETY: passed on to the caller.
            let x = _mm256_set1_ps(unsafe { *operands.left(row, first_step + step) });
            acc[octet] = _mm256_fmadd_ps(x, *turned, acc[octet]);
        }
    }
}
