//! DeepSpec's target cache, version 2: `manifest.json`, `samples.idx` and shards of raw numbers.
//!
//! A sample's numbers lie in one shard, each kind from an offset of its own: ids (i32), attention mask (u8), loss mask
//! (u8), tapped layers `[T, A, H]` and the states after the final norm `[T, H]` (bf16; f16 and f32 are read too).
//! Numbers are little-endian. A record of the index has 56 bytes: sample u64, shard u32, tokens u32, five offsets u64.

use std::fs::File;
use std::io::{BufReader, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use candle_core::{Device, Tensor};
use half::{bf16, f16};
use serde::Deserialize;

use super::{Captured, Format, RecordDocument, problem};
use crate::error::{FeatureError, Result};

/// Name of the description.
pub(super) const MANIFEST: &str = "manifest.json";

/// Name of the index.
pub(super) const INDEX: &str = "samples.idx";

/// The version that is read.
const VERSION: u64 = 2;

/// Bytes of a record of the index.
const RECORD_BYTES: usize = 56;

/// Bytes of a mask that are read at once.
const MASK_PART: u64 = 64 << 10;

/// Bytes of a description, at most.
const MOST_MANIFEST: u64 = 64 << 20;

#[derive(Deserialize)]
struct Manifest {
    num_samples: usize,
    num_shards: usize,
    target_layer_ids: Vec<usize>,
    hidden_size: usize,
    hidden_dtype: Float,
    token_dtype: String,
    mask_dtype: String,
    index_record_size: usize,
    shards: Vec<Shard>,
}

#[derive(Deserialize)]
struct Shard {
    shard_id: usize,
    file_name: String,
}

/// What states are held as.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Float {
    Bfloat16,
    Float16,
    Float32,
}

impl Float {
    fn bytes(self) -> u64 {
        match self {
            Self::Bfloat16 | Self::Float16 => 2,
            Self::Float32 => 4,
        }
    }

    fn values(self, bytes: &[u8]) -> Vec<f32> {
        let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        match self {
            Self::Bfloat16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            Self::Float16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
            Self::Float32 => {
                let fours = bytes.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
                fours.map(f32::from_le_bytes).collect()
            }
        }
    }
}

/// A record of the index.
#[derive(Clone, Copy)]
struct Sample {
    shard: usize,
    tokens: u32,
    /// Of ids, attention mask, loss mask, layers and final states.
    offsets: [u64; 5],
}

/// A cache whose description and index were read.
pub(super) struct Cache {
    folder: PathBuf,
    layers: Vec<usize>,
    hidden: usize,
    float: Float,
    shards: Vec<PathBuf>,
    samples: Vec<Sample>,
}

impl Cache {
    /// Reads description and index; every sample lies within its shard.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let manifest = manifest(folder)?;
        let shards = shards(folder, &manifest)?;
        let samples = samples(folder, &manifest)?;
        let Manifest { target_layer_ids: layers, hidden_size: hidden, hidden_dtype: float, .. } =
            manifest;
        let cache = Self { folder: folder.to_path_buf(), layers, hidden, float, shards, samples };
        cache.check_samples()?;
        Ok(cache)
    }

    /// All files, the description first.
    pub(super) fn files(&self) -> Vec<PathBuf> {
        let mut files = vec![self.folder.join(MANIFEST), self.folder.join(INDEX)];
        files.extend(self.shards.iter().cloned());
        files
    }

    /// Names of the five kinds of numbers and their bytes of a sample.
    fn kinds(&self, tokens: u32) -> Option<[(&'static str, u64); 5]> {
        let tokens = u64::from(tokens);
        let states = tokens.checked_mul(self.hidden as u64)?.checked_mul(self.float.bytes())?;
        Some([
            ("input_ids", tokens * 4),
            ("attention_mask", tokens),
            ("loss_mask", tokens),
            ("target_hidden_states", states.checked_mul(self.layers.len() as u64)?),
            ("target_last_hidden_states", states),
        ])
    }

    fn check_samples(&self) -> Result<()> {
        let mut lengths = Vec::with_capacity(self.shards.len());
        for shard in &self.shards {
            let fail = |error: std::io::Error| problem(shard, error);
            lengths.push(std::fs::metadata(shard).map_err(fail)?.len());
        }
        for (index, sample) in self.samples.iter().enumerate() {
            let shard = &self.shards[sample.shard];
            let kinds = self.kinds(sample.tokens);
            let too_long = || problem(shard, format!("sample {index} of {} tokens", sample.tokens));
            for ((name, bytes), offset) in kinds.ok_or_else(too_long)?.iter().zip(sample.offsets) {
                let end = offset.checked_add(*bytes);
                if end.is_none_or(|end| end > lengths[sample.shard]) {
                    let length = lengths[sample.shard];
                    return Err(problem(
                        shard,
                        format!(
                            "sample {index}: `{name}` of {bytes} bytes from {offset} on lies outside of the \
                             file's {length} (cut off?)"
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    /// Bytes of one kind of a sample, counted from where the kind begins.
    fn read(&self, index: usize, kind: usize, bytes: Range<u64>) -> Result<Vec<u8>> {
        let sample = self.samples[index];
        let shard = &self.shards[sample.shard];
        let name = self.kinds(sample.tokens).map_or("", |kinds| kinds[kind].0);
        let fail = |error: &dyn std::fmt::Display| {
            problem(shard, format!("sample {index}: `{name}`: {error}"))
        };
        let file = File::open(shard).map_err(|error| fail(&error))?;
        // The file may have shrunk since it was checked.
        let length = file.metadata().map_err(|error| fail(&error))?.len();
        if length < sample.offsets[kind].saturating_add(bytes.end) {
            return Err(fail(&"the file ends before"));
        }
        let mut values = vec![0; (bytes.end - bytes.start) as usize];
        file.read_exact_at(&mut values, sample.offsets[kind] + bytes.start)
            .map_err(|error| fail(&error))?;
        Ok(values)
    }

    /// Tokens of a sample before its padding. The mask is read in parts: where a file has holes, it may be
    /// far longer than what it holds, and no more memory is taken than for tokens that are there.
    fn attended(&self, index: usize) -> Result<u64> {
        let held = u64::from(self.samples[index].tokens);
        let (mut tokens, mut at) = (0, 0);
        while at < held {
            let end = held.min(at + MASK_PART);
            let part = self.read(index, 1, at..end)?;
            // Padding may stand after the document, nowhere else.
            let ones = if tokens == at { part.iter().take_while(|m| **m == 1).count() } else { 0 };
            if part[ones..].iter().any(|mask| *mask != 0) {
                let text = "`attention_mask` is not a run of ones and then one of zeros";
                return Err(FeatureError::store(self.place(index), text));
            }
            tokens += ones as u64;
            at = end;
        }
        Ok(tokens)
    }

    fn place(&self, index: usize) -> String {
        format!("{}, sample {index}", self.shards[self.samples[index].shard].display())
    }
}

impl Format for Cache {
    fn len(&self) -> usize {
        self.samples.len()
    }

    fn document(&self, index: usize) -> Result<RecordDocument> {
        let tokens = self.attended(index)?;
        let ids = self.read(index, 0, 0..4 * tokens)?;
        let ids = ids.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let ids: Vec<i64> = ids.map(i64::from).collect();
        let learned = self.read(index, 2, 0..tokens)?;
        let learned: Vec<i64> = learned.iter().map(|mask| i64::from(*mask)).collect();
        RecordDocument::of_numbers(self.place(index), &ids, Some(&learned))
    }

    fn captured(&self, index: usize, (tokens, hidden): (usize, usize)) -> Result<Captured> {
        let held = self.samples[index].tokens as usize;
        if held < tokens || hidden != self.hidden {
            let own = self.hidden;
            let text =
                format!("{held} tokens of width {own} where {tokens} of {hidden} are needed");
            return Err(FeatureError::store(self.place(index), text));
        }
        let tensor = |kind: usize, layers: usize| -> Result<Tensor> {
            let bytes = (tokens * layers * hidden) as u64 * self.float.bytes();
            let values = self.float.values(&self.read(index, kind, 0..bytes)?);
            Ok(Tensor::from_vec(values, (tokens, layers, hidden), &Device::Cpu)?)
        };
        let (layers, last) = (tensor(3, self.layers.len())?, tensor(4, 1)?.squeeze(1)?);
        Ok(Captured {
            layers: Some(("target_hidden_states", layers)),
            last: Some(("target_last_hidden_states", last)),
        })
    }

    fn layers(&self) -> Option<&[usize]> {
        Some(&self.layers)
    }

    fn hidden_size(&self) -> Option<usize> {
        Some(self.hidden)
    }
}

fn manifest(folder: &Path) -> Result<Manifest> {
    let path = folder.join(MANIFEST);
    let fail = |text: &dyn std::fmt::Display| problem(&path, text);
    let bytes = std::fs::metadata(&path).map_err(|error| fail(&error))?.len();
    if bytes > MOST_MANIFEST {
        return Err(fail(&format!("{bytes} bytes, more than {MOST_MANIFEST}")));
    }
    let text = std::fs::read(&path).map_err(|error| fail(&error))?;
    // The version decides what the rest means.
    let version: serde_json::Value =
        serde_json::from_slice(&text).map_err(|error| fail(&format!("no JSON: {error}")))?;
    match version["version"].as_u64() {
        Some(VERSION) => {}
        other => return Err(fail(&format!("`version` {other:?}; version {VERSION} is read"))),
    }
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| fail(&error))?;
    for (name, found, wanted) in [
        ("token_dtype", &manifest.token_dtype, "int32"),
        ("mask_dtype", &manifest.mask_dtype, "uint8"),
    ] {
        if found != wanted {
            return Err(fail(&format!("`{name}` is {found:?}; {wanted:?} is read")));
        }
    }
    let Manifest { num_shards, ref shards, index_record_size, .. } = manifest;
    let ids = &manifest.target_layer_ids;
    if index_record_size != RECORD_BYTES {
        return Err(fail(&format!("`index_record_size` {index_record_size}, not {RECORD_BYTES}")));
    }
    if num_shards != shards.len() {
        return Err(fail(&format!("`num_shards` {num_shards}, and {} are named", shards.len())));
    }
    if ids.is_empty() || manifest.hidden_size == 0 || ids.windows(2).any(|pair| pair[0] >= pair[1])
    {
        let hidden = manifest.hidden_size;
        let text = format!("`target_layer_ids` {ids:?} that do not ascend, `hidden_size` {hidden}");
        return Err(fail(&text));
    }
    Ok(manifest)
}

fn shards(folder: &Path, manifest: &Manifest) -> Result<Vec<PathBuf>> {
    let path = folder.join(MANIFEST);
    let file = |(index, shard): (usize, &Shard)| {
        let mut parts = Path::new(&shard.file_name).components();
        let plain = matches!(parts.next(), Some(Component::Normal(_))) && parts.next().is_none();
        if !plain || shard.shard_id != index {
            let Shard { shard_id, file_name } = shard;
            let text = format!("shard {index} is `{file_name}` of id {shard_id}");
            return Err(problem(&path, format!("{text}: no file of this folder, or out of order")));
        }
        Ok(folder.join(&shard.file_name))
    };
    manifest.shards.iter().enumerate().map(file).collect()
}

fn samples(folder: &Path, manifest: &Manifest) -> Result<Vec<Sample>> {
    let path = folder.join(INDEX);
    let fail = |text: &dyn std::fmt::Display| problem(&path, text);
    let file = File::open(&path).map_err(|error| fail(&error))?;
    let length = file.metadata().map_err(|error| fail(&error))?.len();
    let wanted = (manifest.num_samples as u64).checked_mul(RECORD_BYTES as u64);
    if wanted != Some(length) {
        let samples = manifest.num_samples;
        return Err(fail(&format!(
            "{length} bytes, and {samples} samples take {RECORD_BYTES} each"
        )));
    }
    // One by one: a file with holes may be far longer than what it holds.
    let mut records = BufReader::new(file);
    let sample = |index: usize| {
        let mut record = [0; RECORD_BYTES];
        records.read_exact(&mut record).map_err(|error| fail(&error))?;
        let long = |at: usize| {
            let bytes = record[at..at + 8].try_into().unwrap_or_default();
            u64::from_le_bytes(bytes)
        };
        let short =
            |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().unwrap_or_default());
        let (id, shard, tokens) = (long(0), short(8) as usize, short(12));
        if id != index as u64 || shard >= manifest.num_shards || tokens == 0 {
            let text = format!("record {index} is sample {id} of {tokens} tokens in shard {shard}");
            return Err(fail(&text));
        }
        let offsets = [16, 24, 32, 40, 48].map(long);
        Ok(Sample { shard, tokens, offsets })
    };
    (0..manifest.num_samples).map(sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache of one shard of so many bytes, all of them a hole, with this index.
    fn cache(samples: usize, index: &[u8], length: u64) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("tempdir");
        let manifest = serde_json::json!({
            "version": 2, "num_samples": samples, "num_shards": 1, "target_layer_ids": [0],
            "hidden_size": 1, "hidden_dtype": "float16", "token_dtype": "int32",
            "mask_dtype": "uint8", "index_record_size": RECORD_BYTES,
            "shards": [{"shard_id": 0, "file_name": "shard"}],
        });
        let write = |name: &str, bytes: &[u8], length: u64| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).expect("file");
            let file = File::options().write(true).open(&path).expect("file");
            file.set_len(length).expect("a file with a hole");
        };
        let manifest = manifest.to_string();
        write(MANIFEST, manifest.as_bytes(), manifest.len() as u64);
        write(INDEX, index, (samples * RECORD_BYTES) as u64);
        // The masks, which lie at its start: zeros before a one.
        write("shard", &[0, 1], length);
        dir
    }

    #[test]
    fn an_index_full_of_holes_is_refused_at_its_first_record() {
        // Terabytes that no memory holds.
        let dir = cache(1 << 37, &[], 1);
        let error = Cache::open(dir.path()).err().expect("a hole").to_string();
        assert!(error.contains("record 0 is sample 0 of 0 tokens"), "{error}");
    }

    #[test]
    fn a_shard_full_of_holes_takes_no_memory_for_its_tokens() {
        let mut index = [0; RECORD_BYTES];
        index[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        let dir = cache(1, &index, 4 * u64::from(u32::MAX));
        let cache = Cache::open(dir.path()).expect("every kind lies within the file");
        // Ids alone would take 16 GiB; the mask is refused in its first part.
        let error = cache.document(0).expect_err("no mask").to_string();
        assert!(error.contains("`attention_mask`"), "{error}");
    }
}
