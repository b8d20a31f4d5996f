//! Inner kernels for quantised blocks of 16 columns side by side.

use std::arch::x86_64::{
    __m256i, __m512i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_abs_epi8,
    _mm256_add_epi16, _mm256_add_epi32, _mm256_and_si256, _mm256_cvtepi32_ps, _mm256_cvtph_ps,
    _mm256_fmadd_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_mul_ps,
    _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_setzero_si256, _mm256_sign_epi8, _mm256_srli_epi16, _mm256_storeu_ps, _mm256_sub_epi32,
    _mm256_xor_si256, _mm512_and_si512, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_dpbusd_epi32,
    _mm512_fmadd_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_set1_epi8, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512, _mm512_srli_epi16, _mm512_storeu_ps,
};

use super::super::micro::{Destination, store};
use super::format::WORDS;
use super::{BLOCK, BlockFormat, GROUP, Tile};

const Q4_0: u8 = 0;
const Q4_1: u8 = 1;
const Q8_0: u8 = 2;

/// Bytes of a group that are fetched ahead: with several rows, instructions in flight reach no
/// further than the block at hand, and memory would rest.
const AHEAD: usize = 2048;

/// Most rows whose sums over two groups of columns fit the registers.
const ROWS_OF_TWO: usize = 5;

/// Where fetching goes on from the bytes of a group: behind its end at the groups behind these.
const fn ahead_of(offset: usize, stride: usize, groups: usize) -> usize {
    if offset < stride { offset } else { offset + stride * (groups - 1) }
}

/// Parts of a word: four codes of every column each.
const fn parts_of_word(format: u8) -> usize {
    if format == Q8_0 { 1 } else { 2 }
}

/// The unsigned code of zero.
const fn zero(format: u8) -> i32 {
    match format {
        Q4_0 => BlockFormat::Q4_0.zero(),
        Q4_1 => BlockFormat::Q4_1.zero(),
        _ => BlockFormat::Q8_0.zero(),
    }
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
/// AVX-512F, -BW and -VNNI; the operands reach as far as the tile of at most 8 rows and 32 columns,
/// and `dst` is writable for them.
pub(super) unsafe fn avx512(tile: Tile<'_>, dst: Destination) {
    if dst.cols > GROUP && dst.rows <= ROWS_OF_TWO {
        // SAFETY: passed on to the caller.
        unsafe { by_format!(columns_512, [2], tile, dst) };
        return;
    }
    for first in (0..dst.cols).step_by(GROUP) {
        let right = &tile.right[first / GROUP * tile.right_stride..];
        // SAFETY: passed on to the caller; the first column lies within the destination.
        unsafe {
            let cols = (dst.cols - first).min(GROUP);
            let dst = Destination { at: dst.at.add(first), cols, ..dst };
            by_format!(columns_512, [1], Tile { right, ..tile }, dst);
        }
    }
}

/// # Safety
/// As [`avx512`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn columns_512<const ROWS: usize, const GROUPS: usize, const FORMAT: u8>(
    tile: Tile<'_>,
    dst: Destination,
) {
    let (size, head) = sizes(FORMAT);
    let groups: [*const u8; GROUPS] =
        std::array::from_fn(|group| tile.right.as_ptr().wrapping_add(group * tile.right_stride));
    let mut acc = [[_mm512_setzero_ps(); GROUPS]; ROWS];
    // Loops instead of closures: those would not be inlined into functions without AVX-512.
    for block in 0..tile.blocks {
        // SAFETY: the block lies within every group and every row.
        unsafe {
            let codes = tile.codes.as_ptr().add(block * BLOCK);
            let fixed = tile.scales.as_ptr().add(block);
            let mut sums = [[_mm512_setzero_si512(); GROUPS]; ROWS];
            if zero(FORMAT) != 0 {
                for (row, sums) in sums.iter_mut().enumerate() {
                    let sum = (*fixed.add(row * tile.blocks)).sum;
                    *sums = [_mm512_set1_epi32(-zero(FORMAT) * sum); GROUPS];
                }
            }
            let ahead = ahead_of(block * size + AHEAD, tile.right_stride, GROUPS);
            for group in groups {
                _mm_prefetch::<_MM_HINT_T0>(group.wrapping_add(ahead).cast());
            }
            for word in 0..(size - head) / WORDS {
                let mut words = [_mm512_setzero_si512(); GROUPS];
                for (words, group) in words.iter_mut().zip(groups) {
                    let offset = head + word * WORDS;
                    _mm_prefetch::<_MM_HINT_T0>(group.wrapping_add(ahead + offset).cast());
                    *words = _mm512_loadu_si512(group.add(block * size + offset).cast());
                }
                for part in 0..parts_of_word(FORMAT) {
                    let step = 4 * (parts_of_word(FORMAT) * word + part);
                    let mut right = [_mm512_setzero_si512(); GROUPS];
                    for (right, words) in right.iter_mut().zip(words) {
                        *right = codes_512::<FORMAT>(words, part);
                    }
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let x = codes.add(row * tile.blocks * BLOCK + step).cast::<[u8; 4]>();
                        let x = _mm512_set1_epi32(i32::from_ne_bytes(x.read()));
                        for (sum, right) in sums.iter_mut().zip(right) {
                            *sum = _mm512_dpbusd_epi32(*sum, right, x);
                        }
                    }
                }
            }
            for (group, at) in groups.into_iter().enumerate() {
                let at = at.add(block * size);
                let scales = _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()));
                let least = _mm512_cvtph_ps(_mm256_loadu_si256(at.add(2 * GROUP).cast()));
                for row in 0..ROWS {
                    let fixed = &*fixed.add(row * tile.blocks);
                    let scale = _mm512_mul_ps(scales, _mm512_set1_ps(fixed.scale));
                    let exact = _mm512_cvtepi32_ps(sums[row][group]);
                    acc[row][group] = _mm512_fmadd_ps(exact, scale, acc[row][group]);
                    if FORMAT == Q4_1 {
                        let offset = _mm512_set1_ps(fixed.offset);
                        acc[row][group] = _mm512_fmadd_ps(least, offset, acc[row][group]);
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

/// Four codes of every word, as bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn codes_512<const FORMAT: u8>(words: __m512i, part: usize) -> __m512i {
    if FORMAT == Q8_0 {
        return words;
    }
    let low = if part == 0 { words } else { _mm512_srli_epi16::<4>(words) };
    _mm512_and_si512(low, _mm512_set1_epi8(15))
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
    let mut acc = [_mm256_setzero_ps(); ROWS];
    for block in 0..tile.blocks {
        // SAFETY: the block lies within the group and every row.
        unsafe {
            let at = tile.right.as_ptr().add(block * size);
            let codes = tile.codes.as_ptr().add(block * BLOCK);
            let fixed = tile.scales.as_ptr().add(block);
            let mut sums = [_mm256_setzero_si256(); ROWS];
            for word in 0..(size - head) / WORDS {
                let words = at.add(head + word * WORDS + 32 * octet);
                let words = _mm256_loadu_si256(words.cast());
                for part in 0..parts_of_word(FORMAT) {
                    let right = codes_256::<FORMAT>(words, part);
                    let step = 4 * (parts_of_word(FORMAT) * word + part);
                    for (row, sum) in sums.iter_mut().enumerate() {
                        let x = codes.add(row * tile.blocks * BLOCK + step).cast::<[u8; 4]>();
                        let x = _mm256_set1_epi32(i32::from_ne_bytes(x.read()));
                        *sum = add_products_256::<FORMAT>(*sum, right, x);
                    }
                }
            }
            for (row, sum) in sums.iter_mut().enumerate() {
                let zero = zero(FORMAT) * (*fixed.add(row * tile.blocks)).sum;
                *sum = exact_sums_256::<FORMAT>(*sum, zero);
            }
            let scales = _mm256_cvtph_ps(_mm_loadu_si128(at.add(16 * octet).cast()));
            let least = at.add(2 * GROUP + 16 * octet);
            let least = _mm256_cvtph_ps(_mm_loadu_si128(least.cast()));
            for row in 0..ROWS {
                let fixed = &*fixed.add(row * tile.blocks);
                let scale = _mm256_mul_ps(scales, _mm256_set1_ps(fixed.scale));
                acc[row] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[row]), scale, acc[row]);
                if FORMAT == Q4_1 {
                    acc[row] = _mm256_fmadd_ps(least, _mm256_set1_ps(fixed.offset), acc[row]);
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

/// As [`codes_512`]; signed where a byte is one code.
#[inline]
#[target_feature(enable = "avx2")]
fn codes_256<const FORMAT: u8>(words: __m256i, part: usize) -> __m256i {
    if FORMAT == Q8_0 {
        return _mm256_xor_si256(words, _mm256_set1_epi8(i8::MIN));
    }
    let low = if part == 0 { words } else { _mm256_srli_epi16::<4>(words) };
    _mm256_and_si256(low, _mm256_set1_epi8(15))
}

/// Adds the products of the bytes of every lane. 16 bits hold the sums of a block of 4-bit codes, at most
/// 16 x 15 x 127, and of two products of bytes, at most 2 x 128 x 127.
#[inline]
#[target_feature(enable = "avx2")]
fn add_products_256<const FORMAT: u8>(sum: __m256i, codes: __m256i, x: __m256i) -> __m256i {
    if FORMAT == Q8_0 {
        // One factor has to be unsigned: the code's sign moves to the activation.
        let products = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
    }
    _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x))
}

/// What [`add_products_256`] added up, in 32 bits, without what codes of `zero` stand for.
#[inline]
#[target_feature(enable = "avx2")]
fn exact_sums_256<const FORMAT: u8>(sum: __m256i, zero: i32) -> __m256i {
    if FORMAT == Q8_0 {
        return sum;
    }
    let sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
    _mm256_sub_epi32(sum, _mm256_set1_epi32(zero))
}
