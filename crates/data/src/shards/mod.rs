//! Tokens on disk: data prepared once, trained from many times.
//!
//! A folder of shards, each complete or absent, and an index that is written last:
//!
//! ```text
//! recipe.json       what the shards are made of: sources, templates and masks, tokenizer, rules; another recipe is refused
//! shard-00000.bin   documents of about `shard_bytes` bytes of text   (format: `file.rs`)
//! shard-00000.json  its hash, counts and malformed rows; written when the shard is complete
//! quarantine.jsonl  malformed rows of all sources
//! index.json        hashes and counts of all shards
//! ```
//!
//! A shard is a function of the rows that it is cut from. So a run that was killed goes on after
//! its complete shards, checks by hash that their rows are still the same, and ends with the same
//! bytes as a run that was not.

pub(crate) mod file;
mod read;

use std::io::Write;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{DataError, Result};
use crate::quarantine::BadRow;
use crate::report::SourceReport;

pub(crate) use read::OF_OTHER_RULES;
pub use read::{check, first, is_shards, read};

pub(crate) const INDEX: &str = "index.json";
pub(crate) const RECIPE: &str = "recipe.json";

/// Name of this layout in `index.json`.
pub(crate) const FORMAT: &str = "longdraft-shards-1";

/// Bytes of text that make a shard.
pub const SHARD_BYTES: usize = 16 << 20;

/// `index.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Index {
    /// The layout's name.
    pub format: String,
    /// Fingerprint of the tokenizer that made the ids.
    pub tokenizer: String,
    /// Version of the [rules](crate::template::RULES) that made text and masks; shards that do not say it are refused.
    pub rules: Option<u32>,
    /// Fingerprint of the chat template that made the text of conversations, if there are any.
    pub chat_template: Option<String>,
    /// Documents of all shards.
    pub documents: usize,
    /// Their tokens.
    pub tokens: usize,
    /// Labels that are learned.
    pub learned: usize,
    /// Counts by source, in order.
    pub sources: Vec<SourceReport>,
    /// Every shard, in order.
    pub shards: Vec<ShardEntry>,
}

/// One shard in the index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardEntry {
    /// File name in the folder.
    pub file: String,
    /// Of the file.
    pub blake3: String,
    /// Documents in it.
    pub documents: usize,
    /// Tokens in it.
    pub tokens: usize,
}

/// `shard-NNNNN.json`: says that a shard is complete, and what a resumed run needs to know of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Receipt {
    pub(crate) entry: ShardEntry,
    /// Hash of the rows that it was cut from.
    pub(crate) rows_blake3: String,
    pub(crate) report: SourceReport,
    pub(crate) bad: Vec<BadRow>,
}

/// Writes beside and renames, synced: the file is complete or absent.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let partial = path.with_extension("partial");
    let write = || -> std::io::Result<()> {
        let mut file = std::fs::File::create(&partial)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&partial, path)
    };
    write().map_err(DataError::io(path))
}

pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|e| DataError::shards(path, e))?;
    write_atomically(path, format!("{text}\n").as_bytes())
}

pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read_to_string(path).map_err(DataError::io(path))?;
    serde_json::from_str(&text).map_err(|error| DataError::shards(path, error))
}
