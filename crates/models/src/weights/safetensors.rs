//! Safetensors files, single or sharded by `model.safetensors.index.json`.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata, View};
use serde::Deserialize;

use super::atomic::write_atomically;
use super::file::WeightFile;
use super::{Collector, WeightSource};
use crate::error::{ModelError, Problems, Result};

/// Bytes of the header's length, of which the header is a multiple.
const LENGTH_BYTES: usize = 8;

struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

/// Tensors of one or more safetensors files.
pub struct SafetensorsSource {
    path: PathBuf,
    files: Vec<WeightFile>,
    entries: BTreeMap<String, Entry>,
    metadata: HashMap<String, String>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl std::fmt::Debug for SafetensorsSource {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "tensors of {}", self.path.display())
    }
}

impl SafetensorsSource {
    /// Opens one file.
    ///
    /// # Errors
    /// - unreadable, or its header is not valid
    pub fn open_file(path: &Path) -> Result<Self> {
        let mut source = Self::empty(path);
        source.add(path)?;
        Ok(source)
    }

    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// - neither exists, or a list of every unusable shard and every tensor that is not where the
    ///   index says
    pub fn open_folder(folder: &Path) -> Result<Self> {
        let index = folder.join("model.safetensors.index.json");
        if index.is_file() {
            return Self::open_index(folder, &index);
        }
        let single = folder.join("model.safetensors");
        if !single.is_file() {
            return Err(ModelError::invalid(
                folder,
                "neither model.safetensors nor model.safetensors.index.json is there",
            ));
        }
        let mut source = Self::open_file(&single)?;
        source.path = folder.to_path_buf();
        Ok(source)
    }

    fn open_index(folder: &Path, index_path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(index_path).map_err(ModelError::io(index_path))?;
        let index: Index =
            serde_json::from_str(&text).map_err(|error| ModelError::invalid(index_path, error))?;
        let mut source = Self::empty(folder);
        let mut problems = Problems::default();
        let mut shards: Vec<&String> = index.weight_map.values().collect();
        shards.sort();
        shards.dedup();
        for shard in shards {
            if !is_plain_file_name(shard) {
                problems.push(format!("shard `{shard}` is not a file of this folder"));
            } else if let Err(error) = source.add(&folder.join(shard)) {
                problems.push(error);
            }
        }
        if problems.0.is_empty() {
            for (name, shard) in &index.weight_map {
                let found = source.entries.get(name).map(|e| source.files[e.file].path());
                if found != Some(folder.join(shard).as_path()) {
                    problems.push(format!("tensor `{name}` is not in `{shard}`"));
                }
            }
        }
        problems.into_result(index_path)?;
        Ok(source)
    }

    fn empty(path: &Path) -> Self {
        Self {
            path: path.to_path_buf(),
            files: Vec::new(),
            entries: BTreeMap::new(),
            metadata: HashMap::new(),
        }
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let file = WeightFile::open(path)?;
        let (start, header) = read_header(&file)
            .map_err(|problem| ModelError::invalid(path, format!("not safetensors: {problem}")))?;
        let mut problems = Problems::default();
        for (name, info) in header.tensors() {
            let (first, end) = info.data_offsets;
            let entry = Entry {
                file: self.files.len(),
                dtype: info.dtype,
                shape: info.shape.clone(),
                bytes: start + first..start + end,
            };
            if self.entries.insert(name.clone(), entry).is_some() {
                problems.push(format!("tensor `{name}` is in more than one shard"));
            }
        }
        problems.into_result(path)?;
        self.metadata.extend(header.metadata().clone().unwrap_or_default());
        self.files.push(file);
        Ok(())
    }

    /// Free-form metadata of the header.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// Reads one tensor of 8-bit integers, row-major.
    ///
    /// # Errors
    /// - it does not exist or is of another type
    pub fn load_i8(&self, name: &str) -> Result<Vec<i8>> {
        let entry = self.find(name)?;
        if entry.dtype != Dtype::I8 {
            let problem = format!("tensor `{name}` is {:?}, I8 expected", entry.dtype);
            return Err(ModelError::invalid(&self.path, problem));
        }
        Ok(self.bytes(entry)?.iter().map(|&byte| i8::from_le_bytes([byte])).collect())
    }

    /// Reads a tensor of integers (i64, i32 or u32) or flags, row-major.
    ///
    /// # Errors
    /// - it does not exist or holds no integers
    pub fn load_i64(&self, name: &str) -> Result<Vec<i64>> {
        let entry = self.find(name)?;
        let data = self.bytes(entry)?;
        match entry.dtype {
            Dtype::I64 => Ok(data
                .chunks_exact(8)
                .filter_map(|b| b.try_into().ok().map(i64::from_le_bytes))
                .collect()),
            Dtype::I32 => Ok(data
                .chunks_exact(4)
                .filter_map(|b| b.try_into().ok().map(i32::from_le_bytes))
                .map(i64::from)
                .collect()),
            Dtype::U32 => Ok(data
                .chunks_exact(4)
                .filter_map(|b| b.try_into().ok().map(u32::from_le_bytes))
                .map(i64::from)
                .collect()),
            Dtype::I16 => Ok(data
                .chunks_exact(2)
                .map(|b| i64::from(i16::from_le_bytes([b[0], b[1]])))
                .collect()),
            Dtype::I8 => Ok(data.iter().map(|&b| i64::from(i8::from_le_bytes([b]))).collect()),
            Dtype::BOOL | Dtype::U8 => Ok(data.iter().map(|&b| i64::from(b)).collect()),
            other => Err(ModelError::invalid(
                &self.path,
                format!("tensor `{name}` is {other:?}, integers expected"),
            )),
        }
    }

    /// Reads one tensor as what it is: weights as f32, integers as i64, flags as u8.
    ///
    /// # Errors
    /// - it does not exist or is of another type
    pub fn load_as_stored(&self, name: &str) -> Result<Tensor> {
        let entry = self.find(name)?;
        let shape = entry.shape.as_slice();
        let device = candle_core::Device::Cpu;
        match entry.dtype {
            Dtype::I64 | Dtype::I32 | Dtype::U32 => {
                Ok(Tensor::from_vec(self.load_i64(name)?, shape, &device)?)
            }
            Dtype::BOOL | Dtype::U8 => {
                let flags: Vec<u8> = self.load_i64(name)?.iter().map(|flag| *flag as u8).collect();
                Ok(Tensor::from_vec(flags, shape, &device)?)
            }
            _ => self.load(name, DType::F32),
        }
    }

    /// Reads a tensor of f64, row-major.
    ///
    /// # Errors
    /// - it does not exist or is of another type
    pub fn load_f64(&self, name: &str) -> Result<Vec<f64>> {
        let entry = self.find(name)?;
        if entry.dtype != Dtype::F64 {
            let problem = format!("tensor `{name}` is {:?}, f64 expected", entry.dtype);
            return Err(ModelError::invalid(&self.path, problem));
        }
        let data = self.bytes(entry)?;
        let values = data.chunks_exact(8).filter_map(|b| b.try_into().ok());
        Ok(values.map(f64::from_le_bytes).collect())
    }

    fn find(&self, name: &str) -> Result<&Entry> {
        self.entries
            .get(name)
            .ok_or_else(|| ModelError::invalid(&self.path, format!("no tensor `{name}`")))
    }

    /// Weights of a shape that fill some bytes.
    fn read_floats(
        &self,
        name: &str,
        (entry, shape): (&Entry, &[usize]),
        bytes: Range<usize>,
        dtype: DType,
    ) -> Result<Tensor> {
        let Some(size) = float_bytes(entry.dtype) else {
            let problem = format!("tensor `{name}` is {:?}, not a weight", entry.dtype);
            return Err(ModelError::invalid(&self.path, problem));
        };
        let mut collector = Collector::zeros(dtype, shape.iter().product()).ok_or_else(|| {
            ModelError::invalid(&self.path, format!("weights cannot be held as {dtype:?}"))
        })?;
        self.files[entry.file].read_pieces(bytes, |start, piece| {
            collector.set(start / size, f32_values(entry.dtype, piece));
        })?;
        collector.into_tensor(shape)
    }

    fn bytes(&self, entry: &Entry) -> Result<Vec<u8>> {
        self.files[entry.file].read(entry.bytes.clone())
    }
}

/// Bytes of the number that tells the header's length.
const PROLOGUE: usize = 8;

/// The longest header that is read, as everywhere: a tensor takes some hundred bytes.
const LONGEST_HEADER: usize = 100_000_000;

/// Where the tensors begin, and the header, whose tensors lie in the file and fill it.
fn read_header(file: &WeightFile) -> std::result::Result<(usize, Metadata), String> {
    let mut reader = file.reader();
    let mut length = [0; PROLOGUE];
    reader.read_exact(&mut length).map_err(|error| error.to_string())?;
    let length = u64::from_le_bytes(length);
    let left = file.length().saturating_sub(PROLOGUE);
    let Some(length) = usize::try_from(length).ok().filter(|length| *length <= left) else {
        return Err(format!(
            "a header of {length} bytes in a file of {} (cut off?)",
            file.length()
        ));
    };
    if length > LONGEST_HEADER {
        return Err(format!("a header of {length} bytes, at most {LONGEST_HEADER} are read"));
    }
    let mut header = vec![0; length];
    reader.read_exact(&mut header).map_err(|error| error.to_string())?;
    let header: Metadata =
        serde_json::from_slice(&header).map_err(|error| format!("its header: {error}"))?;
    let (held, told) = (left - length, header.data_len());
    match held.cmp(&told) {
        Ordering::Equal => Ok((PROLOGUE + length, header)),
        Ordering::Less => {
            Err(format!("{held} of {told} bytes of tensors are there (is the download complete?)"))
        }
        Ordering::Greater => Err(format!("{} bytes follow the tensors", held - told)),
    }
}

/// One file name without any way out of its folder.
fn is_plain_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!(components.next(), Some(Component::Normal(_))) && components.next().is_none()
}

impl WeightSource for SafetensorsSource {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Vec<String> {
        self.entries.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.entries.get(name).map(|entry| entry.shape.clone())
    }

    fn stored_type(&self, name: &str) -> Option<&'static str> {
        self.entries.get(name).map(|entry| match entry.dtype {
            Dtype::F32 => "F32",
            Dtype::BF16 => "BF16",
            Dtype::F16 => "F16",
            Dtype::F64 => "F64",
            Dtype::I64 => "I64",
            Dtype::BOOL => "BOOL",
            _ => "other",
        })
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let entry = self.find(name)?;
        self.read_floats(name, (entry, &entry.shape), entry.bytes.clone(), dtype)
    }

    fn load_part(&self, name: &str, (part, parts): (usize, usize), dtype: DType) -> Result<Tensor> {
        let entry = self.find(name)?;
        let values: usize = entry.shape.iter().product();
        let values = if part < parts && values.is_multiple_of(parts) { values / parts } else { 0 };
        if values == 0 {
            let problem = format!("tensor `{name}` has no part {part} of {parts}");
            return Err(ModelError::invalid(&self.path, problem));
        }
        let bytes = entry.bytes.len() / parts;
        let start = entry.bytes.start + part * bytes;
        self.read_floats(name, (entry, &[values]), start..start + bytes, dtype)
    }

    fn load_integers(&self, name: &str) -> Result<Vec<i64>> {
        self.load_i64(name)
    }
}

/// Bytes of a value of a float type.
fn float_bytes(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::BF16 | Dtype::F16 => Some(2),
        Dtype::F32 => Some(4),
        Dtype::F64 => Some(8),
        _ => None,
    }
}

/// Values of a type of [`float_bytes`] as f32; bf16 and f16 widen exactly, f64 rounds.
fn f32_values<'a>(dtype: Dtype, data: &'a [u8]) -> Box<dyn Iterator<Item = f32> + 'a> {
    let pair = |b: &[u8]| [b[0], b[1]];
    match dtype {
        Dtype::BF16 => {
            Box::new(data.chunks_exact(2).map(move |b| bf16::from_le_bytes(pair(b)).to_f32()))
        }
        Dtype::F16 => {
            Box::new(data.chunks_exact(2).map(move |b| f16::from_le_bytes(pair(b)).to_f32()))
        }
        Dtype::F64 => Box::new(
            data.chunks_exact(8)
                .map(|b| f64::from_le_bytes(b.try_into().expect("chunks of 8")) as f32),
        ),
        _ => Box::new(data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
    }
}

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
        safetensors::serialize(views, None).map_err(|error| ModelError::invalid(path, error))?;
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
            DType::U8 => Dtype::BOOL,
            other => {
                let message = format!("cannot write {other:?} tensors as weights");
                return Err(ModelError::Tensor(candle_core::Error::Msg(message)));
            }
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
        let (_, bytes) = little_endian_bytes(&self.tensor).expect("a CPU tensor of a known type");
        Cow::Owned(bytes)
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
    little_endian_bytes(tensor).map(|(_, bytes)| bytes)
}

/// Bytes of a tensor as they stand in weight files, with their type.
pub(crate) fn little_endian_bytes(tensor: &Tensor) -> Result<(Dtype, Vec<u8>)> {
    let flat = tensor.to_device(&candle_core::Device::Cpu)?.flatten_all()?;
    Ok(match tensor.dtype() {
        DType::F32 => {
            (Dtype::F32, flat.to_vec1::<f32>()?.iter().flat_map(|v| v.to_le_bytes()).collect())
        }
        DType::BF16 => {
            (Dtype::BF16, flat.to_vec1::<bf16>()?.iter().flat_map(|v| v.to_le_bytes()).collect())
        }
        DType::F16 => {
            (Dtype::F16, flat.to_vec1::<f16>()?.iter().flat_map(|v| v.to_le_bytes()).collect())
        }
        DType::I64 => {
            (Dtype::I64, flat.to_vec1::<i64>()?.iter().flat_map(|v| v.to_le_bytes()).collect())
        }
        // The tensor library knows no flags.
        DType::U8 => (Dtype::BOOL, flat.to_vec1::<u8>()?),
        other => {
            let message = format!("cannot write {other:?} tensors as weights");
            return Err(ModelError::Tensor(candle_core::Error::Msg(message)));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn tensors() -> Vec<(String, Tensor)> {
        let a = Tensor::arange(0.0_f32, 6.0, &Device::Cpu).and_then(|t| t.reshape((2, 3)));
        let b = Tensor::new(&[0.5_f32, -1.0], &Device::Cpu);
        vec![("a".into(), a.expect("a")), ("b".into(), b.expect("b"))]
    }

    #[test]
    fn what_is_written_is_read_back_in_any_dtype() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("model.safetensors");
        save(&path, &tensors(), HashMap::from([("mode".into(), "default".into())]))?;
        let source = SafetensorsSource::open_folder(dir.path())?;
        assert_eq!(source.names(), ["a", "b"]);
        assert_eq!(source.shape("a"), Some(vec![2, 3]));
        assert_eq!(source.metadata()["mode"], "default");
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let b = source.load("b", dtype)?;
            assert_eq!(b.dtype(), dtype);
            assert_eq!(b.to_dtype(DType::F32)?.to_vec1::<f32>()?, [0.5, -1.0]);
        }
        Ok(())
    }

    #[test]
    fn the_same_tensors_and_metadata_give_the_same_bytes() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("model.safetensors");
        let mut written = std::collections::BTreeSet::new();
        for _ in 0..8 {
            // A new map each time: maps differ in their order.
            let metadata = (0..20).map(|key| (format!("key {key}"), format!("{key} \"é\"")));
            save(&path, &tensors(), metadata.collect())?;
            written.insert(std::fs::read(&path).expect("read"));
        }
        assert_eq!(written.len(), 1);
        let source = SafetensorsSource::open_file(&path)?;
        assert_eq!(source.metadata()["key 7"], "7 \"é\"");
        assert_eq!(source.load("b", DType::F32)?.to_vec1::<f32>()?, [0.5, -1.0]);
        save(&path, &[], HashMap::from([("a".into(), "b".into())]))?;
        assert_eq!(SafetensorsSource::open_file(&path)?.metadata()["a"], "b");
        Ok(())
    }

    #[test]
    fn integers_and_flags_are_read_back() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("map.safetensors");
        let offsets = Tensor::new(&[0_i64, 7, -2], &Device::Cpu)?;
        let flags = Tensor::new(&[1_u8, 0], &Device::Cpu)?;
        save(&path, &[("d2t".into(), offsets), ("t2d".into(), flags)], HashMap::new())?;
        let source = SafetensorsSource::open_file(&path)?;
        assert_eq!(source.load_integers("d2t")?, [0, 7, -2]);
        assert_eq!(source.load_integers("t2d")?, [1, 0]);
        assert!(source.load("d2t", DType::F32).is_err());
        Ok(())
    }

    #[test]
    fn sharded_folder_is_read_and_its_faults_are_listed() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let all = tensors();
        save(&dir.path().join("one.safetensors"), &all[..1], HashMap::new())?;
        save(&dir.path().join("two.safetensors"), &all[1..], HashMap::new())?;
        let index = dir.path().join("model.safetensors.index.json");
        let write = |map: &str| {
            std::fs::write(&index, format!("{{\"weight_map\": {map}}}")).expect("write index");
        };
        write(r#"{"a": "one.safetensors", "b": "two.safetensors"}"#);
        assert_eq!(SafetensorsSource::open_folder(dir.path())?.names(), ["a", "b"]);
        write(r#"{"a": "two.safetensors", "b": "two.safetensors"}"#);
        let message = fails(dir.path());
        assert!(message.contains("`a` is not in `two.safetensors`"), "{message}");
        write(r#"{"a": "../one.safetensors", "b": "absent.safetensors"}"#);
        let message = fails(dir.path());
        assert!(message.contains("`../one.safetensors` is not a file of this folder"), "{message}");
        assert!(message.contains("absent.safetensors"), "{message}");
        Ok(())
    }

    fn fails(folder: &Path) -> String {
        SafetensorsSource::open_folder(folder).expect_err("an error").to_string()
    }

    #[test]
    fn a_file_that_shrinks_after_it_was_opened_is_an_error() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("model.safetensors");
        save(&path, &tensors(), HashMap::new())?;
        let source = SafetensorsSource::open_file(&path)?;
        let length = std::fs::metadata(&path).expect("file").len();
        let file = std::fs::File::options().write(true).open(&path).expect("file");
        file.set_len(length - 4).expect("cut");
        let message = source.load("b", DType::F32).expect_err("cut off").to_string();
        assert!(message.contains("model.safetensors: ") && message.contains("was cut off"));
        assert!(source.load_as_stored("b").is_err());
        assert_eq!(source.load("a", DType::F32)?.dims(), [2, 3]);
        Ok(())
    }

    #[test]
    fn truncated_and_absurd_headers_are_errors() -> Result<()> {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("model.safetensors");
        save(&path, &tensors(), HashMap::new())?;
        let whole = std::fs::read(&path).expect("read");
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).expect("write");
            assert!(SafetensorsSource::open_file(&path).is_err(), "prefix of {length} bytes");
        }
        let mut absurd = whole.clone();
        absurd[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        std::fs::write(&path, &absurd).expect("write");
        assert!(fails(dir.path()).contains("not safetensors"));
        std::fs::write(&path, &whole[..whole.len() - 1]).expect("write");
        assert!(fails(dir.path()).contains("31 of 32 bytes of tensors are there"));
        std::fs::write(&path, [&whole[..], b"x"].concat()).expect("write");
        assert!(fails(dir.path()).contains("1 bytes follow the tensors"));
        Ok(())
    }
}
