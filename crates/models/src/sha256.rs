//! SHA-256 sums as users compare them: in hexadecimal.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

/// Sum of a file's bytes.
///
/// # Errors
/// - the file cannot be opened or read
pub fn of_file(path: &Path) -> std::io::Result<String> {
    Ok(measured(path)?.1)
}

/// A file's length in bytes, and their sum.
///
/// # Errors
/// - as [`of_file`]
pub fn measured(path: &Path) -> std::io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let (mut block, mut length) = (vec![0; 1 << 20], 0);
    loop {
        let count = file.read(&mut block)?;
        if count == 0 {
            return Ok((length, hex(&hasher.finalize())));
        }
        length += count as u64;
        hasher.update(&block[..count]);
    }
}

/// Sum of f32 values as they stand in files: little-endian, row-major.
pub fn of_f32(values: &[f32]) -> String {
    let mut hasher = Sha256::new();
    for value in values {
        hasher.update(value.to_le_bytes());
    }
    hex(&hasher.finalize())
}

/// Sum of a text.
pub fn of_text(text: &str) -> String {
    of_bytes(text.as_bytes())
}

/// Sum of bytes.
pub fn of_bytes(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
