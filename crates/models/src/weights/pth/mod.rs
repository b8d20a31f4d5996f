//! PyTorch `.pth` state dicts: a zip of one pickle and raw storages.
//!
//! Reading builds tensors and nothing else: the pickle machine knows plain containers, numbers,
//! strings and the tensor-rebuilding function; every other name is an error, and nothing is ever
//! called. Writing produces what `torch.load(..., weights_only=True)` reads.

mod pickle;
mod read;
mod write;

pub use read::PthSource;
pub use write::save;

/// Element types that weights and vocabulary maps come in, with PyTorch's storage class; u8 stands
/// for flags.
const STORAGES: [(&str, candle_core::DType, usize); 6] = [
    ("FloatStorage", candle_core::DType::F32, 4),
    ("HalfStorage", candle_core::DType::F16, 2),
    ("BFloat16Storage", candle_core::DType::BF16, 2),
    ("DoubleStorage", candle_core::DType::F64, 8),
    ("LongStorage", candle_core::DType::I64, 8),
    ("BoolStorage", candle_core::DType::U8, 1),
];

#[cfg(test)]
mod tests;
