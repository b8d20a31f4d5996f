//! Element types of the tensors of GGUF files, by the format's numbers.

use half::{bf16, f16};
use longdraft_kernels::matrix::BlockFormat;

/// Element types of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementType {
    /// 32-bit floats.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Blocks of quantised values.
    Blocks(BlockFormat),
    /// 64-bit integers.
    I64,
    /// 32-bit integers.
    I32,
    /// By its number; nothing here reads it.
    Unknown(u32),
}

impl ElementType {
    pub(super) fn from_number(number: u32) -> Self {
        use BlockFormat as B;
        let format = match number {
            0 => return Self::F32,
            1 => return Self::F16,
            30 => return Self::Bf16,
            26 => return Self::I32,
            27 => return Self::I64,
            2 => B::Q4_0,
            3 => B::Q4_1,
            6 => B::Q5_0,
            7 => B::Q5_1,
            8 => B::Q8_0,
            10 => B::Q2K,
            11 => B::Q3K,
            12 => B::Q4K,
            13 => B::Q5K,
            14 => B::Q6K,
            20 => B::Iq4Nl,
            23 => B::Iq4Xs,
            39 => B::Mxfp4,
            other => return Self::Unknown(other),
        };
        Self::Blocks(format)
    }

    /// Elements of a block and its bytes.
    pub(super) fn block(self) -> Option<(usize, usize)> {
        match self {
            Self::Blocks(format) => Some((format.values(), format.bytes())),
            Self::F16 | Self::Bf16 => Some((1, 2)),
            Self::F32 | Self::I32 => Some((1, 4)),
            Self::I64 => Some((1, 8)),
            Self::Unknown(_) => None,
        }
    }

    /// A weight's type as the format writes it.
    pub fn weight_name(self) -> Option<&'static str> {
        match self {
            Self::F32 => Some("F32"),
            Self::F16 => Some("F16"),
            Self::Bf16 => Some("BF16"),
            Self::Blocks(format) => Some(format.name()),
            Self::I64 | Self::I32 | Self::Unknown(_) => None,
        }
    }

    /// The values of a weight's whole blocks; `None` for types that are no weights.
    pub(crate) fn widen(self, raw: &[u8]) -> Option<Vec<f32>> {
        match self {
            Self::F32 => {
                Some(raw.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
            }
            Self::F16 => {
                let values = raw.as_chunks::<2>().0.iter();
                Some(values.map(|b| f16::from_le_bytes(*b).to_f32()).collect())
            }
            Self::Bf16 => {
                let values = raw.as_chunks::<2>().0.iter();
                Some(values.map(|b| bf16::from_le_bytes(*b).to_f32()).collect())
            }
            Self::Blocks(format) => {
                let mut values = vec![0.0; raw.len() / format.bytes() * format.values()];
                format.widen(raw, &mut values);
                Some(values)
            }
            Self::I64 | Self::I32 | Self::Unknown(_) => None,
        }
    }
}

/// Types that files have and that are not read.
pub(super) fn name_of_unread(number: u32) -> Option<&'static str> {
    Some(match number {
        4 => "Q4_2",
        5 => "Q4_3",
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        24 => "I8",
        25 => "I16",
        28 => "F64",
        29 => "IQ1_M",
        31 => "Q4_0_4_4",
        32 => "Q4_0_4_8",
        33 => "Q4_0_8_8",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36 => "IQ4_NL_4_4",
        37 => "IQ4_NL_4_8",
        38 => "IQ4_NL_8_8",
        40 => "NVFP4",
        41 => "Q1_0",
        42 => "Q2_0",
        _ => return None,
    })
}
