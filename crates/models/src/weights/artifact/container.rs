//! The `.ldq` file: one zlib (level 9) or zstd stream over
//!
//! ```text
//! "LDQ8", u32 version, u64 header bytes, JSON header, then data:
//! all codes in name order, all scales, all kept tensors
//! ```
//!
//! Integers are little-endian. The header lists `config`, `tokenizer` and `tensors`: name, kind
//! (code, scale, keep), dtype, shape, offset and length in the data, original dtype. Lengths are
//! checked before anything is made of them; memory grows with what was really read.

use std::collections::BTreeMap;
use std::io::{Read, Write};

use half::f16;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Artifact, Quantised, Stored};

const MAGIC: &[u8; 4] = b"LDQ8";
const VERSION: u32 = 1;
const PROLOGUE: usize = 16;
/// First bytes of a zstd stream.
const ZSTD: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];
const LARGEST_HEADER: u64 = 16 << 20;
/// Most uncompressed bytes that are read.
pub const LARGEST_DATA: u64 = 1 << 30;

/// Which compression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// zlib, level 9.
    #[default]
    Zlib,
    /// zstd, level 22.
    Zstd,
}

impl Compression {
    /// The implementation, for reports: sizes differ a little between them.
    pub fn implementation(self) -> &'static str {
        match self {
            Self::Zlib => "zlib level 9 (flate2, miniz_oxide)",
            Self::Zstd => "zstd level 22 (libzstd)",
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    config: Value,
    tokenizer: String,
    tensors: Vec<Entry>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Code,
    Scale,
    Keep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Dtype {
    I8,
    F16,
    F32,
}

impl Dtype {
    fn size(self) -> u64 {
        match self {
            Self::I8 => 1,
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    kind: Kind,
    dtype: Dtype,
    shape: Vec<usize>,
    offset: u64,
    length: u64,
    original_dtype: String,
}

pub(super) fn write(artifact: &Artifact, compression: Compression) -> Result<Vec<u8>, String> {
    let mut entries = Vec::new();
    let mut data = Vec::new();
    let mut put = |name: &str, kind, dtype, shape: &[usize], bytes: &[u8]| {
        entries.push(Entry {
            name: name.to_owned(),
            kind,
            dtype,
            shape: shape.to_vec(),
            offset: data.len() as u64,
            length: bytes.len() as u64,
            original_dtype: "f32".to_owned(),
        });
        data.extend_from_slice(bytes);
    };
    for (name, stored) in &artifact.tensors {
        if let Quantised::Rows { codes, .. } | Quantised::Whole { codes, .. } = &stored.values {
            let bytes: Vec<u8> = codes.iter().map(|code| code.to_le_bytes()[0]).collect();
            put(name, Kind::Code, Dtype::I8, &stored.shape, &bytes);
        }
    }
    let halves = |values: &[f16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    for (name, stored) in &artifact.tensors {
        match &stored.values {
            Quantised::Rows { scales, .. } => {
                put(name, Kind::Scale, Dtype::F16, &[scales.len()], &halves(scales));
            }
            Quantised::Whole { scale, .. } => {
                put(name, Kind::Scale, Dtype::F32, &[1], &scale.to_le_bytes());
            }
            _ => {}
        }
    }
    for (name, stored) in &artifact.tensors {
        match &stored.values {
            Quantised::F16(values) => {
                put(name, Kind::Keep, Dtype::F16, &stored.shape, &halves(values));
            }
            Quantised::F32(values) => {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                put(name, Kind::Keep, Dtype::F32, &stored.shape, &bytes);
            }
            _ => {}
        }
    }
    let (config, tokenizer) = (artifact.config.clone(), artifact.tokenizer.clone());
    let header = serde_json::to_vec(&Header { config, tokenizer, tensors: entries })
        .map_err(|error| error.to_string())?;
    let mut plain = Vec::with_capacity(PROLOGUE + header.len() + data.len());
    plain.extend_from_slice(MAGIC);
    plain.extend_from_slice(&VERSION.to_le_bytes());
    plain.extend_from_slice(&(header.len() as u64).to_le_bytes());
    plain.extend_from_slice(&header);
    plain.extend_from_slice(&data);
    compress(&plain, compression).map_err(|error| error.to_string())
}

fn compress(plain: &[u8], compression: Compression) -> std::io::Result<Vec<u8>> {
    match compression {
        Compression::Zlib => {
            let level = flate2::Compression::new(9);
            let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), level);
            encoder.write_all(plain)?;
            encoder.finish()
        }
        Compression::Zstd => zstd::bulk::compress(plain, 22),
    }
}

pub(super) fn read(bytes: &[u8]) -> Result<Artifact, String> {
    if bytes.starts_with(&ZSTD) {
        let decoder = zstd::stream::read::Decoder::with_buffer(bytes);
        return parse(&mut decoder.map_err(|error| error.to_string())?);
    }
    let mut decoder = flate2::bufread::ZlibDecoder::new(bytes);
    let artifact = parse(&mut decoder)?;
    if decoder.total_in() != bytes.len() as u64 {
        let rest = bytes.len() as u64 - decoder.total_in();
        return Err(format!("{rest} bytes follow the compressed stream"));
    }
    Ok(artifact)
}

/// Exactly `length` bytes; memory grows with what is there.
fn take(reader: &mut dyn Read, length: u64, what: &str) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = reader.take(length).read_to_end(&mut bytes);
    read.map_err(|error| format!("damaged {what}: {error}"))?;
    if bytes.len() as u64 == length {
        Ok(bytes)
    } else {
        Err(format!("{what} ends after {} of {length} bytes", bytes.len()))
    }
}

fn parse(reader: &mut dyn Read) -> Result<Artifact, String> {
    let prologue = take(reader, PROLOGUE as u64, "prologue")?;
    if prologue[..4] != MAGIC[..] {
        return Err("no LDQ8 artifact".to_owned());
    }
    let number = |range: std::ops::Range<usize>| {
        prologue[range].iter().rev().fold(0_u64, |n, byte| n << 8 | u64::from(*byte))
    };
    if number(4..8) != u64::from(VERSION) {
        return Err(format!("version {}, this build reads {VERSION}", number(4..8)));
    }
    let length = number(8..16);
    if length > LARGEST_HEADER {
        return Err(format!("a header of {length} bytes, at most {LARGEST_HEADER} are read"));
    }
    let header: Header = serde_json::from_slice(&take(reader, length, "header")?)
        .map_err(|error| format!("header: {error}"))?;
    let total = check(&header.tensors)?;
    let data = take(reader, total, "data")?;
    let mut more = [0_u8];
    match reader.read(&mut more) {
        Ok(0) => {}
        Ok(_) => return Err("bytes follow the data".to_owned()),
        Err(error) => return Err(format!("damaged after the data: {error}")),
    }
    let tensors = assemble(&header.tensors, &data)?;
    Ok(Artifact { config: header.config, tokenizer: header.tokenizer, tensors })
}

/// Bytes of the data; entries lie end to end, and every length is that of its shape.
fn check(entries: &[Entry]) -> Result<u64, String> {
    let mut next = 0_u64;
    for entry in entries {
        let name = &entry.name;
        let count = entry.shape.iter().try_fold(1_u64, |n, size| n.checked_mul(*size as u64));
        let length = count.and_then(|count| count.checked_mul(entry.dtype.size()));
        if length != Some(entry.length) {
            let (length, shape) = (entry.length, &entry.shape);
            return Err(format!("tensor `{name}`: {length} bytes for the shape {shape:?}"));
        }
        if entry.offset != next {
            return Err(format!("tensor `{name}` lies at {}, {next} expected", entry.offset));
        }
        next = next
            .checked_add(entry.length)
            .filter(|next| *next <= LARGEST_DATA)
            .ok_or_else(|| format!("more than {LARGEST_DATA} bytes of data, at tensor `{name}`"))?;
    }
    Ok(next)
}

fn assemble(entries: &[Entry], data: &[u8]) -> Result<BTreeMap<String, Stored>, String> {
    let bytes = |entry: &Entry| {
        let start = entry.offset as usize;
        &data[start..start + entry.length as usize]
    };
    let halves = |bytes: &[u8]| -> Vec<f16> {
        bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect()
    };
    let singles = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    let mut scales: BTreeMap<&str, &Entry> = BTreeMap::new();
    for entry in entries.iter().filter(|entry| entry.kind == Kind::Scale) {
        if scales.insert(&entry.name, entry).is_some() {
            return Err(format!("tensor `{}` has two scales", entry.name));
        }
    }
    let mut tensors = BTreeMap::new();
    for entry in entries.iter().filter(|entry| entry.kind != Kind::Scale) {
        let name = &entry.name;
        let values = match (entry.kind, entry.dtype) {
            (Kind::Keep, Dtype::F16) => Quantised::F16(halves(bytes(entry))),
            (Kind::Keep, Dtype::F32) => Quantised::F32(singles(bytes(entry))),
            (Kind::Code, Dtype::I8) => {
                let scale = scales.remove(name.as_str());
                let scale = scale.ok_or_else(|| format!("tensor `{name}` has no scale"))?;
                let codes = bytes(entry).iter().map(|byte| i8::from_le_bytes([*byte])).collect();
                match (scale.dtype, &scale.shape[..], &entry.shape[..]) {
                    (Dtype::F16, [rows], [own, _]) if rows == own => {
                        Quantised::Rows { codes, scales: halves(bytes(scale)) }
                    }
                    (Dtype::F32, [1], _) => {
                        Quantised::Whole { codes, scale: singles(bytes(scale))[0] }
                    }
                    (_, shape, own) => {
                        let problem = format!("scales {shape:?} do not fit codes {own:?}");
                        return Err(format!("tensor `{name}`: {problem}"));
                    }
                }
            }
            (kind, dtype) => return Err(format!("tensor `{name}`: {kind:?} of type {dtype:?}")),
        };
        let stored = Stored { shape: entry.shape.clone(), values };
        if tensors.insert(name.clone(), stored).is_some() {
            return Err(format!("tensor `{name}` is there twice"));
        }
    }
    match scales.keys().next() {
        Some(name) => Err(format!("scales of `{name}` without codes")),
        None => Ok(tensors),
    }
}
