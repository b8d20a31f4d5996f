//! Shards that are being read stay open.

use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use longdraft_models::ModelError;
use longdraft_models::weights::safetensors::SafetensorsSource;
use tempfile::NamedTempFile;

use super::location::Location;
use super::recipe::Compression;
use super::write::{Receipt, hash_of};
use crate::error::Result;

/// Shards that stay open: each costs a file handle.
const OPEN_SHARDS: usize = 64;

/// Bytes, at most, of temporary files of open shards; one shard stays open however large it is.
const MOST_UNPACKED: u64 = 4 << 30;

/// Open shards; the one used last stands last.
#[derive(Default)]
pub(super) struct OpenShards(Mutex<Vec<OpenShard>>);

/// A shard that stays open.
struct OpenShard {
    object: String,
    source: Arc<SafetensorsSource>,
    /// Bytes of its temporary file; 0 if it is read where it lies.
    unpacked: u64,
}

impl OpenShards {
    /// A shard of a store; its hash is checked when it is opened.
    /// It fails where it is missing, damaged, or cannot be unpacked.
    pub(super) fn shard(
        &self,
        location: &Location,
        compression: Compression,
        receipt: &Receipt,
    ) -> Result<Arc<SafetensorsSource>> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let shard = match open.iter().position(|shard| shard.object == receipt.object) {
            Some(at) => open.remove(at),
            None => OpenShard::open(location, compression, receipt, &mut open)?,
        };
        let source = Arc::clone(&shard.source);
        open.push(shard);
        Ok(source)
    }
}

impl OpenShard {
    /// Opens a shard after those of `open` are closed that leave it no room.
    fn open(
        location: &Location,
        compression: Compression,
        receipt: &Receipt,
        open: &mut Vec<Self>,
    ) -> Result<Self> {
        let object = &receipt.object;
        let remedy = "run `longdraft capture` again: it captures this shard alone";
        let damaged = || location.problem(object, format!("is damaged: {remedy}"));
        let missing = || location.problem(object, format!("is missing: {remedy}"));
        let plain = compression == Compression::None;
        if let Some(folder) = location.folder().filter(|_| plain) {
            if location.size(object)?.ok_or_else(missing)? != receipt.bytes
                || hash_of(location, object)? != receipt.blake3
            {
                return Err(damaged());
            }
            close_oldest(open, 0);
            let source = Arc::new(SafetensorsSource::open_file(&folder.join(object))?);
            return Ok(Self { object: object.clone(), source, unpacked: 0 });
        }
        let mut bytes = location.get(object)?.ok_or_else(missing)?;
        if blake3::hash(&bytes).to_hex().as_str() != receipt.blake3 {
            return Err(damaged());
        }
        if !plain {
            bytes = unpacked(&bytes).map_err(|error| {
                let problem = format!("cannot be unpacked: {error}: remove it, and {remedy}");
                location.problem(object, problem)
            })?;
        }
        let unpacked = bytes.len() as u64;
        close_oldest(open, unpacked);
        // A file without a name, so that nothing is left however the process ends.
        let file = temporary(&std::env::temp_dir(), &bytes);
        let file = file.map_err(|problem| location.problem(object, problem))?;
        // Errors name the shard, not a temporary file that is gone.
        let source = SafetensorsSource::open_file(file.path()).map_err(|error| match error {
            ModelError::Invalid { problems, .. } => location.problem(object, problems),
            other => other.into(),
        })?;
        let source = Arc::new(source);
        drop(file);
        Ok(Self { object: object.clone(), source, unpacked })
    }
}

/// Closes the shards that were not used for longest, until there is room for one more.
fn close_oldest(open: &mut Vec<OpenShard>, unpacked: u64) {
    let held: Vec<u64> = open.iter().map(|shard| shard.unpacked).collect();
    open.drain(..to_close(&held, unpacked));
}

/// How many of the open shards, with so many unpacked bytes each, leave no room for one of `next` bytes.
fn to_close(held: &[u64], next: u64) -> usize {
    let too_many = |closed: usize| {
        let bytes: u64 = held[closed..].iter().sum();
        held.len() - closed >= OPEN_SHARDS || bytes.saturating_add(next) > MOST_UNPACKED
    };
    (0..held.len()).find(|closed| !too_many(*closed)).unwrap_or(held.len())
}

/// A temporary file of these bytes, or what is wrong and what to do.
fn temporary(folder: &Path, bytes: &[u8]) -> std::result::Result<NamedTempFile, String> {
    let write = || -> std::io::Result<NamedTempFile> {
        let mut file = NamedTempFile::new_in(folder)?;
        file.write_all(bytes)?;
        file.flush()?;
        Ok(file)
    };
    write().map_err(|error| {
        format!(
            "cannot be unpacked into {}, the folder of temporary files: {error}: make room for {} bytes there, \
             or name another folder in the environment variable TMPDIR",
            folder.display(),
            bytes.len(),
        )
    })
}

/// A packed shard's bytes. Features hardly shrink, token ids do.
fn unpacked(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    /// How many times as long as its file a shard may be.
    const MOST_GROWTH: usize = 1 << 6;
    let most = bytes.len().saturating_mul(MOST_GROWTH);
    let mut unpacked = Vec::new();
    zstd::Decoder::new(bytes)?.take(most as u64 + 1).read_to_end(&mut unpacked)?;
    if unpacked.len() > most {
        return Err(std::io::Error::other(format!("unpacks to more than {most} bytes")));
    }
    Ok(unpacked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_shards_are_bounded_by_their_number_and_their_bytes() {
        let gib = |count: u64| count << 30;
        // Read where they lie: by number alone.
        assert_eq!(to_close(&[0; OPEN_SHARDS - 1], 0), 0);
        assert_eq!(to_close(&[0; OPEN_SHARDS], 0), 1);
        assert_eq!(to_close(&[gib(1), gib(1), gib(1)], gib(1)), 0);
        assert_eq!(to_close(&[gib(1), gib(2), gib(1)], gib(2)), 2);
        // One that is too large for the bound is opened alone.
        assert_eq!(to_close(&[gib(1), gib(1)], gib(9)), 2);
        assert_eq!(to_close(&[], gib(9)), 0);
    }

    #[test]
    fn a_full_temporary_folder_is_named_with_its_variable() {
        let folder = tempfile::tempdir().expect("folder");
        let file = temporary(folder.path(), b"shard").expect("written");
        assert_eq!(std::fs::read(file.path()).expect("file"), b"shard");
        let absent = folder.path().join("absent");
        let told = temporary(&absent, b"shard").expect_err("no such folder");
        assert!(told.contains(&absent.display().to_string()), "{told}");
        assert!(told.contains("TMPDIR") && told.contains("5 bytes"), "{told}");
    }

    #[test]
    fn packed_shards_are_unpacked_within_bounds() {
        let plain: Vec<u8> = (0..100_000_u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
        let packed = zstd::encode_all(plain.as_slice(), 1).expect("packed");
        assert_eq!(unpacked(&packed).expect("unpacked"), plain);
        let bomb = zstd::encode_all(vec![0_u8; 1 << 26].as_slice(), 1).expect("packed");
        assert!(unpacked(&bomb).expect_err("refused").to_string().contains("more than"));
        // A whole shard with zeros at its end.
        let both = [packed, zstd::encode_all(vec![0_u8; 1 << 25].as_slice(), 1).expect("packed")];
        assert!(unpacked(&both.concat()).expect_err("refused").to_string().contains("more than"));
        assert!(unpacked(b"no zstd").is_err());
    }

    #[test]
    fn what_is_wrong_with_a_packed_shard_is_told_of_the_shard() {
        let folder = tempfile::tempdir().expect("folder");
        let location = Location::open(&folder.path().display().to_string(), true).expect("open");
        let object = "train-00000.safetensors.zst";
        for (bytes, problem) in [
            (b"no zstd".to_vec(), "cannot be unpacked"),
            (zstd::encode_all(&b"{}"[..], 1).expect("packed"), "not safetensors"),
        ] {
            location.put(object, bytes.clone()).expect("written");
            let receipt = Receipt {
                object: object.to_owned(),
                bytes: bytes.len() as u64,
                blake3: blake3::hash(&bytes).to_hex().to_string(),
                rows: Vec::new(),
            };
            let shard = OpenShards::default().shard(&location, Compression::Zstd, &receipt);
            let error = shard.expect_err("refused").to_string();
            assert!(error.contains(problem) && error.contains(object), "{error}");
        }
    }
}
