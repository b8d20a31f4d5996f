//! A safetensors header, read so that every fault is named.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::DType;
use serde_json::Value;

use super::json;

/// Longest header that the format's own library reads.
const LONGEST_HEADER: u64 = 100_000_000;

/// Type names of the format with their bytes.
const TYPES: [(&str, usize); 14] = [
    ("F64", 8),
    ("F32", 4),
    ("F16", 2),
    ("BF16", 2),
    ("I64", 8),
    ("I32", 4),
    ("I16", 2),
    ("I8", 1),
    ("U64", 8),
    ("U32", 4),
    ("U16", 2),
    ("U8", 1),
    ("BOOL", 1),
    ("F8_E4M3", 1),
];

/// Types of weights, as the format, `config.json` and the tensor library name them.
pub(crate) const WEIGHT_TYPES: [(&str, &str, DType); 3] = [
    ("BF16", "bfloat16", DType::BF16),
    ("F16", "float16", DType::F16),
    ("F32", "float32", DType::F32),
];

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FoundTensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) file: PathBuf,
    pub(crate) bytes: Range<u64>,
}

impl FoundTensor {
    /// Its type, if weights have it.
    pub(crate) fn weight_type(&self) -> Option<DType> {
        WEIGHT_TYPES.iter().find(|(stored, ..)| *stored == self.dtype).map(|(.., dtype)| *dtype)
    }

    pub(crate) fn read(&self) -> std::io::Result<Vec<u8>> {
        let mut file = File::open(&self.file)?;
        file.seek(SeekFrom::Start(self.bytes.start))?;
        let length = self.bytes.end - self.bytes.start;
        let mut out = Vec::new();
        file.take(length).read_to_end(&mut out)?;
        Ok(out)
    }
}

/// A file's tensors, and everything that is wrong with its header.
pub(crate) fn read(path: &Path) -> (Vec<FoundTensor>, Vec<String>) {
    let mut faults = Vec::new();
    let tensors = open(path, &mut faults).unwrap_or_else(|fault| {
        faults.push(fault);
        Vec::new()
    });
    (tensors, faults)
}

fn open(path: &Path, faults: &mut Vec<String>) -> Result<Vec<FoundTensor>, String> {
    let text = |error: std::io::Error| error.to_string();
    let mut file = File::open(path).map_err(text)?;
    let size = file.metadata().map_err(text)?.len();
    parse(&mut file, size, path, faults)
}

/// Reads the header of a file of `size` bytes.
fn parse(
    file: &mut impl Read,
    size: u64,
    path: &Path,
    faults: &mut Vec<String>,
) -> Result<Vec<FoundTensor>, String> {
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|_| format!("{size} bytes: too short for a header"))?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER || length.saturating_add(8) > size {
        return Err(format!(
            "a header of {length} bytes in a file of {size} (cut off, or no header)"
        ));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(|error| error.to_string())?;
    let header = String::from_utf8(header).map_err(|_| "the header is no UTF-8".to_owned())?;
    let (value, twice) =
        json::parse(&header).map_err(|error| format!("the header is no JSON: {error}"))?;
    for name in twice {
        faults.push(format!("tensor `{name}` is there twice in the header"));
    }
    let entries = value.as_object().ok_or("the header is not a table")?;
    let data = 8 + length;
    let mut tensors = Vec::new();
    for (name, entry) in entries.iter().filter(|(name, _)| *name != "__metadata__") {
        match describe(name, entry, path, data, size) {
            Ok(tensor) => tensors.push(tensor),
            Err(fault) => faults.push(format!("tensor `{name}` {fault}")),
        }
    }
    tensors.sort_by_key(|tensor| (tensor.bytes.start, tensor.bytes.end));
    let mut at = data;
    for tensor in &tensors {
        if tensor.bytes.start < at {
            faults.push(format!("tensor `{}` overlaps the one before it", tensor.name));
        } else if tensor.bytes.start > at {
            faults.push(format!(
                "tensor `{}` leaves {} bytes unused before it",
                tensor.name,
                tensor.bytes.start - at
            ));
        }
        at = at.max(tensor.bytes.end);
    }
    if faults.is_empty() && at != size {
        faults.push(format!("{} bytes after the last tensor", size - at.min(size)));
    }
    Ok(tensors)
}

fn describe(
    name: &str,
    entry: &Value,
    path: &Path,
    data: u64,
    size: u64,
) -> Result<FoundTensor, String> {
    let dtype = entry["dtype"].as_str().unwrap_or_default();
    let (_, element) = TYPES
        .iter()
        .find(|(known, _)| *known == dtype)
        .ok_or_else(|| format!("is of unknown type {}", entry["dtype"]))?;
    let whole =
        |list: &Value| -> Option<Vec<u64>> { list.as_array()?.iter().map(Value::as_u64).collect() };
    let shape = whole(&entry["shape"]).ok_or_else(|| format!("has shape {}", entry["shape"]))?;
    let offsets = whole(&entry["data_offsets"]).filter(|offsets| offsets.len() == 2);
    let offsets = offsets.ok_or_else(|| format!("has offsets {}", entry["data_offsets"]))?;
    let wanted = shape
        .iter()
        .try_fold(*element as u64, |product, size| product.checked_mul(*size))
        .ok_or_else(|| format!("has the absurd shape {shape:?}"))?;
    let (start, end) = (data.checked_add(offsets[0]), data.checked_add(offsets[1]));
    let (Some(start), Some(end)) = (start, end) else {
        return Err(format!("has offsets {offsets:?}"));
    };
    if end < start || end - start != wanted {
        return Err(format!("of shape {shape:?} spans {offsets:?}, not {wanted} bytes"));
    }
    if end > size {
        return Err(format!("ends at byte {end} of a file of {size} (cut off)"));
    }
    let shape = shape.into_iter().map(|size| size as usize).collect();
    Ok(FoundTensor {
        name: name.to_owned(),
        dtype: dtype.to_owned(),
        shape,
        file: path.to_path_buf(),
        bytes: start..end,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A file of two tensors.
    fn example() -> Vec<u8> {
        let header = r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#;
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header.bytes());
        out.extend([7; 32]);
        out
    }

    /// Tensors and faults of a file with these bytes, which lives as long as the first part.
    fn check(bytes: &[u8]) -> (tempfile::NamedTempFile, Vec<FoundTensor>, Vec<String>) {
        let file = tempfile::NamedTempFile::new().expect("file");
        std::fs::write(file.path(), bytes).expect("write");
        let (tensors, faults) = read(file.path());
        (file, tensors, faults)
    }

    #[test]
    fn a_whole_file_has_no_faults_and_every_prefix_has() {
        let bytes = example();
        let (_file, tensors, faults) = check(&bytes);
        assert_eq!((tensors.len(), faults.len()), (2, 0), "{faults:?}");
        assert_eq!(tensors[1].read().expect("bytes"), [7; 8]);
        for length in 0..bytes.len() {
            assert!(!check(&bytes[..length]).2.is_empty(), "{length} bytes");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(
            std::env::var("LONGDRAFT_FUZZ_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(10_000)
        ))]

        #[test]
        fn changed_bytes_never_panic_and_tensors_stay_inside(
            changes in prop::collection::vec((0_usize..400, any::<u8>()), 1..6)
        ) {
            let mut bytes = example();
            for (at, byte) in changes {
                let at = at % bytes.len();
                bytes[at] = byte;
            }
            let size = bytes.len() as u64;
            let mut faults = Vec::new();
            let tensors = parse(&mut bytes.as_slice(), size, Path::new("x"), &mut faults);
            for tensor in tensors.unwrap_or_default() {
                prop_assert!(tensor.bytes.start <= tensor.bytes.end && tensor.bytes.end <= size);
            }
        }
    }
}
