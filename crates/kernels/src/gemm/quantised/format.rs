//! The block types of GGML: one description each.
//!
//! A block holds 32 or 256 values: one or two 16-bit floats, in the larger ones bytes that scale 16 or
//! 32 values each, and a code for every value.
//!
//! ```text
//! value = scale · code + least       scale = d · s,   least = m, or −m · s'
//! ```
//!
//! Here codes are unsigned, as products of bytes want them; `zero` is the code of 0, and where
//! there is a table it holds the codes that nibbles stand for. Scales and products are exact in f32, and a
//! value is rounded once.

use half::{bf16, f16};

/// Values with one activation scale, and of the smaller blocks.
pub(crate) const BLOCK: usize = 32;

/// Values of the larger blocks.
const LARGE: usize = 256;

/// Most blocks of [`BLOCK`] values that a stored one holds.
pub(super) const PARTS: usize = LARGE / BLOCK;

/// What turns the first bit of a byte: signed codes become unsigned.
pub(super) const SIGN: u8 = 0x80;

/// Values of IQ4, with 128 added.
const IQ4: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

/// Twice the values of FP4 (1 bit of sign, 2 of exponent, 1 of mantissa), with 12 added.
const FP4: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// Block types of GGML.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockFormat {
    /// 32 values: f16 scale; 4 bits, minus 8.
    Q4_0,
    /// 32 values: f16 scale, f16 minimum; 4 bits.
    Q4_1,
    /// 32 values: f16 scale; 5 bits, minus 16.
    Q5_0,
    /// 32 values: f16 scale, f16 minimum; 5 bits.
    Q5_1,
    /// 32 values: f16 scale; signed bytes.
    Q8_0,
    /// 256 values: f16 scale and minimum; 4 bits of each for 16 values; 2 bits.
    Q2K,
    /// 256 values: f16 scale; 6 bits of it for 16 values, minus 32; 3 bits, minus 4.
    Q3K,
    /// 256 values: f16 scale and minimum; 6 bits of each for 32 values; 4 bits.
    Q4K,
    /// 256 values: f16 scale and minimum; 6 bits of each for 32 values; 5 bits.
    Q5K,
    /// 256 values: f16 scale; a signed byte for 16 values; 6 bits, minus 32.
    Q6K,
    /// 32 values: f16 scale; 4 bits that choose among 16 uneven values.
    Iq4Nl,
    /// 256 values: f16 scale; 6 bits of it for 32 values, minus 32; 4 bits as [`Self::Iq4Nl`].
    Iq4Xs,
    /// 32 values: a power of two in one byte; FP4 numbers.
    Mxfp4,
}

/// What the floats of a block are in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Floats {
    /// f16 scale.
    Scale,
    /// f16 scale and minimum.
    ScaleAndLeast,
    /// A power of two as bf16, whose smallest numbers it holds exactly.
    Power,
}

/// What scales the values of a larger block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scales {
    /// The floats alone.
    None,
    /// A signed byte for 32 values.
    Signed,
    /// A signed byte for each 16 values.
    SignedHalves,
    /// A byte of the scale, then one of the minimum, for 32 values.
    WithLeast,
    /// A byte for each 16 values: 4 bits of the scale, then 4 of the minimum.
    NibbleHalves,
}

impl Scales {
    /// Bytes for 32 values of a row.
    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::None => 0,
            Self::Signed => 1,
            Self::SignedHalves | Self::WithLeast | Self::NibbleHalves => 2,
        }
    }

    /// Whether 16 values have a scale of their own.
    pub(super) const fn halves(self) -> bool {
        matches!(self, Self::SignedHalves | Self::NibbleHalves)
    }
}

/// All that tells one type from another once its numbers are taken out of the file's order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    /// Values of a block.
    pub(super) values: usize,
    pub(super) floats: Floats,
    pub(super) scales: Scales,
    /// Bits of a code: its lower ones and those above.
    pub(super) planes: [usize; 2],
    /// The unsigned code of zero.
    pub(super) zero: i32,
    /// The largest unsigned code.
    pub(super) largest: i32,
    /// The unsigned codes that the bits choose among.
    pub(super) table: Option<&'static [u8; 16]>,
}

impl Layout {
    const fn of_bits(values: usize, floats: Floats, planes: [usize; 2], zero: i32) -> Self {
        let largest = (1 << (planes[0] + planes[1])) - 1;
        Self { values, floats, scales: Scales::None, planes, zero, largest, table: None }
    }

    const fn scaled(self, scales: Scales) -> Self {
        Self { scales, ..self }
    }

    const fn chosen_from(self, table: &'static [u8; 16], largest: i32) -> Self {
        Self { table: Some(table), largest, ..self }
    }

    /// Blocks of 32 values.
    #[inline]
    pub(super) const fn parts(&self) -> usize {
        self.values / BLOCK
    }

    /// Bytes of a row's floats.
    #[inline]
    pub(super) const fn float_bytes(&self) -> usize {
        if matches!(self.floats, Floats::ScaleAndLeast) { 4 } else { 2 }
    }

    /// Bytes of a row's 32 codes, with the bytes that scale them.
    #[inline]
    pub(super) const fn part_bytes(&self) -> usize {
        self.scales.bytes() + BLOCK / 8 * (self.planes[0] + self.planes[1])
    }

    /// Bytes of a row's block in memory.
    #[inline]
    pub(super) const fn held_bytes(&self) -> usize {
        self.float_bytes() + self.parts() * self.part_bytes()
    }

    /// Whether there are minima.
    #[inline]
    pub(super) const fn has_least(&self) -> bool {
        matches!(self.floats, Floats::ScaleAndLeast)
    }

    /// What a code's bits stand for, as a multiple of the scale.
    #[inline]
    pub(super) fn signed(&self, bits: u8) -> i32 {
        let code = self.table.map_or(bits, |table| table[usize::from(bits & 15)]);
        i32::from(code) - self.zero
    }
}

/// Name, bytes of a block in a file and layout of every type, in the order of [`BlockFormat`].
const TYPES: [(&str, usize, Layout); 13] = {
    use Floats::{Power, Scale, ScaleAndLeast};
    use Scales::{NibbleHalves, Signed, SignedHalves, WithLeast};
    [
        ("Q4_0", 18, Layout::of_bits(BLOCK, Scale, [4, 0], 8)),
        ("Q4_1", 20, Layout::of_bits(BLOCK, ScaleAndLeast, [4, 0], 0)),
        ("Q5_0", 22, Layout::of_bits(BLOCK, Scale, [4, 1], 16)),
        ("Q5_1", 24, Layout::of_bits(BLOCK, ScaleAndLeast, [4, 1], 0)),
        ("Q8_0", 34, Layout::of_bits(BLOCK, Scale, [8, 0], SIGN as i32)),
        ("Q2_K", 84, Layout::of_bits(LARGE, ScaleAndLeast, [2, 0], 0).scaled(NibbleHalves)),
        ("Q3_K", 110, Layout::of_bits(LARGE, Scale, [2, 1], 4).scaled(SignedHalves)),
        ("Q4_K", 144, Layout::of_bits(LARGE, ScaleAndLeast, [4, 0], 0).scaled(WithLeast)),
        ("Q5_K", 176, Layout::of_bits(LARGE, ScaleAndLeast, [4, 1], 0).scaled(WithLeast)),
        ("Q6_K", 210, Layout::of_bits(LARGE, Scale, [4, 2], 32).scaled(SignedHalves)),
        ("IQ4_NL", 18, Layout::of_bits(BLOCK, Scale, [4, 0], 128).chosen_from(&IQ4, 241)),
        (
            "IQ4_XS",
            136,
            Layout::of_bits(LARGE, Scale, [4, 0], 128).chosen_from(&IQ4, 241).scaled(Signed),
        ),
        ("MXFP4", 17, Layout::of_bits(BLOCK, Power, [4, 0], 12).chosen_from(&FP4, 24)),
    ]
};

impl BlockFormat {
    /// Every one.
    pub const ALL: [Self; 13] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Mxfp4,
    ];

    /// Values of a block: a row consists of whole ones.
    pub const fn values(self) -> usize {
        self.layout().values
    }

    /// Bytes of a block in a file.
    pub const fn bytes(self) -> usize {
        TYPES[self as usize].1
    }

    /// The type that GGML calls so.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// The type's name as GGML writes it.
    pub const fn name(self) -> &'static str {
        TYPES[self as usize].0
    }

    pub(super) const fn layout(self) -> Layout {
        TYPES[self as usize].2
    }

    /// Widens whole blocks of a file.
    ///
    /// # Panics
    /// - `stored` or `out` does not consist of whole blocks, or one has more of them
    pub fn widen(self, stored: &[u8], out: &mut [f32]) {
        let layout = self.layout();
        let blocks = stored.len() / self.bytes();
        assert_eq!(stored.len(), blocks * self.bytes(), "bytes of whole blocks");
        assert_eq!(out.len(), blocks * layout.values, "values of whole blocks");
        let values = out.chunks_exact_mut(layout.values);
        for (block, out) in stored.chunks_exact(self.bytes()).zip(values) {
            let numbers = self.numbers(block);
            for (part, out) in out.chunks_exact_mut(BLOCK).enumerate() {
                let factors = layout.factors(numbers.floats, numbers.scales_of(&layout, part));
                let codes = &numbers.codes[part * BLOCK..][..BLOCK];
                layout.widen_part(&factors, codes, out);
            }
        }
    }
}

/// What the codes of each half of 32 values are multiplied with, and what is added.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Factors {
    pub(super) scale: [f32; 2],
    /// 0 where there are no minima.
    pub(super) least: [f32; 2],
}

impl Layout {
    /// Of a row's floats, as bits, and the bytes that scale 32 of its values.
    #[inline]
    pub(super) fn factors(&self, floats: [u16; 2], scales: [u8; 2]) -> Factors {
        let d = match self.floats {
            Floats::Power => bf16::from_bits(floats[0]).to_f32(),
            _ => f16::from_bits(floats[0]).to_f32(),
        };
        let m = if self.has_least() { f16::from_bits(floats[1]).to_f32() } else { 0.0 };
        let signed = |byte: u8| d * f32::from(byte.cast_signed());
        let both = |scale, least| Factors { scale: [scale; 2], least: [least; 2] };
        match self.scales {
            Scales::None => both(d, m),
            Scales::Signed => both(signed(scales[0]), 0.0),
            Scales::SignedHalves => Factors { scale: scales.map(signed), least: [0.0; 2] },
            Scales::WithLeast => both(d * f32::from(scales[0]), -(m * f32::from(scales[1]))),
            Scales::NibbleHalves => Factors {
                scale: scales.map(|byte| d * f32::from(byte & 15)),
                least: scales.map(|byte| -(m * f32::from(byte >> 4))),
            },
        }
    }

    /// 32 values of one row.
    #[inline]
    pub(super) fn widen_part(&self, factors: &Factors, codes: &[u8], out: &mut [f32]) {
        let (codes, out) = (codes.chunks_exact(BLOCK / 2), out.chunks_exact_mut(BLOCK / 2));
        for (half, (codes, out)) in codes.zip(out).enumerate() {
            let (scale, least) = (factors.scale[half], factors.least[half]);
            match self.table {
                Some(_) => {
                    let products = codes.iter().map(|code| self.signed(*code) as f32 * scale);
                    out.iter_mut().zip(products).for_each(|(out, product)| *out = product);
                }
                None => {
                    for (code, out) in codes.iter().zip(&mut *out) {
                        *out = (i32::from(*code) - self.zero) as f32 * scale;
                    }
                }
            }
            if self.has_least() {
                out.iter_mut().for_each(|out| *out += least);
            }
        }
    }
}
