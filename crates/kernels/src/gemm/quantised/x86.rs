//! Registers of x86: AVX-512 and pairs of AVX2 ones, with and without instructions for four products.

#[allow(clippy::wildcard_imports, reason = "instructions by the dozen")]
use std::arch::x86_64::*;

use super::super::micro::Destination;
use super::fixed::FixedBlock;
use super::format::BlockFormat;
use super::lanes::{Codes, Lanes, ROWS_AT_ONCE, by_format_and_rows, columns, methods};
use super::{Kernel, Tile};

/// Four activations in every lane.
macro_rules! four {
    ($splat:ident, $x:expr, $step:expr) => {
        $splat(i32::from_ne_bytes($x.add(4 * $step).cast::<[u8; 4]>().read()))
    };
}

/// Registers of AVX-512, with VNNI or only BW.
struct Wide<const VNNI: bool>;

impl<const VNNI: bool> Lanes for Wide<VNNI> {
    type Bytes = __m512i;
    type Ints = __m512i;
    type Floats = __m512;

    methods! {
        load(at: *const u8) -> __m512i = _mm512_loadu_si512(at.cast());
        splat_bytes(value: u8) -> __m512i = _mm512_set1_epi8(value.cast_signed());
        and(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        or(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        shift(a: __m512i, bits: i32) -> __m512i = if bits < 0 {
            _mm512_srl_epi16(a, _mm_cvtsi32_si128(-bits))
        } else {
            _mm512_sll_epi16(a, _mm_cvtsi32_si128(bits))
        };
        look_up(table: &[u8; 16], index: __m512i) -> __m512i = {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), index)
        };
        halves(at: *const u8) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()));
        brain_halves(at: *const u8) -> __m512 = {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        };
        unsigned(at: *const u8) -> __m512 =
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())));
        signed(at: *const u8) -> __m512 =
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())));
        nibbles(at: *const u8) -> [__m512; 2] = {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()));
            let low = _mm512_and_si512(bytes, _mm512_set1_epi32(15));
            [_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(bytes))]
        };
        ints(value: i32) -> __m512i = _mm512_set1_epi32(value);
        to_floats(ints: __m512i) -> __m512 = _mm512_cvtepi32_ps(ints);
        splat(value: f32) -> __m512 = _mm512_set1_ps(value);
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        negate(a: __m512) -> __m512 = {
            let sign = _mm512_set1_epi32(i32::MIN);
            _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), sign))
        };
        add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        floats(at: *const f32) -> __m512 = _mm512_loadu_ps(at);
        store(a: __m512, at: *mut f32) = _mm512_storeu_ps(at, a);
        prefetch(at: *const u8) = _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
    #[inline(always)]
    unsafe fn product(codes: &[__m512i], kind: Codes, x: *const i8, x_sum: i32) -> __m512i {
        // SAFETY: as the trait says.
        unsafe {
            let mut sum = _mm512_set1_epi32(-kind.zero * x_sum);
            let ones = _mm512_set1_epi16(1);
            if kind.are_bytes() {
                // One factor has to be unsigned: the code's sign moves to the activation.
                sum = _mm512_setzero_si512();
                let (none, sign) = (_mm512_setzero_si512(), _mm512_set1_epi8(i8::MIN));
                for (step, codes) in codes.iter().enumerate() {
                    let codes = _mm512_xor_si512(*codes, sign);
                    let x = four!(_mm512_set1_epi32, x, step);
                    let x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), none, x);
                    let pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(codes), x);
                    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, ones));
                }
                return sum;
            }
            let mut pairs = _mm512_setzero_si512();
            for (step, code) in codes.iter().enumerate() {
                let x = four!(_mm512_set1_epi32, x, step);
                pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(*code, x));
                if (step + 1) % kind.pairs_in_16_bits() == 0 || step + 1 == codes.len() {
                    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, ones));
                    pairs = _mm512_setzero_si512();
                }
            }
            sum
        }
    }

    // With VNNI step by step for all rows: a row's products wait for each other, and the processor does not
    // look far enough ahead for the next row's.
    #[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
    #[inline(always)]
    unsafe fn products<const R: usize>(
        codes: &[__m512i],
        kind: Codes,
        (rows, first): (&[FixedBlock; R], usize),
        x_sums: [i32; R],
    ) -> [__m512i; R] {
        // SAFETY: as the trait says.
        unsafe {
            let mut sums = [Self::ints(0); R];
            for ((sum, row), x_sum) in sums.iter_mut().zip(rows).zip(x_sums) {
                *sum = if VNNI {
                    Self::ints(-kind.zero * x_sum)
                } else {
                    Self::product(codes, kind, row.codes.as_ptr().add(first), x_sum)
                };
            }
            if VNNI {
                for (step, codes) in codes.iter().enumerate() {
                    for (sum, row) in sums.iter_mut().zip(rows) {
                        let x = row.codes.as_ptr().add(first);
                        *sum = _mm512_dpbusd_epi32(*sum, *codes, four!(_mm512_set1_epi32, x, step));
                    }
                }
            }
            sums
        }
    }
}

/// Pairs of registers of AVX2, with AVX-VNNI or without.
struct Pair<const VNNI: bool>;

/// A register of each half.
macro_rules! both {
    ($a:ident => $value:expr) => {{
        let [low, high] = $a;
        [
            {
                let $a = low;
                $value
            },
            {
                let $a = high;
                $value
            },
        ]
    }};
    ($a:ident, $b:ident => $value:expr) => {{
        let ([a_low, a_high], [b_low, b_high]) = ($a, $b);
        [
            {
                let ($a, $b) = (a_low, b_low);
                $value
            },
            {
                let ($a, $b) = (a_high, b_high);
                $value
            },
        ]
    }};
}

impl<const VNNI: bool> Lanes for Pair<VNNI> {
    type Bytes = [__m256i; 2];
    type Ints = [__m256i; 2];
    type Floats = [__m256; 2];

    methods! {
        load(at: *const u8) -> [__m256i; 2] =
            [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())];
        splat_bytes(value: u8) -> [__m256i; 2] = [_mm256_set1_epi8(value.cast_signed()); 2];
        and(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] =
            both!(a, b => _mm256_and_si256(a, b));
        or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] =
            both!(a, b => _mm256_or_si256(a, b));
        shift(a: [__m256i; 2], bits: i32) -> [__m256i; 2] = if bits < 0 {
            both!(a => _mm256_srl_epi16(a, _mm_cvtsi32_si128(-bits)))
        } else {
            both!(a => _mm256_sll_epi16(a, _mm_cvtsi32_si128(bits)))
        };
        look_up(table: &[u8; 16], index: [__m256i; 2]) -> [__m256i; 2] = {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            both!(index => _mm256_shuffle_epi8(table, index))
        };
        halves(at: *const u8) -> [__m256; 2] = [
            _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(at.add(16).cast())),
        ];
        brain_halves(at: *const u8) -> [__m256; 2] = {
            let words = [_mm_loadu_si128(at.cast()), _mm_loadu_si128(at.add(16).cast())];
            both!(words => _mm256_castsi256_ps(
                _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(words))
            ))
        };
        unsigned(at: *const u8) -> [__m256; 2] = {
            let bytes = [_mm_loadl_epi64(at.cast()), _mm_loadl_epi64(at.add(8).cast())];
            both!(bytes => _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)))
        };
        signed(at: *const u8) -> [__m256; 2] = {
            let bytes = [_mm_loadl_epi64(at.cast()), _mm_loadl_epi64(at.add(8).cast())];
            both!(bytes => _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)))
        };
        nibbles(at: *const u8) -> [[__m256; 2]; 2] = {
            let bytes = [_mm_loadl_epi64(at.cast()), _mm_loadl_epi64(at.add(8).cast())];
            let bytes = both!(bytes => _mm256_cvtepu8_epi32(bytes));
            let low = both!(bytes => _mm256_and_si256(bytes, _mm256_set1_epi32(15)));
            let high = both!(bytes => _mm256_srli_epi32::<4>(bytes));
            [both!(low => _mm256_cvtepi32_ps(low)), both!(high => _mm256_cvtepi32_ps(high))]
        };
        ints(value: i32) -> [__m256i; 2] = [_mm256_set1_epi32(value); 2];
        to_floats(ints: [__m256i; 2]) -> [__m256; 2] = both!(ints => _mm256_cvtepi32_ps(ints));
        splat(value: f32) -> [__m256; 2] = [_mm256_set1_ps(value); 2];
        mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] = both!(a, b => _mm256_mul_ps(a, b));
        mul_add(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] =
            [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])];
        negate(a: [__m256; 2]) -> [__m256; 2] =
            both!(a => _mm256_xor_ps(a, _mm256_set1_ps(-0.0)));
        add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] = both!(a, b => _mm256_add_ps(a, b));
        floats(at: *const f32) -> [__m256; 2] = [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))];
        store(a: [__m256; 2], at: *mut f32) = {
            _mm256_storeu_ps(at, a[0]);
            _mm256_storeu_ps(at.add(8), a[1]);
        };
        prefetch(at: *const u8) = _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
    #[inline(always)]
    unsafe fn product(
        codes: &[[__m256i; 2]],
        kind: Codes,
        x: *const i8,
        x_sum: i32,
    ) -> [__m256i; 2] {
        // SAFETY: as the trait says.
        unsafe {
            let mut sum = [_mm256_set1_epi32(-kind.zero * x_sum); 2];
            if VNNI {
                for (step, codes) in codes.iter().enumerate() {
                    let (x, codes) = (four!(_mm256_set1_epi32, x, step), *codes);
                    sum = both!(sum, codes => _mm256_dpbusd_avx_epi32(sum, codes, x));
                }
                return sum;
            }
            let ones = _mm256_set1_epi16(1);
            if kind.are_bytes() {
                // One factor has to be unsigned: the code's sign moves to the activation.
                sum = [_mm256_setzero_si256(); 2];
                let sign = _mm256_set1_epi8(i8::MIN);
                for (step, codes) in codes.iter().enumerate() {
                    let x = four!(_mm256_set1_epi32, x, step);
                    let codes = *codes;
                    let codes = both!(codes => _mm256_xor_si256(codes, sign));
                    let pairs = both!(codes => _mm256_maddubs_epi16(
                        _mm256_abs_epi8(codes),
                        _mm256_sign_epi8(x, codes)
                    ));
                    sum =
                        both!(sum, pairs => _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones)));
                }
                return sum;
            }
            let mut pairs = [_mm256_setzero_si256(); 2];
            for (step, code) in codes.iter().enumerate() {
                let (x, code) = (four!(_mm256_set1_epi32, x, step), *code);
                pairs =
                    both!(pairs, code => _mm256_add_epi16(pairs, _mm256_maddubs_epi16(code, x)));
                if (step + 1) % kind.pairs_in_16_bits() == 0 || step + 1 == codes.len() {
                    sum =
                        both!(sum, pairs => _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones)));
                    pairs = [_mm256_setzero_si256(); 2];
                }
            }
            sum
        }
    }
}

/// A kernel compiled for its instruction set.
macro_rules! kernel {
    ($name:ident, $lanes:ty, $features:literal) => {
        /// # Safety
        /// As [`columns`].
        #[target_feature(enable = $features)]
        unsafe fn $name<const FORMAT: usize, const ROWS: usize>(tile: Tile<'_>, dst: Destination) {
            // SAFETY: passed on to the caller.
            unsafe { columns::<$lanes, FORMAT, ROWS>(tile, dst) }
        }
    };
}
kernel!(avx512_vnni, Wide<true>, "avx512f,avx512bw,avx512vnni,avx2,fma,f16c");
kernel!(avx512, Wide<false>, "avx512f,avx512bw,avx2,fma,f16c");
kernel!(avx_vnni, Pair<true>, "avxvnni,avx2,fma,f16c");
kernel!(avx2, Pair<false>, "avx2,fma,f16c");

/// # Safety
/// As [`columns`].
pub(super) unsafe fn run(kernel: Kernel, tile: Tile<'_>, dst: Destination) {
    // SAFETY: passed on to the caller.
    unsafe {
        match kernel {
            Kernel::Avx512Vnni => {
                // Registers hold the sums of eight rows. Sixteen share what is unpacked, other numbers are two parts.
                let whole = dst.rows <= ROWS_AT_ONCE || dst.rows == 2 * ROWS_AT_ONCE;
                let part = if whole { dst.rows.max(1) } else { dst.rows.div_ceil(2) };
                for first in (0..dst.rows).step_by(part) {
                    let (at, rows) = (dst.at.add(first * dst.stride), part.min(dst.rows - first));
                    let (tile, dst) = (tile.from(first), Destination { at, rows, ..dst });
                    by_format_and_rows!(avx512_vnni, [1 2 3 4 5 6 7 8 16], tile, dst);
                }
            }
            Kernel::Avx512 => by_format_and_rows!(avx512, [1], tile, dst),
            Kernel::AvxVnni => by_format_and_rows!(avx_vnni, [1 2], tile, dst),
            Kernel::Avx2 => by_format_and_rows!(avx2, [1 2], tile, dst),
            Kernel::Plain => super::plain::columns(tile, dst),
        }
    }
}
