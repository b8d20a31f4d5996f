//! How longdraft holds blocks in memory.
//!
//! A file holds a row's blocks one after the other. In memory 16 rows lie side by side: of each block
//! the floats of all rows, then for every 32 values the bytes that scale them and the codes. A vector
//! register then holds the same values of 16 rows.
//!
//! Codes are cut into planes of 8, 4, 2 or 1 bits. A word of a plane holds codes of one row, four to a
//! step, one in each byte: the first step's in the lowest bits of the bytes, the next one's above.
//! A shift and a mask bring four codes of every row to bytes.
//!
//! No value is rounded. What grows are six-bit scales, which take a byte: at most 4 % of a block.

use super::format::{BLOCK, BlockFormat, Factors, Layout};
use super::stored::Numbers;

/// Rows that lie side by side.
pub(crate) const GROUP: usize = 16;
/// Bytes of a word of every row.
pub(super) const WORDS: usize = 4 * GROUP;

impl Layout {
    /// Bytes of a block of 16 rows.
    #[inline]
    pub(super) const fn size(&self) -> usize {
        GROUP * self.held_bytes()
    }

    /// Where 32 of its values begin.
    #[inline]
    pub(super) const fn part_at(&self, part: usize) -> usize {
        GROUP * (self.float_bytes() + part * self.part_bytes())
    }

    /// Planes that have bits, and how many.
    fn used_planes(&self) -> impl Iterator<Item = (usize, usize)> {
        self.planes.into_iter().enumerate().filter(|(_, bits)| *bits > 0)
    }

    /// Where the words of a plane begin, from [`Self::part_at`] on.
    #[inline]
    pub(super) const fn plane_at(&self, plane: usize) -> usize {
        let before = if plane == 0 { 0 } else { self.planes[0] };
        GROUP * self.scales.bytes() + WORDS * before
    }
}

/// The lowest `bits` of every byte of a word.
const fn byte_mask(bits: usize) -> u32 {
    0x0101_0101 * ((1 << bits) - 1)
}

/// Bytes of an `[outputs, inputs]` matrix in memory: whole groups of 16 rows. `None` if a row does not
/// consist of blocks, or there are too many bytes.
pub(crate) fn held_bytes(format: BlockFormat, outputs: usize, inputs: usize) -> Option<usize> {
    if !inputs.is_multiple_of(format.values()) {
        return None;
    }
    let row = (inputs / format.values()).checked_mul(format.layout().held_bytes())?;
    outputs.checked_next_multiple_of(GROUP)?.checked_mul(row)
}

/// Puts rows of stored blocks, `inputs` values each, side by side into `out`, which holds zeros and begins
/// with a group. What the last group lacks stays zero.
pub(crate) fn put_side_by_side(format: BlockFormat, inputs: usize, stored: &[u8], out: &mut [u8]) {
    let layout = format.layout();
    let blocks = inputs / layout.values;
    if blocks == 0 {
        return;
    }
    let row = blocks * format.bytes();
    let groups = out.chunks_exact_mut(blocks * layout.size());
    for (out, stored) in groups.zip(stored.chunks(GROUP * row)) {
        for (lane, stored) in stored.chunks_exact(row).enumerate() {
            let stored = stored.chunks_exact(format.bytes());
            for (out, block) in out.chunks_exact_mut(layout.size()).zip(stored) {
                put(&layout, &format.numbers(block), lane, out);
            }
        }
    }
}

fn put(layout: &Layout, numbers: &Numbers, lane: usize, out: &mut [u8]) {
    for i in 0..layout.float_bytes() / 2 {
        out[2 * (GROUP * i + lane)..][..2].copy_from_slice(&numbers.floats[i].to_le_bytes());
    }
    for part in 0..layout.parts() {
        let out = &mut out[layout.part_at(part)..];
        let scales = numbers.scales_of(layout, part);
        for (i, scale) in scales.into_iter().take(layout.scales.bytes()).enumerate() {
            out[GROUP * i + lane] = scale;
        }
        let mut below = 0;
        for (plane, bits) in layout.used_planes() {
            let words = &mut out[layout.plane_at(plane)..];
            let mask = byte_mask(bits);
            let codes = numbers.codes[BLOCK * part..][..BLOCK].as_chunks::<4>().0;
            for (word, codes) in codes.chunks_exact(8 / bits).enumerate() {
                let steps = codes.iter().enumerate().map(|(step, codes)| {
                    (u32::from_le_bytes(*codes) >> below & mask) << (step * bits)
                });
                let bytes = steps.fold(0, |word, step| word | step).to_le_bytes();
                words[WORDS * word + 4 * lane..][..4].copy_from_slice(&bytes);
            }
            below += bits;
        }
    }
}

/// Moves one row between groups of 16, block by block.
pub(super) fn copy_row(layout: &Layout, from: (&[u8], usize), to: &mut [u8], lane: usize) {
    for (out, block) in to.chunks_exact_mut(layout.size()).zip(from.0.chunks_exact(layout.size())) {
        let mut copy = |at: usize, width: usize| {
            let (here, there) = (at + width * from.1, at + width * lane);
            out[there..there + width].copy_from_slice(&block[here..here + width]);
        };
        (0..layout.float_bytes() / 2).for_each(|i| copy(2 * GROUP * i, 2));
        for part in 0..layout.parts() {
            let at = layout.part_at(part);
            (0..layout.scales.bytes()).for_each(|i| copy(at + GROUP * i, 1));
            let words = at + layout.plane_at(0)..at + GROUP * layout.part_bytes();
            words.step_by(WORDS).for_each(|at| copy(at, 4));
        }
    }
}

impl Layout {
    /// Factors and code bits of 32 values of one row in a block of 16.
    #[inline]
    pub(super) fn row_of(&self, block: &[u8], part: usize, lane: usize) -> (Factors, [u8; BLOCK]) {
        let half = |i: usize| {
            let at = 2 * (GROUP * i + lane);
            u16::from_le_bytes([block[at], block[at + 1]])
        };
        let floats = [half(0), if self.has_least() { half(1) } else { 0 }];
        let held = &block[self.part_at(part)..][..GROUP * self.part_bytes()];
        let mut scales = [0; 2];
        for (i, scale) in scales.iter_mut().take(self.scales.bytes()).enumerate() {
            *scale = held[GROUP * i + lane];
        }
        let mut codes = [0; BLOCK];
        let mut below = 0;
        for (plane, bits) in self.used_planes() {
            let words = &held[self.plane_at(plane)..];
            let mask = byte_mask(bits);
            for (word, codes) in codes.as_chunks_mut::<4>().0.chunks_exact_mut(8 / bits).enumerate()
            {
                let at = WORDS * word + 4 * lane;
                let word = u32::from_le_bytes([0, 1, 2, 3].map(|i| words[at + i]));
                for (step, codes) in codes.iter_mut().enumerate() {
                    let bits = (word >> (step * bits) & mask) << below;
                    *codes = (u32::from_le_bytes(*codes) | bits).to_le_bytes();
                }
            }
            below += bits;
        }
        (self.factors(floats, scales), codes)
    }
}
