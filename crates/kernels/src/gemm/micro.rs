//! The inner kernel: a tile of the destination held in registers while the sum runs.
//!
//! Every element is the sum `Σ_k a_k b_k` taken in ascending `k`, one fused multiply-add at a time,
//! whatever tile it falls into and on every machine: its bits depend on its own row and column only.

use super::blocks::BLOCK_ROWS;
#[cfg(target_arch = "x86_64")]
use super::pack::AVX2_TILE;
use super::pack::{LeftOrder, ROW_STRIDE, SHORT_STRIDE, Widths};
#[cfg(target_arch = "x86_64")]
use x86::{avx2, avx512};
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{fetch, store_8};

/// Calls the kernel `avx512`, `avx2` or `portable` of where it stands, compiled for the rows of a tile and for the order in which its
/// left operand lies.
macro_rules! kernel_of {
    ($isa:expr, $order:expr, $rows:expr, $arguments:tt) => {
        match ($isa, $order) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, LeftOrder::Rows) => {
                kernel_of!(@ $rows, avx512, ROW_STRIDE, 1, $arguments; 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, LeftOrder::ShortRows) => {
                kernel_of!(@ $rows, avx512, SHORT_STRIDE, 1, $arguments; 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, LeftOrder::Steps) => {
                kernel_of!(@ $rows, avx512, 1, 16, $arguments; 1 2 3 4 5 6 7 8 9 10 11 12 13 14);
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, _) => kernel_of!(@ $rows, avx2, 1, AVX2_TILE, $arguments; 1 2 3 4 5 6),
            (Isa::Portable, LeftOrder::Rows) => {
                kernel_of!(@ $rows, portable, ROW_STRIDE, 1, $arguments; 1 2 3 4);
            }
            (Isa::Portable, LeftOrder::ShortRows) => {
                kernel_of!(@ $rows, portable, SHORT_STRIDE, 1, $arguments; 1 2 3 4);
            }
            (Isa::Portable, LeftOrder::Steps) => {
                kernel_of!(@ $rows, portable, 1, 8, $arguments; 1 2 3 4);
            }
        }
    };
    (@ $count:expr, $kernel:ident, $row:tt, $step:tt, $arguments:tt; $($rows:literal)*) => {
        match $count {
            $($rows => $kernel::<$rows, $row, $step> $arguments,)*
            _ => {}
        }
    };
}
pub(super) use kernel_of;

/// Where a tile of the product goes.
#[derive(Clone, Copy)]
pub(super) struct Destination {
    pub(super) at: *mut f32,
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Add to what is there instead of replacing it.
    pub(super) accumulate: bool,
}

/// Instruction sets with a kernel of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    /// The widest that this machine has.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;

            use crate::simd::{has_avx2_fma, has_avx512};
            if has_avx512() && has!("avx512bw") {
                return Self::Avx512;
            }
            if has_avx2_fma() && has!("f16c") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// Whether products of integers are faster than those of f32 here: AVX2 has units that multiply pairs of them, and units
    /// beside these that add; AVX-512 needs one instruction for both.
    pub(super) fn gains_by_rounding(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => std::arch::is_x86_feature_detected!("avx512vnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => true,
            Self::Portable => false,
        }
    }

    /// Sizes of the blocks that its kernel reads. A tile of sums fills the registers. Where a step is
    /// longer than a tile has rows, its last values are not used.
    pub(super) fn widths(self) -> Widths {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => Widths { panel: 32, tile: 14, step: 16, rows: BLOCK_ROWS },
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                Widths { panel: 16, tile: AVX2_TILE, step: AVX2_TILE, rows: BLOCK_ROWS / 2 }
            }
            Self::Portable => Widths { panel: 16, tile: 4, step: 8, rows: BLOCK_ROWS },
        }
    }

    /// How its kernel reads a left block with so many values a row, which in memory is `row_major` or not.
    pub(super) fn left_order(self, row_major: bool, values: usize) -> LeftOrder {
        match self {
            // Six values of a step share a line of the first-level cache. Six rows would take six.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => LeftOrder::Steps,
            _ if row_major => LeftOrder::of_rows(values),
            _ => LeftOrder::Steps,
        }
    }

    /// Computes one tile from `depth` steps of a left tile and a right panel.
    ///
    /// # Safety
    /// The CPU has the instruction set; `a` holds `dst.rows` rows of `depth` values in `order`, which is
    /// one of [`Self::left_order`]; `b` is a panel of `depth` steps; `dst` is writable for its rows and columns, with
    /// `rows` and `cols` at most those of [`Self::widths`].
    pub(super) unsafe fn tile(
        self,
        order: LeftOrder,
        depth: usize,
        a: *const f32,
        b: *const f32,
        dst: Destination,
    ) {
        // SAFETY: passed on to the caller.
        unsafe { kernel_of!(self, order, dst.rows, (depth, a, b, dst)) }
    }
}

/// Plain loops, for any machine.
///
/// # Safety
/// As [`Isa::tile`].
unsafe fn portable<const ROWS: usize, const ROW: usize, const STEP: usize>(
    depth: usize,
    a: *const f32,
    b: *const f32,
    dst: Destination,
) {
    const COLUMNS: usize = 16;
    let mut acc = [[0.0_f32; COLUMNS]; ROWS];
    for k in 0..depth {
        // SAFETY: step `k < depth` of the panel and of each row.
        let panel = unsafe { &*b.add(k * COLUMNS).cast::<[f32; COLUMNS]>() };
        for (row, acc) in acc.iter_mut().enumerate() {
            // SAFETY: as above.
            let x = unsafe { *a.add(row * ROW + k * STEP) };
            for (acc, b) in acc.iter_mut().zip(panel) {
                *acc = x.mul_add(*b, *acc);
            }
        }
    }
    for (row, acc) in acc.iter().enumerate() {
        // SAFETY: row and columns lie within the destination.
        unsafe { store(acc, dst, row, 0) };
    }
}

/// Writes `values` from column `first` on into a row, as far as the destination goes.
///
/// # Safety
/// `row` lies within the destination.
pub(super) unsafe fn store(values: &[f32], dst: Destination, row: usize, first: usize) {
    for (i, value) in values.iter().take(dst.cols.saturating_sub(first)).enumerate() {
        // SAFETY: `first + i < cols`, and the caller vouches for the row.
        unsafe {
            let at = dst.at.add(row * dst.stride + first + i);
            *at = if dst.accumulate { *at + value } else { *value };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, _MM_HINT_T0, _mm_prefetch, _mm256_add_ps, _mm256_fmadd_ps, _mm256_loadu_ps,
        _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps, _mm512_add_ps, _mm512_fmadd_ps,
        _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_set1_ps,
        _mm512_setzero_ps,
    };

    use super::{Destination, store};

    /// # Safety
    /// As [`super::Isa::tile`], with AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512<const ROWS: usize, const ROW: usize, const STEP: usize>(
        depth: usize,
        a: *const f32,
        b: *const f32,
        dst: Destination,
    ) {
        let mut acc: [[__m512; 2]; ROWS] = [[_mm512_setzero_ps(); 2]; ROWS];
        fetch(dst, ROWS);
        let (mut a, mut b) = (a, b);
        // Four steps a turn: counting takes the ports that multiply.
        macro_rules! step {
            ($ahead:literal) => {
                let b = b.add($ahead * 32);
                let (b0, b1) = (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16)));
                for (row, acc) in acc.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*a.add(row * ROW + $ahead * STEP));
                    acc[0] = _mm512_fmadd_ps(x, b0, acc[0]);
                    acc[1] = _mm512_fmadd_ps(x, b1, acc[1]);
                }
            };
        }
        for _ in 0..depth / 4 {
            // SAFETY: the caller vouches for `depth` steps of the panel and of every row.
            unsafe {
                step!(0);
                step!(1);
                step!(2);
                step!(3);
                (a, b) = (a.add(4 * STEP), b.add(4 * 32));
            }
        }
        for _ in 0..depth % 4 {
            // SAFETY: as above.
            unsafe {
                step!(0);
                (a, b) = (a.add(STEP), b.add(32));
            }
        }
        let mask = |first: usize| -> u16 {
            let left = dst.cols.saturating_sub(first).min(16);
            ((1_u32 << left) - 1) as u16
        };
        for (row, acc) in acc.into_iter().enumerate() {
            for (half, value) in acc.into_iter().enumerate() {
                let mask = mask(half * 16);
                if mask == 0 {
                    continue;
                }
                // SAFETY: the mask keeps loads and stores within the destination's columns.
                unsafe {
                    let at = dst.at.add(row * dst.stride + half * 16);
                    let old = _mm512_maskz_loadu_ps(mask, at);
                    let sum = if dst.accumulate { _mm512_add_ps(old, value) } else { value };
                    _mm512_mask_storeu_ps(at, mask, sum);
                }
            }
        }
    }

    /// # Safety
    /// As [`super::Isa::tile`], with AVX2 and FMA, a left tile kept step by step.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2<const ROWS: usize, const ROW: usize, const STEP: usize>(
        depth: usize,
        a: *const f32,
        b: *const f32,
        dst: Destination,
    ) {
        /// Steps whose values of a left tile are whole cache lines.
        const TURN: usize = 16;
        let mut acc: [[__m256; 2]; ROWS] = [[_mm256_setzero_ps(); 2]; ROWS];
        fetch(dst, ROWS);
        let (mut a, mut b) = (a, b);
        // The next tile comes from the second-level cache at the pace at which this one is used.
        let mut next = a.wrapping_add(depth * STEP);
        macro_rules! step {
            ($ahead:literal) => {
                let b = b.add($ahead * 16);
                let (b0, b1) = (_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(8)));
                for (row, acc) in acc.iter_mut().enumerate() {
                    let x = _mm256_set1_ps(*a.add(row * ROW + $ahead * STEP));
                    acc[0] = _mm256_fmadd_ps(x, b0, acc[0]);
                    acc[1] = _mm256_fmadd_ps(x, b1, acc[1]);
                }
            };
        }
        macro_rules! steps_and_line {
            ($($first:literal $second:literal $line:literal)*) => {$(
                step!($first);
                step!($second);
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add($line * 16).cast());
            )*};
        }
        for _ in 0..depth / TURN {
            // SAFETY: the caller vouches for `depth` steps of the panel and of every row; what is
            // fetched is a hint, and no address can make it fail.
            unsafe {
                steps_and_line!(0 1 0  2 3 1  4 5 2  6 7 3  8 9 4  10 11 5);
                step!(12);
                step!(13);
                step!(14);
                step!(15);
                (a, b) = (a.add(TURN * STEP), b.add(TURN * 16));
                next = next.wrapping_add(TURN * STEP);
            }
        }
        for _ in 0..depth % TURN {
            // SAFETY: as above.
            unsafe {
                step!(0);
                (a, b) = (a.add(STEP), b.add(16));
            }
        }
        for (row, acc) in acc.into_iter().enumerate() {
            for (half, value) in acc.into_iter().enumerate() {
                // SAFETY: the row lies within the destination.
                unsafe { store_8(value, dst, row, half * 8) };
            }
        }
    }

    /// Writes eight values from column `first` on into a row, as far as the destination goes.
    ///
    /// # Safety
    /// The CPU has AVX2 with FMA; `row` lies within the destination.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(in super::super) unsafe fn store_8(
        value: __m256,
        dst: Destination,
        row: usize,
        first: usize,
    ) {
        // SAFETY: whole vectors only where 8 columns are left, single values elsewhere.
        unsafe {
            if first + 8 <= dst.cols {
                let at = dst.at.add(row * dst.stride + first);
                let value =
                    if dst.accumulate { _mm256_add_ps(_mm256_loadu_ps(at), value) } else { value };
                _mm256_storeu_ps(at, value);
            } else {
                let mut values = [0.0; 8];
                _mm256_storeu_ps(values.as_mut_ptr(), value);
                store(&values, dst, row, first);
            }
        }
    }

    /// Asks for the lines of the destination while the sum runs: they are written right after it. A tile
    /// has at most two lines and a part of a third in a row.
    pub(in super::super) fn fetch(dst: Destination, rows: usize) {
        for row in 0..rows {
            let at = dst.at.wrapping_add(row * dst.stride);
            for col in [0, dst.cols / 2, dst.cols - 1] {
                // SAFETY: a hint; no address can make it fail.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(col).cast()) };
            }
        }
    }
}
