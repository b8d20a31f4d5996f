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
    let (count, code) = (words_of(block.cols), largest_code(block.cols) as f32);
    grow(wide, if T::as_f32(&[]).is_some() { 0 } else { block.cols });
    let rows = out.chunks_mut(stride.max(1)).zip(scales).take(block.rows);
    for (row, (out, scale)) in rows.enumerate() {
        let line = &block.data[row * block.row_stride..][..block.cols];
        fetch_ahead(line, block.row_stride);
        let line = widened(line, wide);
        let inverse;
        (*scale, inverse) = scale_of(largest_of(line), code);
        round_line(line, inverse, &mut out[..count]);
    }
}

impl Words {
    /// Of a block whose steps lie one by one.
    fn round_steps<T: Element>(&mut self, block: Mat<'_, T>, code: f32, scales: &mut [f32]) {
        let Self { values, largest, inverses, wide } = self;
        let (rows, steps) = (block.rows, block.cols);
        let line = |step: usize| &block.data[step * block.col_stride..][..rows];
        grow(values, words_of(steps) * rows);
        grow(wide, 2 * rows);
        largest.clear();
        largest.resize(rows, 0);
        for step in 0..steps {
            fetch_ahead(line(step), block.col_stride);
            raise(largest, widened(line(step), wide));
        }
        inverses.clear();
        for (largest, scale) in largest.iter().zip(scales) {
            let inverse;
            (*scale, inverse) = scale_of(*largest, code);
            inverses.push(inverse);
        }
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
fn scale_of(largest: u32, code: f32) -> (f32, f32) {
    /// Smaller ones are taken for zero: the inverse of their scale need not be finite.
    const SMALLEST: f32 = 1e-30;
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < SMALLEST {
        (0.0, 0.0)
    } else {
        (largest / code, code / largest)
    }
}

/// Adding it rounds to the nearest integer, whose low bits are those of the sum.
const ROUND: f32 = 12_582_912.0;
/// All bits of an f32 but its sign. As integers, magnitudes have the order of their numbers, then come infinity and NaN.
const MAGNITUDE: u32 = 0x7fff_ffff;

vectorised! {
    /// Bits of the largest magnitude. The compiler turns a fold into vectors. It loaded lanes that lay in an array one by one.
    fn largest_of(line: &[f32]) -> u32 {
        line.iter().fold(0, |largest, value| largest.max(value.to_bits() & MAGNITUDE))
    }

    /// The same of each column of several lines.
    fn raise(largest: &mut [u32], line: &[f32]) {
        for (largest, value) in largest.iter_mut().zip(line) {
            *largest = (*largest).max(value.to_bits() & MAGNITUDE);
        }
    }

    /// Words of a row whose steps lie side by side.
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
