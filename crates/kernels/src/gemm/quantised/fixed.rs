//! Activations as 8-bit fixed-point numbers.

use rayon::prelude::*;

use super::super::Mat;
use super::{BLOCK, MOST_ROWS};
use crate::simd::vectorised;

/// The largest code.
const LARGEST: f32 = 127.0;
/// Added to a number below 2^22, it leaves the nearest integer in the low bits.
const ROUNDING: f32 = 12_582_912.0;

/// Rows of activations, each in blocks of 32 values with a scale: value = code x scale, rounded to
/// the nearest.
///
/// The rows of a tile, [`MOST_ROWS`] of them or what is left, lie side by side: one block of each, then
/// the next. A kernel reads them with what holds for them as one stream, from one address.
#[derive(Debug, Default)]
pub(crate) struct FixedRows {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// `[cols / 32, rows]` of every tile.
    pub(super) blocks: Vec<FixedBlock>,
}

/// 32 values of a row.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FixedBlock {
    pub(super) codes: [i8; BLOCK],
    /// NaN where a value is not finite, and so is every product.
    pub(super) scale: f32,
    /// Sum of the values.
    pub(super) offset: f32,
    /// Sums of the first 16 codes and of the others.
    pub(super) sums: [i32; 2],
}

impl FixedRows {
    /// Rows without gaps between their values, of whole blocks.
    pub(crate) fn of(a: Mat<'_>) -> Self {
        let Mat { rows, cols, .. } = a;
        assert!(cols.is_multiple_of(BLOCK), "a row does not consist of blocks");
        assert!(a.col_stride == 1 || cols == 0, "rows of the left operand have gaps");
        let mut blocks = vec![FixedBlock::default(); rows * cols / BLOCK];
        let tile = |(tile, blocks): (usize, &mut [FixedBlock])| {
            let rows = MOST_ROWS.min(rows - tile * MOST_ROWS);
            for row in 0..rows {
                let values = &a.data[(tile * MOST_ROWS + row) * a.row_stride..][..cols];
                fix(values, blocks, row, rows);
            }
        };
        let height = (MOST_ROWS * cols / BLOCK).max(1);
        if rows <= MOST_ROWS {
            blocks.chunks_mut(height).enumerate().for_each(tile);
        } else {
            blocks.par_chunks_mut(height).enumerate().for_each(tile);
        }
        Self { rows, cols, blocks }
    }

    /// One row that is given as codes from -127 on, whose scales are of [`BLOCK`] of them each.
    pub(crate) fn of_codes(codes: &[i8], scales: &[f32]) -> Self {
        assert_eq!(codes.len(), scales.len() * BLOCK, "a scale for every {BLOCK} codes");
        let block = |(codes, scale): (&[i8; BLOCK], &f32)| {
            let sum = |codes: &[i8]| codes.iter().map(|code| i32::from(*code)).sum::<i32>();
            let (first, second) = codes.split_at(BLOCK / 2);
            let sums = [sum(first), sum(second)];
            let offset = scale * (sums[0] + sums[1]) as f32;
            FixedBlock { codes: *codes, scale: *scale, offset, sums }
        };
        let blocks = codes.as_chunks::<BLOCK>().0.iter().zip(scales).map(block).collect();
        Self { rows: 1, cols: codes.len(), blocks }
    }
}

vectorised! {
    /// One of a tile's rows.
    fn fix(values: &[f32], blocks: &mut [FixedBlock], row: usize, rows: usize) {
        for (block, values) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
            blocks[block * rows + row] = FixedBlock::of(values);
        }
    }
}

impl FixedBlock {
    // Loops over indices and sums of their own: that is what the compiler turns into vectors.
    #[allow(
        clippy::inline_always,
        reason = "vectorised only inside the function that it is part of"
    )]
    #[allow(clippy::needless_range_loop, reason = "vectorised")]
    #[inline(always)]
    fn of(values: &[f32; BLOCK]) -> Self {
        // Bits of magnitudes are in the order of the magnitudes, infinity and NaN last.
        let mut largest = 0;
        for i in 0..BLOCK {
            largest = (values[i].to_bits() & (u32::MAX >> 1)).cast_signed().max(largest);
        }
        let largest = f32::from_bits(largest.cast_unsigned());
        let inverse = LARGEST / largest;
        if !largest.is_finite() {
            return Self { scale: f32::NAN, offset: f32::NAN, ..Self::default() };
        }
        if !inverse.is_finite() {
            // Zeros, or numbers below 1e-34.
            return Self::default();
        }
        let (mut codes, mut rounded) = ([0; BLOCK], [0; BLOCK]);
        for i in 0..BLOCK {
            let moved = (values[i] * inverse + ROUNDING).to_bits().cast_signed();
            rounded[i] = moved - ROUNDING.to_bits().cast_signed();
            codes[i] = rounded[i] as i8;
        }
        let (mut first, mut second) = (0, 0);
        for i in 0..BLOCK / 2 {
            first += rounded[i];
            second += rounded[BLOCK / 2 + i];
        }
        let scale = largest / LARGEST;
        Self { codes, scale, offset: scale * (first + second) as f32, sums: [first, second] }
    }
}
