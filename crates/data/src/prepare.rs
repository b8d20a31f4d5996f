//! Sources into shards, resumable at every shard.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::thread::ScopedJoinHandle;

use serde_json::json;

use crate::encoder::TextEncoder;
use crate::error::{DataError, Result};
use crate::quarantine::Quarantine;
use crate::reader::{SourceReader, SourceReport, in_chunks};
use crate::report::Part;
use crate::shards::{
    FORMAT, INDEX, Index, OF_OTHER_RULES, RECIPE, Receipt, ShardEntry, file, read_json,
    write_atomically, write_json,
};
use crate::source::{RawRow, SourceConfig};
use crate::template::RULES;

/// A source and the files that its text stands in.
#[derive(Debug, Clone)]
pub struct Source {
    /// As configured.
    pub config: SourceConfig,
    /// Local paths.
    pub paths: Vec<PathBuf>,
}

/// How to prepare.
#[derive(Debug, Clone)]
pub struct PrepareOptions {
    /// Where the shards go.
    pub output: PathBuf,
    /// Bytes of text that make a shard.
    pub shard_bytes: usize,
    /// Tolerated share of malformed rows of a source.
    pub max_bad_rows: f64,
}

/// What is told after every shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Shards that are complete.
    pub shards: usize,
    /// Those of them that an earlier run left.
    pub reused: usize,
    /// Rows read of all sources.
    pub rows: usize,
    /// Tokens in the complete shards.
    pub tokens: usize,
}

/// Writes shards of all sources, those that are complete already excepted.
///
/// # Errors
/// - the folder was prepared from something else, a source is unreadable, has too many malformed
///   rows or changed since the run that is resumed, or the disk is full; complete shards stay
pub fn prepare(
    sources: &[Source],
    encoder: &dyn TextEncoder,
    options: &PrepareOptions,
    on_shard: &mut dyn FnMut(Progress),
) -> Result<Index> {
    let output = &options.output;
    let readers = sources
        .iter()
        .map(|source| SourceReader::open(&source.config, source.paths.clone(), encoder))
        .collect::<Result<Vec<_>>>()?;
    std::fs::create_dir_all(output).map_err(DataError::io(output))?;
    check_recipe(sources, &readers, encoder, options)?;
    let quarantine = Quarantine::new(Some(output.join("quarantine.jsonl")), options.max_bad_rows)?;
    let progress = Progress { shards: 0, reused: 0, rows: 0, tokens: 0 };
    let mut run = Run { options, quarantine, progress, entries: Vec::new(), on_shard };
    let mut reports = Vec::new();
    for (source, reader) in sources.iter().zip(&readers) {
        reports.push(run.source(&source.config, reader)?);
    }
    let sum = |count: fn(&SourceReport) -> usize| reports.iter().map(count).sum();
    let index = Index {
        format: FORMAT.to_owned(),
        tokenizer: encoder.fingerprint(),
        rules: Some(RULES),
        chat_template: chat_template(&readers, encoder),
        documents: sum(|report| report.documents),
        tokens: sum(|report| report.tokens),
        learned: sum(|report| report.learned),
        sources: reports.clone(),
        shards: run.entries,
    };
    write_json(&output.join(INDEX), &index)?;
    Ok(index)
}

/// Fingerprint of the chat template, where a source goes through it.
fn chat_template(readers: &[SourceReader<'_>], encoder: &dyn TextEncoder) -> Option<String> {
    let has_chats = readers.iter().any(|reader| reader.template().is_chat());
    has_chats.then(|| encoder.chat_fingerprint()).flatten()
}

/// Shards of another recipe must not be mixed with these.
fn check_recipe(
    sources: &[Source],
    readers: &[SourceReader<'_>],
    encoder: &dyn TextEncoder,
    options: &PrepareOptions,
) -> Result<()> {
    let configs: Vec<&SourceConfig> = sources.iter().map(|source| &source.config).collect();
    // As it was recognised, where the configuration leaves it open.
    let read_as: Vec<_> =
        readers.iter().map(|reader| (reader.template(), reader.learn())).collect();
    let recipe = json!({
        "format": FORMAT, "rules": RULES, "tokenizer": encoder.fingerprint(),
        "end_of_text": encoder.end_of_text(), "chat_template": chat_template(readers, encoder),
        "shard_bytes": options.shard_bytes, "sources": configs, "read_as": read_as,
    });
    let path = options.output.join(RECIPE);
    if !path.is_file() {
        return write_json(&path, &recipe);
    }
    let old: serde_json::Value = read_json(&path)?;
    if old == recipe {
        return Ok(());
    }
    let problem = if old.get("rules") == recipe.get("rules") {
        let keys = recipe.as_object().into_iter().flat_map(serde_json::Map::keys);
        let differing: Vec<&str> =
            keys.filter(|key| old.get(key) != recipe.get(key)).map(String::as_str).collect();
        format!("holds shards of another recipe ({} differ)", differing.join(", "))
    } else {
        format!("holds shards {OF_OTHER_RULES}")
    };
    let problem = format!("{problem}: give another output, or remove it");
    Err(DataError::shards(&options.output, problem))
}

struct Run<'a> {
    options: &'a PrepareOptions,
    quarantine: Quarantine,
    progress: Progress,
    entries: Vec<ShardEntry>,
    on_shard: &'a mut dyn FnMut(Progress),
}

/// A shard on its way to the disk.
type Pending<'scope> = ScopedJoinHandle<'scope, Result<(Receipt, bool)>>;

impl Run<'_> {
    /// One shard is written while the next one is encoded: writing waits for the disk, and would
    /// leave every core idle.
    fn source(&mut self, config: &SourceConfig, reader: &SourceReader<'_>) -> Result<SourceReport> {
        let limit = config.limit_tokens.unwrap_or(usize::MAX);
        let mut total = reader.report();
        let options = self.options;
        let output = options.output.as_path();
        self.quarantine.begin_source();
        std::thread::scope(|scope| {
            let mut pending: Option<Pending<'_>> = None;
            let (mut number, mut rows_done) = (self.entries.len(), 0);
            in_chunks(reader.rows()?, self.options.shard_bytes, &mut |rows| {
                let shard = match self.reuse(config, number, rows)? {
                    Some(receipt) => Shard { receipt, bytes: None },
                    None => encode(reader, number, rows, limit - total.tokens),
                };
                total.merge(&shard.receipt.report);
                self.written(config, pending.take(), &mut rows_done)?;
                pending = Some(scope.spawn(move || shard.write(output, number)));
                number += 1;
                Ok(total.tokens < limit)
            })?;
            self.written(config, pending.take(), &mut rows_done)
        })?;
        self.quarantine.end_source(&config.path, (total.rows, total.learned))?;
        Ok(total)
    }

    /// Waits for a shard and tells of it; its malformed rows follow on `rows_done` rows.
    fn written(
        &mut self,
        config: &SourceConfig,
        pending: Option<Pending<'_>>,
        rows_done: &mut usize,
    ) -> Result<()> {
        let Some(pending) = pending else { return Ok(()) };
        let (receipt, reused) =
            pending.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        *rows_done += receipt.report.rows;
        self.quarantine.take(&receipt.bad, &config.path, *rows_done)?;
        self.progress.shards += 1;
        self.progress.reused += usize::from(reused);
        self.progress.rows += receipt.report.rows;
        self.progress.tokens += receipt.report.tokens;
        self.entries.push(receipt.entry);
        (self.on_shard)(self.progress);
        Ok(())
    }

    /// The shard as an earlier run left it.
    fn reuse(
        &self,
        config: &SourceConfig,
        number: usize,
        rows: &[RawRow],
    ) -> Result<Option<Receipt>> {
        let output = &self.options.output;
        let Some(receipt) = complete(output, &output.join(receipt_name(number)))? else {
            return Ok(None);
        };
        if receipt.rows_blake3 == hash(rows) {
            return Ok(Some(receipt));
        }
        Err(DataError::shards(
            &config.path,
            format!(
                "changed since {} was prepared from it: remove {} to prepare anew",
                receipt.entry.file,
                output.display()
            ),
        ))
    }
}

/// A shard in memory.
struct Shard {
    receipt: Receipt,
    /// What is to be written; none if it stands on the disk already.
    bytes: Option<Vec<u8>>,
}

impl Shard {
    /// The file first, its receipt after it: a receipt tells that the shard is whole. Returns also whether an earlier
    /// run left it.
    fn write(self, output: &Path, number: usize) -> Result<(Receipt, bool)> {
        let mut receipt = self.receipt;
        let reused = self.bytes.is_none();
        if let Some(bytes) = self.bytes {
            receipt.entry.blake3 = blake3::hash(&bytes).to_hex().to_string();
            write_atomically(&output.join(&receipt.entry.file), &bytes)?;
            write_json(&output.join(receipt_name(number)), &receipt)?;
        }
        Ok((receipt, reused))
    }
}

/// Documents of rows on every thread, up to `limit` tokens.
fn encode(reader: &SourceReader<'_>, number: usize, rows: &[RawRow], limit: usize) -> Shard {
    let Part { documents, bad, report } = reader.part(rows, limit);
    let file = format!("shard-{number:05}.bin");
    let (documents, bytes) = (report.documents, file::encode(&documents));
    let entry = ShardEntry { file, blake3: String::new(), documents, tokens: report.tokens };
    let receipt = Receipt { entry, rows_blake3: hash(rows), report, bad };
    Shard { receipt, bytes: Some(bytes) }
}

fn receipt_name(number: usize) -> String {
    format!("shard-{number:05}.json")
}

/// The receipt of a shard whose file is there and whole. A damaged one is made again.
fn complete(output: &Path, receipt_path: &Path) -> Result<Option<Receipt>> {
    if !receipt_path.is_file() {
        return Ok(None);
    }
    let receipt: Receipt = read_json(receipt_path)?;
    let path = output.join(&receipt.entry.file);
    let Ok(bytes) = std::fs::read(&path) else { return Ok(None) };
    let whole = blake3::hash(&bytes).to_hex().as_str() == receipt.entry.blake3;
    Ok(whole.then_some(receipt))
}

fn hash(rows: &[RawRow]) -> String {
    let mut hasher = blake3::Hasher::new();
    for row in rows {
        for part in [row.origin().as_bytes(), row.raw().as_bytes()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
    }
    hasher.finalize().to_hex().to_string()
}
