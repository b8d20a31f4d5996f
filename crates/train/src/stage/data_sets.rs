//! Sources into packed training rows and held-out rows.

use std::path::PathBuf;

use longdraft_data::packing::{Overlong, PackedRow, Packing, Piece, arrange, pieces};
use longdraft_data::quarantine::Quarantine;
use longdraft_data::reader::read_source;
use longdraft_data::source::{SourceConfig, is_data_file};
use longdraft_data::{Document, TextEncoder};
use longdraft_features::records::is_record_folder;
use longdraft_models::hub::DataSetId;
use longdraft_models::target_model::Target;
use longdraft_models::tokenizer::TextTokenizer;
use longdraft_parallel::World;

use super::{DataSet, Encoder, Event, Observer};
use crate::config::TrainConfig;
use crate::error::{Result, TrainError};

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

/// Reads, splits and packs; the first rank keeps malformed rows of the sources beside the run.
pub(super) fn data_sets(
    config: &TrainConfig,
    target: &Target,
    tokenizer: &TextTokenizer,
    world: &World,
    observer: &mut dyn Observer,
) -> Result<(DataSet, DataSet)> {
    let aside = world.is_first().then(|| config.output.join("quarantine.jsonl"));
    let (train, held_out) = read_all(config, target, tokenizer, aside, observer)?;
    let layout = RowLayout::of(config);
    let left_out = layout.left_out(&train);
    if left_out > 0 {
        let told = format!(
            "{left_out} pieces of the training text have no token to learn and stand in no row; longer rows keep a \
             long prompt and its answer together"
        );
        observer.on_event(Event::Warning(&told));
    }
    let train = packed(config, target, train);
    let is_learned = |piece: &Piece| piece.is_learned(&train.documents);
    if !train.rows.iter().any(|row| row.pieces.iter().any(is_learned)) {
        return Err(TrainError::NothingToLearn);
    }
    Ok((train, packed(config, target, held_out)))
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
    let data = &config.data;
    let encoder =
        Encoder::new(tokenizer, target.config()).with_variables(&data.chat_template_kwargs);
    let mut quarantine = Quarantine::new(aside, data.max_bad_rows)?;
    let mut read = |sources: &[SourceConfig]| {
        let read = |source| read_one(source, &encoder, &mut quarantine, observer);
        sources.iter().map(read).collect::<Result<Vec<_>>>()
    };
    let mut sources = read(&data.train)?;
    let mut held_out = read(&data.held_out)?.concat();
    // Of the training text, for what is measured here or in other trainings.
    let mut taken = 0;
    if held_out.is_empty()
        && let Some(first) = sources.first_mut()
    {
        // Counted with rows of which nothing is learned, so that long prompts do not take more documents.
        let layout = RowLayout { keeps_unlearned: true, ..RowLayout::of(config) };
        held_out = split_last(first, data.held_out_rows, layout);
        let rows = layout.rows(&held_out).len();
        if rows != data.held_out_rows {
            let told = format!(
                "{rows} of the {} rows of `data.held_out_rows` are held out: the first source has no more \
                 whole documents to spare",
                data.held_out_rows
            );
            observer.on_event(Event::Warning(&told));
        }
        if let Some(told) = falls_short(&held_out, RowLayout::of(config), data.held_out_rows) {
            observer.on_event(Event::Warning(&told));
        }
        taken = tokens_of(&held_out);
    }
    if let Some(first) = sources.first_mut() {
        let wanted = data.reserved_tokens.unwrap_or(0).saturating_sub(taken);
        // A record is that of a whole document.
        let whole = config.train.features.store().is_some_and(is_record_folder);
        taken += drop_last(first, wanted, whole);
    }
    if let Some(told) = takes_much(&sources, taken) {
        observer.on_event(Event::Warning(&told));
    }
    Ok((sources.concat(), held_out))
}

fn tokens_of(documents: &[Document]) -> usize {
    documents.iter().map(|document| document.ids.len()).sum()
}

/// What is said where fewer rows are measured than are held out, since nothing is learned of some pieces.
fn falls_short(held_out: &[Document], layout: RowLayout, wanted: usize) -> Option<String> {
    let rows = layout.rows(held_out).len();
    let all = RowLayout { keeps_unlearned: true, ..layout }.rows(held_out).len();
    (rows < all).then(|| {
        format!(
            "{rows} of the {wanted} rows of `data.held_out_rows` are measured: pieces of the held-out text that have \
             no token to learn stand in no row; raise `data.held_out_rows`, or `data.row_tokens`, so that a long \
             prompt and its answer stay together"
        )
    })
}

/// What is said where held-out and reserved tokens are the greater part of the text.
fn takes_much(sources: &[Vec<Document>], taken: usize) -> Option<String> {
    let kept: usize = sources.iter().map(|documents| tokens_of(documents)).sum();
    (taken > kept).then(|| {
        let share = 100.0 * taken as f64 / (kept + taken) as f64;
        format!(
            "held-out rows take {share:.0} % of the text, {kept} tokens are left to train on: give more text, or \
             lower data.held_out_rows, data.row_tokens or data.reserved_tokens"
        )
    })
}

/// Pieces of a text that stand in none of its rows.
pub(super) fn pieces_left_out(config: &TrainConfig, text: &DataSet) -> usize {
    let layout = RowLayout::of(config);
    let in_rows: usize = text.rows.iter().map(|row| row.pieces.len()).sum();
    pieces(&text.documents, layout.row_tokens, layout.overlong).count() - in_rows
}

/// Documents in rows.
fn packed(config: &TrainConfig, target: &Target, mut documents: Vec<Document>) -> DataSet {
    if config.draft.method.masks_padding() {
        let pad = target.config().pad_token_id;
        mask_padding(&mut documents, pad.or(target.config().eos_token_ids.first().copied()));
    }
    let rows = RowLayout::of(config).rows(&documents);
    DataSet { documents, rows }
}

/// How documents become rows.
#[derive(Debug, Clone, Copy)]
struct RowLayout {
    row_tokens: usize,
    packing: Packing,
    overlong: Overlong,
    /// Whether pieces of which nothing is learned stand in rows, too.
    keeps_unlearned: bool,
}

impl RowLayout {
    fn of(config: &TrainConfig) -> Self {
        let data = &config.data;
        let keeps_unlearned = config.draft.method.is_compat();
        let (packing, overlong) = if keeps_unlearned {
            // Published rows: one document, truncated, whatever is learned of it.
            (Packing::None, Overlong::Truncate)
        } else {
            (data.packing, data.overlong)
        };
        Self { row_tokens: data.row_tokens, packing, overlong, keeps_unlearned }
    }

    fn rows(self, documents: &[Document]) -> Vec<PackedRow> {
        let all = pieces(documents, self.row_tokens, self.overlong);
        let standing = all.filter(|piece| self.stands(piece, documents));
        arrange(standing, self.row_tokens, self.packing)
    }

    /// Whether a piece stands in a row.
    fn stands(self, piece: &Piece, documents: &[Document]) -> bool {
        self.keeps_unlearned || piece.is_learned(documents)
    }

    /// Pieces of two tokens or more that stand in no row.
    fn left_out(self, documents: &[Document]) -> usize {
        pieces(documents, self.row_tokens, self.overlong)
            .filter(|piece| piece.tokens.len() > 1 && !self.stands(piece, documents))
            .count()
    }
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
        observer.on_event(Event::Note(&format!(
            "malformed rows of the sources are in {}",
            path.display()
        )));
    }
    Ok(documents)
}

/// Takes so many tokens away from the end; how many they were. Of the last document that is touched only so much goes as
/// is needed, or the `whole` of it. The first document stays where nothing would be left.
fn drop_last(documents: &mut Vec<Document>, tokens: usize, whole: bool) -> usize {
    let mut dropped = 0;
    while dropped < tokens
        && let Some(mut last) = documents.pop()
    {
        let length = last.ids.len();
        let left = if whole { 0 } else { length.saturating_sub(tokens - dropped) };
        if left == 0 && !documents.is_empty() {
            dropped += length;
            continue;
        }
        if left > 0 {
            dropped += length - left;
            last.ids.truncate(left);
            last.loss_mask.truncate(left);
        }
        documents.push(last);
        break;
    }
    dropped
}

/// Takes documents from the end that make `rows` rows. Where the next document would make too many,
/// the rest of the rows is cut from its end. One document, or the beginning of one, always stays.
fn split_last(documents: &mut Vec<Document>, rows: usize, layout: RowLayout) -> Vec<Document> {
    if rows == 0 {
        return Vec::new();
    }
    let count = |taken: usize| layout.rows(&documents[documents.len() - taken..]).len();
    // The most documents that make no more rows than are wanted.
    let (mut taken, mut too_many) = (0, 1);
    while too_many < documents.len() && count(too_many) <= rows {
        (taken, too_many) = (too_many, 2 * too_many);
    }
    too_many = too_many.min(documents.len());
    while taken + 1 < too_many {
        let middle = usize::midpoint(taken, too_many);
        if count(middle) <= rows {
            taken = middle;
        } else {
            too_many = middle;
        }
    }
    let missing = rows - count(taken).min(rows);
    let mut held_out = documents.split_off(documents.len() - taken);
    let wanted = missing.saturating_mul(layout.row_tokens);
    if layout.overlong == Overlong::Split
        && let Some(last) = documents.last_mut()
        && wanted > 0
        && last.ids.len() > wanted
    {
        // As much as the rows hold, so that all rows are full.
        let at = last.ids.len() - wanted;
        let tail = Document {
            ids: last.ids.split_off(at),
            loss_mask: last.loss_mask.split_off(at),
            origin: last.origin.clone(),
        };
        held_out.insert(0, tail);
    }
    held_out
}

/// Published rule: a token with the pad's id is never learned.
fn mask_padding(documents: &mut [Document], pad: Option<u32>) {
    for document in documents {
        for (mask, id) in document.loss_mask.iter_mut().zip(&document.ids) {
            *mask = *mask && Some(*id) != pad;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn documents(lengths: &[usize]) -> Vec<Document> {
        let document = |(index, &length): (usize, &usize)| Document {
            ids: vec![index as u32; length],
            loss_mask: vec![true; length],
            origin: format!("rows.jsonl:{index}"),
        };
        lengths.iter().enumerate().map(document).collect()
    }

    fn layout(row_tokens: usize) -> RowLayout {
        let (packing, overlong) = (Packing::BestFit, Overlong::Split);
        RowLayout { row_tokens, packing, overlong, keeps_unlearned: false }
    }

    /// Rows that are held out of documents of these lengths, and tokens that stay.
    fn split(lengths: &[usize], rows: usize, layout: RowLayout) -> (usize, usize) {
        let mut kept = documents(lengths);
        let held_out = split_last(&mut kept, rows, layout);
        (layout.rows(&held_out).len(), tokens_of(&kept))
    }

    #[test]
    fn as_many_rows_are_held_out_as_are_asked_for() {
        for (lengths, rows, row_tokens) in [
            (&[60; 40][..], 2, 128),
            (&[60; 40][..], 9, 128),
            (&[100; 30][..], 2, 256),
            // A book of which the end is held out, and the rest trained on.
            (&[50, 5000][..], 4, 128),
            (&[5000][..], 4, 128),
            (&[50, 700, 90][..], 3, 128),
        ] {
            let (held_out, kept) = split(lengths, rows, layout(row_tokens));
            assert_eq!(held_out, rows, "{lengths:?}");
            assert!(kept > 0, "{lengths:?}");
        }
        assert_eq!(split(&[50, 5000], 4, layout(128)).1, 50 + 5000 - 4 * 128);
        // Rows of one document each.
        let single =
            RowLayout { packing: Packing::None, overlong: Overlong::Truncate, ..layout(128) };
        assert_eq!(split(&[50, 5000, 300], 2, single), (2, 50));
        // There is no more; one document stays.
        assert_eq!(split(&[50, 60], 4, layout(128)), (1, 50));
        assert_eq!(split(&[60], 4, layout(128)), (0, 60));
        assert_eq!(split(&[60, 60], 0, layout(128)), (0, 120));
    }

    #[test]
    fn text_that_others_hold_out_is_left_alone() {
        let left_of = |tokens: usize, whole: bool| {
            let mut kept = documents(&[50, 100]);
            let dropped = drop_last(&mut kept, tokens, whole);
            assert_eq!(tokens_of(&kept) + dropped, 150);
            assert!(kept.iter().all(|document| document.ids.len() == document.loss_mask.len()));
            kept.iter().map(|document| document.ids.len()).collect::<Vec<_>>()
        };
        let left = |tokens: usize| left_of(tokens, false);
        assert_eq!((left(0), left(30), left(100)), (vec![50, 100], vec![50, 70], vec![50]));
        assert_eq!((left(120), left(150), left(1000)), (vec![30], vec![50], vec![50]));
        // Records are those of whole documents.
        let left = |tokens: usize| left_of(tokens, true);
        assert_eq!((left(0), left(30), left(120)), (vec![50, 100], vec![50], vec![50]));
    }

    #[test]
    fn held_out_rows_of_which_nothing_is_learned_are_told() {
        let mut held_out = documents(&[128, 128, 128]);
        assert_eq!(falls_short(&held_out, layout(128), 3), None);
        held_out[1].loss_mask.fill(false);
        let told = falls_short(&held_out, layout(128), 3).expect("a warning");
        assert!(told.starts_with("2 of the 3 rows of `data.held_out_rows`"), "{told}");
        let published = RowLayout { keeps_unlearned: true, ..layout(128) };
        assert_eq!(falls_short(&held_out, published, 3), None);
    }

    #[test]
    fn held_out_rows_that_take_the_greater_part_of_the_text_are_told() {
        let told = |kept: usize, held_out: usize| {
            takes_much(&[documents(&[kept - 50]), documents(&[50])], held_out)
        };
        let warning = told(97, 626).expect("a warning");
        assert!(warning.contains("take 87 % of the text, 97 tokens are left"), "{warning}");
        assert!(warning.contains("data.held_out_rows"), "{warning}");
        assert_eq!((told(500, 500), told(5000, 256)), (None, None));
    }

    proptest! {
        #[test]
        fn no_token_is_lost_and_rows_are_those_asked_for(
            lengths in proptest::collection::vec(2_usize..400, 2..120), rows in 1_usize..9
        ) {
            let all: usize = lengths.iter().sum();
            let mut kept = documents(&lengths);
            let held_out = split_last(&mut kept, rows, layout(128));
            prop_assert_eq!(tokens_of(&kept) + tokens_of(&held_out), all);
            prop_assert!(tokens_of(&kept) > 0);
            let made = layout(128).rows(&held_out).len();
            prop_assert!(made <= rows);
            // Short of them only where the text is.
            if all > (rows + 4) * 400 {
                prop_assert_eq!(made, rows);
            }
        }
    }
}
