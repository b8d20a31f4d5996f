//! The header of a GGUF file, versions 2 and 3, read within the file's bounds.
//!
//! ```text
//! "GGUF" version:u32 tensors:u64 keys:u64
//! key   = name, type:u32, value          string = length:u64, bytes; array = type:u32, length:u64, values
//! entry = name, rank:u32, sizes:u64 [rank] (innermost first), element:u32, offset:u64
//! data from the next multiple of `general.alignment` (32) on
//! ```
//!
//! Nothing is allocated before the bytes that fill it were seen, so that a wrong length is an error
//! and no more. It knows no particular model.

use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;

use candle_core::quantized::gguf_file::Value;

pub use super::element::ElementType;
use super::element::name_of_unread;
use crate::error::Problems;

/// Nesting of arrays that is read.
const DEEPEST: usize = 4;
/// Entries of all arrays that are read: each takes the room of a value, whatever its bytes.
const MOST_ENTRIES: u64 = 1 << 24;
/// Ranks that the format knows.
const LARGEST_RANK: u32 = 4;
/// Where tensors start and end by default.
pub(super) const ALIGNMENT: usize = 32;
/// Bytes of a string that are made room for at a time.
const STRING_PIECE: usize = 1 << 20;

/// The fewest bytes of a tensor's entry and of a key.
const TENSOR: u64 = 8 + 4 + 8 + 4 + 8;
const KEY: u64 = 8 + 4 + 1;

/// Said where bytes are missing.
const CUT_OFF: &str = "the file is cut off (is the download complete?)";

/// A tensor's description.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// What it consists of.
    pub element: ElementType,
    /// Row-major, outermost first.
    pub shape: Vec<usize>,
    /// Its bytes in the file; empty for an unknown element type.
    pub bytes: Range<usize>,
}

/// Keys and tensors.
#[derive(Debug)]
pub struct Header {
    /// Format version.
    pub version: u32,
    /// Values by key.
    pub metadata: BTreeMap<String, Value>,
    /// Descriptions by name.
    pub tensors: BTreeMap<String, StoredTensor>,
}

impl Header {
    /// Reads the header of a whole file's `bytes`.
    ///
    /// # Errors
    /// - it is none, ends early, repeats a key or tensor, or every tensor that does not lie in the
    ///   file, overlaps another one or is of an unknown element type
    pub fn read(bytes: &[u8]) -> Result<Self, Problems> {
        Self::read_from(bytes, bytes.len())
    }

    /// Reads the header of a file of `length` bytes from its start on.
    ///
    /// # Errors
    /// - as [`Self::read`]
    pub fn read_from(reader: impl Read, length: usize) -> Result<Self, Problems> {
        let mut cursor = Cursor { reader, at: 0, length, entries: 0 };
        let one = |problem: String| Problems(vec![problem]);
        let magic = cursor.array::<4>();
        if magic.as_ref() != Ok(b"GGUF") {
            return Err(one("not GGUF: it does not begin with these four letters".to_owned()));
        }
        let read = cursor.header();
        let (header, entries) =
            read.map_err(|problem| one(format!("GGUF header: {problem} (byte {})", cursor.at)))?;
        header.with_tensors(entries, cursor.at, length)
    }

    fn with_tensors(
        mut self,
        entries: Vec<(String, Entry)>,
        header_end: usize,
        file_bytes: usize,
    ) -> Result<Self, Problems> {
        let mut problems = Problems::default();
        let alignment = match self.metadata.get("general.alignment") {
            None => ALIGNMENT,
            Some(value) => match value.to_u32().map(|n| n as usize) {
                Ok(n) if n.is_power_of_two() && (8..=1 << 20).contains(&n) => n,
                _ => {
                    problems.push(format!("`general.alignment` = {value:?} is not an alignment"));
                    ALIGNMENT
                }
            },
        };
        let data = header_end.next_multiple_of(alignment);
        let (all, mut outside) = (entries.len(), Vec::new());
        for (name, entry) in entries {
            match entry.place(data, alignment) {
                Ok(tensor) if tensor.bytes.end > file_bytes => outside.push(name),
                Ok(tensor) => {
                    if self.tensors.insert(name.clone(), tensor).is_some() {
                        problems.push(format!("tensor `{name}` is there twice"));
                    }
                }
                Err(problem) => problems.push(format!("tensor `{name}` {problem}")),
            }
        }
        if let Some(name) = outside.first() {
            let count = outside.len();
            problems.push(format!(
                "{count} of {all} tensors lie outside this GGUF file of {file_bytes} bytes, `{name}` first: \
                 {CUT_OFF}"
            ));
        }
        let mut placed: Vec<(&String, &Range<usize>)> =
            self.tensors.iter().map(|(name, tensor)| (name, &tensor.bytes)).collect();
        placed.sort_by_key(|(_, bytes)| (bytes.start, bytes.end));
        for pair in placed.windows(2) {
            if pair[0].1.end > pair[1].1.start {
                problems.push(format!("tensors `{}` and `{}` overlap", pair[0].0, pair[1].0));
            }
        }
        if problems.0.is_empty() { Ok(self) } else { Err(problems) }
    }

    /// A key's number, whatever its width.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.metadata.get(key).and_then(number)
    }

    /// A key's text.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).and_then(|value| value.to_string().ok()).map(String::as_str)
    }

    /// A key's flag.
    pub fn flag(&self, key: &str) -> Option<bool> {
        self.metadata.get(key).and_then(|value| value.to_bool().ok())
    }

    /// A key's list of flags.
    pub fn flags(&self, key: &str) -> Option<Vec<bool>> {
        let items = self.metadata.get(key)?.to_vec().ok()?;
        items.iter().map(|value| value.to_bool().ok()).collect()
    }

    /// A key's list of whole numbers.
    pub fn integers(&self, key: &str) -> Option<Vec<i64>> {
        let items = self.metadata.get(key)?.to_vec().ok()?;
        let whole = |value: &Value| number(value).map(|number| number as i64);
        items.iter().map(whole).collect()
    }
}

/// A tensor's description before its place was checked.
struct Entry {
    element: ElementType,
    shape: Vec<u64>,
    offset: u64,
}

impl Entry {
    /// Its place, which may lie outside the file.
    fn place(self, data: usize, alignment: usize) -> Result<StoredTensor, String> {
        let Self { element, shape, offset } = self;
        let (block, block_bytes) = match (element, element.block()) {
            (ElementType::Unknown(number), _) => {
                return Err(match name_of_unread(number) {
                    Some(name) => format!(
                        "is of type {name}, which is not read: take a file of Q2_K to Q8_0, IQ4_XS, IQ4_NL or MXFP4"
                    ),
                    None => format!("is of unknown element type {number}"),
                });
            }
            (_, Some(block)) => block,
            (_, None) => return Err("has no block size".into()),
        };
        let sizes: Option<Vec<usize>> =
            shape.iter().map(|size| usize::try_from(*size).ok()).collect();
        let elements = sizes.as_ref().and_then(|sizes| {
            sizes.iter().try_fold(1_usize, |product, size| product.checked_mul(*size))
        });
        let (Some(shape_of), Some(elements)) = (sizes, elements) else {
            return Err(format!("has an absurd shape {shape:?}"));
        };
        if elements == 0 {
            return Err(format!("of shape {shape_of:?} holds nothing"));
        }
        let width = shape_of.last().copied().unwrap_or(1);
        if !width.is_multiple_of(block) {
            return Err(format!("of shape {shape_of:?} does not consist of blocks of {block}"));
        }
        if !offset.is_multiple_of(alignment as u64) {
            return Err(format!("starts at {offset}, which is not a multiple of {alignment}"));
        }
        let Some(length) = (elements / block).checked_mul(block_bytes) else {
            return Err(format!("has an absurd shape {shape_of:?}"));
        };
        let range = usize::try_from(offset).ok().and_then(|offset| {
            let start = data.checked_add(offset)?;
            Some(start..start.checked_add(length)?)
        });
        let bytes = range.ok_or_else(|| format!("lies at an absurd place, {offset}"))?;
        Ok(StoredTensor { element, shape: shape_of, bytes })
    }
}

/// Reads values; never beyond `length`, which the file has.
struct Cursor<R> {
    reader: R,
    at: usize,
    length: usize,
    /// Those of the arrays so far.
    entries: u64,
}

impl<R: Read> Cursor<R> {
    fn header(&mut self) -> Result<(Header, Vec<(String, Entry)>), String> {
        let version = self.u32()?;
        if (1..=3).contains(&version.swap_bytes()) {
            return Err("its numbers are big-endian, which is not read".into());
        }
        if !(2..=3).contains(&version) {
            return Err(format!("version {version} (2 and 3 are read)"));
        }
        let (tensors, keys) = (self.u64()?, self.u64()?);
        let least = tensors.saturating_mul(TENSOR).saturating_add(keys.saturating_mul(KEY));
        if least > self.left() as u64 {
            return Err(format!("{tensors} tensors and {keys} keys: {CUT_OFF}"));
        }
        let mut metadata = BTreeMap::new();
        for _ in 0..keys {
            let key = self.string()?;
            let kind = self.u32()?;
            let value = self.value(kind, 0)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(format!("key `{key}` is there twice"));
            }
        }
        let mut entries = Vec::new();
        for _ in 0..tensors {
            let name = self.string()?;
            let rank = self.u32()?;
            if rank == 0 || rank > LARGEST_RANK {
                return Err(format!("tensor `{name}` of rank {rank}"));
            }
            let mut shape = (0..rank).map(|_| self.u64()).collect::<Result<Vec<_>, _>>()?;
            shape.reverse();
            let element = ElementType::from_number(self.u32()?);
            entries.push((name, Entry { element, shape, offset: self.u64()? }));
        }
        Ok((Header { version, metadata, tensors: BTreeMap::new() }, entries))
    }

    fn left(&self) -> usize {
        self.length - self.at
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), String> {
        if bytes.len() > self.left() {
            return Err(CUT_OFF.to_owned());
        }
        self.reader.read_exact(bytes).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => CUT_OFF.to_owned(),
            _ => error.to_string(),
        })?;
        self.at += bytes.len();
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut out = [0; N];
        self.fill(&mut out)?;
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self) -> Result<Vec<u8>, String> {
        let length = self.u64()?;
        let length = usize::try_from(length).ok().filter(|length| *length <= self.left());
        let length = length.ok_or(CUT_OFF)?;
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let start = bytes.len();
            bytes.resize(length.min(start + STRING_PIECE), 0);
            self.fill(&mut bytes[start..])?;
        }
        Ok(bytes)
    }

    /// A name.
    fn string(&mut self) -> Result<String, String> {
        String::from_utf8(self.text()?).map_err(|_| "a name is no UTF-8".into())
    }

    fn value(&mut self, kind: u32, depth: usize) -> Result<Value, String> {
        Ok(match kind {
            0 => Value::U8(self.array::<1>()?[0]),
            1 => Value::I8(i8::from_le_bytes(self.array()?)),
            2 => Value::U16(u16::from_le_bytes(self.array()?)),
            3 => Value::I16(i16::from_le_bytes(self.array()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.array()?)),
            6 => Value::F32(f32::from_le_bytes(self.array()?)),
            7 => match self.array::<1>()?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => return Err(format!("a flag is {other}")),
            },
            // Some writers end strings with zeros, or cut characters.
            8 => {
                let bytes = self.text()?;
                Value::String(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned())
            }
            9 if depth < DEEPEST => {
                let kind = self.u32()?;
                let length = self.u64()?;
                self.entries = self.entries.saturating_add(length);
                if self.entries > MOST_ENTRIES {
                    let problem = format!("an array of {length} entries: at most {MOST_ENTRIES}");
                    return Err(problem + " are read in all");
                }
                if length > self.left() as u64 {
                    return Err(format!("an array of {length} entries: {CUT_OFF}"));
                }
                let mut items = Vec::new();
                for _ in 0..length {
                    items.push(self.value(kind, depth + 1)?);
                }
                Value::Array(items)
            }
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.array()?)),
            12 => Value::F64(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("a value of type {other}")),
        })
    }
}
/// A GGUF number of any width as f64.
pub(crate) fn number(value: &Value) -> Option<f64> {
    Some(match value {
        Value::U8(v) => f64::from(*v),
        Value::I8(v) => f64::from(*v),
        Value::U16(v) => f64::from(*v),
        Value::I16(v) => f64::from(*v),
        Value::U32(v) => f64::from(*v),
        Value::I32(v) => f64::from(*v),
        Value::U64(v) => *v as f64,
        Value::I64(v) => *v as f64,
        Value::F32(v) => f64::from(*v),
        Value::F64(v) => *v,
        _ => return None,
    })
}
