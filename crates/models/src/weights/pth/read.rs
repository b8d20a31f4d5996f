//! Reading a `.pth` file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use zip::{CompressionMethod, ZipArchive};

use super::STORAGES;
use super::pickle::{TensorRef, Value, parse};
use crate::error::{ModelError, Problems, Result};
use crate::side_files::require_file;
use crate::weights::{Collector, WeightSource, other_type};

/// Largest pickle: a tensor takes some hundred bytes. Each byte may stand for a value, which takes more room.
const MAX_PICKLE_BYTES: u64 = 16 << 20;

/// Most values of nested dicts: shared ones are met again wherever they are shared.
const MAX_VALUES: usize = 1 << 20;

/// Most bytes of all names: those of nested dicts are put together from their keys.
const MAX_NAMES: usize = 1 << 26;

/// A tensor whose storage was found and is large enough.
struct Entry {
    storage: String,
    dtype: DType,
    offset: usize,
    shape: Vec<usize>,
    stride: Vec<usize>,
    /// Elements that the storage must have.
    needed: usize,
}

/// Tensors of one `.pth` file; nested dicts have their keys joined by dots.
pub struct PthSource {
    path: PathBuf,
    entries: BTreeMap<String, Entry>,
}

impl PthSource {
    /// Opens a file and reads its pickle.
    ///
    /// # Errors
    /// - unreadable, not a PyTorch zip, a pickle that is no state dict, or a list of tensors whose
    ///   storage is missing, compressed or too small
    pub fn open(path: &Path) -> Result<Self> {
        let invalid = |problem: String| ModelError::invalid(path, problem);
        let mut archive = open_archive(path)?;
        let pickle_name = archive
            .file_names()
            .filter_map(std::result::Result::ok)
            .find(|name| *name == "data.pkl" || name.ends_with("/data.pkl"))
            .map(std::borrow::Cow::into_owned)
            .ok_or_else(|| invalid("a zip without data.pkl is no PyTorch file".into()))?;
        let root = pickle_name.trim_end_matches("data.pkl").to_owned();
        let pickle = read_entry(&mut archive, &pickle_name, MAX_PICKLE_BYTES)
            .map_err(|problem| invalid(problem.clone()))?;
        if let Ok(order) = read_entry(&mut archive, &format!("{root}byteorder"), 64)
            && order != b"little"
        {
            return Err(invalid("big-endian storages are not supported".into()));
        }
        let state = parse(&pickle).map_err(invalid)?;
        let mut tensors = Vec::new();
        let mut budget = Budget { values: MAX_VALUES, names: MAX_NAMES };
        flatten("", &state, &mut budget, &mut tensors).map_err(invalid)?;
        if tensors.is_empty() {
            return Err(invalid("the pickle holds no tensors".into()));
        }
        let mut entries = BTreeMap::new();
        let mut problems = Problems::default();
        for (name, tensor) in tensors {
            match locate(&mut archive, &root, &tensor) {
                Ok(entry) => drop(entries.insert(name, entry)),
                Err(problem) => problems.push(format!("tensor `{name}`: {problem}")),
            }
        }
        problems.into_result(path)?;
        Ok(Self { path: path.to_path_buf(), entries })
    }

    /// A tensor's place and the bytes of its storage.
    fn read(&self, name: &str) -> Result<(&Entry, Vec<u8>)> {
        let invalid = |problem: String| ModelError::invalid(&self.path, problem);
        let entry = self.entries.get(name).ok_or_else(|| invalid(format!("no tensor `{name}`")))?;
        let mut archive = open_archive(&self.path)?;
        let bytes = read_entry(&mut archive, &entry.storage, u64::MAX - 1).map_err(&invalid)?;
        // Sizes in the zip's directory may be anything.
        let size = STORAGES.iter().find(|(_, dtype, _)| *dtype == entry.dtype);
        if size.is_none_or(|(.., size)| bytes.len() / size < entry.needed) {
            return Err(invalid(format!("tensor `{name}` is cut short")));
        }
        Ok((entry, bytes))
    }
}

fn open_archive(path: &Path) -> Result<ZipArchive<File>> {
    require_file(path)?;
    let file = File::open(path).map_err(ModelError::io(path))?;
    ZipArchive::new(file)
        .map_err(|error| ModelError::invalid(path, format!("not a PyTorch zip file: {error}")))
}

fn read_entry(
    archive: &mut ZipArchive<File>,
    name: &str,
    limit: u64,
) -> std::result::Result<Vec<u8>, String> {
    let entry = archive.by_name(name).map_err(|error| format!("`{name}`: {error}"))?;
    let mut bytes = Vec::new();
    entry.take(limit + 1).read_to_end(&mut bytes).map_err(|error| format!("`{name}`: {error}"))?;
    if bytes.len() as u64 > limit {
        return Err(format!("`{name}` is larger than {limit} bytes"));
    }
    Ok(bytes)
}

/// What may still be flattened.
struct Budget {
    values: usize,
    names: usize,
}

fn flatten(
    prefix: &str,
    value: &Value,
    budget: &mut Budget,
    out: &mut Vec<(String, TensorRef)>,
) -> std::result::Result<(), String> {
    let Value::Dict(entries, _) = value else {
        return Ok(());
    };
    for (key, value) in entries.iter() {
        let left = budget.values.checked_sub(1);
        budget.values = left.ok_or_else(|| format!("it holds more than {MAX_VALUES} values"))?;
        let Value::Str(key) = key else { continue };
        let left = budget.names.checked_sub(prefix.len() + 1 + key.len());
        budget.names = left.ok_or_else(|| format!("its names have more than {MAX_NAMES} bytes"))?;
        let name = if prefix.is_empty() { key.to_string() } else { format!("{prefix}.{key}") };
        match value {
            Value::Tensor(tensor) => out.push((name, TensorRef::clone(tensor))),
            nested => flatten(&name, nested, budget, out)?,
        }
    }
    Ok(())
}

/// Checks that a tensor's elements lie inside its storage.
fn locate(
    archive: &mut ZipArchive<File>,
    root: &str,
    tensor: &TensorRef,
) -> std::result::Result<Entry, String> {
    let (_, dtype, size) = STORAGES
        .iter()
        .find(|(class, ..)| *class == &*tensor.storage.class)
        .ok_or_else(|| format!("storage class `{}` holds no weights", tensor.storage.class))?;
    if tensor.shape.len() != tensor.stride.len() {
        return Err("shape and stride differ in rank".into());
    }
    let absurd = || format!("shape {:?} is absurd", tensor.shape);
    let elements = tensor
        .shape
        .iter()
        .try_fold(1_usize, |product, &dim| product.checked_mul(dim))
        .ok_or_else(absurd)?;
    let mut last = tensor.offset;
    for (&dim, &stride) in tensor.shape.iter().zip(&tensor.stride) {
        let reach = dim.saturating_sub(1).checked_mul(stride).ok_or_else(absurd)?;
        last = last.checked_add(reach).ok_or_else(absurd)?;
    }
    let storage = format!("{root}data/{}", tensor.storage.key);
    let entry = archive.by_name(&storage).map_err(|error| format!("`{storage}`: {error}"))?;
    if entry.compression() != CompressionMethod::Stored {
        return Err(format!("`{storage}` is compressed"));
    }
    let available = entry.size().min(entry.compressed_size()) / *size as u64;
    if elements > 0 && (last as u64 >= available || elements as u64 > available) {
        return Err(format!(
            "shape {:?} needs {} elements, `{storage}` holds {available}",
            tensor.shape,
            last.saturating_add(1)
        ));
    }
    Ok(Entry {
        storage,
        dtype: *dtype,
        offset: tensor.offset,
        shape: tensor.shape.clone(),
        stride: tensor.stride.clone(),
        needed: if elements > 0 { last + 1 } else { 0 },
    })
}

impl WeightSource for PthSource {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Vec<String> {
        self.entries.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.entries.get(name).map(|entry| entry.shape.clone())
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let (entry, bytes) = self.read(name)?;
        if matches!(entry.dtype, DType::I64 | DType::U8) {
            let problem = format!("tensor `{name}` is {:?}, not a weight", entry.dtype);
            return Err(ModelError::invalid(&self.path, problem));
        }
        let count = entry.shape.iter().product();
        let mut collector = Collector::zeros(&self.path, dtype, count)?;
        let element = |index: usize| read_element(&bytes, entry.dtype, index);
        collector.set(0, (0..count).map(|i| element(position(entry, i))));
        collector.into_tensor(&entry.shape)
    }

    fn load_integers(&self, name: &str) -> Result<Vec<i64>> {
        let (entry, bytes) = self.read(name)?;
        let size = match entry.dtype {
            DType::I64 => 8,
            DType::U8 => 1,
            other => return Err(other_type(&self.path, name, other, "integers")),
        };
        let element = |i: usize| {
            let index = position(entry, i);
            let short = || ModelError::invalid(&self.path, format!("tensor `{name}` is cut short"));
            let bytes = bytes.get(index * size..(index + 1) * size).ok_or_else(short)?;
            let mut wide = [0; 8];
            wide[..size].copy_from_slice(bytes);
            Ok(i64::from_le_bytes(wide))
        };
        (0..entry.shape.iter().product()).map(element).collect()
    }
}

/// Storage index of the i-th element in row-major order.
fn position(entry: &Entry, mut i: usize) -> usize {
    let mut at = entry.offset;
    for (&dim, &stride) in entry.shape.iter().zip(&entry.stride).rev() {
        at += i % dim * stride;
        i /= dim;
    }
    at
}

fn read_element(bytes: &[u8], dtype: DType, index: usize) -> f32 {
    let at = |size: usize| bytes.get(index * size..(index + 1) * size);
    let value = match dtype {
        DType::F16 => at(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()),
        DType::BF16 => at(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()),
        DType::F64 => at(8).and_then(|b| b.try_into().ok()).map(|b| f64::from_le_bytes(b) as f32),
        _ => at(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
    };
    value.unwrap_or(f32::NAN)
}
