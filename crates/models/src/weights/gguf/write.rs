//! Writing a GGUF file, version 3.

use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Tensor};

use super::header::ALIGNMENT;
use crate::error::{ModelError, Result, refused};
use crate::weights::atomic::write_atomically;
use crate::weights::safetensors::tensor_bytes;

/// A tensor as the file holds it.
#[derive(Debug, Clone)]
pub enum Stored {
    /// f32, f16, bf16 or i64, as it is.
    Plain(Tensor),
    /// Blocks of 32 codes of 8 bits with a scale each, made from floats; rows of whole blocks.
    Q8_0(Tensor),
}

impl From<Tensor> for Stored {
    fn from(tensor: Tensor) -> Self {
        Self::Plain(tensor)
    }
}

impl Stored {
    fn tensor(&self) -> &Tensor {
        match self {
            Self::Plain(tensor) | Self::Q8_0(tensor) => tensor,
        }
    }

    /// The format's number of the type, and the bytes.
    fn encode(&self, name: &str) -> Result<(u32, Vec<u8>)> {
        match self {
            Self::Plain(tensor) => {
                Ok((element_number(name, tensor.dtype())?, tensor_bytes(tensor)?))
            }
            Self::Q8_0(tensor) => {
                let quantised = QTensor::quantize(tensor, GgmlDType::Q8_0)?;
                Ok((8, quantised.data()?.into_owned()))
            }
        }
    }
}

/// Writes keys and tensors in the order given, complete or not at all.
///
/// # Errors
/// - a tensor or an array of a key is of another type, or the file cannot be written
pub fn save(path: &Path, metadata: &[(String, Value)], tensors: &[(String, Stored)]) -> Result<()> {
    let bytes = to_bytes(metadata, tensors).map_err(|error| match error {
        ModelError::Tensor(error) => ModelError::invalid(path, error),
        other => other,
    })?;
    write_atomically(path, &bytes)
}

fn to_bytes(metadata: &[(String, Value)], tensors: &[(String, Stored)]) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    out.extend(b"GGUF");
    out.extend(3_u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        string(&mut out, key);
        out.extend(kind(value).to_le_bytes());
        write_value(&mut out, value)?;
    }
    let mut data = Vec::new();
    for (name, stored) in tensors {
        let tensor = stored.tensor();
        let (element, bytes) = stored.encode(name)?;
        string(&mut out, name);
        out.extend((tensor.rank() as u32).to_le_bytes());
        for size in tensor.dims().iter().rev() {
            out.extend((*size as u64).to_le_bytes());
        }
        out.extend(element.to_le_bytes());
        out.extend((data.len() as u64).to_le_bytes());
        data.extend(bytes);
        data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    out.extend(data);
    Ok(out)
}

fn element_number(name: &str, dtype: DType) -> Result<u32> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(1),
        DType::BF16 => Ok(30),
        DType::I64 => Ok(27),
        other => Err(unwritable(&format!("tensor `{name}` is {other:?}"))),
    }
}

fn unwritable(what: &str) -> ModelError {
    refused(format!("{what}: GGUF files here hold none"))
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.bytes());
}

fn kind(value: &Value) -> u32 {
    match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12,
    }
}

fn write_value(out: &mut Vec<u8>, value: &Value) -> Result<()> {
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(text) => string(out, text),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
        Value::Array(items) => {
            let first = items.first().map_or(4, kind);
            if items.iter().any(|item| kind(item) != first) {
                return Err(unwritable("an array of several types"));
            }
            out.extend(first.to_le_bytes());
            out.extend((items.len() as u64).to_le_bytes());
            for item in items {
                write_value(out, item)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use proptest::prelude::*;

    use super::super::header::{ElementType, Header};
    use super::*;

    fn example() -> Vec<u8> {
        let metadata = [
            ("general.architecture", Value::String("eagle3".into())),
            ("eagle3.block_count", Value::U32(1)),
            ("eagle3.flag", Value::Bool(true)),
            ("eagle3.layers", Value::Array([2, 15, 27].map(Value::I32).to_vec())),
            ("words", Value::Array(["a", "bc"].map(|w| Value::String(w.into())).to_vec())),
        ]
        .map(|(key, value)| (key.to_owned(), value));
        let ids = Tensor::new(&[0_i64, 7, 9], &Device::Cpu).expect("ids");
        let matrix = Tensor::arange(0.0_f32, 6.0, &Device::Cpu).and_then(|t| t.reshape((2, 3)));
        let matrix = matrix.expect("matrix");
        let half = matrix.to_dtype(DType::BF16).expect("half");
        let tensors =
            [("d2t", ids), ("m", matrix), ("h", half)].map(|(name, t)| (name.to_owned(), t.into()));
        to_bytes(&metadata, &tensors).expect("bytes")
    }

    #[test]
    fn what_is_written_is_read_back() {
        let bytes = example();
        let header = Header::read(&bytes).expect("header");
        assert_eq!(header.text("general.architecture"), Some("eagle3"));
        assert_eq!(header.number("eagle3.block_count"), Some(1.0));
        assert_eq!(header.flag("eagle3.flag"), Some(true));
        assert_eq!(header.integers("eagle3.layers"), Some(vec![2, 15, 27]));
        let (ids, matrix) = (&header.tensors["d2t"], &header.tensors["m"]);
        assert_eq!((ids.element, ids.shape.as_slice()), (ElementType::I64, &[3][..]));
        assert_eq!(&bytes[ids.bytes.start + 8..ids.bytes.start + 16], 7_i64.to_le_bytes());
        assert_eq!(matrix.shape, [2, 3]);
        assert_eq!(&bytes[matrix.bytes.clone()][20..], 5_f32.to_le_bytes());
        assert!(header.tensors.values().all(|tensor| tensor.bytes.start % ALIGNMENT == 0));
    }

    #[test]
    fn every_prefix_is_an_error() {
        let bytes = example();
        let end = Header::read(&bytes).expect("header");
        let end = end.tensors.values().map(|tensor| tensor.bytes.end).max().expect("tensors");
        for length in 0..end {
            assert!(Header::read(&bytes[..length]).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn absurd_lengths_are_errors_not_allocations() {
        let bytes = example();
        for at in [8, 16, 24] {
            let mut wrong = bytes.clone();
            wrong[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
            let text = Header::read(&wrong).expect_err("refused").to_string();
            assert!(text.contains("GGUF header: ") && text.contains("is cut off"), "{text}");
        }
    }

    #[test]
    fn arrays_share_what_may_be_read_of_them() {
        // Two arrays of bytes: key, type of the value, type and number of entries.
        let array = |key: u8, count: u64| {
            let start = [1, 0, 0, 0, 0, 0, 0, 0, key, 9, 0, 0, 0, 0, 0, 0, 0];
            [&start[..], &count.to_le_bytes(), &vec![0; count as usize]].concat()
        };
        let bytes = |count: u64| {
            let start = [&b"GGUF\x03\0\0\0"[..], &[0; 8], &2_u64.to_le_bytes()].concat();
            [start, array(b'a', 3), array(b'b', count)].concat()
        };
        assert!(Header::read(&bytes(5)).is_ok());
        let text = Header::read(&bytes((1 << 24) - 2)).expect_err("refused").to_string();
        assert!(text.contains("an array of 16777214 entries: at most 16777216 are read"), "{text}");
    }

    #[test]
    fn types_shapes_and_byte_orders_that_are_not_read_are_told() {
        let bytes = example();
        // Its name and its rank.
        let start = [1, 0, 0, 0, 0, 0, 0, 0, b'm', 2, 0, 0, 0];
        let entry = bytes.windows(start.len()).position(|part| part == start);
        let sizes = entry.expect("an entry") + start.len();
        let refused = |at: usize, new: &[u8]| {
            let mut wrong = bytes.clone();
            wrong[at..at + new.len()].copy_from_slice(new);
            Header::read(&wrong).expect_err("refused").to_string()
        };
        for (number, told) in [
            (34_u32, "is of type TQ1_0, which is not read"),
            (38, "is of type IQ4_NL_8_8, which is not read"),
            (41, "is of type Q1_0, which is not read"),
            (99, "is of unknown element type 99"),
        ] {
            let text = refused(sizes + 16, &number.to_le_bytes());
            assert!(text.contains("tensor `m` ") && text.contains(told), "{text}");
        }
        let text = refused(sizes, &[0; 8]);
        assert!(text.contains("holds nothing"), "{text}");
        let text = refused(sizes, &(u64::MAX / 4).to_le_bytes());
        assert!(text.contains("has an absurd shape"), "{text}");
        let text = refused(4, &3_u32.to_be_bytes());
        assert!(text.contains("are big-endian"), "{text}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(longdraft_cases()))]

        #[test]
        fn changed_bytes_never_panic(changes in prop::collection::vec((0_usize..400, any::<u8>()), 1..6)) {
            let mut bytes = example();
            for (at, byte) in changes {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            let _ = Header::read(&bytes);
        }

        #[test]
        fn any_bytes_never_panic(tail in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = b"GGUF\x03\0\0\0".to_vec();
            bytes.extend(tail);
            let _ = Header::read(&bytes);
        }
    }

    /// More with `LONGDRAFT_FUZZ_CASES` (`scripts/check-long`).
    fn longdraft_cases() -> u32 {
        let cases = std::env::var("LONGDRAFT_FUZZ_CASES").ok().and_then(|text| text.parse().ok());
        cases.unwrap_or(4000)
    }
}
