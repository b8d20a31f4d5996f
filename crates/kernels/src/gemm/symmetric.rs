//! Products that are known to be symmetric: half of their tiles.

use super::blocks::Output;
use super::factors::Factors;
use super::{Mat, Threads, compute};

/// `dst = a · b`, `[n, n]` without gaps, of which the caller knows that it is symmetric: elements above the diagonal are computed
/// and those below are copies of them. On the whole pool, with rounded factors or not.
///
/// # Panics
/// - sizes do not fit each other
pub(crate) fn matmul_symmetric(rounded: bool, dst: &mut [f32], a: Mat<'_>, b: Mat<'_>) {
    let factors = Factors { rounded, ..Factors::detect() };
    product(factors, dst, (a, b), Threads::Pool);
}

fn product(factors: Factors, dst: &mut [f32], (a, b): (Mat<'_>, Mat<'_>), threads: Threads) {
    let side = a.rows;
    assert!(a.cols == b.rows && side == b.cols, "a symmetric product is square");
    assert_eq!(dst.len(), side * side, "a symmetric product fills its destination");
    if side == 0 {
        return;
    }
    let (at, stride) = (dst.as_mut_ptr(), side);
    let whole = Output { at, stride, accumulate: false, diagonal: Some(0) };
    // SAFETY: sizes fit and `dst` holds the product, as was asserted; callers give instructions that were detected.
    unsafe { compute(factors, whole, (a, b), threads) };
    mirror(dst, side);
}

/// Rows and columns that are copied at a time: the lines of as many rows stay in the first cache.
const MIRRORED: usize = 16;

/// Copies what lies above the diagonal of a square below it.
fn mirror(square: &mut [f32], side: usize) {
    for first_row in (0..side).step_by(MIRRORED) {
        let (above, rows) = square.split_at_mut(first_row * side);
        let rows = &mut rows[..MIRRORED.min(side - first_row) * side];
        for first_col in (0..first_row).step_by(MIRRORED) {
            for (row, line) in rows.chunks_mut(side).enumerate() {
                let line = &mut line[first_col..first_col + MIRRORED];
                for (col, value) in line.iter_mut().enumerate() {
                    *value = above[(first_col + col) * side + first_row + row];
                }
            }
        }
        for row in 1..rows.len() / side {
            for col in 0..row {
                rows[row * side + first_row + col] = rows[col * side + first_row + row];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{instruction_sets, operand, values};
    use super::*;
    use crate::test_support::Noise;

    #[test]
    fn half_of_a_symmetric_product_is_computed_and_the_rest_mirrors_it() {
        let mut noise = Noise::new(9);
        for (side, depth) in [(1, 3), (5, 40), (16, 16), (33, 7), (130, 515), (170, 64), (400, 96)]
        {
            let data = values(&mut noise, (side + 3) * (depth + 3));
            for transposed in [false, true] {
                let a = operand(&data, side, depth, transposed);
                for isa in instruction_sets() {
                    let factors = Factors { isa, rounded: false };
                    for threads in [Threads::One, Threads::Pool] {
                        let mut whole = vec![f32::NAN; side * side];
                        super::super::product(
                            factors,
                            &mut whole,
                            side,
                            (a, a.t()),
                            false,
                            threads,
                        );
                        let mut half = vec![f32::NAN; side * side];
                        product(factors, &mut half, (a, a.t()), threads);
                        for (index, got) in half.iter().enumerate() {
                            let (row, col) = (index / side, index % side);
                            let want = whole[row.min(col) * side + row.max(col)];
                            assert_eq!(
                                got.to_bits(),
                                want.to_bits(),
                                "{isa:?} {side}: ({row}, {col})"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn tiles_below_the_diagonal_are_left_out() {
        let (side, depth) = (400, 8);
        let data = vec![1.0_f32; side * depth];
        let a = Mat::rows(&data, side, depth, depth);
        for isa in instruction_sets() {
            let mut dst = vec![-1.0; side * side];
            let (at, stride) = (dst.as_mut_ptr(), side);
            let whole = Output { at, stride, accumulate: false, diagonal: Some(0) };
            // SAFETY: `dst` holds the product, and the CPU has the instructions.
            unsafe { compute(Factors { isa, rounded: false }, whole, (a, a.t()), Threads::Pool) };
            let written = dst.iter().filter(|value| **value > 0.0).count();
            assert!(written < side * side * 6 / 10, "{isa:?}: {written}");
        }
    }
}
