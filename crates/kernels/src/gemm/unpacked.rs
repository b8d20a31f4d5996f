//! Products with few rows (decoding): the right operand is read once, where it lies.
//!
//! Its columns are stored one after the other (`[O, I]` weights), so squares of some steps of some
//! columns are turned around in registers; what is added in which order is as in the packed kernels.

use super::Mat;
use super::blocks::Output;
use super::element::{Element, Storage};
use super::micro::{Destination, Isa};
use super::pack::MAX_DEPTH;

/// Most rows of the left operand for which turning columns in registers beats packing them.
pub(super) const MOST_ROWS: usize = 16;
/// The same where AVX-512 also widens them, as long as the rows stay in the cache: an attention's tiles.
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
            let (a_stride, rows_at_once) = (a.row_stride, isa.rows_at_once());
            for first_row in (0..a.rows).step_by(rows_at_once) {
                let rows = rows_at_once.min(a.rows - first_row);
                let (depth, a) = (a.cols, a.data[first_row * a.row_stride..].as_ptr());
                // SAFETY: row and column lie within the destination; the views bound both
                // operands; the caller vouches for the instruction set.
                unsafe {
                    let Output { at, stride, accumulate } =
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
            Self::Avx512 if T::STORAGE != Storage::F32 => MOST_ROWS_OF_HALVES,
            _ => MOST_ROWS,
        }
    }

    /// Most rows for which a group of columns is turned around once.
    fn rows_at_once(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => 8,
            _ => MOST_ROWS_OF_HALVES,
        }
    }

    /// Whether the kernel widens values of this type itself.
    fn reads<T: Element>(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => true,
            _ => T::STORAGE == Storage::F32,
        }
    }
}

/// # Safety
/// The CPU has the instruction set, which reads the type; the operands hold `dst.rows` <= [`Isa::rows_at_once`]
/// rows and `dst.cols` <= [`GROUP`] columns of `depth` steps; `dst` is writable for them.
pub(super) unsafe fn tile<T: Element>(isa: Isa, operands: Operands<T>, dst: Destination) {
    // SAFETY: passed on to the caller.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => x86::avx512(operands, dst),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => match dst.rows {
                1 => x86::avx2::<1, T>(operands, dst),
                2 => x86::avx2::<2, T>(operands, dst),
                3 => x86::avx2::<3, T>(operands, dst),
                4 => x86::avx2::<4, T>(operands, dst),
                5 => x86::avx2::<5, T>(operands, dst),
                6 => x86::avx2::<6, T>(operands, dst),
                7 => x86::avx2::<7, T>(operands, dst),
                _ => x86::avx2::<8, T>(operands, dst),
            },
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

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, __mmask16, _MM_HINT_T1, _mm_prefetch, _mm256_fmadd_ps, _mm256_loadu_ps,
        _mm256_loadu_si256, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps, _mm512_add_ps,
        _mm512_castpd_ps, _mm512_castps_pd, _mm512_castsi512_ps, _mm512_cvtepu16_epi32,
        _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps,
        _mm512_maskz_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_shuffle_f32x4,
        _mm512_slli_epi32, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd,
        _mm512_unpacklo_ps,
    };

    use super::super::element::{Element, Storage};
    use super::super::micro::{Destination, store};
    use super::super::pack::x86::transposed_8x8;
    use super::{GROUP, MOST_ROWS_OF_HALVES, Operands};

    /// The last values of some columns, zeros after them.
    ///
    /// # Safety
    /// `count < N` values from `from` on lie within every column.
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

    /// # Safety
    /// As [`super::tile`], with AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512<T: Element>(operands: Operands<T>, dst: Destination) {
        let starts: [*const T; 16] = operands.starts(0, dst.cols);
        let mut acc = [_mm512_setzero_ps(); MOST_ROWS_OF_HALVES];
        let acc = &mut acc[..dst.rows];
        let whole = operands.depth / 16 * 16;
        for k in (0..whole).step_by(16) {
            let first_of_line = (k * size_of::<T>()).is_multiple_of(64);
            // SAFETY: 16 steps from `k` on lie within every column and row.
            unsafe {
                let mut lines = [_mm512_setzero_ps(); 16];
                for (line, start) in lines.iter_mut().zip(&starts) {
                    let at = start.add(k);
                    if first_of_line {
                        _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(operands.ahead).cast());
                    }
                    *line = load(at);
                }
                let turned = transposed_16x16(&lines);
                add_512(&operands, k, &turned, acc);
            }
        }
        if whole < operands.depth {
            let count = operands.depth - whole;
            // SAFETY: `count` steps from `whole` on lie within every column and row.
            unsafe {
                let tails: [[T; 16]; 16] = tails(&starts, whole, count);
                let mut lines = [_mm512_setzero_ps(); 16];
                for (line, tail) in lines.iter_mut().zip(&tails) {
                    *line = load(tail.as_ptr());
                }
                add_512(&operands, whole, &transposed_16x16(&lines)[..count], acc);
            }
        }
        let columns = ((1_u32 << dst.cols) - 1) as __mmask16;
        for (row, acc) in acc.iter().enumerate() {
            // SAFETY: the row's columns lie within the destination; the mask leaves out all others.
            unsafe {
                let at = dst.at.add(row * dst.stride);
                let sum = if dst.accumulate {
                    _mm512_add_ps(_mm512_maskz_loadu_ps(columns, at), *acc)
                } else {
                    *acc
                };
                _mm512_mask_storeu_ps(at, columns, sum);
            }
        }
    }

    /// Adds some steps of 16 columns to every row's sums.
    ///
    /// # Safety
    /// The steps lie within every row.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add_512<T>(
        operands: &Operands<T>,
        first_step: usize,
        turned: &[__m512],
        acc: &mut [__m512],
    ) {
        let mut row = 0;
        macro_rules! take {
            ($count:literal) => {
                while let Some(sums) = acc[row..].first_chunk_mut::<$count>() {
                    // SAFETY: passed on to the caller.
                    unsafe {
                        add_rows(operands.left(row, first_step), operands.a_stride, turned, sums);
                    }
                    row += $count;
                }
            };
        }
        take!(8);
        take!(7);
        take!(6);
        take!(5);
        take!(4);
        take!(3);
        take!(2);
        take!(1);
    }

    /// The same for a number of rows that is known: enough of them keep both units for products busy.
    ///
    /// # Safety
    /// As [`add_512`].
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add_rows<const COUNT: usize>(
        left: *const f32,
        stride: usize,
        turned: &[__m512],
        acc: &mut [__m512; COUNT],
    ) {
        let mut sums = *acc;
        for (step, turned) in turned.iter().enumerate() {
            for (row, sum) in sums.iter_mut().enumerate() {
                // SAFETY: passed on to the caller.
                let x = _mm512_set1_ps(unsafe { *left.add(row * stride + step) });
                *sum = _mm512_fmadd_ps(x, *turned, *sum);
            }
        }
        *acc = sums;
    }

    /// 16 values as f32.
    ///
    /// # Safety
    /// They are readable.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(in super::super) unsafe fn load<T: Element>(from: *const T) -> __m512 {
        // SAFETY: passed on to the caller; the storage names the type.
        unsafe {
            match T::STORAGE {
                Storage::F32 => _mm512_loadu_ps(from.cast()),
                Storage::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())),
                Storage::Bf16 => {
                    let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
                }
            }
        }
    }

    /// The columns of 16 rows of 16 values.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(in super::super) fn transposed_16x16(rows: &[__m512; 16]) -> [__m512; 16] {
        // Within every quarter of a vector: quads[4 i + j] holds, quarter by quarter, value j of
        // that quarter from rows 4 i to 4 i + 3.
        let mut quads = [_mm512_setzero_ps(); 16];
        for i in 0..4 {
            let r = &rows[4 * i..4 * i + 4];
            let pairs = [
                (_mm512_unpacklo_ps(r[0], r[1]), _mm512_unpacklo_ps(r[2], r[3])),
                (_mm512_unpackhi_ps(r[0], r[1]), _mm512_unpackhi_ps(r[2], r[3])),
            ];
            for (half, (upper, lower)) in pairs.into_iter().enumerate() {
                let (upper, lower) = (_mm512_castps_pd(upper), _mm512_castps_pd(lower));
                quads[4 * i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(upper, lower));
                quads[4 * i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(upper, lower));
            }
        }
        // Quarter q of quads[4 i + j] goes to quarter i of column 4 q + j.
        let mut columns = [_mm512_setzero_ps(); 16];
        for j in 0..4 {
            let [a, b, c, d] = [quads[j], quads[4 + j], quads[8 + j], quads[12 + j]];
            let (ab_even, ab_odd) =
                (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b));
            let (cd_even, cd_odd) =
                (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xDD>(c, d));
            columns[j] = _mm512_shuffle_f32x4::<0x88>(ab_even, cd_even);
            columns[4 + j] = _mm512_shuffle_f32x4::<0x88>(ab_odd, cd_odd);
            columns[8 + j] = _mm512_shuffle_f32x4::<0xDD>(ab_even, cd_even);
            columns[12 + j] = _mm512_shuffle_f32x4::<0xDD>(ab_odd, cd_odd);
        }
        columns
    }

    /// # Safety
    /// As [`super::tile`], with AVX2 and FMA; the values are f32.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2<const ROWS: usize, T: Element>(
        operands: Operands<T>,
        dst: Destination,
    ) {
        let Operands { depth, a, a_stride, b, b_stride, ahead } = operands;
        let operands = Operands { depth, a, a_stride, b: b.cast::<f32>(), b_stride, ahead };
        if dst.cols > 8 && ROWS <= 3 {
            // SAFETY: passed on to the caller.
            unsafe { octets::<ROWS, 2>(operands, dst, 0) };
            return;
        }
        for first in (0..dst.cols).step_by(8) {
            // SAFETY: passed on to the caller.
            unsafe { octets::<ROWS, 1>(operands, dst, first) };
        }
    }

    /// `8 · OCTETS` columns from `first` on; few rows take two octets at a time, to have enough
    /// independent sums.
    ///
    /// # Safety
    /// As [`avx2`]; `first < dst.cols`.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn octets<const ROWS: usize, const OCTETS: usize>(
        operands: Operands<f32>,
        dst: Destination,
        first: usize,
    ) {
        let mut acc: [[__m256; OCTETS]; ROWS] = [[_mm256_setzero_ps(); OCTETS]; ROWS];
        let starts: [[*const f32; 8]; OCTETS] =
            std::array::from_fn(|octet| operands.starts(first + octet * 8, dst.cols));
        let whole = operands.depth / 8 * 8;
        for k in (0..whole).step_by(8) {
            for (octet, starts) in starts.iter().enumerate() {
                // SAFETY: 8 steps from `k` on lie within every column and row.
                unsafe {
                    let turned = transposed_8x8(&loaded(starts, k));
                    add_256(&operands, k, &turned, octet, &mut acc);
                }
            }
        }
        let count = operands.depth - whole;
        for (octet, starts) in starts.iter().enumerate().filter(|_| count > 0) {
            // SAFETY: `count` steps from `whole` on lie within every column and row.
            unsafe {
                let tails: [[f32; 8]; 8] = tails(starts, whole, count);
                let turned =
                    transposed_8x8(&loaded(&tails.each_ref().map(|tail| tail.as_ptr()), 0));
                add_256(&operands, whole, &turned[..count], octet, &mut acc);
            }
        }
        for (row, acc) in acc.into_iter().enumerate() {
            let mut values = [0.0; GROUP];
            for (octet, value) in acc.into_iter().enumerate() {
                // SAFETY: at most two octets in 16 values.
                unsafe { _mm256_storeu_ps(values.as_mut_ptr().add(octet * 8), value) };
            }
            // SAFETY: the row lies within the destination.
            unsafe { store(&values[..8 * OCTETS], dst, row, first) };
        }
    }

    /// 8 values of every column.
    ///
    /// # Safety
    /// The values from `step` on lie within every column.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn loaded(starts: &[*const f32; 8], step: usize) -> [__m256; 8] {
        let mut columns = [_mm256_setzero_ps(); 8];
        for (column, start) in columns.iter_mut().zip(starts) {
            // SAFETY: passed on to the caller.
            *column = unsafe { _mm256_loadu_ps(start.add(step)) };
        }
        columns
    }

    /// Adds some steps of 8 columns to every row's sums.
    ///
    /// # Safety
    /// The steps lie within every row.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn add_256<const ROWS: usize, const OCTETS: usize>(
        operands: &Operands<f32>,
        first_step: usize,
        turned: &[__m256],
        octet: usize,
        acc: &mut [[__m256; OCTETS]; ROWS],
    ) {
        for (step, turned) in turned.iter().enumerate() {
            for (row, acc) in acc.iter_mut().enumerate() {
                // SAFETY: passed on to the caller.
                let x = _mm256_set1_ps(unsafe { *operands.left(row, first_step + step) });
                acc[octet] = _mm256_fmadd_ps(x, *turned, acc[octet]);
            }
        }
    }
}
