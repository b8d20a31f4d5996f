//! The inner kernel of rounded factors: a tile of exact sums held in registers.

use super::super::micro::{Destination, Isa, kernel_of, store};
#[cfg(target_arch = "x86_64")]
use super::super::pack::AVX2_TILE;
use super::super::pack::{LeftOrder, ROW_STRIDE, SHORT_STRIDE};
#[cfg(target_arch = "x86_64")]
use x86::{avx2, avx512};

/// Scales of the rows of a left tile, and of the columns of a panel.
#[derive(Clone, Copy)]
pub(in super::super) struct Scales {
    pub(in super::super) left: *const f32,
    pub(in super::super) right: *const f32,
}

/// As [`Isa::tile`], of `words` words of a left tile and a right panel.
///
/// # Safety
/// As [`Isa::tile`], with AVX512-VNNI where that is the instruction set. `scales` has one of every row of `dst`, and of every column
/// of a panel.
pub(in super::super) unsafe fn tile(
    isa: Isa,
    order: LeftOrder,
    words: usize,
    (a, b): (*const f32, *const f32),
    scales: Scales,
    dst: Destination,
) {
    let (a, b) = (a.cast::<i32>(), b.cast::<i32>());
    // SAFETY: passed on to the caller.
    unsafe { kernel_of!(isa, order, dst.rows, (words, a, b, scales, dst)) }
}

/// Plain loops, for any machine.
///
/// # Safety
/// As [`tile`].
unsafe fn portable<const ROWS: usize, const ROW: usize, const STEP: usize>(
    words: usize,
    a: *const i32,
    b: *const i32,
    scales: Scales,
    dst: Destination,
) {
    const COLUMNS: usize = 16;
    let halves = |word: i32| (word as i16, (word >> 16) as i16);
    let mut acc = [[0_i32; COLUMNS]; ROWS];
    for k in 0..words {
        // SAFETY: word `k < words` of the panel and of each row.
        let panel = unsafe { &*b.add(k * COLUMNS).cast::<[i32; COLUMNS]>() };
        for (row, acc) in acc.iter_mut().enumerate() {
            // SAFETY: as above.
            let (low, high) = halves(unsafe { *a.add(row * ROW + k * STEP) });
            for (acc, b) in acc.iter_mut().zip(panel) {
                let b = halves(*b);
                let [low, high] =
                    [i32::from(low) * i32::from(b.0), i32::from(high) * i32::from(b.1)];
                // Only the codes of a NaN can leave 32 bits.
                *acc = acc.wrapping_add(low.wrapping_add(high));
            }
        }
    }
    for (row, acc) in acc.iter().enumerate() {
        // SAFETY: the caller vouches for a scale of each row and column; the row lies within the destination.
        unsafe {
            let left = *scales.left.add(row);
            let right = &*scales.right.cast::<[f32; COLUMNS]>();
            let mut values = [0.0; COLUMNS];
            for ((value, sum), right) in values.iter_mut().zip(acc).zip(right) {
                *value = *sum as f32 * left * right;
            }
            store(&values, dst, row, 0);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_prefetch, _mm256_add_epi32, _mm256_cvtepi32_ps, _mm256_loadu_ps,
        _mm256_loadu_si256, _mm256_madd_epi16, _mm256_mul_ps, _mm256_set1_epi32, _mm256_set1_ps,
        _mm256_setzero_si256, _mm512_add_ps, _mm512_cvtepi32_ps, _mm512_dpwssd_epi32,
        _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
        _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_si512,
    };

    use super::super::super::micro::{fetch, store_8};
    use super::{Destination, Scales};

    /// # Safety
    /// As [`super::tile`], with AVX2, a left tile kept step by step.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2<const ROWS: usize, const ROW: usize, const STEP: usize>(
        words: usize,
        a: *const i32,
        b: *const i32,
        scales: Scales,
        dst: Destination,
    ) {
        let mut acc = [[_mm256_setzero_si256(); 2]; ROWS];
        fetch(dst, ROWS);
        // One word a turn: of several the compiler adds products up before it adds them to the sums, and
        // registers do not hold them.
        for word in 0..words {
            // The next tile comes from the second-level cache at the pace at which this one is used.
            let next = a.wrapping_add((words + word) * STEP);
            // SAFETY: the caller vouches for `words` words of the panel and of every row; what is fetched is a hint.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(next.cast());
                let (a, b) = (a.add(word * STEP), b.add(word * 16));
                let (b0, b1) = (_mm256_loadu_si256(b.cast()), _mm256_loadu_si256(b.add(8).cast()));
                for (row, acc) in acc.iter_mut().enumerate() {
                    let x = _mm256_set1_epi32(*a.add(row * ROW));
                    acc[0] = _mm256_add_epi32(acc[0], _mm256_madd_epi16(x, b0));
                    acc[1] = _mm256_add_epi32(acc[1], _mm256_madd_epi16(x, b1));
                }
            }
        }
        for (row, acc) in acc.into_iter().enumerate() {
            for (half, sum) in acc.into_iter().enumerate() {
                let first = half * 8;
                // SAFETY: the caller vouches for the scales, and the row lies within the destination.
                unsafe {
                    let left = _mm256_set1_ps(*scales.left.add(row));
                    let value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), left);
                    let value = _mm256_mul_ps(value, _mm256_loadu_ps(scales.right.add(first)));
                    store_8(value, dst, row, first);
                }
            }
        }
    }

    /// # Safety
    /// As [`super::tile`], with AVX-512F and AVX512-VNNI.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) unsafe fn avx512<const ROWS: usize, const ROW: usize, const STEP: usize>(
        words: usize,
        a: *const i32,
        b: *const i32,
        scales: Scales,
        dst: Destination,
    ) {
        let mut acc = [[_mm512_setzero_si512(); 2]; ROWS];
        fetch(dst, ROWS);
        for word in 0..words {
            // SAFETY: the caller vouches for `words` words of the panel and of every row.
            unsafe {
                let (a, b) = (a.add(word * STEP), b.add(word * 32));
                let (b0, b1) = (_mm512_loadu_si512(b.cast()), _mm512_loadu_si512(b.add(16).cast()));
                for (row, acc) in acc.iter_mut().enumerate() {
                    let x = _mm512_set1_epi32(*a.add(row * ROW));
                    acc[0] = _mm512_dpwssd_epi32(acc[0], x, b0);
                    acc[1] = _mm512_dpwssd_epi32(acc[1], x, b1);
                }
            }
        }
        for (row, acc) in acc.into_iter().enumerate() {
            for (half, sum) in acc.into_iter().enumerate() {
                let first = half * 16;
                let columns = dst.cols.saturating_sub(first).min(16);
                if columns == 0 {
                    continue;
                }
                let mask = ((1_u32 << columns) - 1) as u16;
                // SAFETY: the mask keeps loads and stores within the destination's columns; the caller vouches for
                // the scales.
                unsafe {
                    let left = _mm512_set1_ps(*scales.left.add(row));
                    let value = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), left);
                    let value = _mm512_mul_ps(value, _mm512_loadu_ps(scales.right.add(first)));
                    let at = dst.at.add(row * dst.stride + first);
                    let old = _mm512_maskz_loadu_ps(mask, at);
                    let sum = if dst.accumulate { _mm512_add_ps(old, value) } else { value };
                    _mm512_mask_storeu_ps(at, mask, sum);
                }
            }
        }
    }
}
