//! The form in which a product's operands are packed and multiplied: as f32, or rounded.

use super::blocks::Output;
use super::micro::{Destination, Isa};
use super::pack::{self, LeftOrder, Widths};
use super::{Element, Mat, rounded};

/// Instructions of a product, and the form of its factors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Factors {
    pub(super) isa: Isa,
    pub(super) rounded: bool,
}

/// Values of a cache line: the scales of a left block begin at one and fill some.
const LINE: usize = 16;

impl Factors {
    /// f32, in the widest instructions.
    pub(super) fn detect() -> Self {
        Self { isa: Isa::detect(), rounded: false }
    }

    pub(super) fn widths(self) -> Widths {
        self.isa.widths()
    }

    /// Values that the inner kernel reads for so many steps of one row or column.
    fn length(self, steps: usize) -> usize {
        if self.rounded { rounded::words_of(steps) } else { steps }
    }

    /// How the inner kernel reads a left block of so many steps, which in memory is `row_major` or not.
    pub(super) fn left_order(self, row_major: bool, steps: usize) -> LeftOrder {
        self.isa.left_order(row_major, self.length(steps))
    }

    /// Values of a packed left block without its scales.
    fn left_values(self, order: LeftOrder, rows: usize, steps: usize) -> usize {
        pack::left_len(order, rows, self.length(steps), self.widths()).next_multiple_of(LINE)
    }

    /// Values of a packed left block of at most `rows` x `steps`.
    pub(super) fn left_len(self, order: LeftOrder, rows: usize, steps: usize) -> usize {
        let scales = if self.rounded { rows.next_multiple_of(LINE) } else { 0 };
        self.left_values(order, rows, steps) + scales
    }

    /// Packs a left block into [`Self::left_len`] values.
    pub(super) fn pack_left(self, a: Mat<'_>, order: LeftOrder, out: &mut [f32]) {
        if !self.rounded {
            return pack::left(a, order, self.widths(), out);
        }
        let (out, scales) = out.split_at_mut(self.left_values(order, a.rows, a.cols));
        if let Some(stride) = order.row_stride() {
            return rounded::write_rows(a, scales, out, stride);
        }
        rounded::with_words(a, scales, |words| pack::left(words, order, self.widths(), out));
    }

    /// Values of a packed right block without its scales.
    fn right_values(self, cols: usize, steps: usize) -> usize {
        cols.next_multiple_of(self.widths().panel) * self.length(steps)
    }

    /// Values of a packed right block.
    pub(super) fn right_len(self, cols: usize, steps: usize) -> usize {
        let scales = if self.rounded { cols.next_multiple_of(self.widths().panel) } else { 0 };
        self.right_values(cols, steps) + scales
    }

    /// Packs a right block into [`Self::right_len`] values; `wide` holds a panel's columns when they are stored narrower
    /// than f32.
    pub(super) fn pack_right<T: Element>(
        self,
        b: Mat<'_, T>,
        out: &mut [f32],
        wide: &mut Vec<f32>,
    ) {
        let panel = self.widths().panel;
        if !self.rounded {
            return pack::right(b, panel, out, wide);
        }
        let (out, scales) = out.split_at_mut(self.right_values(b.cols, b.rows));
        // Columns that do not exist are zeros with any scale.
        scales.fill(0.0);
        rounded::with_words(b.t(), scales, |words| pack::right(words.t(), panel, out, wide));
    }

    /// All tiles of a packed left block times a packed right block.
    ///
    /// # Safety
    /// The CPU has the instructions; `left` and `right` hold packed blocks of `rows` x `depth` and `depth` x `cols`; `dst` is
    /// writable for `rows` x `cols`.
    pub(super) unsafe fn tiles(
        self,
        dst: Output,
        order: LeftOrder,
        (rows, cols, depth): (usize, usize, usize),
        left: &[f32],
        right: &[f32],
    ) {
        let Widths { panel, tile, step, .. } = self.widths();
        let length = self.length(depth);
        let (left_scales, right_scales) =
            (self.left_values(order, rows, depth), self.right_values(cols, depth));
        let one = |row: usize, col: usize| {
            let start = match order.row_stride() {
                Some(stride) => row * stride,
                None => row / tile * length * step,
            };
            // SAFETY: `row < rows` and `col < cols`, and both blocks reach that far, their scales too.
            unsafe {
                let part = Destination {
                    at: dst.at.add(row * dst.stride + col),
                    stride: dst.stride,
                    rows: tile.min(rows - row),
                    cols: panel.min(cols - col),
                    accumulate: dst.accumulate,
                };
                let (a, b) = (left.as_ptr().add(start), right.as_ptr().add(col * length));
                if self.rounded {
                    let scales = rounded::Scales {
                        left: left.as_ptr().add(left_scales + row),
                        right: right.as_ptr().add(right_scales + col),
                    };
                    rounded::tile(self.isa, order, length, (a, b), scales, part);
                } else {
                    self.isa.tile(order, depth, a, b, part);
                }
            }
        };
        // A panel is wider than a tile: it stays in the first cache while the tiles pass.
        for col in (0..cols).step_by(panel) {
            let asked_for = |row: &usize| dst.is_asked_for(*row, col + panel);
            (0..rows).step_by(tile).take_while(asked_for).for_each(|row| one(row, col));
        }
    }
}
