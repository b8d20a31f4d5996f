//! Sending an export to the Hugging Face hub, with a model card made from its manifest.

pub mod card;
mod client;

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::Manifest;
use crate::error::{Result, ServingError};

pub use client::{Client, HubError, Sent};

/// Name of the model card.
pub const CARD: &str = "README.md";

/// A file to send.
#[derive(Debug, Clone)]
pub struct Upload {
    /// Name in the repository.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
    /// Where the bytes are.
    pub content: Content,
}

/// Bytes in a file, or in memory.
#[derive(Debug, Clone)]
pub enum Content {
    /// On disk.
    File(PathBuf),
    /// Made here.
    Bytes(Vec<u8>),
}

impl Content {
    /// All of them.
    pub(crate) fn read(&self) -> std::io::Result<Vec<u8>> {
        match self {
            Self::File(path) => std::fs::read(path),
            Self::Bytes(bytes) => Ok(bytes.clone()),
        }
    }
}

/// Everything that an export sends: the files that its manifest lists, the manifest, the card.
///
/// # Errors
/// - a file cannot be read
pub fn uploads(folder: &Path, manifest: &Manifest, card: &str) -> Result<Vec<Upload>> {
    let listed = manifest.files.keys().map(String::as_str);
    let mut all = Vec::new();
    for name in listed.chain([crate::MANIFEST_FILE]).filter(|name| *name != CARD) {
        let path = folder.join(name);
        let (size, sha256) = hash_file(&path).map_err(ServingError::io(&path))?;
        all.push(Upload { name: name.to_owned(), size, sha256, content: Content::File(path) });
    }
    let bytes = card.as_bytes().to_vec();
    let sha256 = crate::export::hash(&bytes);
    let size = bytes.len() as u64;
    all.push(Upload { name: CARD.into(), size, sha256, content: Content::Bytes(bytes) });
    Ok(all)
}

fn hash_file(path: &Path) -> std::io::Result<(u64, String)> {
    use std::io::Read;
    let mut file = std::fs::File::open(path)?;
    let mut hasher = Sha256::new();
    let (mut block, mut size) = (vec![0; 1 << 20], 0);
    loop {
        let count = file.read(&mut block)?;
        if count == 0 {
            let hex = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            return Ok((size, hex));
        }
        size += count as u64;
        hasher.update(&block[..count]);
    }
}
