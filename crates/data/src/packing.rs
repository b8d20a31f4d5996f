//! Whole documents into rows of `T` tokens.
//!
//! Documents longer than a row are split at its length; pieces are then placed best-fit among a
//! bounded number of open rows, in the order given. No token is lost or doubled.

use std::ops::Range;

use crate::document::Document;

/// Rows that are still being filled.
const OPEN_ROWS: usize = 64;

/// A piece of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Index of the document in the data set.
    pub document: usize,
    /// Its tokens in this row.
    pub tokens: Range<usize>,
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

/// Packs every document into rows of at most `row_tokens`.
///
/// # Panics
/// - `row_tokens` is 0
pub fn pack(documents: &[Document], row_tokens: usize) -> Vec<PackedRow> {
    assert!(row_tokens > 0, "rows hold at least one token");
    let mut open: Vec<(usize, PackedRow)> = Vec::new();
    let mut full = Vec::new();
    for (document, content) in documents.iter().enumerate() {
        let length = content.ids.len();
        for start in (0..length).step_by(row_tokens) {
            let tokens = start..(start + row_tokens).min(length);
            let needed = tokens.len();
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
            open[index].1.pieces.push(Piece { document, tokens });
            if open[index].0 == 0 {
                full.push(open.remove(index).1);
            }
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
            let rows = pack(&documents(&lengths), row);
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
        let rows = pack(&documents(&lengths), 1024);
        let tokens: usize = lengths.iter().sum();
        let fill = tokens as f64 / (rows.len() * 1024) as f64;
        assert!(fill > 0.97, "fill {fill}");
    }
}
