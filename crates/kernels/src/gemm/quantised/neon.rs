//! Registers of NEON, four of them for 16 columns.

#[allow(clippy::wildcard_imports, reason = "instructions by the dozen")]
use std::arch::aarch64::*;

use super::super::micro::Destination;
use super::Tile;
use super::format::BlockFormat;
use super::lanes::{Codes, Lanes, by_format_and_rows, columns, methods};

/// What four registers hold.
type Four<T> = [T; 4];

/// Four registers of NEON.
struct Quad;

/// An expression for every register.
macro_rules! four {
    ($i:ident => $value:expr) => {
        [
            {
                const $i: usize = 0;
                $value
            },
            {
                const $i: usize = 1;
                $value
            },
            {
                const $i: usize = 2;
                $value
            },
            {
                const $i: usize = 3;
                $value
            },
        ]
    };
}

impl Lanes for Quad {
    type Bytes = Four<uint8x16_t>;
    type Ints = Four<int32x4_t>;
    type Floats = Four<float32x4_t>;

    methods! {
        load(at: *const u8) -> Four<uint8x16_t> = four!(I => vld1q_u8(at.add(16 * I)));
        splat_bytes(value: u8) -> Four<uint8x16_t> = [vdupq_n_u8(value); 4];
        and(a: Four<uint8x16_t>, b: Four<uint8x16_t>) -> Four<uint8x16_t> =
            four!(I => vandq_u8(a[I], b[I]));
        or(a: Four<uint8x16_t>, b: Four<uint8x16_t>) -> Four<uint8x16_t> =
            four!(I => vorrq_u8(a[I], b[I]));
        shift(a: Four<uint8x16_t>, bits: i32) -> Four<uint8x16_t> =
            four!(I => vshlq_u8(a[I], vdupq_n_s8(bits as i8)));
        look_up(table: &[u8; 16], index: Four<uint8x16_t>) -> Four<uint8x16_t> = {
            let table = vld1q_u8(table.as_ptr());
            four!(I => vqtbl1q_u8(table, index[I]))
        };
        halves(at: *const u8) -> Four<float32x4_t> =
            four!(I => half_to_float(vmovl_u16(vld1_u16(at.add(8 * I).cast()))));
        brain_halves(at: *const u8) -> Four<float32x4_t> = four!(I => {
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(at.add(8 * I).cast())))
        });
        unsigned(at: *const u8) -> Four<float32x4_t> = {
            let bytes = widened(vld1q_u8(at));
            four!(I => vcvtq_f32_u32(bytes[I]))
        };
        signed(at: *const u8) -> Four<float32x4_t> = {
            // Whole numbers are exact: 128 added to the byte is taken from the float.
            let bytes = widened(veorq_u8(vld1q_u8(at), vdupq_n_u8(128)));
            four!(I => vsubq_f32(vcvtq_f32_u32(bytes[I]), vdupq_n_f32(128.0)))
        };
        nibbles(at: *const u8) -> [Four<float32x4_t>; 2] = {
            let bytes = vld1q_u8(at);
            let low = widened(vandq_u8(bytes, vdupq_n_u8(15)));
            let high = widened(vshrq_n_u8::<4>(bytes));
            [four!(I => vcvtq_f32_u32(low[I])), four!(I => vcvtq_f32_u32(high[I]))]
        };
        ints(value: i32) -> Four<int32x4_t> = [vdupq_n_s32(value); 4];
        to_floats(ints: Four<int32x4_t>) -> Four<float32x4_t> = four!(I => vcvtq_f32_s32(ints[I]));
        splat(value: f32) -> Four<float32x4_t> = [vdupq_n_f32(value); 4];
        mul(a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> =
            four!(I => vmulq_f32(a[I], b[I]));
        mul_add(a: Four<float32x4_t>, b: Four<float32x4_t>, c: Four<float32x4_t>)
            -> Four<float32x4_t> = four!(I => vfmaq_f32(c[I], a[I], b[I]));
        negate(a: Four<float32x4_t>) -> Four<float32x4_t> = four!(I => vnegq_f32(a[I]));
        add(a: Four<float32x4_t>, b: Four<float32x4_t>) -> Four<float32x4_t> =
            four!(I => vaddq_f32(a[I], b[I]));
        floats(at: *const f32) -> Four<float32x4_t> = four!(I => vld1q_f32(at.add(4 * I)));
        store(a: Four<float32x4_t>, at: *mut f32) = {
            for (i, a) in a.into_iter().enumerate() {
                vst1q_f32(at.add(4 * i), a);
            }
        };
        // The processor fetches ahead of plain streams itself.
        prefetch(_at: *const u8) = {};
    }

    #[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
    #[inline(always)]
    unsafe fn product(
        codes: &[Four<uint8x16_t>],
        kind: Codes,
        x: *const i8,
        _x_sum: i32,
    ) -> Four<int32x4_t> {
        // SAFETY: as the trait says.
        unsafe {
            let zero = vdupq_n_u8(kind.zero as u8);
            // Sums of two products of a column each.
            let mut sums = [[vdupq_n_s32(0); 2]; 4];
            for (step, codes) in codes.iter().enumerate() {
                let x = x.add(4 * step).cast::<[u8; 4]>().read();
                let x = vreinterpret_s8_s32(vdup_n_s32(i32::from_ne_bytes(x)));
                for (sums, codes) in sums.iter_mut().zip(codes) {
                    // Signed, 8 bits hold them.
                    let codes = vreinterpretq_s8_u8(vsubq_u8(*codes, zero));
                    sums[0] = vpadalq_s16(sums[0], vmull_s8(vget_low_s8(codes), x));
                    sums[1] = vpadalq_s16(sums[1], vmull_s8(vget_high_s8(codes), x));
                }
            }
            four!(I => vpaddq_s32(sums[I][0], sums[I][1]))
        }
    }
}

/// 16 bytes in 32 bits each.
#[inline]
#[target_feature(enable = "neon")]
fn widened(bytes: uint8x16_t) -> Four<uint32x4_t> {
    let halves = [vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))];
    four!(I => {
        let half = halves[I / 2];
        vmovl_u16(if I % 2 == 0 { vget_low_u16(half) } else { vget_high_u16(half) })
    })
}

/// Numbers of f16 in the low bits: their exponents are moved by a product, which is exact, also of those
/// that are not normal.
#[inline]
#[target_feature(enable = "neon")]
fn half_to_float(bits: uint32x4_t) -> float32x4_t {
    let size = vandq_u32(bits, vdupq_n_u32(0x7fff));
    let sign = vshlq_n_u32::<16>(veorq_u32(bits, size));
    let moved = vshlq_n_u32::<13>(size);
    let finite = vmulq_f32(vreinterpretq_f32_u32(moved), vdupq_n_f32(f32::from_bits(0x7780_0000)));
    let other = vorrq_u32(moved, vdupq_n_u32(0x7f80_0000));
    let is_other = vcgeq_u32(size, vdupq_n_u32(0x7c00));
    let size = vbslq_u32(is_other, other, vreinterpretq_u32_f32(finite));
    vreinterpretq_f32_u32(vorrq_u32(size, sign))
}

/// # Safety
/// As [`columns`].
#[target_feature(enable = "neon")]
unsafe fn neon<const FORMAT: usize, const ROWS: usize>(tile: Tile<'_>, dst: Destination) {
    // SAFETY: passed on to the caller.
    unsafe { columns::<Quad, FORMAT, ROWS>(tile, dst) }
}

/// # Safety
/// As [`columns`].
pub(super) unsafe fn run(tile: Tile<'_>, dst: Destination) {
    // SAFETY: passed on to the caller.
    unsafe { by_format_and_rows!(neon, [1 2], tile, dst) }
}
