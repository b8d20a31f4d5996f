//! The inner kernel of every vector instruction set: 16 columns side by side.
//!
//! 32 steps of the columns are unpacked once, and multiplied with all rows of the tile.

use super::super::micro::{Destination, store};
use super::fixed::FixedBlock;
use super::format::{Floats, Layout, SIGN, Scales};
use super::side_by_side::WORDS;
use super::{BLOCK, BlockFormat, GROUP, MOST_ROWS, Tile};

/// Bytes of a group that are fetched ahead: with several rows, instructions in flight reach no
/// further than the block at hand, and memory would rest.
const AHEAD: usize = 2048;
/// Bytes that memory hands over at once.
const LINE: usize = 64;
/// Words of four codes in 32 values.
const STEPS: usize = BLOCK / 4;

/// Rows whose sums registers hold beside the codes.
pub(super) const ROWS_AT_ONCE: usize = 8;

/// Registers of 16 columns, on one instruction set.
///
/// # Safety
/// The CPU has the instruction set. All methods are inlined into functions that are compiled for it.
pub(super) trait Lanes {
    /// Four bytes of every column.
    type Bytes: Copy;
    /// A whole number of 32 bits of every column.
    type Ints: Copy;
    /// A float of every column.
    type Floats: Copy;

    /// [`WORDS`] bytes.
    unsafe fn load(at: *const u8) -> Self::Bytes;
    unsafe fn splat_bytes(value: u8) -> Self::Bytes;
    unsafe fn and(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Up to the left by `bits`, or down where that is negative; bits cross the bytes of a pair.
    unsafe fn shift(a: Self::Bytes, bits: i32) -> Self::Bytes;
    /// Entry of a table of 16 for every byte below 16.
    unsafe fn look_up(table: &[u8; 16], index: Self::Bytes) -> Self::Bytes;

    /// The same number in every column.
    unsafe fn ints(value: i32) -> Self::Ints;
    /// `Σ (code − zero) x` over `codes` and four activations for each of them, from `x` on, whose sum is `x_sum`.
    unsafe fn product(codes: &[Self::Bytes], kind: Codes, x: *const i8, x_sum: i32) -> Self::Ints;
    /// The same for the activations of several rows from the value `first` on, whose sums are `x_sums`.
    #[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
    #[inline(always)]
    unsafe fn products<const R: usize>(
        codes: &[Self::Bytes],
        kind: Codes,
        (rows, first): (&[FixedBlock; R], usize),
        x_sums: [i32; R],
    ) -> [Self::Ints; R] {
        // SAFETY: passed on to the caller.
        unsafe {
            let mut sums = [Self::ints(0); R];
            for ((sum, row), x_sum) in sums.iter_mut().zip(rows).zip(x_sums) {
                *sum = Self::product(codes, kind, row.codes.as_ptr().add(first), x_sum);
            }
            sums
        }
    }

    /// 16 numbers of f16.
    unsafe fn halves(at: *const u8) -> Self::Floats;
    /// 16 numbers of bf16.
    unsafe fn brain_halves(at: *const u8) -> Self::Floats;
    /// 16 bytes as floats.
    unsafe fn unsigned(at: *const u8) -> Self::Floats;
    /// 16 signed bytes as floats.
    unsafe fn signed(at: *const u8) -> Self::Floats;
    /// The lower and the upper halves of 16 bytes as floats.
    unsafe fn nibbles(at: *const u8) -> [Self::Floats; 2];
    unsafe fn to_floats(ints: Self::Ints) -> Self::Floats;
    unsafe fn splat(value: f32) -> Self::Floats;
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a b + c`, rounded once.
    unsafe fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    unsafe fn negate(a: Self::Floats) -> Self::Floats;
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// 16 numbers of f32.
    unsafe fn floats(at: *const f32) -> Self::Floats;
    unsafe fn store(a: Self::Floats, at: *mut f32);
    /// Asks for a line of memory.
    unsafe fn prefetch(at: *const u8);
}

/// Methods of [`Lanes`], each one expression.
macro_rules! methods {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = $body:expr;)*) => {$(
        #[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
        #[allow(unused_unsafe, reason = "a body may do nothing")]
        #[inline(always)]
        unsafe fn $name($($argument: $type),*) $(-> $result)? {
            // SAFETY: as the trait says; pointers are the caller's.
            unsafe { $body }
        }
    )*};
}
pub(super) use methods;

/// What is known of unsigned codes; constants once a kernel is inlined.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "sums of 16 bits ask for it"))]
pub(super) struct Codes {
    pub(super) largest: i32,
    /// The code of zero; where the largest needs all 8 bits it is [`SIGN`].
    pub(super) zero: i32,
}

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "sums of 16 bits ask for it"))]
impl Codes {
    const fn of(layout: &Layout) -> Self {
        Self { largest: layout.largest, zero: layout.zero }
    }

    /// Whether turning their first bits makes them signed, as they have to be where 16 bits do not hold
    /// the sum of two products.
    pub(super) const fn are_bytes(self) -> bool {
        self.zero == SIGN as i32
    }

    /// Products of two codes each with two activations that add up in 16 bits.
    pub(super) const fn pairs_in_16_bits(self) -> usize {
        i16::MAX as usize / (2 * i8::MAX as usize * self.largest as usize)
    }
}

/// Kernels are compiled for a format by its number.
const fn layout<const FORMAT: usize>() -> Layout {
    BlockFormat::ALL[FORMAT].layout()
}

/// Factors of 32 values of every column.
struct Factors<V: Lanes> {
    scale: [V::Floats; 2],
    least: [V::Floats; 2],
}

/// # Safety
/// The CPU has the instruction set; the operands reach as far as the tile of at most [`MOST_ROWS`]
/// rows, and `dst` is writable for it. `ROWS` are the tile's, or 0 for any number of them; more than [`ROWS_AT_ONCE`] are a
/// multiple of it.
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
pub(super) unsafe fn columns<V: Lanes, const FORMAT: usize, const ROWS: usize>(
    tile: Tile<'_>,
    dst: Destination,
) {
    let rows = if ROWS == 0 { dst.rows } else { ROWS };
    for first in (0..dst.cols).step_by(GROUP) {
        let group = tile.right[first / GROUP * tile.right_stride..].as_ptr();
        // SAFETY: the group lies within the operand, all else is passed on to the caller.
        unsafe {
            let mut acc = [V::splat(0.0); MOST_ROWS];
            of_group::<V, FORMAT, ROWS>(&tile, group, rows, &mut acc);
            let is_whole = dst.cols - first >= GROUP;
            for (row, acc) in acc[..rows].iter().enumerate() {
                if is_whole {
                    let at = dst.at.add(row * dst.stride + first);
                    let sum = if dst.accumulate { V::add(V::floats(at), *acc) } else { *acc };
                    V::store(sum, at);
                } else {
                    let mut values = [0.0; GROUP];
                    V::store(*acc, values.as_mut_ptr());
                    store(&values, dst, row, first);
                }
            }
        }
    }
}

/// # Safety
/// As [`columns`], for the 16 columns from `group` on; `rows` are the tile's.
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
unsafe fn of_group<V: Lanes, const FORMAT: usize, const ROWS: usize>(
    tile: &Tile<'_>,
    group: *const u8,
    rows: usize,
    acc: &mut [V::Floats; MOST_ROWS],
) {
    let layout = const { layout::<FORMAT>() };
    for block in 0..tile.blocks / layout.parts() {
        // SAFETY: the block lies within the group, and its 32 values within every row.
        unsafe {
            let at = group.add(block * layout.size());
            let d = match layout.floats {
                Floats::Power => V::brain_halves(at),
                _ => V::halves(at),
            };
            let m = if layout.has_least() { V::halves(at.add(2 * GROUP)) } else { d };
            for part in 0..layout.parts() {
                let at = at.add(layout.part_at(part));
                for line in (0..GROUP * layout.part_bytes()).step_by(LINE) {
                    V::prefetch(at.wrapping_add(AHEAD + line));
                }
                let factors = factors::<V, FORMAT>(at, d, m);
                let codes = unpacked::<V, FORMAT>(at);
                let fixed = tile.fixed.as_ptr().add((block * layout.parts() + part) * tile.rows);
                if ROWS > ROWS_AT_ONCE {
                    for first in (0..ROWS).step_by(ROWS_AT_ONCE) {
                        let acc = &mut acc[first..first + ROWS_AT_ONCE];
                        add::<V, FORMAT, ROWS_AT_ONCE>(acc, &codes, &factors, fixed.add(first));
                    }
                } else if ROWS > 0 {
                    add::<V, FORMAT, ROWS>(&mut acc[..ROWS], &codes, &factors, fixed);
                } else {
                    for (row, acc) in acc[..rows].chunks_exact_mut(1).enumerate() {
                        add::<V, FORMAT, 1>(acc, &codes, &factors, fixed.add(row));
                    }
                }
            }
        }
    }
}

/// # Safety
/// As [`columns`]; `at` is where 32 values of a group begin, with floats `d` and `m`.
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
unsafe fn factors<V: Lanes, const FORMAT: usize>(
    at: *const u8,
    d: V::Floats,
    m: V::Floats,
) -> Factors<V> {
    let layout = const { layout::<FORMAT>() };
    // SAFETY: passed on to the caller.
    unsafe {
        match layout.scales {
            Scales::None => Factors { scale: [d; 2], least: [m; 2] },
            Scales::Signed => {
                let scale = V::mul(d, V::signed(at));
                Factors { scale: [scale; 2], least: [m; 2] }
            }
            Scales::SignedHalves => {
                let second = V::mul(d, V::signed(at.add(GROUP)));
                Factors { scale: [V::mul(d, V::signed(at)), second], least: [m; 2] }
            }
            Scales::WithLeast => {
                let scale = V::mul(d, V::unsigned(at));
                let least = V::negate(V::mul(m, V::unsigned(at.add(GROUP))));
                Factors { scale: [scale; 2], least: [least; 2] }
            }
            Scales::NibbleHalves => {
                let (first, second) = (V::nibbles(at), V::nibbles(at.add(GROUP)));
                Factors {
                    scale: [V::mul(d, first[0]), V::mul(d, second[0])],
                    least: [V::negate(V::mul(m, first[1])), V::negate(V::mul(m, second[1]))],
                }
            }
        }
    }
}

/// Four codes of every column in every register.
///
/// # Safety
/// As [`columns`]; `at` is where 32 values of a group begin.
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
unsafe fn unpacked<V: Lanes, const FORMAT: usize>(at: *const u8) -> [V::Bytes; STEPS] {
    let layout = const { layout::<FORMAT>() };
    // SAFETY: passed on to the caller.
    unsafe {
        let mut codes = plane::<V, FORMAT>(at, 0, 0);
        if layout.planes[1] > 0 {
            let above = plane::<V, FORMAT>(at, 1, layout.planes[0] as i32);
            for (code, above) in codes.iter_mut().zip(above) {
                *code = V::or(*code, above);
            }
        }
        if let Some(table) = layout.table {
            for code in &mut codes {
                *code = V::look_up(table, *code);
            }
        }
        codes
    }
}

/// Bits of a plane, moved up by `up`.
///
/// # Safety
/// As [`unpacked`].
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
unsafe fn plane<V: Lanes, const FORMAT: usize>(
    at: *const u8,
    plane: usize,
    up: i32,
) -> [V::Bytes; STEPS] {
    let layout = const { layout::<FORMAT>() };
    let bits = layout.planes[plane];
    // SAFETY: passed on to the caller.
    unsafe {
        let words = at.add(layout.plane_at(plane));
        let mask = V::splat_bytes((((1_u32 << bits) - 1) << up) as u8);
        let mut out = [mask; STEPS];
        let mut word = mask;
        // Written out, so that every shift is by a constant.
        macro_rules! steps {
            ($($step:literal)*) => {$({
                let from = $step * bits % 8;
                if from == 0 {
                    word = V::load(words.add(WORDS * ($step * bits / 8)));
                }
                out[$step] = if bits == 8 {
                    word
                } else {
                    V::and(V::shift(word, up - from as i32), mask)
                };
            })*};
        }
        steps!(0 1 2 3 4 5 6 7);
        out
    }
}

/// Adds the products of 32 values and the activations of `R` rows from `fixed` on.
///
/// # Safety
/// As [`columns`]; the activations lie within the tile, and `acc` are `R` sums.
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
unsafe fn add<V: Lanes, const FORMAT: usize, const R: usize>(
    acc: &mut [V::Floats],
    codes: &[V::Bytes; STEPS],
    factors: &Factors<V>,
    fixed: *const FixedBlock,
) {
    let kind = const { Codes::of(&layout::<FORMAT>()) };
    let layout = const { layout::<FORMAT>() };
    // SAFETY: passed on to the caller.
    unsafe {
        let rows = &*fixed.cast::<[FixedBlock; R]>();
        let sums = rows.each_ref().map(|row| row.sums);
        if !layout.scales.halves() {
            let exact = V::products(codes, kind, (rows, 0), sums.map(|[a, b]| a + b));
            for ((acc, exact), row) in acc.iter_mut().zip(exact).zip(rows) {
                let scale = V::mul(factors.scale[0], V::splat(row.scale));
                *acc = V::mul_add(V::to_floats(exact), scale, *acc);
                if layout.has_least() {
                    *acc = V::mul_add(factors.least[0], V::splat(row.offset), *acc);
                }
            }
            return;
        }
        let (first, second) = codes.split_at(STEPS / 2);
        let first = V::products(first, kind, (rows, 0), sums.map(|[a, _]| a));
        let second = V::products(second, kind, (rows, BLOCK / 2), sums.map(|[_, b]| b));
        for (((acc, first), second), row) in acc.iter_mut().zip(first).zip(second).zip(rows) {
            let sum = V::mul(V::to_floats(first), factors.scale[0]);
            let mut sum = V::mul_add(V::to_floats(second), factors.scale[1], sum);
            if layout.has_least() {
                for (least, codes) in factors.least.iter().zip(row.sums) {
                    sum = V::mul_add(*least, V::splat(codes as f32), sum);
                }
            }
            *acc = V::mul_add(sum, V::splat(row.scale), *acc);
        }
    }
}

/// Runs the kernel that is compiled for a tile's format, and for its rows if they are listed.
macro_rules! by_format_and_rows {
    ($kernel:ident, $rows:tt, $tile:expr, $dst:expr) => {
        $crate::gemm::quantised::lanes::by_format_and_rows!(@formats $kernel, $rows, $tile, $dst,
            Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2K Q3K Q4K Q5K Q6K Iq4Nl Iq4Xs Mxfp4)
    };
    (@formats $kernel:ident, $rows:tt, $tile:expr, $dst:expr, $($format:ident)*) => {
        match $tile.format {
            $(BlockFormat::$format => $crate::gemm::quantised::lanes::by_format_and_rows!(
                @rows $kernel, $format, $rows, $tile, $dst
            ),)*
        }
    };
    (@rows $kernel:ident, $format:ident, [$($rows:literal)*], $tile:expr, $dst:expr) => {{
        const FORMAT: usize = BlockFormat::$format as usize;
        match $dst.rows {
            $($rows => $kernel::<FORMAT, $rows>($tile, $dst),)*
            _ => $kernel::<FORMAT, 0>($tile, $dst),
        }
    }};
}
pub(super) use by_format_and_rows;
