//! Bytes of text that a token stands for.
//!
//! `bytes(y | prev) = base[y] + (lead[y] and not boundary[prev])`: a piece that begins with the
//! space mark U+2581 brings a space, unless a control token stands before it. `prev` is the input
//! token at the position. The count is of normalised text.

use crate::tokenizer::{PieceKind, SentencePieces, TextTokenizer};

/// The mark that SentencePiece writes for a space.
const SPACE_MARK: char = '\u{2581}';

/// Byte counts of a vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ByteTable {
    base: Vec<u16>,
    lead: Vec<bool>,
    boundary: Vec<bool>,
    inner_marks: usize,
}

impl ByteTable {
    /// The table of a SentencePiece model over `vocabulary` ids; ids beyond the model are borders
    /// without text.
    pub fn new(pieces: &SentencePieces, vocabulary: usize) -> Self {
        let mut table = Self {
            base: vec![0; vocabulary],
            lead: vec![false; vocabulary],
            boundary: vec![true; vocabulary],
            inner_marks: 0,
        };
        for (id, piece) in pieces.pieces.iter().enumerate().take(vocabulary) {
            match piece.kind {
                PieceKind::Unknown | PieceKind::Control | PieceKind::Unused => continue,
                PieceKind::Byte => table.base[id] = 1,
                PieceKind::Normal | PieceKind::UserDefined => {
                    let rest = piece.text.strip_prefix(SPACE_MARK);
                    table.lead[id] = rest.is_some();
                    let rest = rest.unwrap_or(&piece.text);
                    table.base[id] = u16::try_from(rest.len()).unwrap_or(u16::MAX);
                    table.inner_marks += usize::from(rest.contains(SPACE_MARK));
                }
            }
            table.boundary[id] = false;
        }
        table
    }

    /// The table of a tokenizer whose tokens stand for bytes one by one; `None` for another kind,
    /// whose bytes have to be counted in the text.
    pub fn of_byte_level(tokenizer: &TextTokenizer, vocabulary: usize) -> Option<Self> {
        if !tokenizer.is_byte_level() {
            return None;
        }
        let length = |id: usize| match tokenizer.token(id as u32) {
            Some(token) if !tokenizer.is_special(id as u32) => {
                u16::try_from(token.chars().count()).unwrap_or(u16::MAX)
            }
            _ => 0,
        };
        let base: Vec<u16> = (0..vocabulary).map(length).collect();
        let boundary = base.iter().map(|length| *length == 0).collect();
        Some(Self { base, lead: vec![false; vocabulary], boundary, inner_marks: 0 })
    }

    /// Bytes of the target `token` after the input `previous`; 0 for unknown ids.
    pub fn bytes(&self, token: u32, previous: u32) -> u32 {
        let of = |values: &[bool], id: u32| values.get(id as usize).copied();
        let base = self.base.get(token as usize).copied().unwrap_or(0);
        let space =
            of(&self.lead, token).unwrap_or(false) && !of(&self.boundary, previous).unwrap_or(true);
        u32::from(base) + u32::from(space)
    }

    /// Bytes of every target of a stream, `[T − 1]`.
    pub fn of_stream(&self, tokens: &[u32]) -> Vec<u32> {
        tokens.windows(2).map(|pair| self.bytes(pair[1], pair[0])).collect()
    }

    /// Bytes of a token's text without its space, `[V]`.
    pub fn base(&self) -> &[u16] {
        &self.base
    }

    /// Whether a token begins with a space, `[V]`.
    pub fn lead(&self) -> &[bool] {
        &self.lead
    }

    /// Whether a token is a border after which a space is dropped, `[V]`.
    pub fn boundary(&self) -> &[bool] {
        &self.boundary
    }

    /// Pieces with a space mark inside, which this rule counts as 3 bytes.
    pub fn inner_marks(&self) -> usize {
        self.inner_marks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::Piece;

    #[test]
    fn kinds_spaces_and_borders_count_as_published() {
        let piece = |text: &str, kind| Piece { text: text.to_owned(), score: 0.0, kind };
        let pieces = SentencePieces::of(vec![
            piece("<s>", PieceKind::Control),
            piece("<unk>", PieceKind::Unknown),
            piece("<0x41>", PieceKind::Byte),
            piece("\u{2581}the", PieceKind::Normal),
            piece("é", PieceKind::Normal),
            piece("\u{2581}", PieceKind::Normal),
            piece("a\u{2581}b", PieceKind::UserDefined),
            piece("gone", PieceKind::Unused),
        ]);
        let table = ByteTable::new(&pieces, 10);
        let got: Vec<u32> = (0..11).map(|id| table.bytes(id, 2)).collect();
        assert_eq!(got, [0, 0, 1, 4, 2, 1, 5, 0, 0, 0, 0]);
        // After borders, unused ids and ids beyond the model the space is dropped.
        for previous in [0, 1, 7, 9, 40] {
            assert_eq!((table.bytes(3, previous), table.bytes(5, previous)), (3, 0));
        }
        assert_eq!(table.inner_marks(), 1);
        assert_eq!(table.of_stream(&[0, 3, 3, 2]), [3, 4, 1]);
    }
}
