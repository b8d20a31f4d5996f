//! Blocks of a product that fit the caches: who packs what, and in which order.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::OnceLock;

use rayon::prelude::*;

use super::factors::Factors;
use super::pack::{Buffer, LeftOrder, MAX_DEPTH};
use super::quantised::BLOCK;
use super::{Element, Mat, row_by_row, unpacked};

/// Most rows of a product with one left block; a multiple of the rows of a block where there are several.
pub(crate) const BLOCK_ROWS: usize = 168;
/// Columns of a row-major right operand that are packed at a time for a product with one left block. They are whole
/// panels.
const LINE_COLUMNS: usize = 128;
/// Blocks of steps that are packed together for a product with one left block.
const STEP_BLOCKS: usize = 2;
/// Panels of a right block, at least, as far as a second-level cache has room for them.
const LEAST_PANELS: usize = 4;
/// Rows of the left operand that are packed at a time for all tasks.
const SHARED_ROWS: usize = 16 * BLOCK_ROWS;
/// Values of the left operand that are packed at a time for all tasks, as far as one block of steps allows:
/// small beside the operand where the inner sum is as long as a vocabulary.
const SHARED_VALUES: usize = 1 << 22;

/// The destination of a block, shared between tasks that write disjoint parts of it.
#[derive(Clone, Copy)]
pub(super) struct Output {
    pub(super) at: *mut f32,
    pub(super) stride: usize,
    pub(super) accumulate: bool,
    /// The column in which a diagonal crosses the first row, where only elements on and above it are asked for; negative where
    /// that is left of the first column. Tiles below it may be left out.
    pub(super) diagonal: Option<isize>,
}

impl Output {
    /// The pointer, through a method so that closures capture the whole (shareable) value.
    pub(super) fn pointer(&self) -> *mut f32 {
        self.at
    }

    /// The part from an element on, for the sum from `first_step` on.
    ///
    /// # Safety
    /// The element lies within the destination.
    pub(super) unsafe fn part(self, row: usize, col: usize, first_step: usize) -> Self {
        // SAFETY: passed on to the caller.
        let at = unsafe { self.at.add(row * self.stride + col) };
        let accumulate = self.accumulate || first_step > 0;
        let diagonal = self.diagonal.map(|diagonal| diagonal + row as isize - col as isize);
        Self { at, accumulate, diagonal, ..self }
    }

    /// Whether an element of a row is asked for in columns before `end`; where none is, none of the rows after it is either.
    pub(super) fn is_asked_for(self, row: usize, end: usize) -> bool {
        self.diagonal.is_none_or(|diagonal| row as isize + diagonal < end as isize)
    }
}

// SAFETY: tasks write disjoint elements only, see `super::compute`.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

/// Packed blocks of both operands, and a panel's values while they are widened.
#[derive(Default)]
pub(super) struct Scratch {
    left: Buffer,
    right: Buffer,
    pub(super) wide: Vec<f32>,
}

thread_local! {
    pub(super) static SCRATCH: RefCell<Scratch> = RefCell::default();
    /// The left operand of a product that this thread began.
    static SHARED: RefCell<Buffer> = RefCell::default();
}

/// One task's product, on the calling thread.
///
/// # Safety
/// `dst` is writable for `a.rows` x `b.cols` elements, and nobody else touches them.
pub(super) unsafe fn block<T: Element>(factors: Factors, dst: Output, a: Mat<'_>, b: Mat<'_, T>) {
    if a.cols == 0 {
        for row in (0..a.rows).filter(|_| !dst.accumulate) {
            // SAFETY: the caller vouches for the row.
            unsafe { dst.at.add(row * dst.stride).write_bytes(0, b.cols) };
        }
        return;
    }
    let depth = depth_of(a.cols);
    let Factors { isa, rounded } = factors;
    if !rounded && row_by_row::fits(isa, a, b) {
        // SAFETY: passed on to the caller.
        unsafe { row_by_row::block(isa, dst, a, b, depth) };
        return;
    }
    SCRATCH.with_borrow_mut(|scratch| {
        // SAFETY: passed on to the caller.
        unsafe {
            if !rounded && unpacked::fits(isa, a, b) {
                unpacked::block(isa, dst, a, b, depth, &mut scratch.wide);
            } else if a.rows <= BLOCK_ROWS {
                few_rows(factors, dst, a, b, depth, scratch);
            } else {
                many_rows(factors, dst, a, b, depth, scratch);
            }
        }
    });
}

/// One left block: panels are used as soon as they are packed.
///
/// # Safety
/// As [`block`].
unsafe fn few_rows<T: Element>(
    factors: Factors,
    dst: Output,
    a: Mat<'_>,
    b: Mat<'_, T>,
    depth: usize,
    Scratch { left, right, wide }: &mut Scratch,
) {
    let panel = factors.widths().panel;
    // Rows are read in parts of several panels: parts of one panel are slow to fetch.
    let width = if b.col_stride == 1 { LINE_COLUMNS } else { panel };
    let order = factors.left_order(a.col_stride == 1, depth);
    let slot = factors.left_len(order, a.rows, depth);
    let step_blocks = a.cols.div_ceil(depth);
    for first_block in (0..step_blocks).step_by(STEP_BLOCKS) {
        let blocks = first_block..(first_block + STEP_BLOCKS).min(step_blocks);
        let steps = |block: usize| block * depth..((block + 1) * depth).min(a.cols);
        let packed = left.get(blocks.len() * slot);
        for (block, out) in blocks.clone().zip(packed.chunks_mut(slot)) {
            factors.pack_left(a.columns(steps(block)), order, out);
        }
        for first_col in (0..b.cols).step_by(width) {
            let cols = first_col..(first_col + width).min(b.cols);
            for (block, left) in blocks.clone().zip(packed.chunks(slot)) {
                let b = b.columns(cols.clone()).t().columns(steps(block)).t();
                let right = right.get(factors.right_len(b.cols, b.rows));
                factors.pack_right(b, right, wide);
                let sizes = (a.rows, b.cols, b.rows);
                // SAFETY: the column lies within the destination; both blocks were just packed for
                // these sizes.
                unsafe {
                    let dst = dst.part(0, first_col, block * depth);
                    factors.tiles(dst, order, sizes, left, right);
                }
            }
        }
    }
}

/// Right blocks in the second-level cache, each for all left blocks.
///
/// # Safety
/// As [`block`].
unsafe fn many_rows<T: Element>(
    factors: Factors,
    dst: Output,
    a: Mat<'_>,
    b: Mat<'_, T>,
    depth: usize,
    Scratch { left, right, wide }: &mut Scratch,
) {
    let rows = factors.widths().rows;
    for_right_blocks(factors, b, 0..b.cols, depth, (right, wide), |right| {
        for first_row in (0..a.rows).step_by(rows) {
            let a = a.t().columns(first_row..(first_row + rows).min(a.rows)).t();
            for block in right.blocks.clone() {
                let a = a.columns(right.steps(block));
                let order = pack_left(factors, a, left);
                // SAFETY: row and column lie within the destination; the left block was just packed.
                unsafe {
                    let dst = dst.part(first_row, right.first_col, block * depth);
                    right.times(factors, (order, a.rows, left.all()), block, dst);
                }
            }
        }
    });
}

fn pack_left(factors: Factors, a: Mat<'_>, left: &mut Buffer) -> LeftOrder {
    let order = factors.left_order(a.col_stride == 1, a.cols);
    factors.pack_left(a, order, left.get(factors.left_len(order, a.rows, a.cols)));
    order
}

/// A product of many rows: all tasks pack the left operand together, then each takes some columns.
///
/// # Safety
/// The CPU has the instruction set; `dst` is writable for `a.rows` x `b.cols` elements, and nobody
/// else touches them.
pub(super) unsafe fn shared_rows<T: Element>(
    factors: Factors,
    dst: Output,
    a: Mat<'_>,
    b: Mat<'_, T>,
    tasks: usize,
) {
    let (depth, widths) = (depth_of(a.cols), factors.widths());
    let order = factors.left_order(a.col_stride == 1, depth);
    let slot = factors.left_len(order, widths.rows, depth);
    let step_blocks = a.cols.div_ceil(depth);
    // Taken, not borrowed: while this thread waits it may work on other products.
    let mut buffer = SHARED.take();
    for first_row in (0..a.rows).step_by(SHARED_ROWS) {
        let a = a.t().columns(first_row..(first_row + SHARED_ROWS).min(a.rows)).t();
        let row_blocks = a.rows.div_ceil(widths.rows);
        let part = |rows: usize, steps: usize| {
            let steps = steps * depth..((steps + 1) * depth).min(a.cols);
            let rows = rows * widths.rows..((rows + 1) * widths.rows).min(a.rows);
            a.columns(steps).t().columns(rows).t()
        };
        let each = shared_steps(row_blocks * slot);
        for first_block in (0..step_blocks).step_by(each) {
            let blocks = row_blocks * each.min(step_blocks - first_block);
            let packed = buffer.get(blocks * slot);
            packed.par_chunks_mut(slot).take(blocks).enumerate().for_each(|(index, out)| {
                let (rows, steps) = (index % row_blocks, first_block + index / row_blocks);
                factors.pack_left(part(rows, steps), order, out);
            });
            let packed = &*packed;
            let steps = first_block * depth..((first_block + each) * depth).min(a.cols);
            let b = b.t().columns(steps.clone()).t();
            let panels = b.cols.div_ceil(widths.panel);
            (0..tasks).into_par_iter().for_each(|task| {
                let bound = |task: usize| (task * panels / tasks * widths.panel).min(b.cols);
                let cols = bound(task)..bound(task + 1);
                let multiply = |right: RightBlocks<'_>| {
                    for rows in 0..row_blocks {
                        for block in right.blocks.clone() {
                            let left = &packed[(block * row_blocks + rows) * slot..];
                            let count = part(rows, first_block + block).rows;
                            // SAFETY: the element lies within the destination, and the tasks' columns are
                            // disjoint; the left block was packed for these sizes.
                            unsafe {
                                let (row, step) =
                                    (first_row + rows * widths.rows, steps.start + block * depth);
                                let dst = dst.part(row, right.first_col, step);
                                right.times(factors, (order, count, left), block, dst);
                            }
                        }
                    }
                };
                SCRATCH.with_borrow_mut(|Scratch { right, wide, .. }| {
                    for_right_blocks(factors, b, cols, depth, (right, wide), multiply);
                });
            });
        }
    }
    SHARED.set(buffer);
}

/// Values of the buffer that [`shared_rows`] packs a left operand `[rows, inner]` into.
pub(super) fn shared_values(factors: Factors, row_major: bool, rows: usize, inner: usize) -> usize {
    let (depth, widths) = (depth_of(inner), factors.widths());
    let order = factors.left_order(row_major, depth);
    let slot = factors.left_len(order, widths.rows, depth);
    let of_steps = rows.min(SHARED_ROWS).div_ceil(widths.rows) * slot;
    inner.div_ceil(depth.max(1)).min(shared_steps(of_steps)) * of_steps
}

/// Blocks of steps that are packed at a time, each of so many values.
fn shared_steps(values: usize) -> usize {
    (SHARED_VALUES / values.max(1)).max(1)
}

/// Packed blocks of some columns of a right operand, one for each of some blocks of steps.
struct RightBlocks<'a> {
    first_col: usize,
    cols: usize,
    /// Which blocks of steps.
    blocks: Range<usize>,
    /// Steps of a block, but for the last one of a sum.
    depth: usize,
    /// Steps of all blocks of the sum.
    length: usize,
    packed: &'a [f32],
    /// Values from one packed block to the next.
    slot: usize,
}

impl RightBlocks<'_> {
    /// Steps of the sum that a block holds.
    fn steps(&self, block: usize) -> Range<usize> {
        block * self.depth..((block + 1) * self.depth).min(self.length)
    }

    /// A packed left block of so many rows times one of the blocks.
    ///
    /// # Safety
    /// As [`Factors::tiles`]: the left block has the steps of `block`.
    unsafe fn times(
        &self,
        factors: Factors,
        (order, rows, left): (LeftOrder, usize, &[f32]),
        block: usize,
        dst: Output,
    ) {
        let right = &self.packed[(block - self.blocks.start) * self.slot..];
        let sizes = (rows, self.cols, self.steps(block).len());
        // SAFETY: passed on to the caller; the right block was packed for these sizes.
        unsafe { factors.tiles(dst, order, sizes, left, right) };
    }
}

/// Packs blocks of some columns of the right operand and hands them on, columns by columns. Several blocks of steps
/// are packed at once, so that what one of them leaves in the destination is still in a cache when the next one adds to it.
fn for_right_blocks<T: Element>(
    factors: Factors,
    b: Mat<'_, T>,
    cols: Range<usize>,
    depth: usize,
    (right, wide): (&mut Buffer, &mut Vec<f32>),
    mut use_blocks: impl FnMut(RightBlocks<'_>),
) {
    let panel = factors.widths().panel;
    let most = (right_block() / depth / panel).max(1);
    let step_blocks = b.rows.div_ceil(depth);
    let together = (most / LEAST_PANELS).clamp(1, step_blocks.max(1));
    let most = most / together;
    // Blocks of nearly one width: a narrow last one would read all of the left operand for little.
    let panels = cols.len().div_ceil(panel);
    let width = panels.div_ceil(panels.div_ceil(most).max(1)).max(1) * panel;
    for first_col in cols.clone().step_by(width) {
        let cols = first_col..(first_col + width).min(cols.end);
        let slot = factors.right_len(cols.len(), depth);
        for first_block in (0..step_blocks).step_by(together) {
            let blocks = first_block..(first_block + together).min(step_blocks);
            let packed = right.get(blocks.len() * slot);
            for (block, out) in blocks.clone().zip(packed.chunks_mut(slot)) {
                let steps = block * depth..((block + 1) * depth).min(b.rows);
                let b = b.columns(cols.clone()).t().columns(steps).t();
                factors.pack_right(b, out, wide);
            }
            let (cols, length) = (cols.len(), b.rows);
            use_blocks(RightBlocks { first_col, cols, blocks, depth, length, packed, slot });
        }
    }
}

/// Values of a right block: half of this machine's second-level cache.
fn right_block() -> usize {
    static VALUES: OnceLock<usize> = OnceLock::new();
    *VALUES.get_or_init(|| second_level_cache() / 2 / size_of::<f32>())
}

/// Bytes of the second-level cache of a core; a usual size where the machine does not say.
fn second_level_cache() -> usize {
    const USUAL: usize = 1 << 20;
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__cpuid, __cpuid_count};

        // Intel's leaf and AMD's, of one layout: type and level, then line, partitions, ways and sets less one.
        for leaf in [4, 0x8000_001D] {
            if __cpuid(leaf & 0x8000_0000).eax < leaf {
                continue;
            }
            for index in 0..8 {
                let cache = __cpuid_count(leaf, index);
                let (kind, level) = (cache.eax & 0x1f, (cache.eax >> 5) & 0x7);
                if kind == 0 {
                    break;
                }
                if level == 2 {
                    let field =
                        |low: u32, bits: u32| ((cache.ebx >> low) as usize & ((1 << bits) - 1)) + 1;
                    let bytes =
                        field(0, 12) * field(12, 10) * field(22, 10) * (cache.ecx as usize + 1);
                    return bytes.clamp(USUAL / 4, USUAL * 4);
                }
            }
        }
    }
    USUAL
}

/// Steps of the inner sum between two visits of the destination; depends on its length only, and
/// cuts no quantised block.
pub(super) fn depth_of(length: usize) -> usize {
    let parts = length.div_ceil(MAX_DEPTH);
    if parts == 1 { length } else { length.div_ceil(parts).next_multiple_of(BLOCK) }
}
