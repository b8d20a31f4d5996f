//! Sources into packed training rows and held-out rows.

use std::path::PathBuf;

use longdraft_data::packing::{Overlong, Packing, arrange};
use longdraft_data::quarantine::Quarantine;
use longdraft_data::reader::read_source;
use longdraft_data::source::{SourceConfig, is_data_file};
use longdraft_data::{Document, TextEncoder};
use longdraft_models::hub::DataSetId;
use longdraft_models::target::Target;
use longdraft_models::tokenizer::TextTokenizer;

use super::{DataSet, Encoder, Event, Observer};
use crate::config::TrainConfig;
use crate::error::Result;
use crate::parallel::World;

/// Where a source's text stands on this machine; `hf://` data sets are fetched.
///
/// # Errors
/// - the hub cannot deliver
pub fn source_paths(source: &SourceConfig) -> Result<Vec<PathBuf>> {
    match source.path.to_str().and_then(DataSetId::parse) {
        Some(id) => Ok(id?.fetch(&|name| is_data_file(name.as_ref()))?),
        None => Ok(vec![source.path.clone()]),
    }
}

/// Reads, splits and packs; the first rank keeps malformed rows beside the run.
pub(super) fn data_sets(
    config: &TrainConfig,
    target: &Target,
    tokenizer: &TextTokenizer,
    world: &World,
    observer: &mut dyn Observer,
) -> Result<(DataSet, DataSet)> {
    let aside = world.is_first().then(|| config.output.join("quarantine.jsonl"));
    let (train, held_out) = read_all(config, target, tokenizer, aside, observer)?;
    Ok((packed(config, target, train), packed(config, target, held_out)))
}

/// The held-out rows alone; nothing is written.
pub(super) fn held_out_set(
    config: &TrainConfig,
    target: &Target,
    tokenizer: &TextTokenizer,
    observer: &mut dyn Observer,
) -> Result<DataSet> {
    let (_, held_out) = read_all(config, target, tokenizer, None, observer)?;
    Ok(packed(config, target, held_out))
}

/// Documents for training and the held-out ones.
fn read_all(
    config: &TrainConfig,
    target: &Target,
    tokenizer: &TextTokenizer,
    aside: Option<PathBuf>,
    observer: &mut dyn Observer,
) -> Result<(Vec<Document>, Vec<Document>)> {
    let encoder = Encoder::new(tokenizer, target.config());
    let data = &config.data;
    let mut quarantine = Quarantine::new(aside, data.max_bad_rows)?;
    let mut read = |sources: &[SourceConfig]| {
        let read = |source| read_one(source, &encoder, &mut quarantine, observer);
        sources.iter().map(read).collect::<Result<Vec<_>>>()
    };
    let mut sources = read(&data.train)?;
    let mut held_out = read(&data.held_out)?.concat();
    if held_out.is_empty()
        && let Some(first) = sources.first_mut()
    {
        held_out = split_last(first, data.held_out_rows * data.row_tokens);
    }
    Ok((sources.concat(), held_out))
}

/// Documents in rows.
fn packed(config: &TrainConfig, target: &Target, mut documents: Vec<Document>) -> DataSet {
    let data = &config.data;
    let (packing, overlong) = if config.draft.method.is_compat(config) {
        // Published rows: one document, truncated.
        (Packing::None, Overlong::Truncate)
    } else {
        (data.packing, data.overlong)
    };
    if config.draft.method.masks_padding(config) {
        let pad = target.config().pad_token_id;
        mask_padding(&mut documents, pad.or(target.config().eos_token_ids.first().copied()));
    }
    let rows = arrange(&documents, data.row_tokens, packing, overlong);
    DataSet { documents, rows }
}

/// Reads a source and tells what it left out.
fn read_one(
    source: &SourceConfig,
    encoder: &dyn TextEncoder,
    quarantine: &mut Quarantine,
    observer: &mut dyn Observer,
) -> Result<Vec<Document>> {
    let paths = source_paths(source)?;
    let (documents, report) = read_source(source, paths, encoder, quarantine)?;
    if let Some(kind) = &report.detected {
        observer.on_event(Event::Note(&format!("{}: read as `{kind}`", report.source)));
    }
    for remark in report.remarks() {
        observer.on_event(Event::Warning(&remark));
    }
    if report.bad > 0
        && let Some(path) = quarantine.written()
    {
        observer.on_event(Event::Note(&format!("malformed rows are in {}", path.display())));
    }
    Ok(documents)
}

/// Takes documents of at least `tokens` tokens from the end; one document always stays.
fn split_last(documents: &mut Vec<Document>, tokens: usize) -> Vec<Document> {
    let (mut first, mut taken) = (documents.len(), 0);
    while first > 1 && taken < tokens {
        first -= 1;
        taken += documents[first].ids.len();
    }
    documents.split_off(first)
}

/// Published rule: a token with the pad's id is never learned.
fn mask_padding(documents: &mut [Document], pad: Option<u32>) {
    for document in documents {
        for (mask, id) in document.loss_mask.iter_mut().zip(&document.ids) {
            *mask = *mask && Some(*id) != pad;
        }
    }
}
