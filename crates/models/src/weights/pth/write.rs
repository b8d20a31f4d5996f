//! Writing a `.pth` file: protocol-2 pickle of a dict of tensors, storages uncompressed.

use std::io::{Cursor, Write};
use std::path::Path;

use candle_core::{DType, Tensor};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::STORAGES;
use crate::error::{ModelError, Result, refused};
use crate::weights::atomic::write_atomically;
use crate::weights::safetensors::tensor_bytes;

/// Writes tensors (f32, bf16, f16, i64, or u8 as flags) as a state dict, complete or not at all.
///
/// # Errors
/// - a tensor is of another type, or the file cannot be written
pub fn save(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let bytes = to_bytes(tensors).map_err(|error| match error {
        Failure::Model(error) => error,
        Failure::Zip(message) => ModelError::invalid(path, message),
    })?;
    write_atomically(path, &bytes)
}

enum Failure {
    Model(ModelError),
    Zip(String),
}

impl From<zip::result::ZipError> for Failure {
    fn from(error: zip::result::ZipError) -> Self {
        Self::Zip(error.to_string())
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Zip(error.to_string())
    }
}

/// Storages begin at multiples of it, as PyTorch's own do.
const ALIGNMENT: u16 = 64;

fn to_bytes(tensors: &[(String, Tensor)]) -> std::result::Result<Vec<u8>, Failure> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    // A fixed time keeps the bytes a function of the tensors alone.
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .last_modified_time(zip::DateTime::default());
    zip.start_file("archive/data.pkl", options)?;
    zip.write_all(&pickle(tensors).map_err(Failure::Model)?)?;
    zip.start_file("archive/byteorder", options)?;
    zip.write_all(b"little")?;
    for (index, (_, tensor)) in tensors.iter().enumerate() {
        let bytes = tensor_bytes(tensor).map_err(Failure::Model)?;
        zip.start_file(format!("archive/data/{index}"), options.with_alignment(ALIGNMENT))?;
        zip.write_all(&bytes)?;
    }
    zip.start_file("archive/version", options)?;
    zip.write_all(b"3\n")?;
    Ok(zip.finish()?.into_inner())
}

/// The dict `{name: tensor}` whose i-th tensor is storage `i`.
fn pickle(tensors: &[(String, Tensor)]) -> Result<Vec<u8>> {
    let mut out = vec![0x80, 2, b'}', b'('];
    for (index, (name, tensor)) in tensors.iter().enumerate() {
        let class = storage_class(tensor.dtype())?;
        string(&mut out, name);
        out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        string(&mut out, "storage");
        out.extend(format!("ctorch\n{class}\n").bytes());
        string(&mut out, &index.to_string());
        string(&mut out, "cpu");
        int(&mut out, tensor.elem_count());
        out.extend(b"tQ");
        int(&mut out, 0);
        for sizes in [tensor.dims().to_vec(), row_major_strides(tensor.dims())] {
            out.push(b'(');
            sizes.into_iter().for_each(|n| int(&mut out, n));
            out.push(b't');
        }
        // requires_grad = False, no backward hooks.
        out.push(0x89);
        out.extend(b"ccollections\nOrderedDict\n)RtR");
    }
    out.extend(b"u.");
    Ok(out)
}

fn row_major_strides(dims: &[usize]) -> Vec<usize> {
    let mut strides: Vec<usize> = dims
        .iter()
        .rev()
        .scan(1, |stride, dim| {
            let this = *stride;
            *stride *= dim;
            Some(this)
        })
        .collect();
    strides.reverse();
    strides
}

fn storage_class(dtype: DType) -> Result<&'static str> {
    let known = STORAGES.iter().find(|(_, known, _)| *known == dtype);
    known
        .map(|(class, ..)| *class)
        .ok_or_else(|| refused(format!("cannot write {dtype:?} tensors")))
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.bytes());
}

fn int(out: &mut Vec<u8>, n: usize) {
    if let Ok(byte) = u8::try_from(n) {
        out.extend([b'K', byte]);
    } else if let Ok(n) = i32::try_from(n) {
        out.push(b'J');
        out.extend(n.to_le_bytes());
    } else {
        // LONG1: nine bytes keep the sign bit clear.
        out.extend([0x8a, 8]);
        out.extend((n as u64).to_le_bytes());
    }
}
