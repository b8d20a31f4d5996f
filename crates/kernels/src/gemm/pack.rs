//! Blocks of the operands copied into the order in which the inner kernel reads them.

use super::{Element, Mat};
use crate::simd::vectorised;

/// Most columns of a panel of the right operand.
pub(super) const MOST_PANEL: usize = 32;
/// Most steps of the inner sum between two visits of the destination.
pub(super) const MAX_DEPTH: usize = 512;
/// Values from one row to the next of a left block kept row by row; not a power of two, so that
/// rows do not compete for the same cache sets.
pub(super) const ROW_STRIDE: usize = MAX_DEPTH + 16;
/// The same of rows with half as many values: a rounded block's, and an attention's.
pub(super) const SHORT_STRIDE: usize = MAX_DEPTH / 2 + 16;

/// A cache line of values: buffers made of these are aligned for the widest loads.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// An aligned scratch buffer that only grows.
#[derive(Default)]
pub(super) struct Buffer(Vec<Line>);

impl Buffer {
    /// The first `values` values, whatever they hold.
    pub(super) fn get(&mut self, values: usize) -> &mut [f32] {
        let lines = values.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        // SAFETY: `Line` is 16 consecutive f32 without padding, and `lines` of them are initialised.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast::<f32>(), lines * 16) }
    }

    /// Everything.
    pub(super) fn all(&self) -> &[f32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast::<f32>(), self.0.len() * 16) }
    }
}

/// Rows of a left tile of the AVX2 kernel, and values from one of its steps to the next.
pub(super) const AVX2_TILE: usize = 6;

/// How a left block lies in its buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LeftOrder {
    /// Rows [`ROW_STRIDE`] apart.
    Rows,
    /// Rows [`SHORT_STRIDE`] apart.
    ShortRows,
    /// Tiles of rows, each step by step, [`Widths::step`] apart.
    Steps,
}

impl LeftOrder {
    /// Rows of so many values, as close as they fit.
    pub(super) fn of_rows(values: usize) -> Self {
        if values <= MAX_DEPTH / 2 { Self::ShortRows } else { Self::Rows }
    }

    /// From one row to the next, where a block is kept row by row.
    pub(super) fn row_stride(self) -> Option<usize> {
        match self {
            Self::Rows => Some(ROW_STRIDE),
            Self::ShortRows => Some(SHORT_STRIDE),
            Self::Steps => None,
        }
    }
}

/// Widths of packed blocks, as the inner kernel of an instruction set reads them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Widths {
    /// Columns of a panel of the right operand.
    pub(super) panel: usize,
    /// Rows of a tile of the left operand.
    pub(super) tile: usize,
    /// Values from one step to the next of a left block kept step by step.
    pub(super) step: usize,
    /// Rows of a left block where a product has several.
    pub(super) rows: usize,
}

/// Values of a packed left block of at most `rows` x `steps`.
pub(super) fn left_len(order: LeftOrder, rows: usize, steps: usize, widths: Widths) -> usize {
    match order.row_stride() {
        Some(stride) => rows * stride,
        None => rows.div_ceil(widths.tile) * steps * widths.step,
    }
}

/// Copies a left block in tiles of rows.
pub(super) fn left(a: Mat<'_>, order: LeftOrder, widths: Widths, out: &mut [f32]) {
    match (order.row_stride(), widths.step) {
        (Some(stride), _) => {
            for (row, out) in out.chunks_mut(stride).take(a.rows).enumerate() {
                out[..a.cols].copy_from_slice(&a.data[row * a.row_stride..][..a.cols]);
            }
        }
        (None, 16) => left_steps::<16>(a, widths.tile, out),
        (None, AVX2_TILE) => left_steps::<AVX2_TILE>(a, widths.tile, out),
        (None, _) => left_steps::<8>(a, widths.tile, out),
    }
}

fn left_steps<const STEP: usize>(a: Mat<'_>, tile: usize, out: &mut [f32]) {
    let length = a.cols * STEP;
    if a.row_stride == 1 {
        for step in 0..a.cols {
            let line = &a.data[step * a.col_stride..];
            fetch_ahead(&line[..a.rows], a.col_stride);
            for (first, out) in (0..a.rows).step_by(tile).zip(out.chunks_mut(length)) {
                let (line, out) = (&line[first..], &mut out[step * STEP..]);
                // A copy of a known length is a vector or two; what it takes too much is never read.
                if let (Some(line), Some(out)) = (line.first_chunk(), out.first_chunk_mut::<STEP>())
                {
                    *out = *line;
                } else {
                    let rows = tile.min(a.rows - first);
                    out[..rows].copy_from_slice(&line[..rows]);
                }
            }
        }
        return;
    }
    for (first, out) in (0..a.rows).step_by(tile).zip(out.chunks_mut(length)) {
        let (source, rows) = (&a.data[first * a.row_stride..], tile.min(a.rows - first));
        #[cfg(target_arch = "x86_64")]
        let turned = if STEP == AVX2_TILE && rows == tile && a.col_stride == 1 {
            x86::turn_tile(source, a.row_stride, a.cols, out)
        } else {
            0
        };
        #[cfg(not(target_arch = "x86_64"))]
        let turned = 0;
        for (step, out) in
            out.as_chunks_mut::<STEP>().0[..a.cols].iter_mut().enumerate().skip(turned)
        {
            for (row, out) in out[..rows].iter_mut().enumerate() {
                *out = source[row * a.row_stride + step * a.col_stride];
            }
        }
    }
}

/// Copies a right block into panels of `panel` columns, each step by step, zeros beyond the
/// last column; `wide` holds a panel's columns when they are stored narrower than f32.
pub(super) fn right<T: Element>(b: Mat<'_, T>, panel: usize, out: &mut [f32], wide: &mut Vec<f32>) {
    if panel == MOST_PANEL {
        right_by::<MOST_PANEL, T>(b, out, wide);
    } else {
        right_by::<16, T>(b, out, wide);
    }
}

fn right_by<const PANEL: usize, T: Element>(b: Mat<'_, T>, out: &mut [f32], wide: &mut Vec<f32>) {
    let length = b.rows * PANEL;
    if !b.cols.is_multiple_of(PANEL) {
        out[b.cols / PANEL * length..][..length].fill(0.0);
    }
    if b.col_stride == 1 {
        for step in 0..b.rows {
            let line = &b.data[step * b.row_stride..][..b.cols];
            fetch_ahead(line, b.row_stride);
            let out = &mut out[step * PANEL..];
            let copied = T::as_f32(line).map_or(0, |line| {
                spread(line, PANEL, length, out);
                line.len() / PANEL
            });
            for (line, out) in line.chunks(PANEL).zip(out.chunks_mut(length)).skip(copied) {
                T::widen(line, &mut out[..line.len()]);
            }
        }
        return;
    }
    for (first, out) in (0..b.cols).step_by(PANEL).zip(out.chunks_mut(length)) {
        let cols = PANEL.min(b.cols - first);
        let source = &b.data[first * b.col_stride..];
        if b.row_stride == 1 {
            if let Some(source) = T::as_f32(source) {
                transposed::<PANEL>(source, b.col_stride, b.rows, cols, out);
            } else {
                wide.resize(cols * b.rows, 0.0);
                for (col, wide) in wide.chunks_mut(b.rows).enumerate() {
                    let source = &source[col * b.col_stride..][..b.rows];
                    fetch_ahead(source, b.col_stride);
                    T::widen(source, wide);
                }
                transposed::<PANEL>(wide, b.rows, b.rows, cols, out);
            }
        } else {
            for (step, out) in out.chunks_mut(PANEL).take(b.rows).enumerate() {
                for (col, out) in out[..cols].iter_mut().enumerate() {
                    let at = step * b.row_stride + col * b.col_stride;
                    T::widen(&source[at..=at], std::slice::from_mut(out));
                }
            }
        }
    }
}

/// One step of whole panels, `length` values apart.
#[allow(clippy::inline_always, reason = "compiled per instruction set")]
#[inline(always)]
fn spread_by<const PANEL: usize>(line: &[f32], length: usize, out: &mut [f32]) {
    for (line, out) in line.as_chunks::<PANEL>().0.iter().zip(out.chunks_mut(length)) {
        if let Some(out) = out.first_chunk_mut() {
            *out = *line;
        }
    }
}

vectorised! {
    /// The same for either panel. With narrower vectors a copy of the wider one is a call.
    fn spread(line: &[f32], panel: usize, length: usize, out: &mut [f32]) {
        if panel == MOST_PANEL {
            spread_by::<MOST_PANEL>(line, length, out);
        } else {
            spread_by::<16>(line, length, out);
        }
    }
}

/// Has the cache fetch the line of values that stands some lines of the operand after this one: lines have gaps, over which
/// the machine's own fetching is slow.
pub(super) fn fetch_ahead<T>(line: &[T], stride: usize) {
    #[cfg(target_arch = "x86_64")]
    for first in (0..line.len()).step_by(64 / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let at = line.as_ptr().wrapping_add(first + AHEAD * stride);
        // SAFETY: every x86-64 has the instruction, and it reads nothing that a program could see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (line, stride);
}

/// Lines that are fetched ahead.
#[cfg(target_arch = "x86_64")]
pub(super) const AHEAD: usize = 16;

/// `out[step, col] = source[col · stride + step]`.
fn transposed<const PANEL: usize>(
    source: &[f32],
    stride: usize,
    steps: usize,
    cols: usize,
    out: &mut [f32],
) {
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut, reason = "of the vector kernels"))]
    let (mut whole_steps, mut whole_cols) = (0, 0);
    #[cfg(target_arch = "x86_64")]
    if let Some((side, turn)) = x86::square::<PANEL>() {
        (whole_steps, whole_cols) = (steps / side * side, cols / side * side);
        if whole_steps > 0 && whole_cols > 0 {
            assert!((whole_cols - 1) * stride + whole_steps <= source.len());
            assert!(whole_steps * PANEL <= out.len());
            for col in (0..whole_cols).step_by(side) {
                for step in (0..whole_steps).step_by(side) {
                    // SAFETY: the machine has the instructions; the assertions above bound the `side` rows of
                    // `side` values read at stride `stride` and written at stride `PANEL`.
                    unsafe {
                        let from = source.as_ptr().add(col * stride + step);
                        let to = out.as_mut_ptr().add(step * PANEL + col);
                        turn(from, stride, to);
                    }
                }
            }
        }
    }
    for col in 0..cols {
        let first = if col < whole_cols { whole_steps } else { 0 };
        for step in first..steps {
            out[step * PANEL + col] = source[col * stride + step];
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::{
        __m256, _mm_castps_pd, _mm_storel_pd, _mm_storeu_ps, _mm256_castps256_ps128,
        _mm256_extractf128_ps, _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_setzero_ps,
        _mm256_shuffle_ps, _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
        _mm512_loadu_ps, _mm512_setzero_ps, _mm512_storeu_ps,
    };

    use super::super::unpacked::avx512::transposed_16x16;
    use super::AVX2_TILE;
    use crate::simd::{has_avx2_fma, has_avx512};

    /// Writes rows of a square, some values apart, as columns.
    type Turn = unsafe fn(*const f32, usize, *mut f32);

    /// The largest square that this machine turns around in registers, for panels of a width: its side,
    /// and what turns it.
    pub(super) fn square<const PANEL: usize>() -> Option<(usize, Turn)> {
        if has_avx512() {
            return Some((16, transpose_16x16::<PANEL>));
        }
        has_avx2_fma().then_some((8, transpose_8x8::<PANEL> as Turn))
    }

    /// Writes 16 rows of 16 values as 16 columns into rows `PANEL` apart.
    ///
    /// # Safety
    /// The CPU has AVX-512F; `from` has 16 readable rows `stride` apart, `to` 16 writable ones.
    #[target_feature(enable = "avx512f")]
    unsafe fn transpose_16x16<const PANEL: usize>(from: *const f32, stride: usize, to: *mut f32) {
        let mut rows = [_mm512_setzero_ps(); 16];
        for (i, row) in rows.iter_mut().enumerate() {
            // SAFETY: the caller vouches for all 16 rows.
            *row = unsafe { _mm512_loadu_ps(from.add(i * stride)) };
        }
        let columns = transposed_16x16(&rows);
        for (i, column) in columns.iter().enumerate() {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(to.add(i * PANEL), *column) };
        }
    }

    /// Writes 8 rows of 8 values as 8 columns into rows `PANEL` apart.
    ///
    /// # Safety
    /// The CPU has AVX; `from` has 8 readable rows `stride` apart, `to` 8 writable ones.
    #[target_feature(enable = "avx")]
    unsafe fn transpose_8x8<const PANEL: usize>(from: *const f32, stride: usize, to: *mut f32) {
        let mut rows = [_mm256_setzero_ps(); 8];
        for (i, row) in rows.iter_mut().enumerate() {
            // SAFETY: the caller vouches for all 8 rows.
            *row = unsafe { _mm256_loadu_ps(from.add(i * stride)) };
        }
        let columns = transposed_8x8(&rows);
        for (i, column) in columns.iter().enumerate() {
            // SAFETY: as above.
            unsafe { _mm256_storeu_ps(to.add(i * PANEL), *column) };
        }
    }

    /// Writes the first values of [`AVX2_TILE`] rows step by step, eight steps at a time, and returns how many of `steps` it
    /// wrote.
    pub(super) fn turn_tile(source: &[f32], stride: usize, steps: usize, out: &mut [f32]) -> usize {
        let whole = steps / 8 * 8;
        if whole == 0 || !has_avx2_fma() {
            return 0;
        }
        assert!((AVX2_TILE - 1) * stride + whole <= source.len(), "a tile leaves its operand");
        assert!(whole * AVX2_TILE <= out.len(), "a tile leaves its block");
        // SAFETY: the machine has the instructions; the assertions bound what is read and written.
        unsafe { turn_rows(source.as_ptr(), stride, whole, out.as_mut_ptr()) };
        whole
    }

    /// # Safety
    /// The CPU has AVX; `steps` is a multiple of 8; `from` has `steps` readable values in each of [`AVX2_TILE`] rows `stride`
    /// apart, and `to` `AVX2_TILE · steps` writable ones.
    #[target_feature(enable = "avx")]
    unsafe fn turn_rows(from: *const f32, stride: usize, steps: usize, to: *mut f32) {
        for first in (0..steps).step_by(8) {
            let mut rows = [_mm256_setzero_ps(); 8];
            for (i, row) in rows.iter_mut().take(AVX2_TILE).enumerate() {
                // SAFETY: the caller vouches for the rows.
                *row = unsafe { _mm256_loadu_ps(from.add(i * stride + first)) };
            }
            for (i, column) in transposed_8x8(&rows).into_iter().enumerate() {
                // SAFETY: as above. The next column takes the place of the two values beyond the tile; after the last
                // one, nothing need be there.
                unsafe {
                    let to = to.add((first + i) * AVX2_TILE);
                    if first + i + 1 < steps {
                        _mm256_storeu_ps(to, column);
                    } else {
                        let rest = _mm256_extractf128_ps::<1>(column);
                        _mm_storeu_ps(to, _mm256_castps256_ps128(column));
                        _mm_storel_pd(to.add(4).cast(), _mm_castps_pd(rest));
                    }
                }
            }
        }
    }

    /// The columns of 8 rows of 8 values. In loops: closures of such instructions are called, not inlined.
    #[inline]
    #[target_feature(enable = "avx")]
    pub(in super::super) fn transposed_8x8(rows: &[__m256; 8]) -> [__m256; 8] {
        // Within each half of a vector: quads[4 i + j] holds, half by half, value j of that half from rows
        // 4 i to 4 i + 3.
        let mut quads = [_mm256_setzero_ps(); 8];
        for i in 0..2 {
            let r = &rows[4 * i..4 * i + 4];
            let pairs = [
                (_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpacklo_ps(r[2], r[3])),
                (_mm256_unpackhi_ps(r[0], r[1]), _mm256_unpackhi_ps(r[2], r[3])),
            ];
            for (half, (upper, lower)) in pairs.into_iter().enumerate() {
                quads[4 * i + 2 * half] = _mm256_shuffle_ps::<0x44>(upper, lower);
                quads[4 * i + 2 * half + 1] = _mm256_shuffle_ps::<0xEE>(upper, lower);
            }
        }
        let mut columns = [_mm256_setzero_ps(); 8];
        for j in 0..4 {
            columns[j] = _mm256_permute2f128_ps::<0x20>(quads[j], quads[4 + j]);
            columns[4 + j] = _mm256_permute2f128_ps::<0x31>(quads[j], quads[4 + j]);
        }
        columns
    }
}
