//! Writing safetensors files: the same tensors and metadata give the same bytes.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use ::safetensors::tensor::{Dtype, View};
use candle_core::{DType, Tensor};
use half::{bf16, f16};

use super::LENGTH_BYTES;
use crate::error::{ModelError, Result, refused};
use crate::weights::atomic::write_atomically;

/// Writes tensors (f32, bf16, f16, i64, or u8 as flags) with string metadata, complete or not at
/// all. The same tensors and metadata give the same bytes.
///
/// # Errors
/// - a tensor is of another type, or the file cannot be written
pub fn save(
    path: &Path,
    tensors: &[(String, Tensor)],
    metadata: HashMap<String, String>,
) -> Result<()> {
    let views: Vec<(&str, Stored)> = tensors
        .iter()
        .map(|(name, tensor)| Ok((name.as_str(), Stored::of(tensor)?)))
        .collect::<Result<_>>()?;
    let mut bytes =
        ::safetensors::serialize(views, None).map_err(|error| ModelError::invalid(path, error))?;
    add_metadata(&mut bytes, metadata).map_err(|error| ModelError::invalid(path, error))?;
    write_atomically(path, &bytes)
}

/// Adds metadata to the header of a file without any, in the order of its keys: the library writes it
/// in another one each time.
fn add_metadata(
    file: &mut Vec<u8>,
    metadata: HashMap<String, String>,
) -> std::result::Result<(), serde_json::Error> {
    let (length, rest) = file.split_at(LENGTH_BYTES);
    let length = length.iter().rev().fold(0, |all, byte| all << 8 | usize::from(*byte));
    let tensors = rest[..length].trim_ascii_end();
    let metadata: BTreeMap<String, String> = metadata.into_iter().collect();
    let mut header =
        format!("{{\"__metadata__\":{}", serde_json::to_string(&metadata)?).into_bytes();
    if tensors != b"{}" {
        header.push(b',');
    }
    header.extend_from_slice(&tensors[1..]);
    header.resize(header.len().next_multiple_of(LENGTH_BYTES), b' ');
    let count = (header.len() as u64).to_le_bytes();
    file.splice(..LENGTH_BYTES + length, count.into_iter().chain(header));
    Ok(())
}

/// A tensor as it stands in a file; its bytes are made when their turn comes.
struct Stored {
    /// On the CPU.
    tensor: Tensor,
    dtype: Dtype,
    bytes: usize,
}

impl Stored {
    fn of(tensor: &Tensor) -> Result<Self> {
        let dtype = match tensor.dtype() {
            DType::F32 => Dtype::F32,
            DType::BF16 => Dtype::BF16,
            DType::F16 => Dtype::F16,
            DType::I64 => Dtype::I64,
            // The tensor library knows no flags.
            DType::U8 => Dtype::BOOL,
            other => return Err(unwritable(other)),
        };
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let tensor = tensor.to_device(&candle_core::Device::Cpu)?;
        Ok(Self { tensor, dtype, bytes })
    }
}

impl View for Stored {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.tensor.dims()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(tensor_bytes(&self.tensor).expect("a CPU tensor of a known type"))
    }

    fn data_len(&self) -> usize {
        self.bytes
    }
}

/// A tensor's values as they stand in weight files: little-endian, row-major.
///
/// # Errors
/// - it is of a type that weight files do not hold
pub fn tensor_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = tensor.to_device(&candle_core::Device::Cpu)?.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::F32 => flat.to_vec1::<f32>()?.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::BF16 => flat.to_vec1::<bf16>()?.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => flat.to_vec1::<f16>()?.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::I64 => flat.to_vec1::<i64>()?.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::U8 => flat.to_vec1::<u8>()?,
        other => return Err(unwritable(other)),
    })
}

fn unwritable(dtype: DType) -> ModelError {
    refused(format!("cannot write {dtype:?} tensors as weights"))
}
