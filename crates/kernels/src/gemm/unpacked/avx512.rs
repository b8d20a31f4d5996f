//! Squares of 16 steps of 16 columns, in registers of AVX-512.

use std::arch::x86_64::{
    __m512, __mmask16, _MM_HINT_T1, _mm_prefetch, _mm256_loadu_si256, _mm512_add_ps,
    _mm512_castpd_ps, _mm512_castps_pd, _mm512_castsi512_ps, _mm512_cvtepu16_epi32,
    _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_shuffle_f32x4,
    _mm512_slli_epi32, _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd,
    _mm512_unpacklo_ps,
};

use super::super::element::{Element, Storage};
use super::super::micro::Destination;
use super::{MOST_ROWS_OF_HALVES, Operands, tails};

/// # Safety
/// As [`super::tile`], with AVX-512F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn tile<T: Element>(operands: Operands<T>, dst: Destination) {
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
