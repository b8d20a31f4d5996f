//! Inner kernels for quantised blocks of 16 columns side by side.

use std::arch::x86_64::{
    __m256, __m256i, __m512, __m512i, _mm_loadu_si128, _mm256_and_si256, _mm256_cvtepi32_ps,
    _mm256_cvtph_ps, _mm256_fmadd_ps, _mm256_loadu_si256, _mm256_mul_ps, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_setzero_ps, _mm256_sllv_epi32, _mm256_srai_epi32, _mm256_srlv_epi32,
    _mm256_storeu_ps, _mm256_sub_ps, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_fmadd_ps,
    _mm512_loadu_si512, _mm512_mul_ps, _mm512_permutexvar_ps, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setr_ps, _mm512_setzero_ps, _mm512_sllv_epi32, _mm512_srai_epi32, _mm512_srlv_epi32,
    _mm512_storeu_ps,
};

use super::super::micro::{Destination, store};
use super::format::WORDS;
use super::{BLOCK, BlockFormat, GROUP, Tile};

const Q4_0: u8 = 0;
const Q4_1: u8 = 1;
const Q8_0: u8 = 2;

/// Codes of a word.
const fn codes_of_word(format: u8) -> usize {
    if format == Q8_0 { 4 } else { 8 }
}

/// Bytes of a block of 16 columns, and of them scales and minima.
const fn sizes(format: u8) -> (usize, usize) {
    match format {
        Q4_0 => (GROUP * BlockFormat::Q4_0.bytes(), 2 * GROUP),
        Q4_1 => (GROUP * BlockFormat::Q4_1.bytes(), 4 * GROUP),
        _ => (GROUP * BlockFormat::Q8_0.bytes(), 2 * GROUP),
    }
}

macro_rules! by_rows {
    ($kernel:ident, $format:ident, [$($groups:literal)?], $tile:expr, $dst:expr) => {
        match $dst.rows {
            1 => $kernel::<1, $($groups,)? $format>($tile, $dst),
            2 => $kernel::<2, $($groups,)? $format>($tile, $dst),
            3 => $kernel::<3, $($groups,)? $format>($tile, $dst),
            4 => $kernel::<4, $($groups,)? $format>($tile, $dst),
            5 => $kernel::<5, $($groups,)? $format>($tile, $dst),
            6 => $kernel::<6, $($groups,)? $format>($tile, $dst),
            7 => $kernel::<7, $($groups,)? $format>($tile, $dst),
            _ => $kernel::<8, $($groups,)? $format>($tile, $dst),
        }
    };
}

macro_rules! by_format {
    ($kernel:ident, $groups:tt, $tile:expr, $dst:expr) => {
        match $tile.format {
            BlockFormat::Q4_0 => by_rows!($kernel, Q4_0, $groups, $tile, $dst),
            BlockFormat::Q4_1 => by_rows!($kernel, Q4_1, $groups, $tile, $dst),
            BlockFormat::Q8_0 => by_rows!($kernel, Q8_0, $groups, $tile, $dst),
        }
    };
}

/// # Safety
/// AVX-512F; the operands reach as far as the tile of at most 8 rows and 32 columns, and `dst` is
/// writable for them.
pub(super) unsafe fn avx512(tile: Tile<'_>, dst: Destination) {
    // SAFETY: passed on to the caller.
    unsafe {
        if dst.cols > GROUP {
            by_format!(columns_512, [2], tile, dst);
        } else {
            by_format!(columns_512, [1], tile, dst);
        }
    }
}

/// # Safety
/// As [`avx512`].
#[target_feature(enable = "avx512f")]
unsafe fn columns_512<const ROWS: usize, const GROUPS: usize, const FORMAT: u8>(
    tile: Tile<'_>,
    dst: Destination,
) {
    let (size, head) = sizes(FORMAT);
    let groups: [*const u8; GROUPS] =
        std::array::from_fn(|group| tile.right.as_ptr().wrapping_add(group * tile.right_stride));
    let rows: [*const f32; ROWS] =
        std::array::from_fn(|row| tile.left.as_ptr().wrapping_add(row * tile.left_stride));
    let mut acc = [[_mm512_setzero_ps(); GROUPS]; ROWS];
    for block in 0..tile.blocks {
        // SAFETY: the block lies within every group, and its steps within every row.
        unsafe {
            let at: [*const u8; GROUPS] = groups.map(|group| group.add(block * size));
            let halves = |at: *const u8| _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()));
            let scales = at.map(halves);
            let least = if FORMAT == Q4_1 { at.map(|at| halves(at.add(32))) } else { scales };
            for word in 0..(size - head) / WORDS {
                let words = at.map(|at| _mm512_loadu_si512(at.add(head + word * WORDS).cast()));
                for i in 0..codes_of_word(FORMAT) {
                    let mut values = [_mm512_setzero_ps(); GROUPS];
                    for (group, value) in values.iter_mut().enumerate() {
                        *value =
                            value_512::<FORMAT>(words[group], i, (scales[group], least[group]));
                    }
                    let step = block * BLOCK + codes_of_word(FORMAT) * word + i;
                    for (row, acc) in rows.iter().zip(&mut acc) {
                        let x = _mm512_set1_ps(*row.add(step));
                        for (acc, value) in acc.iter_mut().zip(values) {
                            *acc = _mm512_fmadd_ps(x, value, *acc);
                        }
                    }
                }
            }
        }
    }
    for (row, acc) in acc.into_iter().enumerate() {
        for (group, acc) in acc.into_iter().enumerate() {
            let mut values = [0.0; GROUP];
            // SAFETY: 16 values fit, and the row lies within the destination.
            unsafe {
                _mm512_storeu_ps(values.as_mut_ptr(), acc);
                store(&values, dst, row, group * GROUP);
            }
        }
    }
}

/// Value `i` of every word. Products of scale and code are exact, so fusing the addition rounds no
/// differently.
#[inline]
#[target_feature(enable = "avx512f")]
fn value_512<const FORMAT: u8>(
    words: __m512i,
    i: usize,
    (scale, least): (__m512, __m512),
) -> __m512 {
    if FORMAT == Q8_0 {
        let high = _mm512_sllv_epi32(words, _mm512_set1_epi32(24 - 8 * i as i32));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(high)), scale);
    }
    // A permutation looks at the low four bits alone.
    let codes = _mm512_srlv_epi32(words, _mm512_set1_epi32(4 * i as i32));
    if FORMAT == Q4_0 {
        let table = _mm512_setr_ps(
            -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
        );
        return _mm512_mul_ps(_mm512_permutexvar_ps(codes, table), scale);
    }
    let table = _mm512_setr_ps(
        0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
    );
    _mm512_fmadd_ps(_mm512_permutexvar_ps(codes, table), scale, least)
}

/// # Safety
/// As [`avx512`], with AVX2, FMA and F16C.
pub(super) unsafe fn avx2(tile: Tile<'_>, dst: Destination) {
    for first in (0..dst.cols).step_by(8) {
        let right = &tile.right[first / GROUP * tile.right_stride..];
        let half =
            Half { format: tile.format, tile: Tile { right, ..tile }, octet: first % GROUP / 8 };
        // SAFETY: passed on to the caller; the first column lies within the destination.
        unsafe {
            let cols = (dst.cols - first).min(8);
            let dst = Destination { at: dst.at.add(first), cols, ..dst };
            by_format!(columns_256, [], half, dst);
        }
    }
}

/// Eight columns of a group.
#[derive(Clone, Copy)]
struct Half<'a> {
    format: BlockFormat,
    /// From the group on.
    tile: Tile<'a>,
    /// 0 or 1.
    octet: usize,
}

/// # Safety
/// As [`avx2`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn columns_256<const ROWS: usize, const FORMAT: u8>(half: Half<'_>, dst: Destination) {
    let Half { tile, octet, .. } = half;
    let (size, head) = sizes(FORMAT);
    let rows: [*const f32; ROWS] =
        std::array::from_fn(|row| tile.left.as_ptr().wrapping_add(row * tile.left_stride));
    let mut acc = [_mm256_setzero_ps(); ROWS];
    for block in 0..tile.blocks {
        // SAFETY: the block lies within the group, and its steps within every row.
        unsafe {
            let at = tile.right.as_ptr().add(block * size);
            let halves =
                |at: *const u8| _mm256_cvtph_ps(_mm_loadu_si128(at.add(16 * octet).cast()));
            let scale = halves(at);
            let least = if FORMAT == Q4_1 { halves(at.add(2 * GROUP)) } else { scale };
            for word in 0..(size - head) / WORDS {
                let words = at.add(head + word * WORDS + 32 * octet);
                let words = _mm256_loadu_si256(words.cast());
                for i in 0..codes_of_word(FORMAT) {
                    let value = value_256::<FORMAT>(words, i, (scale, least));
                    let step = block * BLOCK + codes_of_word(FORMAT) * word + i;
                    for (row, acc) in rows.iter().zip(&mut acc) {
                        *acc = _mm256_fmadd_ps(_mm256_set1_ps(*row.add(step)), value, *acc);
                    }
                }
            }
        }
    }
    for (row, acc) in acc.into_iter().enumerate() {
        let mut values = [0.0; 8];
        // SAFETY: 8 values fit, and the row lies within the destination.
        unsafe {
            _mm256_storeu_ps(values.as_mut_ptr(), acc);
            store(&values, dst, row, 0);
        }
    }
}

/// As [`value_512`].
#[inline]
#[target_feature(enable = "avx2,fma")]
fn value_256<const FORMAT: u8>(
    words: __m256i,
    i: usize,
    (scale, least): (__m256, __m256),
) -> __m256 {
    if FORMAT == Q8_0 {
        let high = _mm256_sllv_epi32(words, _mm256_set1_epi32(24 - 8 * i as i32));
        return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(high)), scale);
    }
    let codes = _mm256_srlv_epi32(words, _mm256_set1_epi32(4 * i as i32));
    let codes = _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)));
    if FORMAT == Q4_0 {
        return _mm256_mul_ps(_mm256_sub_ps(codes, _mm256_set1_ps(8.0)), scale);
    }
    _mm256_fmadd_ps(codes, scale, least)
}
