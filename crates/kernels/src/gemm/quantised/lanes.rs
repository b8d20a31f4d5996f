//! The inner kernel of every vector instruction set: 16 columns side by side.
//!
//! Four steps of the columns are unpacked once, and multiplied with all rows of the tile.

use super::super::micro::{Destination, store};
use super::fixed::FixedBlock;
use super::format::{Layout, SIGN};
use super::unpack::{Piece, code, factors, layout};
use super::{BLOCK, GROUP, Tile};

/// Bytes of a group that are fetched ahead: with several rows, instructions in flight reach no
/// further than the block at hand, and memory would rest.
const AHEAD: usize = 2048;
/// Bytes that memory hands over at once.
const LINE: usize = 64;
/// Words of four codes in 32 values.
const STEPS: usize = BLOCK / 4;

/// Registers of some columns, on one instruction set.
///
/// # Safety
/// The CPU has the instruction set. All methods are inlined into functions that are compiled for it.
pub(super) trait Lanes {
    /// How many columns: [`GROUP`], or half of it.
    const COLUMNS: usize;
    /// Four bytes of every column.
    type Bytes: Copy;
    /// A whole number of 32 bits of every column.
    type Ints: Copy;
    /// What products take of [`Self::Bytes`].
    type Factor: Copy;
    /// A sum of products that goes on.
    type Sum: Copy;
    /// A float of every column.
    type Floats: Copy;

    /// Four bytes of every column.
    unsafe fn load(at: *const u8) -> Self::Bytes;
    unsafe fn splat_bytes(value: u8) -> Self::Bytes;
    unsafe fn and(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Up to the left by `bits`, or down where that is negative; bits cross the bytes of a pair.
    unsafe fn shift(a: Self::Bytes, bits: i32) -> Self::Bytes;
    /// Entry of a table of 16 for every byte below 16.
    unsafe fn look_up(table: &[u8; 16], index: Self::Bytes) -> Self::Bytes;

    /// Codes as products want them, for all rows.
    unsafe fn factor(codes: Self::Bytes, kind: Codes) -> Self::Factor;
    /// `Σ (code − zero) x` over nothing yet, where activations sum up to `x_sum` in the end.
    unsafe fn begin(kind: Codes, x_sum: i32) -> Self::Sum;
    /// Adds the products with four activations: of step `step` of `steps`.
    unsafe fn add(
        sum: Self::Sum,
        codes: Self::Factor,
        kind: Codes,
        x: *const i8,
        of: (usize, usize),
    ) -> Self::Sum;
    /// The whole sum.
    unsafe fn end(sum: Self::Sum) -> Self::Ints;

    /// Numbers of f16.
    unsafe fn halves(at: *const u8) -> Self::Floats;
    /// Numbers of bf16.
    unsafe fn brain_halves(at: *const u8) -> Self::Floats;
    /// Bytes as floats.
    unsafe fn unsigned(at: *const u8) -> Self::Floats;
    /// Signed bytes as floats.
    unsafe fn signed(at: *const u8) -> Self::Floats;
    /// The lower and the upper halves of bytes as floats.
    unsafe fn nibbles(at: *const u8) -> [Self::Floats; 2];
    unsafe fn to_floats(ints: Self::Ints) -> Self::Floats;
    unsafe fn splat(value: f32) -> Self::Floats;
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a b + c`, rounded once.
    unsafe fn mul_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    unsafe fn negate(a: Self::Floats) -> Self::Floats;
    unsafe fn store(a: Self::Floats, to: *mut f32);
    /// Asks for a line of memory.
    unsafe fn prefetch(at: *const u8);
}

/// What is known of unsigned codes; constants once a kernel is inlined.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    pub(super) largest: i32,
    /// The code of zero; where the largest needs all 8 bits it is [`SIGN`].
    pub(super) zero: i32,
    /// Whether so few sums are formed at a time that each waits for itself.
    pub(super) few_sums: bool,
}

impl Codes {
    const fn of(layout: &Layout, sums: usize) -> Self {
        Self { largest: layout.largest, zero: layout.zero, few_sums: sums <= 2 }
    }

    /// Whether turning their first bits makes them signed, as they have to be where 16 bits do not hold
    /// the sum of two products.
    pub(super) const fn are_bytes(self) -> bool {
        self.zero == SIGN as i32
    }

    /// Products of two codes each with two activations that add up in 16 bits.
    const fn pairs_in_16_bits(self) -> usize {
        i16::MAX as usize / (2 * i8::MAX as usize * self.largest as usize)
    }

    /// Whether sums of pairs have to go on in 32 bits after this of some steps.
    pub(super) const fn ends_in_16_bits(self, step: usize, steps: usize) -> bool {
        (step + 1).is_multiple_of(self.pairs_in_16_bits()) || step + 1 == steps
    }
}

/// # Safety
/// The CPU has the instruction set; the operands reach as far as the tile of `ROWS` rows, and `dst` is
/// writable for it. `TOGETHER` registers of a group's columns are worked on at a time.
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
pub(super) unsafe fn columns<
    V: Lanes,
    const FORMAT: usize,
    const ROWS: usize,
    const TOGETHER: usize,
>(
    tile: Tile<'_>,
    dst: Destination,
) {
    for first in (0..dst.cols).step_by(TOGETHER * V::COLUMNS) {
        let mut pieces = [Piece { group: tile.right.as_ptr(), column: 0 }; TOGETHER];
        for (i, piece) in pieces.iter_mut().enumerate() {
            // A group is whole, also where the destination is not.
            let column = first + i * V::COLUMNS;
            let group = tile.right[column / GROUP * tile.right_stride..].as_ptr();
            *piece = Piece { group, column: column % GROUP };
        }
        // SAFETY: the groups lie within the operand, all else is passed on to the caller.
        unsafe {
            let mut acc = [[V::splat(0.0); TOGETHER]; ROWS];
            add_blocks::<V, FORMAT, ROWS, TOGETHER>(&tile, pieces, &mut acc);
            for (row, acc) in acc.into_iter().enumerate() {
                for (i, acc) in acc.into_iter().enumerate() {
                    let first = first + i * V::COLUMNS;
                    if first + V::COLUMNS <= dst.cols && !dst.accumulate {
                        V::store(acc, dst.at.add(row * dst.stride + first));
                    } else {
                        let mut values = [0.0; GROUP];
                        V::store(acc, values.as_mut_ptr());
                        store_some(&values[..V::COLUMNS], dst, row, first);
                    }
                }
            }
        }
    }
}

/// Not inlined: there is a call for every register of sums.
///
/// # Safety
/// As [`store`].
#[cold]
#[inline(never)]
unsafe fn store_some(values: &[f32], dst: Destination, row: usize, first: usize) {
    // SAFETY: passed on to the caller.
    unsafe { store(values, dst, row, first) };
}

/// # Safety
/// As [`columns`].
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
unsafe fn add_blocks<V: Lanes, const FORMAT: usize, const ROWS: usize, const TOGETHER: usize>(
    tile: &Tile<'_>,
    pieces: [Piece; TOGETHER],
    acc: &mut [[V::Floats; TOGETHER]; ROWS],
) {
    let layout = const { layout::<FORMAT>() };
    for block in 0..tile.blocks / layout.parts() {
        // SAFETY: the block lies within the groups, and its 32 values within every row.
        unsafe {
            let at = block * layout.size();
            let mut floats = [(acc[0][0], acc[0][0]); TOGETHER];
            for (floats, piece) in floats.iter_mut().zip(pieces) {
                *floats = super::unpack::floats::<V, FORMAT>(piece.at(at, 2));
            }
            for part in 0..layout.parts() {
                let part_at = at + layout.part_at(part);
                for piece in pieces.iter().filter(|piece| piece.column == 0) {
                    for line in (0..GROUP * layout.part_bytes()).step_by(LINE) {
                        V::prefetch(piece.group.wrapping_add(part_at + AHEAD + line));
                    }
                }
                let place = (block * layout.parts() + part) * tile.side_by_side;
                let rows = Rows {
                    codes: tile.codes.as_ptr().add(place * BLOCK),
                    fixed: tile.fixed.as_ptr().add(place),
                };
                if layout.scales.halves() {
                    add_halves::<V, FORMAT, ROWS, TOGETHER>(pieces, part_at, floats, rows, acc);
                } else {
                    add_whole::<V, FORMAT, ROWS, TOGETHER>(pieces, part_at, floats, rows, acc);
                }
            }
        }
    }
}

/// 32 activations of every row, row after row.
#[derive(Clone, Copy)]
struct Rows {
    codes: *const i8,
    fixed: *const FixedBlock,
}

/// 32 values with one scale.
///
/// # Safety
/// As [`columns`]; the values begin at `at`.
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
unsafe fn add_whole<V: Lanes, const FORMAT: usize, const ROWS: usize, const TOGETHER: usize>(
    pieces: [Piece; TOGETHER],
    at: usize,
    floats: [(V::Floats, V::Floats); TOGETHER],
    rows: Rows,
    acc: &mut [[V::Floats; TOGETHER]; ROWS],
) {
    let layout = const { layout::<FORMAT>() };
    // SAFETY: passed on to the caller.
    unsafe {
        let exact = products::<V, FORMAT, ROWS, TOGETHER, 0, STEPS>(pieces, at, rows);
        for (i, piece) in pieces.into_iter().enumerate() {
            let factors = factors::<V, FORMAT>(piece.at(at, 1), floats[i].0, floats[i].1);
            for row in 0..ROWS {
                let fixed = &*rows.fixed.add(row);
                let scale = V::mul(factors.scale[0], V::splat(fixed.scale));
                let mut sum = V::mul_add(V::to_floats(exact[row][i]), scale, acc[row][i]);
                if layout.has_least() {
                    sum = V::mul_add(factors.least[0], V::splat(fixed.offset), sum);
                }
                acc[row][i] = sum;
            }
        }
    }
}

/// Twice 16 values with a scale each.
///
/// # Safety
/// As [`add_whole`].
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
unsafe fn add_halves<V: Lanes, const FORMAT: usize, const ROWS: usize, const TOGETHER: usize>(
    pieces: [Piece; TOGETHER],
    at: usize,
    floats: [(V::Floats, V::Floats); TOGETHER],
    rows: Rows,
    acc: &mut [[V::Floats; TOGETHER]; ROWS],
) {
    const HALF: usize = STEPS / 2;
    let layout = const { layout::<FORMAT>() };
    // SAFETY: passed on to the caller.
    unsafe {
        let first = products::<V, FORMAT, ROWS, TOGETHER, 0, HALF>(pieces, at, rows);
        let second = products::<V, FORMAT, ROWS, TOGETHER, HALF, HALF>(pieces, at, rows);
        for (i, piece) in pieces.into_iter().enumerate() {
            let factors = factors::<V, FORMAT>(piece.at(at, 1), floats[i].0, floats[i].1);
            for row in 0..ROWS {
                let fixed = &*rows.fixed.add(row);
                let sum = V::mul(V::to_floats(first[row][i]), factors.scale[0]);
                let mut sum = V::mul_add(V::to_floats(second[row][i]), factors.scale[1], sum);
                if layout.has_least() {
                    for (least, codes) in factors.least.iter().zip(fixed.sums) {
                        sum = V::mul_add(*least, V::splat(codes as f32), sum);
                    }
                }
                acc[row][i] = V::mul_add(sum, V::splat(fixed.scale), acc[row][i]);
            }
        }
    }
}

/// `Σ (code − zero) x` over `COUNT` steps from the step `FIRST` on, of every row. A step's codes are
/// unpacked once, and forgotten after the last row: registers hold the sums.
///
/// # Safety
/// As [`add_whole`].
#[allow(clippy::inline_always, reason = "compiled for the caller's instruction set")]
#[inline(always)]
unsafe fn products<
    V: Lanes,
    const FORMAT: usize,
    const ROWS: usize,
    const TOGETHER: usize,
    const FIRST: usize,
    const COUNT: usize,
>(
    pieces: [Piece; TOGETHER],
    at: usize,
    rows: Rows,
) -> [[V::Ints; TOGETHER]; ROWS] {
    let kind = const { Codes::of(&layout::<FORMAT>(), ROWS * TOGETHER) };
    // SAFETY: passed on to the caller.
    unsafe {
        let mut sums = [[V::begin(kind, 0); TOGETHER]; ROWS];
        for (row, sums) in sums.iter_mut().enumerate() {
            let [first, second] = (*rows.fixed.add(row)).sums;
            let x_sum = match (FIRST, COUNT) {
                (_, STEPS) => first + second,
                (0, _) => first,
                _ => second,
            };
            *sums = [V::begin(kind, x_sum); TOGETHER];
        }
        // Written out, so that every shift is by a constant.
        macro_rules! steps {
            ($($step:literal)*) => {$(
                if $step >= FIRST && $step < FIRST + COUNT {
                    let mut codes = [V::factor(V::splat_bytes(0), kind); TOGETHER];
                    for (codes, piece) in codes.iter_mut().zip(pieces) {
                        *codes = V::factor(code::<V, FORMAT>(piece, at, $step), kind);
                    }
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let x = rows.codes.add(row * BLOCK + 4 * $step);
                        for (sum, codes) in sums.iter_mut().zip(codes) {
                            *sum = V::add(*sum, codes, kind, x, ($step - FIRST, COUNT));
                        }
                    }
                }
            )*};
        }
        steps!(0 1 2 3 4 5 6 7);
        let mut whole = [[V::end(sums[0][0]); TOGETHER]; ROWS];
        for (whole, sums) in whole.iter_mut().zip(sums) {
            for (whole, sum) in whole.iter_mut().zip(sums) {
                *whole = V::end(sum);
            }
        }
        whole
    }
}

/// Runs the kernel that is compiled for a tile's format and its number of rows. Lists say `rows x together`:
/// the first is for types that files mostly consist of, the second for the others.
macro_rules! by_format_and_rows {
    ($kernel:ident, $common:tt, $others:tt, $tile:expr, $dst:expr) => {
        $crate::gemm::quantised::lanes::by_format_and_rows!(
            @formats $kernel, $tile, $dst,
            $common Q4_0, $common Q4_1, $common Q5_0, $common Q8_0, $common Q4K, $common Q5K,
            $common Q6K, $others Q5_1, $others Q2K, $others Q3K, $others Iq4Nl, $others Iq4Xs,
            $others Mxfp4
        )
    };
    (@formats $kernel:ident, $tile:expr, $dst:expr, $($rows:tt $format:ident),*) => {
        match $tile.format {
            $(BlockFormat::$format => $crate::gemm::quantised::lanes::by_format_and_rows!(
                @rows $kernel, $format, $rows, $tile, $dst
            ),)*
        }
    };
    (@rows $kernel:ident, $format:ident, [$($rows:literal x $together:literal)*], $tile:expr,
        $dst:expr) => {{
        const FORMAT: usize = BlockFormat::$format as usize;
        match $dst.rows {
            $($rows => $kernel::<FORMAT, $rows, $together>($tile, $dst),)*
            rows => unreachable!("{rows} rows together"),
        }
    }};
}
pub(super) use by_format_and_rows;
