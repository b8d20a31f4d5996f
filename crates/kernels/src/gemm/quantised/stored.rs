//! Numbers of a block in the order in which files hold them.

use super::format::{BLOCK, BlockFormat, Layout, PARTS, SIGN};

/// A block's numbers, part after part of 32 values.
pub(super) struct Numbers {
    /// Bits of scale and minimum.
    pub(super) floats: [u16; 2],
    /// As [`super::format::Scales`] has them.
    pub(super) scales: [u8; 2 * PARTS],
    /// Bits of the codes, unsigned.
    pub(super) codes: [u8; PARTS * BLOCK],
}

impl Numbers {
    /// The bytes that scale 32 values.
    pub(super) fn scales_of(&self, layout: &Layout, part: usize) -> [u8; 2] {
        match *layout.scale_bytes(part, &self.scales) {
            [first, second] => [first, second],
            [first] => [first, 0],
            _ => [0; 2],
        }
    }
}

impl Layout {
    fn scale_bytes<'a>(&self, part: usize, scales: &'a [u8]) -> &'a [u8] {
        let count = self.scales.bytes();
        &scales[count * part..][..count]
    }
}

impl BlockFormat {
    /// Takes a stored block apart.
    #[inline]
    pub(super) fn numbers(self, block: &[u8]) -> Numbers {
        let mut out = Numbers { floats: [0; 2], scales: [0; 16], codes: [0; 256] };
        let word = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
        let Numbers { floats, scales, codes } = &mut out;
        match self {
            Self::Q4_0 | Self::Iq4Nl => {
                floats[0] = word(0);
                nibbles(&block[2..18], codes);
            }
            Self::Q4_1 => {
                *floats = [word(0), word(2)];
                nibbles(&block[4..20], codes);
            }
            Self::Q5_0 => {
                floats[0] = word(0);
                nibbles(&block[6..22], codes);
                fifth_bits(&block[2..6], codes);
            }
            Self::Q5_1 => {
                *floats = [word(0), word(2)];
                nibbles(&block[8..24], codes);
                fifth_bits(&block[4..8], codes);
            }
            Self::Q8_0 => {
                floats[0] = word(0);
                codes.iter_mut().zip(&block[2..34]).for_each(|(code, byte)| *code = byte ^ SIGN);
            }
            Self::Mxfp4 => {
                floats[0] = power(block[0]);
                nibbles(&block[1..17], codes);
            }
            Self::Q2K => {
                scales.copy_from_slice(&block[..16]);
                two_bits(&block[16..80], codes);
                *floats = [word(80), word(82)];
            }
            Self::Q3K => {
                two_bits(&block[32..96], codes);
                bits_above(&block[..32], 2, codes);
                *scales = six_bit_scales(&block[96..108]);
                floats[0] = word(108);
            }
            Self::Q4K => {
                *floats = [word(0), word(2)];
                *scales = scales_and_leasts(&block[4..16]);
                runs_of_nibbles(&block[16..144], codes);
            }
            Self::Q5K => {
                *floats = [word(0), word(2)];
                *scales = scales_and_leasts(&block[4..16]);
                runs_of_nibbles(&block[48..176], codes);
                bits_above(&block[16..48], 4, codes);
            }
            Self::Q6K => {
                for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
                    let (half, quarter) = (run / 4, run % 4);
                    let low = &block[64 * half + 32 * (quarter % 2)..][..32];
                    let top = &block[128 + 32 * half..][..32];
                    for ((code, low), top) in codes.iter_mut().zip(low).zip(top) {
                        *code = low >> (4 * (quarter / 2)) & 15 | (top >> (2 * quarter) & 3) << 4;
                    }
                }
                scales.copy_from_slice(&block[192..208]);
                floats[0] = word(208);
            }
            Self::Iq4Xs => {
                floats[0] = word(0);
                for (part, scale) in scales.iter_mut().take(PARTS).enumerate() {
                    let low = block[4 + part / 2] >> (4 * (part % 2)) & 15;
                    let high = (word(2) >> (2 * part) & 3) as u8;
                    *scale = (low | high << 4).wrapping_sub(32);
                    nibbles(&block[8 + 16 * part..][..16], &mut codes[BLOCK * part..]);
                }
            }
        }
        out
    }
}

/// 16 bytes: low halves first.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// Runs of 64 codes: 32 low halves, then 32 high ones.
fn runs_of_nibbles(bytes: &[u8], codes: &mut [u8]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(64)) {
        nibbles(bytes, codes);
    }
}

fn fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    for (byte, codes) in bytes.iter().zip(codes.chunks_exact_mut(8)) {
        for (bit, code) in codes.iter_mut().enumerate() {
            *code |= (byte >> bit & 1) << 4;
        }
    }
}

/// 32 bytes that hold a bit of every run of 32 codes, which comes to `place`.
fn bits_above(bytes: &[u8], place: usize, codes: &mut [u8]) {
    for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
        for (code, byte) in codes.iter_mut().zip(bytes) {
            *code |= (byte >> run & 1) << place;
        }
    }
}

/// Halves of 128 codes, each of 32 bytes: their lowest two bits first.
fn two_bits(bytes: &[u8], codes: &mut [u8]) {
    for (run, codes) in codes.chunks_exact_mut(32).enumerate() {
        let bytes = &bytes[32 * (run / 4)..][..32];
        for (code, byte) in codes.iter_mut().zip(bytes) {
            *code = byte >> (2 * (run % 4)) & 3;
        }
    }
}

/// 16 numbers of 6 bits, minus 32: halves of 8 bytes, and two bits above of 4 more.
fn six_bit_scales(bytes: &[u8]) -> [u8; 16] {
    std::array::from_fn(|group| {
        let low = if group < 8 { bytes[group] & 15 } else { bytes[group - 8] >> 4 };
        let high = bytes[8 + group % 4] >> (2 * (group / 4)) & 3;
        (low | high << 4).wrapping_sub(32)
    })
}

/// 8 scales and 8 minima of 6 bits, in turns.
fn scales_and_leasts(bytes: &[u8]) -> [u8; 16] {
    std::array::from_fn(|i| match (i / 2, i % 2) {
        (group @ 0..4, 0) => bytes[group] & 63,
        (group @ 0..4, _) => bytes[group + 4] & 63,
        (group, 0) => bytes[group + 4] & 15 | bytes[group - 4] >> 6 << 4,
        (group, _) => bytes[group + 4] >> 4 | bytes[group] >> 6 << 4,
    })
}

/// `2^(exponent − 128)` as bf16: half of what the byte says, for codes are twice the values.
fn power(exponent: u8) -> u16 {
    match exponent {
        0 => 0x20,
        1 => 0x40,
        _ => u16::from(exponent - 1) << 7,
    }
}
