//! Safetensors files, single or sharded by `model.safetensors.index.json`.

#[cfg(test)]
mod tests;
mod write;

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Read;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata};
use serde::Deserialize;

use super::file::WeightFile;
use super::{Collector, WeightSource, integers, other_type};
use crate::error::{ModelError, Problems, Result};
use crate::side_files;

pub use write::{save, tensor_bytes};

/// Names the shards of a folder.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Weights in one file.
const SINGLE: &str = "model.safetensors";
/// Bytes of the header's length, of which written headers are a multiple.
const LENGTH_BYTES: usize = 8;
/// The longest header that is read, as everywhere: a tensor takes some hundred bytes.
const LONGEST_HEADER: usize = 100_000_000;

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

impl Index {
    fn read(path: &Path) -> Result<Self> {
        let text = side_files::read_text(path)?;
        serde_json::from_str(&text).map_err(|error| ModelError::invalid(path, error))
    }

    /// Names of the shards, each once.
    fn shards(&self) -> BTreeSet<String> {
        self.weight_map.values().cloned().collect()
    }
}

/// Names of the shards that an index lists, as they stand there: not to be trusted.
/// It fails where it is unreadable or no index.
pub(crate) fn shards_of(index: &Path) -> Result<BTreeSet<String>> {
    Ok(Index::read(index)?.shards())
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

    /// Whether a folder holds what [`Self::open_folder`] opens.
    pub(crate) fn is_in(folder: &Path) -> bool {
        folder.join(INDEX).is_file() || folder.join(SINGLE).is_file()
    }

    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// - neither exists, or a list of every unusable shard and every tensor that is not where the
    ///   index says
    pub fn open_folder(folder: &Path) -> Result<Self> {
        let index = folder.join(INDEX);
        if index.is_file() {
            return Self::open_index(folder, &index);
        }
        let single = folder.join(SINGLE);
        if !single.is_file() {
            return Err(ModelError::invalid(
                folder,
                format!("neither {SINGLE} nor {INDEX} is there"),
            ));
        }
        let mut source = Self::open_file(&single)?;
        source.path = folder.to_path_buf();
        Ok(source)
    }

    fn open_index(folder: &Path, index_path: &Path) -> Result<Self> {
        let index = Index::read(index_path)?;
        let mut source = Self::empty(folder);
        let mut problems = Problems::default();
        for shard in index.shards() {
            if !is_plain_file_name(&shard) {
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
            return Err(other_type(&self.path, name, entry.dtype, "I8"));
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
        Ok(match entry.dtype {
            Dtype::I64 => integers(&data, i64::from_le_bytes),
            Dtype::I32 => integers(&data, i32::from_le_bytes),
            Dtype::U32 => integers(&data, u32::from_le_bytes),
            Dtype::I16 => integers(&data, i16::from_le_bytes),
            Dtype::I8 => integers(&data, i8::from_le_bytes),
            Dtype::BOOL | Dtype::U8 => integers(&data, u8::from_le_bytes),
            _ => return Err(other_type(&self.path, name, entry.dtype, "integers")),
        })
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
            return Err(other_type(&self.path, name, entry.dtype, "f64"));
        }
        let data = self.bytes(entry)?;
        Ok(data.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect())
    }

    fn find(&self, name: &str) -> Result<&Entry> {
        self.entries
            .get(name)
            .ok_or_else(|| ModelError::invalid(&self.path, format!("no tensor `{name}`")))
    }

    fn bytes(&self, entry: &Entry) -> Result<Vec<u8>> {
        self.files[entry.file].read(entry.bytes.clone())
    }
}

/// Where the tensors begin, and the header, whose tensors lie in the file and fill it.
fn read_header(file: &WeightFile) -> std::result::Result<(usize, Metadata), String> {
    let mut reader = file.reader();
    let mut length = [0; LENGTH_BYTES];
    reader.read_exact(&mut length).map_err(|error| error.to_string())?;
    let length = u64::from_le_bytes(length);
    let left = file.length().saturating_sub(LENGTH_BYTES);
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
        Ordering::Equal => Ok((LENGTH_BYTES + length, header)),
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
        let rows = self.find(name)?.shape.first().copied();
        self.load_some(name, rows.map(|rows| 0..rows), dtype)
    }

    fn load_rows(&self, name: &str, rows: Range<usize>, dtype: DType) -> Result<Tensor> {
        self.load_some(name, Some(rows), dtype)
    }

    fn load_bytes(&self, name: &str, rows: Range<usize>) -> Result<Vec<u8>> {
        let entry = self.find(name)?;
        if entry.dtype != Dtype::U8 {
            return Err(other_type(&self.path, name, entry.dtype, "U8"));
        }
        self.files[entry.file].read(self.part(name, entry, &rows)?)
    }

    fn load_integers(&self, name: &str) -> Result<Vec<i64>> {
        self.load_i64(name)
    }
}

impl SafetensorsSource {
    /// Where some of a tensor's first dimension lies.
    fn part(&self, name: &str, entry: &Entry, rows: &Range<usize>) -> Result<Range<usize>> {
        let all = entry.shape.first().copied().unwrap_or(0);
        if rows.start > rows.end || rows.end > all {
            let problem = format!("tensor `{name}` has {all} rows, {rows:?} expected");
            return Err(ModelError::invalid(&self.path, problem));
        }
        let size = entry.bytes.len() / all.max(1);
        Ok(entry.bytes.start + rows.start * size..entry.bytes.start + rows.end * size)
    }

    /// Reads a tensor, or some of its first dimension.
    fn load_some(&self, name: &str, rows: Option<Range<usize>>, dtype: DType) -> Result<Tensor> {
        let entry = self.find(name)?;
        let Some(size) = float_bytes(entry.dtype) else {
            let problem = format!("tensor `{name}` is {:?}, not a weight", entry.dtype);
            return Err(ModelError::invalid(&self.path, problem));
        };
        let mut shape = entry.shape.clone();
        let mut bytes = entry.bytes.clone();
        if let (Some(rows), Some(first)) = (rows, shape.first_mut()) {
            bytes = self.part(name, entry, &rows)?;
            *first = rows.len();
        }
        let count = shape.iter().product();
        let mut collector = Collector::zeros(&self.path, dtype, count)?;
        self.files[entry.file].read_pieces(bytes, |start, piece| {
            collector.set(start / size, f32_values(entry.dtype, piece));
        })?;
        collector.into_tensor(&shape)
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
    let (pairs, fours, eights) =
        (data.as_chunks::<2>().0, data.as_chunks::<4>().0, data.as_chunks::<8>().0);
    match dtype {
        Dtype::BF16 => Box::new(pairs.iter().map(|b| bf16::from_le_bytes(*b).to_f32())),
        Dtype::F16 => Box::new(pairs.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
        Dtype::F64 => Box::new(eights.iter().map(|b| f64::from_le_bytes(*b) as f32)),
        _ => Box::new(fours.iter().map(|b| f32::from_le_bytes(*b))),
    }
}
