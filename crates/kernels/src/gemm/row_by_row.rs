//! Products with few rows whose right operand lies row by row (attention's values at decoding): it is
//! read where it lies.
//!
//! What is added in which order is as in the packed kernels. These take what does not fit, and everything in
//! plain Rust.

use super::Mat;
use super::blocks::Output;
use super::element::Element;
#[cfg(target_arch = "x86_64")]
use super::element::Storage;
use super::micro::Isa;

/// Whether a product is of this kind.
pub(super) fn fits<T: Element>(isa: Isa, a: Mat<'_>, b: Mat<'_, T>) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let whole = match isa {
            // Masks reach values of 32 bits only.
            Isa::Avx512 => T::STORAGE == Storage::F32 || b.cols.is_multiple_of(16),
            Isa::Avx2 => b.cols.is_multiple_of(x86::NARROW),
            Isa::Portable => false,
        };
        whole && a.rows <= isa.most_rows(b) && b.col_stride == 1
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (isa, a, b);
        false
    }
}

/// One task's product, on the calling thread, `depth` steps between two visits of the destination.
///
/// # Safety
/// The product [`fits`]; `dst` is writable for `a.rows` x `b.cols` elements, and nobody else touches
/// them.
pub(super) unsafe fn block<T: Element>(
    isa: Isa,
    dst: Output,
    a: Mat<'_>,
    b: Mat<'_, T>,
    depth: usize,
) {
    #[cfg(target_arch = "x86_64")]
    let (rows_at_once, columns_at_once) = match isa {
        Isa::Avx512 => (x86::ROWS, x86::COLUMNS),
        // Few rows take twice as many columns: enough sums to keep both units for products busy.
        _ if a.rows <= x86::ROWS / 2 => (x86::ROWS / 2, 4 * x86::NARROW),
        _ => (x86::ROWS, 2 * x86::NARROW),
    };
    #[cfg(target_arch = "x86_64")]
    for first_step in (0..b.rows).step_by(depth) {
        let steps = first_step..(first_step + depth).min(b.rows);
        let a = a.columns(steps.clone());
        for first_col in (0..b.cols).step_by(columns_at_once) {
            let cols = first_col..(first_col + columns_at_once).min(b.cols);
            let b = b.columns(cols).t().columns(steps.clone()).t();
            for first_row in (0..a.rows).step_by(rows_at_once) {
                let rows = first_row..(first_row + rows_at_once).min(a.rows);
                let a = a.t().columns(rows).t();
                // SAFETY: row and column lie within the destination; the caller vouches for the
                // rest.
                unsafe {
                    let dst = dst.part(first_row, first_col, first_step);
                    x86::tile(isa, dst, a, b);
                }
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (isa, dst, a, b, depth);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __mmask16, _MM_HINT_T0, _mm_prefetch, _mm256_add_ps, _mm256_fmadd_ps, _mm256_loadu_ps,
        _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps, _mm512_fmadd_ps,
        _mm512_maskz_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };

    use super::super::Mat;
    use super::super::blocks::Output;
    use super::super::element::{Element, Storage};
    use super::super::micro::{Destination, Isa, store};
    use super::super::pack::AHEAD;
    use super::super::unpacked::avx2::load_8;
    use super::super::unpacked::avx512::load;

    /// Rows of a tile.
    pub(super) const ROWS: usize = 6;
    /// Vectors of a tile's row.
    const VECTORS: usize = 4;
    /// Columns of a tile.
    pub(super) const COLUMNS: usize = 16 * VECTORS;

    /// Values of a vector of AVX2.
    pub(super) const NARROW: usize = 8;

    /// # Safety
    /// The CPU has the instruction set, AVX2 or AVX-512. The product [`super::fits`]; it has at most [`ROWS`] rows and
    /// [`COLUMNS`] columns, of AVX2 two vectors, or four with half as many rows. `dst` is writable for them.
    pub(super) unsafe fn tile<T: Element>(isa: Isa, dst: Output, a: Mat<'_>, b: Mat<'_, T>) {
        let Output { at, stride, accumulate, .. } = dst;
        let dst = Destination { at, stride, rows: a.rows, cols: b.cols, accumulate };
        macro_rules! of_rows {
            ($kernel:ident, $vectors:expr, $($rows:literal)*) => {
                match a.rows {
                    $($rows => $kernel::<$rows, { $vectors }, T>(dst, a, b),)*
                    _ => {}
                }
            };
        }
        // SAFETY: passed on to the caller.
        unsafe {
            match isa {
                Isa::Avx512 => of_rows!(columns, VECTORS, 1 2 3 4 5 6),
                _ => match b.cols.div_ceil(NARROW) {
                    1 => of_rows!(narrow, 1, 1 2 3 4 5 6),
                    2 => of_rows!(narrow, 2, 1 2 3 4 5 6),
                    3 => of_rows!(narrow, 3, 1 2 3),
                    _ => of_rows!(narrow, 4, 1 2 3),
                },
            }
        }
    }

    /// `VECTORS` whole vectors of columns.
    ///
    /// # Safety
    /// As [`tile`], with AVX2, FMA and F16C.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn narrow<const ROWS: usize, const VECTORS: usize, T: Element>(
        dst: Destination,
        a: Mat<'_>,
        b: Mat<'_, T>,
    ) {
        let mut acc = [[_mm256_setzero_ps(); VECTORS]; ROWS];
        for step in 0..b.rows {
            let at = b.data.as_ptr().wrapping_add(step * b.row_stride);
            let ahead = at.wrapping_add(AHEAD * b.row_stride);
            for first in (0..NARROW * VECTORS).step_by(64 / size_of::<T>()) {
                _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(first).cast());
            }
            let mut values = [_mm256_setzero_ps(); VECTORS];
            for (vector, value) in values.iter_mut().enumerate() {
                // SAFETY: whole vectors of columns lie within the row.
                *value = unsafe { load_8(at.add(NARROW * vector)) };
            }
            for (row, acc) in acc.iter_mut().enumerate() {
                // SAFETY: row and step lie within the left operand.
                let x = unsafe { *a.data.as_ptr().add(row * a.row_stride + step * a.col_stride) };
                let x = _mm256_set1_ps(x);
                for (acc, value) in acc.iter_mut().zip(values) {
                    *acc = _mm256_fmadd_ps(x, value, *acc);
                }
            }
        }
        for (row, acc) in acc.into_iter().enumerate() {
            for (vector, value) in acc.into_iter().enumerate() {
                // SAFETY: the vector lies within the destination's row.
                unsafe {
                    let at = dst.at.add(row * dst.stride + NARROW * vector);
                    let sum = if dst.accumulate {
                        _mm256_add_ps(_mm256_loadu_ps(at), value)
                    } else {
                        value
                    };
                    _mm256_storeu_ps(at, sum);
                }
            }
        }
    }

    /// # Safety
    /// As [`tile`].
    #[target_feature(enable = "avx512f")]
    unsafe fn columns<const ROWS: usize, const VECTORS: usize, T: Element>(
        dst: Destination,
        a: Mat<'_>,
        b: Mat<'_, T>,
    ) {
        let masks: [__mmask16; VECTORS] = std::array::from_fn(|vector| {
            let left = dst.cols.saturating_sub(16 * vector).min(16);
            ((1_u32 << left) - 1) as __mmask16
        });
        let right = b.data.as_ptr();
        let mut acc = [[_mm512_setzero_ps(); VECTORS]; ROWS];
        for step in 0..b.rows {
            let mut values = [_mm512_setzero_ps(); VECTORS];
            for (vector, value) in values.iter_mut().enumerate() {
                let at = right.wrapping_add(step * b.row_stride + 16 * vector);
                if (16 * vector * size_of::<T>()).is_multiple_of(64) {
                    _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD * b.row_stride).cast());
                }
                // SAFETY: the mask leaves out what lies after the columns; of 16 bits there are whole
                // vectors or none.
                *value = unsafe {
                    match T::STORAGE {
                        Storage::F32 => _mm512_maskz_loadu_ps(masks[vector], at.cast()),
                        _ if masks[vector] == 0 => _mm512_setzero_ps(),
                        _ => load(at),
                    }
                };
            }
            for (row, acc) in acc.iter_mut().enumerate() {
                // SAFETY: row and step lie within the left operand.
                let x = unsafe { *a.data.as_ptr().add(row * a.row_stride + step * a.col_stride) };
                for (acc, value) in acc.iter_mut().zip(values) {
                    *acc = _mm512_fmadd_ps(_mm512_set1_ps(x), value, *acc);
                }
            }
        }
        for (row, acc) in acc.into_iter().enumerate() {
            let mut values = [0.0; COLUMNS];
            for (vector, acc) in acc.into_iter().enumerate() {
                // SAFETY: the vectors fill the values; the row lies within the destination.
                unsafe { _mm512_storeu_ps(values.as_mut_ptr().add(16 * vector), acc) };
            }
            // SAFETY: the row lies within the destination.
            unsafe { store(&values, dst, row, 0) };
        }
    }
}
