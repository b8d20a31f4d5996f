//! Inner kernel in plain Rust, for any machine, which the others are held against.

use super::super::micro::{Destination, store};
use super::fixed::FixedBlock;
use super::format::Factors;
use super::{BLOCK, GROUP, MOST_ROWS, Tile};

/// # Safety
/// `dst` is writable for its rows and columns.
pub(super) unsafe fn columns(tile: Tile<'_>, dst: Destination) {
    let layout = tile.format.layout();
    let mut codes = [[0; BLOCK]; GROUP];
    let mut factors = [Factors::default(); GROUP];
    for first in (0..dst.cols).step_by(GROUP) {
        let group = &tile.right[first / GROUP * tile.right_stride..];
        let group = &group[..tile.blocks / layout.parts() * layout.size()];
        let mut acc = [[0.0_f32; GROUP]; MOST_ROWS];
        for block in 0..tile.blocks {
            let held = &group[block / layout.parts() * layout.size()..][..layout.size()];
            for lane in 0..GROUP {
                let (of_row, bits) = layout.row_of(held, block % layout.parts(), lane);
                factors[lane] = of_row;
                codes[lane] = bits.map(|bits| layout.signed(bits));
            }
            for (row, acc) in acc.iter_mut().take(dst.rows).enumerate() {
                let fixed = &tile.fixed[block * tile.rows + row];
                for ((acc, codes), factors) in acc.iter_mut().zip(&codes).zip(&factors) {
                    let exact = [0, BLOCK / 2].map(|half| {
                        let pairs = fixed.codes[half..][..BLOCK / 2].iter().zip(&codes[half..]);
                        pairs.map(|(x, code)| i32::from(*x) * code).sum::<i32>()
                    });
                    *acc = if layout.scales.halves() {
                        add_halves(*acc, exact, factors, fixed, layout.has_least())
                    } else {
                        add_whole(*acc, exact, factors, fixed, layout.has_least())
                    };
                }
            }
        }
        for (row, acc) in acc.iter().take(dst.rows).enumerate() {
            // SAFETY: the row lies within the destination.
            unsafe { store(acc, dst, row, first) };
        }
    }
}

/// 32 values with one scale.
fn add_whole(
    acc: f32,
    exact: [i32; 2],
    factors: &Factors,
    fixed: &FixedBlock,
    has_least: bool,
) -> f32 {
    let exact = (exact[0] + exact[1]) as f32;
    let sum = exact.mul_add(factors.scale[0] * fixed.scale, acc);
    if has_least { factors.least[0].mul_add(fixed.offset, sum) } else { sum }
}

/// Twice 16 values with a scale each.
fn add_halves(
    acc: f32,
    exact: [i32; 2],
    factors: &Factors,
    fixed: &FixedBlock,
    has_least: bool,
) -> f32 {
    let [first, second] = exact.map(|exact| exact as f32);
    let mut sum = second.mul_add(factors.scale[1], first * factors.scale[0]);
    if has_least {
        for (least, codes) in factors.least.iter().zip(fixed.sums) {
            sum = least.mul_add(codes as f32, sum);
        }
    }
    sum.mul_add(fixed.scale, acc)
}
