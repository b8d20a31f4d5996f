//! Products whose factors are rounded to integers: block floating point.
//!
//! Up to [`MAX_DEPTH`](super::pack::MAX_DEPTH) steps of a row of the left operand, or of a column of the right one, become integers of 12 to
//! 16 bits that share one f32 scale. Products of integers are summed exactly in 32 bits, and blocks of steps are added in
//! f32. A vector of integers holds twice as many factors as one of f32, so units for products do twice as much.
//! The largest integer depends on the number of steps: all sums fit 32 bits. With 512 steps a factor's error is at most
//! 2^-12 of the largest one of its block, TF32's at most 2^-11 of the factor itself.
//!
//! Two steps make a word of 32 bits. Words are packed like f32 values, and nothing but the inner kernel computes with them.

mod micro;

use std::cell::RefCell;

use super::pack::fetch_ahead;
use super::{Element, Mat};
use crate::simd::vectorised;
pub(super) use micro::{Scales, tile};

/// A block of an operand as words: one row of the operand (of its transposed view, for a right one) in each row.
#[derive(Default)]
pub(super) struct Words {
    values: Vec<f32>,
    largest: Vec<u32>,
    inverses: Vec<f32>,
    wide: Vec<f32>,
}

thread_local! {
    static WORDS: RefCell<Words> = RefCell::default();
}

/// Words of so many steps.
pub(super) const fn words_of(steps: usize) -> usize {
    steps.div_ceil(2)
}

/// The largest integer of a block of so many steps: `2 m²` for each word stays below `2^31` in sum.
pub(super) fn largest_code(steps: usize) -> u32 {
    let each = i32::MAX as u32 / (2 * words_of(steps).max(1) as u32);
    each.isqrt().min(i16::MAX as u32)
}

/// Rounds a block `[rows, steps]`, writes the scale of each row and hands the words on, as an operand `[rows, words]` that lies
/// in memory as the block does. A row that holds NaN or an infinity has a scale of NaN.
pub(super) fn with_words<T: Element, R>(
    block: Mat<'_, T>,
    scales: &mut [f32],
    f: impl FnOnce(Mat<'_>) -> R,
) -> R {
    WORDS.with_borrow_mut(|words| {
        if block.col_stride == 1 {
            let count = words_of(block.cols);
            let Words { values, wide, .. } = words;
            grow(values, block.rows * count);
            round_rows(block, scales, wide, values, count);
            f(Mat::rows(values, block.rows, count, count))
        } else {
            let code = largest_code(block.cols) as f32;
            assert_eq!(block.row_stride, 1, "an operand has gaps in both directions");
            words.round_steps(block, code, scales);
            f(Mat::rows(&words.values, words_of(block.cols), block.rows, block.rows).t())
        }
    })
}

/// As [`with_words`] of a block whose rows lie one by one: writes the words of each row, `stride` apart.
pub(super) fn write_rows(block: Mat<'_>, scales: &mut [f32], out: &mut [f32], stride: usize) {
    // Values in f32 are not widened.
    round_rows(block, scales, &mut Vec::new(), out, stride);
}

fn round_rows<T: Element>(
    block: Mat<'_, T>,
    scales: &mut [f32],
    wide: &mut Vec<f32>,
    out: &mut [f32],
    stride: usize,
) {
    let Mat { data, rows, cols, row_stride, .. } = block;
    let code = largest_code(cols) as f32;
    grow(wide, if T::as_f32(&[]).is_some() { 0 } else { TOGETHER * cols });
    for first in (0..rows).step_by(TOGETHER) {
        let together = first..(first + TOGETHER).min(rows);
        for row in together.clone() {
            fetch_ahead(&data[row * row_stride..][..cols], row_stride);
        }
        let (scales, out) = (&mut scales[together.clone()], &mut out[first * stride..]);
        if let Some(values) = T::as_f32(&data[first * row_stride..]) {
            round_some(values, row_stride, cols, code, scales, out, stride);
        } else {
            for (row, wide) in together.zip(wide.chunks_mut(cols.max(1))) {
                T::widen(&data[row * row_stride..][..cols], &mut wide[..cols]);
            }
            round_some(wide, cols, cols, code, scales, out, stride);
        }
    }
}

impl Words {
    /// Of a block whose steps lie one by one.
    fn round_steps<T: Element>(&mut self, block: Mat<'_, T>, code: f32, scales: &mut [f32]) {
        let Self { values, largest, inverses, wide } = self;
        let (rows, steps) = (block.rows, block.cols);
        let line = |step: usize| &block.data[step * block.col_stride..][..rows];
        grow(values, words_of(steps) * rows);
        grow(wide, RAISED * rows);
        largest.clear();
        largest.resize(rows, 0);
        for first in (0..steps).step_by(RAISED) {
            let mut wide = wide.chunks_mut(rows.max(1));
            // A step that is taken twice raises nothing.
            let lines = [0, 1, 2, 3].map(|next| {
                let line = line((first + next).min(steps - 1));
                fetch_ahead(line, block.col_stride);
                widened(line, wide.next().unwrap_or_default())
            });
            raise(largest, lines);
        }
        inverses.clear();
        inverses.resize(rows, 0.0);
        scales_of(largest, code, &mut scales[..rows], inverses);
        for (word, out) in values.chunks_mut(rows.max(1)).take(words_of(steps)).enumerate() {
            let (low, high) = wide[..2 * rows].split_at_mut(rows);
            let first = widened(line(2 * word), low);
            if 2 * word + 1 < steps {
                round_lines(first, widened(line(2 * word + 1), high), inverses, out);
            } else {
                high.fill(0.0);
                round_lines(first, high, inverses, out);
            }
        }
    }
}

/// Rows that are rounded together: what one of them waits for is computed beside the others.
const TOGETHER: usize = 8;
/// Steps that are looked through at a time.
const RAISED: usize = 4;

/// Makes room for so many values; what they are does not matter.
fn grow(values: &mut Vec<f32>, count: usize) {
    if values.len() < count {
        values.resize(count, 0.0);
    }
}

/// The values in f32: themselves, or a copy.
fn widened<'a, T: Element>(values: &'a [T], wide: &'a mut [f32]) -> &'a [f32] {
    T::as_f32(values).unwrap_or_else(|| {
        let wide = &mut wide[..values.len()];
        T::widen(values, wide);
        wide
    })
}

/// The scale of a row whose largest magnitude has these bits, and what its values are multiplied with.
#[allow(clippy::inline_always, reason = "loops over it are compiled per instruction set")]
#[inline(always)]
fn scale_of(largest: u32, code: f32) -> (f32, f32) {
    /// Smaller ones are taken for zero: the inverse of their scale need not be finite.
    const SMALLEST: f32 = 1e-30;
    let largest = f32::from_bits(largest);
    let (scale, inverse) = (largest / code, code / largest);
    let is_rounded = largest.is_finite() && largest >= SMALLEST;
    let otherwise = if largest.is_finite() { 0.0 } else { f32::NAN };
    (if is_rounded { scale } else { otherwise }, if is_rounded { inverse } else { 0.0 })
}

/// Adding it rounds to the nearest integer, whose low bits are those of the sum.
const ROUND: f32 = 12_582_912.0;
/// All bits of an f32 but its sign. As integers, magnitudes have the order of their numbers, then come infinity and NaN.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// Bits of the largest magnitude. The compiler turns a fold into vectors. It loaded lanes that lay in an array one by one.
#[allow(clippy::inline_always, reason = "compiled per instruction set")]
#[inline(always)]
fn largest_of(line: &[f32]) -> u32 {
    line.iter().fold(0, |largest, value| largest.max(value.to_bits() & MAGNITUDE))
}

/// Words of a row whose steps lie side by side.
#[allow(clippy::inline_always, reason = "compiled per instruction set")]
#[inline(always)]
fn round_line(line: &[f32], inverse: f32, words: &mut [f32]) {
    let (pairs, last) = line.as_chunks::<2>();
    for (word, [low, high]) in words.iter_mut().zip(pairs) {
        let low = low.mul_add(inverse, ROUND).to_bits() & 0xffff;
        let high = high.mul_add(inverse, ROUND).to_bits() << 16;
        *word = f32::from_bits(high | low);
    }
    if let ([low], Some(word)) = (last, words.last_mut()) {
        *word = f32::from_bits(low.mul_add(inverse, ROUND).to_bits() & 0xffff);
    }
}

vectorised! {
    /// Scales and words of up to [`TOGETHER`] rows of `steps` values, `stride` apart; a row's words lie `out_stride` apart
    /// from the next one's.
    fn round_some(
        data: &[f32],
        stride: usize,
        steps: usize,
        code: f32,
        scales: &mut [f32],
        out: &mut [f32],
        out_stride: usize,
    ) {
        let rows = scales.len().min(TOGETHER);
        let mut inverses = [0.0; TOGETHER];
        let mut all = [0.0; TOGETHER];
        let mut largest = [0; TOGETHER];
        for (row, largest) in largest[..rows].iter_mut().enumerate() {
            *largest = largest_of(&data[row * stride..][..steps]);
        }
        for ((largest, scale), inverse) in largest.iter().zip(&mut all).zip(&mut inverses) {
            (*scale, *inverse) = scale_of(*largest, code);
        }
        scales[..rows].copy_from_slice(&all[..rows]);
        for (row, inverse) in inverses[..rows].iter().enumerate() {
            let words = &mut out[row * out_stride..][..words_of(steps)];
            round_line(&data[row * stride..][..steps], *inverse, words);
        }
    }

    /// Bits of the largest magnitude of each column so far, and of four more lines.
    fn raise(largest: &mut [u32], lines: [&[f32]; RAISED]) {
        let [a, b, c, d] = lines.map(|line| &line[..largest.len()]);
        for ((((largest, a), b), c), d) in largest.iter_mut().zip(a).zip(b).zip(c).zip(d) {
            let of = |value: &f32| value.to_bits() & MAGNITUDE;
            *largest = (*largest).max(of(a).max(of(b))).max(of(c).max(of(d)));
        }
    }

    /// Scales and inverses of all columns.
    fn scales_of(largest: &[u32], code: f32, scales: &mut [f32], inverses: &mut [f32]) {
        for ((largest, scale), inverse) in largest.iter().zip(scales).zip(inverses) {
            (*scale, *inverse) = scale_of(*largest, code);
        }
    }

    /// Words of two lines of steps.
    fn round_lines(first: &[f32], second: &[f32], inverses: &[f32], words: &mut [f32]) {
        for (((word, low), high), inverse) in words.iter_mut().zip(first).zip(second).zip(inverses) {
            let low = low.mul_add(*inverse, ROUND).to_bits() & 0xffff;
            let high = high.mul_add(*inverse, ROUND).to_bits() << 16;
            *word = f32::from_bits(high | low);
        }
    }
}

#[cfg(test)]
mod tests;
