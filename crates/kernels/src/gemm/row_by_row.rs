//! Products with few rows whose right operand lies row by row (attention's values at decoding): it is
//! read where it lies.
//!
//! What is added in which order is as in the packed kernels. Other instruction sets than AVX-512
//! pack.

use super::Mat;
use super::blocks::Output;
use super::element::Element;
#[cfg(target_arch = "x86_64")]
use super::element::Storage;
use super::micro::Isa;

/// Whether a product is of this kind.
pub(super) fn fits<T: Element>(isa: Isa, a: Mat<'_>, b: Mat<'_, T>) -> bool {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 {
        // Masks reach values of 32 bits only.
        let whole = T::STORAGE == Storage::F32 || b.cols.is_multiple_of(16);
        return a.rows <= isa.most_rows(b) && b.col_stride == 1 && whole;
    }
    let _ = (isa, a, b);
    false
}

/// One task's product, on the calling thread, `depth` steps between two visits of the destination.
///
/// # Safety
/// The product [`fits`]; `dst` is writable for `a.rows` x `b.cols` elements, and nobody else touches
/// them.
pub(super) unsafe fn block<T: Element>(dst: Output, a: Mat<'_>, b: Mat<'_, T>, depth: usize) {
    #[cfg(target_arch = "x86_64")]
    for first_step in (0..b.rows).step_by(depth) {
        let steps = first_step..(first_step + depth).min(b.rows);
        let a = a.columns(steps.clone());
        for first_col in (0..b.cols).step_by(x86::COLUMNS) {
            let cols = first_col..(first_col + x86::COLUMNS).min(b.cols);
            let b = b.columns(cols).t().columns(steps.clone()).t();
            for first_row in (0..a.rows).step_by(x86::ROWS) {
                let rows = first_row..(first_row + x86::ROWS).min(a.rows);
                let a = a.t().columns(rows).t();
                // SAFETY: row and column lie within the destination; the caller vouches for the
                // rest.
                unsafe {
                    let dst = dst.part(first_row, first_col, first_step);
                    x86::tile(dst, a, b);
                }
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (dst, a, b, depth);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __mmask16, _MM_HINT_T0, _mm_prefetch, _mm512_fmadd_ps, _mm512_maskz_loadu_ps,
        _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };

    use super::super::Mat;
    use super::super::blocks::Output;
    use super::super::element::{Element, Storage};
    use super::super::micro::{Destination, store};
    use super::super::pack::AHEAD;
    use super::super::unpacked::x86::load;

    /// Rows of a tile.
    pub(super) const ROWS: usize = 6;
    /// Vectors of a tile's row.
    const VECTORS: usize = 4;
    /// Columns of a tile.
    pub(super) const COLUMNS: usize = 16 * VECTORS;

    /// # Safety
    /// AVX-512F; at most [`ROWS`] rows of `a` and [`COLUMNS`] columns of f32 in `b`, whose rows have
    /// no gaps; `dst` is writable for them.
    pub(super) unsafe fn tile<T: Element>(dst: Output, a: Mat<'_>, b: Mat<'_, T>) {
        let Output { at, stride, accumulate } = dst;
        let dst = Destination { at, stride, rows: a.rows, cols: b.cols, accumulate };
        // SAFETY: passed on to the caller.
        unsafe {
            match a.rows {
                1 => columns::<1, T>(dst, a, b),
                2 => columns::<2, T>(dst, a, b),
                3 => columns::<3, T>(dst, a, b),
                4 => columns::<4, T>(dst, a, b),
                5 => columns::<5, T>(dst, a, b),
                _ => columns::<6, T>(dst, a, b),
            }
        }
    }

    /// # Safety
    /// As [`tile`].
    #[target_feature(enable = "avx512f")]
    unsafe fn columns<const ROWS: usize, T: Element>(dst: Destination, a: Mat<'_>, b: Mat<'_, T>) {
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
