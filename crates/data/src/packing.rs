//! Whole documents into rows of `T` tokens.
//!
//! Documents longer than a row are split at its length; pieces are then placed best-fit among a
//! bounded number of open rows, the longest of a window of them first: short pieces fill what long
//! ones leave. No token of them is lost or doubled. A piece of which nothing is learned, such as the beginning of a
//! prompt that is longer than a row, need not stand in any row.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::document::Document;

/// How documents share rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// Several documents a row, best fit.
    #[default]
    BestFit,
    /// One document (or piece of one) a row. Rows are never padded, so they need no buckets of
    /// equal length.
    None,
}

/// What becomes of documents longer than a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Overlong {
    /// Pieces of a row's length, each with a context of its own.
    #[default]
    Split,
    /// The first piece alone.
    Truncate,
    /// Nothing of them.
    Drop,
}

/// Rows that are still being filled.
const OPEN_ROWS: usize = 256;

/// Pieces that are sorted by length before they are placed.
const WINDOW: usize = 256;

/// A piece of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Index of the document in the data set.
    pub document: usize,
    /// Its tokens in this row.
    pub tokens: Range<usize>,
}

impl Piece {
    /// Whether a token is learned here: the first one is not, for nothing comes before it.
    pub fn is_learned(&self, documents: &[Document]) -> bool {
        let mask = &documents[self.document].loss_mask[self.tokens.clone()];
        mask.iter().skip(1).any(|learned| *learned)
    }
}

/// Pieces that share a row; at most the row's length in total.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PackedRow {
    /// In row order.
    pub pieces: Vec<Piece>,
}

impl PackedRow {
    /// Tokens in the row.
    pub fn tokens(&self) -> usize {
        self.pieces.iter().map(|piece| piece.tokens.len()).sum()
    }
}

/// Documents as pieces of at most `row_tokens`.
///
/// # Panics
/// - `row_tokens` is 0
pub fn pieces(
    documents: &[Document],
    row_tokens: usize,
    overlong: Overlong,
) -> impl Iterator<Item = Piece> {
    assert!(row_tokens > 0, "rows hold at least one token");
    documents.iter().enumerate().flat_map(move |(document, content)| {
        let length = content.ids.len();
        let end = match overlong {
            Overlong::Truncate => length.min(row_tokens),
            Overlong::Drop if length > row_tokens => 0,
            Overlong::Split | Overlong::Drop => length,
        };
        (0..end)
            .step_by(row_tokens)
            .map(move |start| Piece { document, tokens: start..(start + row_tokens).min(end) })
    })
}

/// Lays pieces out in rows of at most `row_tokens`.
pub fn arrange(
    pieces: impl Iterator<Item = Piece>,
    row_tokens: usize,
    packing: Packing,
) -> Vec<PackedRow> {
    match packing {
        Packing::BestFit => best_fit(pieces, row_tokens),
        Packing::None => pieces.map(|piece| PackedRow { pieces: vec![piece] }).collect(),
    }
}

/// Share of the rows' places that hold a token.
pub fn fill(rows: &[PackedRow], row_tokens: usize) -> f64 {
    let tokens: usize = rows.iter().map(PackedRow::tokens).sum();
    tokens as f64 / (rows.len() * row_tokens).max(1) as f64
}

/// Places each piece in the open row where it leaves the least room.
fn best_fit(pieces: impl Iterator<Item = Piece>, row_tokens: usize) -> Vec<PackedRow> {
    let mut pieces: Vec<Piece> = pieces.collect();
    for window in pieces.chunks_mut(WINDOW) {
        window.sort_by_key(|piece| std::cmp::Reverse(piece.tokens.len()));
    }
    let mut open: Vec<(usize, PackedRow)> = Vec::new();
    let mut full = Vec::new();
    for piece in pieces {
        let needed = piece.tokens.len();
        let best = open
            .iter()
            .enumerate()
            .filter(|(_, (room, _))| *room >= needed)
            .min_by_key(|(_, (room, _))| *room)
            .map(|(index, _)| index);
        let index = best.unwrap_or_else(|| {
            if open.len() == OPEN_ROWS {
                // The fullest row makes place.
                let fullest = (0..open.len()).min_by_key(|i| open[*i].0).unwrap_or(0);
                full.push(open.remove(fullest).1);
            }
            open.push((row_tokens, PackedRow::default()));
            open.len() - 1
        });
        open[index].0 -= needed;
        open[index].1.pieces.push(piece);
        if open[index].0 == 0 {
            full.push(open.remove(index).1);
        }
    }
    full.extend(open.into_iter().map(|(_, row)| row));
    full
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn documents(lengths: &[usize]) -> Vec<Document> {
        lengths
            .iter()
            .map(|&n| Document { ids: vec![0; n], loss_mask: vec![true; n], origin: String::new() })
            .collect()
    }

    proptest! {
        #[test]
        fn every_token_is_in_exactly_one_row(
            lengths in proptest::collection::vec(1_usize..300, 1..200), row in 1_usize..128
        ) {
            let documents = documents(&lengths);
            let rows = arrange(pieces(&documents, row, Overlong::Split), row, Packing::BestFit);
            let mut seen: Vec<Vec<u32>> = lengths.iter().map(|&n| vec![0; n]).collect();
            for packed in &rows {
                prop_assert!(packed.tokens() <= row && packed.tokens() > 0);
                for piece in &packed.pieces {
                    piece.tokens.clone().for_each(|t| seen[piece.document][t] += 1);
                }
            }
            prop_assert!(seen.iter().flatten().all(|count| *count == 1));
        }
    }

    #[test]
    fn many_short_documents_fill_rows_almost_completely() {
        let lengths: Vec<usize> = (0..2000).map(|i| 20 + (i * 37) % 400).collect();
        let rows =
            arrange(pieces(&documents(&lengths), 1024, Overlong::Split), 1024, Packing::BestFit);
        let fill = fill(&rows, 1024);
        assert!(fill > 0.97, "fill {fill}");
    }

    #[test]
    fn long_documents_are_split_truncated_or_dropped() {
        let documents = documents(&[5, 12, 10]);
        let lengths = |packing, overlong| -> Vec<usize> {
            arrange(pieces(&documents, 10, overlong), 10, packing)
                .iter()
                .map(PackedRow::tokens)
                .collect()
        };
        assert_eq!(lengths(Packing::None, Overlong::Split), [5, 10, 2, 10]);
        assert_eq!(lengths(Packing::None, Overlong::Truncate), [5, 10, 10]);
        assert_eq!(lengths(Packing::None, Overlong::Drop), [5, 10]);
        assert_eq!(lengths(Packing::BestFit, Overlong::Split), [10, 10, 7]);
    }

    #[test]
    fn a_piece_is_learned_if_a_token_after_its_first_one_is() {
        let mask = [false, false, false, true, true, false, false, true];
        let document = Document { loss_mask: mask.to_vec(), ..documents(&[8]).remove(0) };
        let learned = |row| -> Vec<bool> {
            let all = pieces(std::slice::from_ref(&document), row, Overlong::Split);
            all.map(|piece| piece.is_learned(std::slice::from_ref(&document))).collect()
        };
        assert_eq!(learned(8), [true]);
        assert_eq!(learned(4), [true, true]);
        assert_eq!(learned(3), [false, true, true]);
        assert_eq!(learned(2), [false, true, false, true]);
        assert_eq!(learned(1), [false; 8]);
    }
}
