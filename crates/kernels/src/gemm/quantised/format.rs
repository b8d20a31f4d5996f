//! Block layouts of GGML, and how longdraft holds them in memory.
//!
//! A file holds a row's blocks one behind the other. In memory 16 rows lie side by side: block by
//! block all scales, then all minima, then words of which each holds some values of one row. A
//! vector register then holds the same values of 16 rows. A byte of a word holds the code of one of four
//! steps, or its low half one of them and its high half one of the next four: a mask brings four codes of
//! every row to bytes. Codes are unsigned, as the products of bytes want them: signed ones have their
//! first bit turned. The bytes are the file's in another order otherwise.

use half::f16;
use rayon::prelude::*;

/// Values of a block.
pub(crate) const BLOCK: usize = 32;
/// Rows that lie side by side.
pub(crate) const GROUP: usize = 16;
/// Bytes of a word of every row.
pub(super) const WORDS: usize = 4 * GROUP;

/// The first bit of a byte.
const SIGN: u8 = 0x80;

/// Block layouts of GGML.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockFormat {
    /// f16 scale; 16 bytes of 4 bits: low halves first, minus 8.
    Q4_0,
    /// f16 scale, f16 minimum; 16 bytes of 4 bits: low halves first.
    Q4_1,
    /// f16 scale; 32 signed bytes.
    Q8_0,
}

impl BlockFormat {
    /// Bytes of a block of 32 values.
    pub const fn bytes(self) -> usize {
        self.head() + self.codes()
    }

    /// Bytes of scale and minimum.
    const fn head(self) -> usize {
        if matches!(self, Self::Q4_1) { 4 } else { 2 }
    }

    /// Bytes of the codes.
    const fn codes(self) -> usize {
        if matches!(self, Self::Q8_0) { BLOCK } else { BLOCK / 2 }
    }

    /// Codes of a word.
    const fn codes_of_word(self) -> usize {
        4 * BLOCK / self.codes()
    }

    /// The words of a stored block's codes, in the order of their values.
    fn words(self, codes: &[u8]) -> impl Iterator<Item = u32> {
        let of_word = self.codes_of_word();
        (0..BLOCK / of_word).map(move |word| {
            (0..of_word).fold(0, |sum, i| {
                let step = of_word * word + i;
                let code = match self {
                    Self::Q8_0 => codes[step] ^ SIGN,
                    _ if step < BLOCK / 2 => codes[step] & 15,
                    _ => codes[step - BLOCK / 2] >> 4,
                };
                sum | u32::from(code) << self.shift(i)
            })
        })
    }

    /// Where code `i` of a word begins.
    const fn shift(self, i: usize) -> usize {
        debug_assert!(i < self.codes_of_word());
        8 * (i % 4) + 4 * (i / 4)
    }

    /// Code `i` of a word.
    #[inline]
    fn code(self, word: u32, i: usize) -> i32 {
        let bits = word >> self.shift(i);
        match self {
            Self::Q4_0 | Self::Q4_1 => (bits & 15).cast_signed() - self.zero(),
            Self::Q8_0 => i32::from(bits as u8) - self.zero(),
        }
    }

    /// The unsigned code of zero.
    pub(super) const fn zero(self) -> i32 {
        match self {
            Self::Q4_0 => 8,
            Self::Q4_1 => 0,
            Self::Q8_0 => SIGN as i32,
        }
    }

    /// A code's value. The product is exact in f32, so that it does not matter whether it is rounded
    /// before the minimum is added.
    #[inline]
    fn value(self, code: i32, scale: f32, least: f32) -> f32 {
        let value = code as f32 * scale;
        if self == Self::Q4_1 { value + least } else { value }
    }

    /// Takes blocks of 16 rows apart.
    #[inline]
    pub(super) fn apart(self, blocks: &[u8]) -> Apart {
        let halves = |from: usize| -> [f32; GROUP] {
            std::array::from_fn(|row| {
                f16::from_le_bytes([blocks[from + 2 * row], blocks[from + 2 * row + 1]]).to_f32()
            })
        };
        let scales = halves(0);
        let least = if self == Self::Q4_1 { halves(2 * GROUP) } else { [0.0; GROUP] };
        let of_word = self.codes_of_word();
        let mut codes = [[0; GROUP]; BLOCK];
        let words = blocks[self.head() * GROUP..].chunks_exact(WORDS);
        for (words, codes) in words.zip(codes.chunks_exact_mut(of_word)) {
            for (row, word) in words.as_chunks::<4>().0.iter().enumerate() {
                let word = u32::from_le_bytes(*word);
                codes.iter_mut().enumerate().for_each(|(i, step)| step[row] = self.code(word, i));
            }
        }
        Apart { format: self, scales, least, codes }
    }
}

/// A block of each of 16 rows.
pub(super) struct Apart {
    format: BlockFormat,
    pub(super) scales: [f32; GROUP],
    /// 0 where the format knows no minima.
    pub(super) least: [f32; GROUP],
    /// Step after step.
    pub(super) codes: [[i32; GROUP]; BLOCK],
}

impl Apart {
    pub(super) fn value(&self, step: usize, row: usize) -> f32 {
        self.format.value(self.codes[step][row], self.scales[row], self.least[row])
    }
}

impl BlockFormat {
    /// The 32 values of one row in blocks of 16.
    pub(super) fn widen_row(self, blocks: &[u8], row: usize, out: &mut [f32]) {
        let half = |at: usize| f16::from_le_bytes([blocks[2 * at], blocks[2 * at + 1]]).to_f32();
        let scale = half(row);
        let least = if self == Self::Q4_1 { half(GROUP + row) } else { 0.0 };
        let of_word = self.codes_of_word();
        let words = blocks[self.head() * GROUP..].chunks_exact(WORDS);
        for (words, out) in words.zip(out.chunks_exact_mut(of_word)) {
            let at = 4 * row;
            let bytes = [words[at], words[at + 1], words[at + 2], words[at + 3]];
            for (i, out) in out.iter_mut().enumerate() {
                *out = self.value(self.code(u32::from_le_bytes(bytes), i), scale, least);
            }
        }
    }
}

/// Rows `[outputs, inputs / 32]` of stored blocks, 16 rows side by side; the last group is filled up
/// with rows of zeros.
pub(crate) fn side_by_side(
    format: BlockFormat,
    outputs: usize,
    inputs: usize,
    stored: &[u8],
) -> Vec<u8> {
    let (size, row) = (format.bytes(), inputs / BLOCK * format.bytes());
    let mut out = vec![0; outputs.div_ceil(GROUP) * GROUP * row];
    let groups = out.par_chunks_mut((GROUP * row).max(1));
    groups.zip(stored.par_chunks((GROUP * row).max(1))).for_each(|(out, stored)| {
        for (lane, stored) in stored.chunks_exact(row).enumerate() {
            for (out, block) in out.chunks_exact_mut(GROUP * size).zip(stored.chunks_exact(size)) {
                put(format, block, lane, out);
            }
        }
    });
    out
}

fn put(format: BlockFormat, block: &[u8], lane: usize, out: &mut [u8]) {
    let (head, codes) = block.split_at(format.head());
    for (i, half) in head.chunks_exact(2).enumerate() {
        out[2 * (GROUP * i + lane)..][..2].copy_from_slice(half);
    }
    let words = out[GROUP * format.head()..].chunks_exact_mut(WORDS);
    for (out, word) in words.zip(format.words(codes)) {
        out[4 * lane..][..4].copy_from_slice(&word.to_le_bytes());
    }
}

/// Moves one row between blocks of 16, block by block.
pub(super) fn copy_row(format: BlockFormat, from: (&[u8], usize), to: &mut [u8], lane: usize) {
    let size = GROUP * format.bytes();
    let head = GROUP * format.head();
    for (out, block) in to.chunks_exact_mut(size).zip(from.0.chunks_exact(size)) {
        let mut copy = |at: usize, width: usize| {
            let (here, there) = (at + width * from.1, at + width * lane);
            out[there..there + width].copy_from_slice(&block[here..here + width]);
        };
        (0..format.head() / 2).for_each(|i| copy(2 * GROUP * i, 2));
        (head..size).step_by(WORDS).for_each(|at| copy(at, 4));
    }
}
