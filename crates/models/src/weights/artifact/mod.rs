//! Small models as one compressed file, `.ldq`: int8 codes (or fewer levels) with a scale a row.
//!
//! ```text
//! weights -> quantise (compat or modern, per-tensor precision) -> container (zlib or zstd)
//! file -> every length checked -> code * scale -> a WeightSource
//! ```

mod budget;
mod container;
mod quantise;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use half::f16;
use serde_json::Value;

use super::WeightSource;
use crate::error::{ModelError, Result, refused};

pub use budget::fit_to_budget;
pub use container::{Compression, LARGEST_DATA};
pub use quantise::{
    Embedding, QuantiseConfig, QuantiseFormat, Quantised, RowCodes, Stored, TensorCodes, quantise,
    quantise_rows, quantise_tensor,
};

/// The published limit on code and file, in decimal bytes.
pub const SIZE_LIMIT: u64 = 16_000_000;

/// Quantised tensors by name, with what the header says beside them.
#[derive(Debug, Clone, PartialEq)]
pub struct Artifact {
    /// The model's configuration.
    pub config: Value,
    /// Hash of the tokenizer's file; empty if there was none.
    pub tokenizer: String,
    /// By name.
    pub tensors: BTreeMap<String, Stored>,
}

/// Sizes of an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// The file.
    pub artifact_bytes: u64,
    /// Codes, scales and kept tensors before compression.
    pub payload_bytes: u64,
    /// Code that is counted with it.
    pub code_bytes: u64,
}

impl Sizes {
    /// File and code.
    pub fn total(&self) -> u64 {
        self.artifact_bytes + self.code_bytes
    }

    /// Whether file and code are within [`SIZE_LIMIT`].
    pub fn fits(&self) -> bool {
        self.total() <= SIZE_LIMIT
    }
}

impl Artifact {
    /// Bytes of codes, scales and kept tensors before compression.
    pub fn payload_bytes(&self) -> u64 {
        self.tensors.values().map(Stored::payload_bytes).sum()
    }

    /// The file's bytes, the same for the same tensors.
    ///
    /// # Errors
    /// - compression fails
    pub fn to_bytes(&self, compression: Compression) -> Result<Vec<u8>> {
        container::write(self, compression).map_err(refused)
    }

    /// Writes the file, complete or not at all; returns its size.
    ///
    /// # Errors
    /// - it cannot be written
    pub fn save(&self, path: &Path, compression: Compression) -> Result<u64> {
        let bytes = self.to_bytes(compression)?;
        super::atomic::write_atomically(path, &bytes)?;
        Ok(bytes.len() as u64)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// - unreadable, damaged, cut, or of lengths that do not fit together
    pub fn open(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(ModelError::io(path))?;
        Self::from_bytes(&bytes).map_err(|problem| ModelError::invalid(path, problem))
    }

    /// As [`Self::open`], from memory.
    ///
    /// # Errors
    /// - what is wrong, in words
    pub fn from_bytes(bytes: &[u8]) -> std::result::Result<Self, String> {
        container::read(bytes)
    }
}

/// An artifact as a source of weights.
#[derive(Debug)]
pub struct ArtifactSource {
    path: PathBuf,
    artifact: Artifact,
}

impl ArtifactSource {
    /// Opens a file.
    ///
    /// # Errors
    /// - as [`Artifact::open`]
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_path_buf(), artifact: Artifact::open(path)? })
    }

    /// What was read.
    pub fn artifact(&self) -> &Artifact {
        &self.artifact
    }
}

impl WeightSource for ArtifactSource {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Vec<String> {
        self.artifact.tensors.keys().cloned().collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.artifact.tensors.get(name).map(|stored| stored.shape.clone())
    }

    fn load(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let stored = self.artifact.tensors.get(name);
        let stored =
            stored.ok_or_else(|| ModelError::invalid(&self.path, format!("no tensor `{name}`")))?;
        let values = stored.values();
        let tensor = Tensor::from_vec(values, stored.shape.as_slice(), &Device::Cpu)?;
        Ok(tensor.to_dtype(dtype)?)
    }
}

/// Values rounded to 16 bits.
fn to_f16(values: &[f32]) -> Vec<f16> {
    values.iter().map(|value| f16::from_f32(*value)).collect()
}

#[cfg(test)]
mod tests;
