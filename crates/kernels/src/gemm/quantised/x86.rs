//! Registers of x86: AVX-512 and AVX2, with and without instructions for four products.

#[allow(clippy::wildcard_imports, reason = "instructions by the dozen")]
use std::arch::x86_64::*;

use super::super::micro::Destination;
use super::format::BlockFormat;
use super::lanes::{Codes, Lanes, by_format_and_rows, columns};
use super::side_by_side::GROUP;
use super::{Kernel, Tile};

/// Methods of [`Lanes`], each one expression.
macro_rules! methods {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = $body:expr;)*) => {$(
        #[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
        #[inline(always)]
        unsafe fn $name($($argument: $type),*) $(-> $result)? {
            // SAFETY: as the trait says; pointers are the caller's.
            unsafe { $body }
        }
    )*};
}

/// Four activations in every lane.
macro_rules! four {
    ($splat:ident, $x:expr) => {
        $splat(i32::from_ne_bytes($x.cast::<[u8; 4]>().read()))
    };
}

/// Registers of AVX-512, with VNNI or only BW.
struct Wide<const VNNI: bool>;

impl<const VNNI: bool> Lanes for Wide<VNNI> {
    const COLUMNS: usize = GROUP;
    type Bytes = __m512i;
    type Ints = __m512i;
    /// Codes, and their sizes where they are signed.
    type Factor = (__m512i, __m512i);
    /// A sum, and a second one: with VNNI of every other step, otherwise of pairs of products in
    /// 16 bits, which ends as zero.
    type Sum = (__m512i, __m512i);
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
        factor(codes: __m512i, kind: Codes) -> Self::Factor = if kind.are_bytes() && !VNNI {
            // One factor has to be unsigned: the code's sign moves to the activation.
            let codes = _mm512_xor_si512(codes, _mm512_set1_epi8(i8::MIN));
            (codes, _mm512_abs_epi8(codes))
        } else {
            (codes, codes)
        };
        begin(kind: Codes, x_sum: i32) -> Self::Sum = {
            let zero = if kind.are_bytes() && !VNNI { 0 } else { kind.zero };
            (_mm512_set1_epi32(-zero * x_sum), _mm512_setzero_si512())
        };
        end(sum: Self::Sum) -> __m512i = _mm512_add_epi32(sum.0, sum.1);
        to_floats(ints: __m512i) -> __m512 = _mm512_cvtepi32_ps(ints);
        splat(value: f32) -> __m512 = _mm512_set1_ps(value);
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        negate(a: __m512) -> __m512 = {
            let sign = _mm512_set1_epi32(i32::MIN);
            _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), sign))
        };
        store(a: __m512, to: *mut f32) = _mm512_storeu_ps(to, a);
        prefetch(at: *const u8) = _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
    #[inline(always)]
    unsafe fn add(
        (sum, pairs): Self::Sum,
        (codes, size): Self::Factor,
        kind: Codes,
        x: *const i8,
        (step, steps): (usize, usize),
    ) -> Self::Sum {
        // SAFETY: as the trait says.
        unsafe {
            let x = four!(_mm512_set1_epi32, x);
            if VNNI && kind.few_sums && step % 2 == 1 {
                return (sum, _mm512_dpbusd_epi32(pairs, codes, x));
            }
            if VNNI {
                return (_mm512_dpbusd_epi32(sum, codes, x), pairs);
            }
            let ones = _mm512_set1_epi16(1);
            if kind.are_bytes() {
                let x =
                    _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), x);
                let two = _mm512_maddubs_epi16(size, x);
                return (_mm512_add_epi32(sum, _mm512_madd_epi16(two, ones)), pairs);
            }
            let pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(codes, x));
            if kind.ends_in_16_bits(step, steps) {
                let sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, ones));
                return (sum, _mm512_setzero_si512());
            }
            (sum, pairs)
        }
    }
}

/// Registers of AVX2, with AVX-VNNI or without: of eight columns, so that their codes and a row's sums fit
/// the sixteen that there are.
struct Octet<const VNNI: bool>;

impl<const VNNI: bool> Lanes for Octet<VNNI> {
    const COLUMNS: usize = 8;
    type Bytes = __m256i;
    type Ints = __m256i;
    /// Codes, and their sizes where they are signed.
    type Factor = (__m256i, __m256i);
    /// A sum, and a second one: with VNNI of every other step, otherwise of pairs of products in
    /// 16 bits, which ends as zero.
    type Sum = (__m256i, __m256i);
    type Floats = __m256;

    methods! {
        load(at: *const u8) -> __m256i = _mm256_loadu_si256(at.cast());
        splat_bytes(value: u8) -> __m256i = _mm256_set1_epi8(value.cast_signed());
        and(a: __m256i, b: __m256i) -> __m256i = _mm256_and_si256(a, b);
        or(a: __m256i, b: __m256i) -> __m256i = _mm256_or_si256(a, b);
        shift(a: __m256i, bits: i32) -> __m256i = if bits < 0 {
            _mm256_srl_epi16(a, _mm_cvtsi32_si128(-bits))
        } else {
            _mm256_sll_epi16(a, _mm_cvtsi32_si128(bits))
        };
        look_up(table: &[u8; 16], index: __m256i) -> __m256i = {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), index)
        };
        halves(at: *const u8) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(at.cast()));
        brain_halves(at: *const u8) -> __m256 = {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        };
        unsigned(at: *const u8) -> __m256 =
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())));
        signed(at: *const u8) -> __m256 =
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())));
        nibbles(at: *const u8) -> [__m256; 2] = {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast()));
            let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(bytes))]
        };
        factor(codes: __m256i, kind: Codes) -> Self::Factor = if kind.are_bytes() && !VNNI {
            // One factor has to be unsigned: the code's sign moves to the activation.
            let codes = _mm256_xor_si256(codes, _mm256_set1_epi8(i8::MIN));
            (codes, _mm256_abs_epi8(codes))
        } else {
            (codes, codes)
        };
        begin(kind: Codes, x_sum: i32) -> Self::Sum = {
            let zero = if kind.are_bytes() && !VNNI { 0 } else { kind.zero };
            (_mm256_set1_epi32(-zero * x_sum), _mm256_setzero_si256())
        };
        end(sum: Self::Sum) -> __m256i = _mm256_add_epi32(sum.0, sum.1);
        to_floats(ints: __m256i) -> __m256 = _mm256_cvtepi32_ps(ints);
        splat(value: f32) -> __m256 = _mm256_set1_ps(value);
        mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        mul_add(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        negate(a: __m256) -> __m256 = _mm256_xor_ps(a, _mm256_set1_ps(-0.0));
        store(a: __m256, to: *mut f32) = _mm256_storeu_ps(to, a);
        prefetch(at: *const u8) = _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
    #[inline(always)]
    unsafe fn add(
        (sum, pairs): Self::Sum,
        (codes, size): Self::Factor,
        kind: Codes,
        x: *const i8,
        (step, steps): (usize, usize),
    ) -> Self::Sum {
        // SAFETY: as the trait says.
        unsafe {
            let x = four!(_mm256_set1_epi32, x);
            if VNNI && kind.few_sums && step % 2 == 1 {
                return (sum, _mm256_dpbusd_avx_epi32(pairs, codes, x));
            }
            if VNNI {
                return (_mm256_dpbusd_avx_epi32(sum, codes, x), pairs);
            }
            let ones = _mm256_set1_epi16(1);
            if kind.are_bytes() {
                let two = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, codes));
                return (_mm256_add_epi32(sum, _mm256_madd_epi16(two, ones)), pairs);
            }
            let pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes, x));
            if kind.ends_in_16_bits(step, steps) {
                let sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
                return (sum, _mm256_setzero_si256());
            }
            (sum, pairs)
        }
    }
}

/// A kernel compiled for its instruction set.
macro_rules! kernel {
    ($name:ident, $lanes:ty, $features:literal) => {
        /// # Safety
        /// As [`columns`].
        #[target_feature(enable = $features)]
        unsafe fn $name<const FORMAT: usize, const ROWS: usize, const TOGETHER: usize>(
            tile: Tile<'_>,
            dst: Destination,
        ) {
            // SAFETY: passed on to the caller.
            unsafe { columns::<$lanes, FORMAT, ROWS, TOGETHER>(tile, dst) }
        }
    };
}
kernel!(avx512_vnni, Wide<true>, "avx512f,avx512bw,avx512vnni,avx2,fma,f16c");
kernel!(avx512, Wide<false>, "avx512f,avx512bw,avx2,fma,f16c");
kernel!(avx_vnni, Octet<true>, "avxvnni,avx2,fma,f16c");
kernel!(avx2, Octet<false>, "avx2,fma,f16c");

/// # Safety
/// As [`columns`].
pub(super) unsafe fn run(kernel: Kernel, tile: Tile<'_>, dst: Destination) {
    // SAFETY: passed on to the caller.
    unsafe {
        match kernel {
            Kernel::Avx512Vnni => by_format_and_rows!(
                avx512_vnni,
                [1 x 1 2 x 1 3 x 1 4 x 1 5 x 1 6 x 1 7 x 1 8 x 1],
                [1 x 1 2 x 1 4 x 1],
                tile,
                dst
            ),
            Kernel::Avx512 => by_format_and_rows!(
                avx512,
                [1 x 1 2 x 1 4 x 1],
                [1 x 1 2 x 1 4 x 1],
                tile,
                dst
            ),
            Kernel::AvxVnni => by_format_and_rows!(
                avx_vnni,
                [1 x 2 2 x 1 4 x 1],
                [1 x 2 2 x 1 4 x 1],
                tile,
                dst
            ),
            Kernel::Avx2 => by_format_and_rows!(
                avx2,
                [1 x 2 2 x 1 3 x 1 4 x 1 5 x 1 6 x 1 7 x 1 8 x 1],
                [1 x 2 2 x 1 4 x 1],
                tile,
                dst
            ),
            Kernel::Plain => super::plain::columns(tile, dst),
        }
    }
}
