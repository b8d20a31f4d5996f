//! Shards back into documents.

use std::path::Path;

use super::{FORMAT, INDEX, Index, RECIPE, ShardEntry, file, read_json};
use crate::document::Document;
use crate::encoder::TextEncoder;
use crate::error::{DataError, Result};
use crate::report::SourceReport;
use crate::template::RULES;

/// Whether a path is a folder of prepared shards, complete or not.
pub fn is_shards(path: &Path) -> bool {
    path.join(INDEX).is_file() || path.join(RECIPE).is_file()
}

/// Checks that shards are complete, all there, and made as they would be made now; none is read.
///
/// # Errors
/// - preparing them was not finished, they were made with another tokenizer or chat template or by other
///   [rules](RULES), or a file is missing
pub fn check(folder: &Path, encoder: &dyn TextEncoder) -> Result<()> {
    for shard in &index_for(folder, encoder)?.shards {
        let path = folder.join(&shard.file);
        std::fs::metadata(&path).map_err(DataError::io(&path))?;
    }
    Ok(())
}

/// Reads shards in order, at most `limit_tokens` tokens and the rest of a document.
///
/// # Errors
/// - as [`check`], or a file is damaged
pub fn read(
    folder: &Path,
    encoder: &dyn TextEncoder,
    limit_tokens: Option<usize>,
) -> Result<(Vec<Document>, SourceReport)> {
    let index = index_for(folder, encoder)?;
    let limit = limit_tokens.unwrap_or(usize::MAX);
    let source = folder.display().to_string();
    let mut report = SourceReport { source, ..SourceReport::default() };
    let mut documents = Vec::new();
    for shard in &index.shards {
        if report.tokens >= limit {
            break;
        }
        for document in decoded(folder, shard)? {
            if report.tokens >= limit {
                break;
            }
            report.add_document(&document);
            documents.push(document);
        }
    }
    if report.learned == 0 {
        let path = folder.to_path_buf();
        return Err(DataError::Empty { path, rows: report.rows, first_problem: None });
    }
    Ok((documents, report))
}

/// The first documents, `most` of them at most. Shards after them are not read.
///
/// # Errors
/// - as [`check`], or a file that is read is damaged
pub fn first(folder: &Path, encoder: &dyn TextEncoder, most: usize) -> Result<Vec<Document>> {
    let mut documents = Vec::new();
    for shard in &index_for(folder, encoder)?.shards {
        if documents.len() >= most {
            break;
        }
        documents.extend(decoded(folder, shard)?);
    }
    documents.truncate(most);
    Ok(documents)
}

/// The documents of a shard, as the index has it.
fn decoded(folder: &Path, shard: &ShardEntry) -> Result<Vec<Document>> {
    let path = folder.join(&shard.file);
    // A named pipe would be waited for.
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return Err(DataError::shards(path, "no regular file: prepare the data again"));
    }
    let bytes = std::fs::read(&path).map_err(DataError::io(&path))?;
    if blake3::hash(&bytes).to_hex().as_str() != shard.blake3 {
        return Err(DataError::shards(path, "damaged: its hash is not the one in the index"));
    }
    file::decode(&bytes).map_err(|problem| DataError::shards(path, problem))
}

/// The index of a folder that was prepared as it would be now.
fn index_for(folder: &Path, encoder: &dyn TextEncoder) -> Result<Index> {
    let index = index(folder)?;
    let fail = |problem: String| Err(DataError::shards(folder, problem));
    if index.rules != Some(RULES) {
        return fail(format!("{OF_OTHER_RULES}: prepare the data again, into another folder"));
    }
    let fingerprint = encoder.fingerprint();
    if index.tokenizer != fingerprint {
        return fail(format!(
            "prepared with another tokenizer ({}, the target's is {fingerprint}): prepare the \
             data again for this target",
            index.tokenizer
        ));
    }
    if index.chat_template.is_some() && index.chat_template != encoder.chat_fingerprint() {
        return fail(
            "its conversations were prepared with another chat template than the target's, or with other variables of \
             it (data.chat_template_kwargs): prepare the data again for this target"
                .to_owned(),
        );
    }
    Ok(index)
}

/// What is wrong with shards of other rules.
pub(crate) const OF_OTHER_RULES: &str =
    "prepared by another version of this program, whose text or masks of the same rows may differ";

pub(super) fn index(folder: &Path) -> Result<Index> {
    let path = folder.join(INDEX);
    if !path.is_file() {
        return Err(DataError::shards(
            folder,
            "preparing these shards was not finished: run the same `data prepare` again",
        ));
    }
    let index: Index = read_json(&path)?;
    if index.format != FORMAT {
        let problem = format!("format `{}` is not `{FORMAT}`", index.format);
        return Err(DataError::shards(path, problem));
    }
    let is_name = |file: &str| Path::new(file).file_name().is_some_and(|name| name == file);
    if let Some(shard) = index.shards.iter().find(|shard| !is_name(&shard.file)) {
        let problem = format!("shard {:?}: not the name of a file in this folder", shard.file);
        return Err(DataError::shards(path, problem));
    }
    Ok(index)
}
