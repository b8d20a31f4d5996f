//! Activations as 8-bit fixed-point numbers.

use rayon::prelude::*;

use super::super::Mat;
use super::BLOCK;
use crate::simd::vectorised;

/// Values below which handing parts to threads costs more than it saves.
const SMALLEST_TASK: usize = 1 << 14;
/// The largest code.
const LARGEST: f32 = 127.0;
/// Added to a number below 2^22, it leaves the nearest integer in the low bits.
const ROUNDING: f32 = 12_582_912.0;

/// Rows of activations, each in blocks of 32 values with a scale: value = code x scale, rounded to
/// the nearest.
#[derive(Debug, Default)]
pub(crate) struct FixedRows {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// `[rows, cols]`
    pub(super) codes: Vec<i8>,
    /// `[rows, cols / 32]`
    pub(super) blocks: Vec<FixedBlock>,
}

/// What holds for 32 values.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FixedBlock {
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
        let mut codes = vec![0; rows * cols];
        let mut blocks = vec![FixedBlock::default(); rows * cols / BLOCK];
        let row = |(row, (codes, blocks)): (usize, (&mut [i8], &mut [FixedBlock]))| {
            fix(&a.data[row * a.row_stride..][..cols], codes, blocks);
        };
        let (width, height) = (cols.max(1), (cols / BLOCK).max(1));
        if codes.len() < SMALLEST_TASK {
            codes.chunks_mut(width).zip(blocks.chunks_mut(height)).enumerate().for_each(row);
        } else {
            let codes = codes.par_chunks_mut(width);
            codes.zip(blocks.par_chunks_mut(height)).enumerate().for_each(row);
        }
        Self { rows, cols, codes, blocks }
    }

    /// One row that is given as codes from -127 on, whose scales are of [`BLOCK`] of them each.
    pub(crate) fn of_codes(codes: &[i8], scales: &[f32]) -> Self {
        assert_eq!(codes.len(), scales.len() * BLOCK, "a scale for every {BLOCK} codes");
        let block = |(codes, scale): (&[i8], &f32)| {
            let sum = |codes: &[i8]| codes.iter().map(|code| i32::from(*code)).sum::<i32>();
            let (first, second) = codes.split_at(BLOCK / 2);
            let sums = [sum(first), sum(second)];
            FixedBlock { scale: *scale, offset: scale * (sums[0] + sums[1]) as f32, sums }
        };
        let blocks = codes.chunks_exact(BLOCK).zip(scales).map(block).collect();
        Self { rows: 1, cols: codes.len(), codes: codes.to_vec(), blocks }
    }
}

vectorised! {
    /// One row.
    fn fix(values: &[f32], codes: &mut [i8], blocks: &mut [FixedBlock]) {
        let values = values.as_chunks::<BLOCK>().0;
        let codes = codes.as_chunks_mut::<BLOCK>().0;
        for ((values, codes), block) in values.iter().zip(codes).zip(blocks) {
            *block = FixedBlock::of(values, codes);
        }
    }
}

impl FixedBlock {
    #[allow(
        clippy::inline_always,
        reason = "vectorised only inside the function that it is part of"
    )]
    #[inline(always)]
    fn of(values: &[f32; BLOCK], codes: &mut [i8; BLOCK]) -> Self {
        // Bits of magnitudes are in the order of the magnitudes, infinity and NaN last.
        let magnitude = |value: &f32| value.abs().to_bits().cast_signed();
        let largest =
            f32::from_bits(values.iter().map(magnitude).fold(0, i32::max).cast_unsigned());
        let inverse = LARGEST / largest;
        if !largest.is_finite() {
            return Self { scale: f32::NAN, offset: f32::NAN, sums: [0; 2] };
        }
        if !inverse.is_finite() {
            // Zeros, or numbers below 1e-34.
            return Self::default();
        }
        let mut sums = [0; 2];
        let halves = codes.chunks_exact_mut(BLOCK / 2).zip(values.chunks_exact(BLOCK / 2));
        for (sum, (codes, values)) in sums.iter_mut().zip(halves) {
            for (code, value) in codes.iter_mut().zip(values) {
                let rounded = (value * inverse + ROUNDING).to_bits().cast_signed();
                let rounded = rounded - ROUNDING.to_bits().cast_signed();
                *sum += rounded;
                *code = rounded as i8;
            }
        }
        let scale = largest / LARGEST;
        Self { scale, offset: scale * (sums[0] + sums[1]) as f32, sums }
    }
}
