//! One packed row with its positions.

use std::ops::Range;

use longdraft_kernels::random::CounterRng;
use longdraft_kernels::token_ranges::TokenRanges;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::document::Document;
use crate::packing::PackedRow;

/// Anchor-offset positions ("sinkpi-slicing", LongSpec): the first `a` tokens of a short document
/// keep their positions, the rest move up by a random offset, so that short rows exercise large
/// rotary positions. `a ~ U{0..4}`, `o ~ U{0 ..= max(max_position − length, 0)}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AnchorOffset {
    /// Off: positions are 0, 1, 2, ...
    pub enabled: bool,
    /// Draw anew in every epoch. Captured features keep the positions of their capture.
    pub redraw: bool,
    /// Longer documents are left alone, in tokens.
    pub max_document: usize,
    /// Largest position that an offset may reach; the target's context also bounds it.
    pub max_position: usize,
}

impl Default for AnchorOffset {
    fn default() -> Self {
        Self { enabled: true, redraw: true, max_document: 1200, max_position: 30_000 }
    }
}

/// Largest number of anchor tokens.
const MAX_ANCHORS: u64 = 4;

impl AnchorOffset {
    /// Anchors and offset of one document of `length` tokens.
    pub fn draw(&self, length: usize, rng: &mut CounterRng) -> (usize, usize) {
        if !self.enabled || length > self.max_document {
            return (0, 0);
        }
        let anchors = rng.below(MAX_ANCHORS + 1) as usize;
        let offset = rng.below(self.max_position.saturating_sub(length) as u64 + 1) as usize;
        (anchors, offset)
    }
}

/// Position ids of `length` tokens: `t` below `anchors`, `t + offset` from there on.
pub fn anchored_positions(length: usize, anchors: usize, offset: usize) -> Vec<u32> {
    (0..length).map(|t| if t < anchors { t as u32 } else { (t + offset) as u32 }).collect()
}

/// A micro-batch: packed tokens and what is learned of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token ids, `[T]`.
    pub ids: Vec<u32>,
    /// Rotary positions, `[T]`.
    pub position_ids: Vec<u32>,
    /// A run of equal ids is a document; negative is padding, `[T]`.
    pub document_ids: Vec<i32>,
    /// Rows `t` that are learned, ascending; the label of `t` is `ids[t + 1]`.
    pub learned: Vec<u32>,
    /// Whether each token is supervised, `[T]`; the bit belongs to its own token.
    pub loss_mask: Vec<bool>,
    /// `file:line` of every piece.
    pub origins: Vec<String>,
    /// Which packed row this is; keys stored features.
    pub row: usize,
    /// What is drawn anew for it belongs to this epoch.
    pub epoch: u64,
    /// What the documents of the row are pieces of; keys what is drawn for them.
    pub pieces: Vec<Piece>,
    /// Tokens whose rows are learned here where several processes share the row; `None`: all.
    pub own: Option<TokenRanges>,
}

impl Batch {
    /// One document of these tokens, `[T]`, from position 0 on, all of it supervised; `learned` is empty.
    pub fn of_document(ids: impl IntoIterator<Item = u32>) -> Self {
        let ids: Vec<u32> = ids.into_iter().collect();
        Self {
            position_ids: (0..ids.len() as u32).collect(),
            document_ids: vec![0; ids.len()],
            loss_mask: vec![true; ids.len()],
            ids,
            ..Self::default()
        }
    }

    /// Whether row `t` is learned here, if it is learned at all.
    pub fn owns(&self, t: usize) -> bool {
        self.own.as_ref().is_none_or(|own| own.contains(t))
    }

    /// Labels of the learned rows.
    pub fn labels(&self) -> Vec<u32> {
        self.learned.iter().map(|&t| self.ids[t as usize + 1]).collect()
    }

    /// Supervises no other tokens than those at these places of their piece, counted from 0 whatever the rotary positions are.
    pub fn supervise_within(&mut self, places: &Range<usize>) {
        let of_pieces = self.pieces.iter().flat_map(|piece| 0..piece.tokens);
        for (supervised, place) in self.loss_mask.iter_mut().zip(of_pieces) {
            *supervised &= places.contains(&place);
        }
        let mask = &self.loss_mask;
        self.learned.retain(|&t| mask[t as usize + 1]);
    }
}

/// A piece of a text's document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Which document.
    pub document: usize,
    /// The document's token that comes first here.
    pub start: usize,
    /// Tokens.
    pub tokens: usize,
}

impl Piece {
    /// Key of what is drawn for it in an epoch.
    pub fn key(&self, epoch: u64) -> [u64; 3] {
        [epoch, self.document as u64, self.start as u64]
    }
}

/// How positions of a batch are drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Draws {
    /// Key of the positions: the run's, or that of the capture which the features are of.
    pub position_seed: u64,
    /// Positions, `max_position` already bounded by the target's context.
    pub anchor: AnchorOffset,
}

/// Epochs of random choices; stored features pin the positions' one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrawEpochs {
    /// Of the positions.
    pub positions: u64,
    /// Of everything else.
    pub batch: u64,
}

impl Batch {
    /// Lays a packed row out and makes its draws.
    pub fn from_row(
        row_index: usize,
        row: &PackedRow,
        documents: &[Document],
        draws: &Draws,
        epochs: DrawEpochs,
    ) -> Self {
        let mut batch = Self { row: row_index, epoch: epochs.batch, ..Self::default() };
        for (slot, piece) in row.pieces.iter().enumerate() {
            let document = &documents[piece.document];
            let length = piece.tokens.len();
            let place =
                Piece { document: piece.document, start: piece.tokens.start, tokens: length };
            let key = place.key(epochs.positions);
            let mut rng = CounterRng::new(draws.position_seed, "anchor", &key);
            let (anchors, offset) = draws.anchor.draw(length, &mut rng);
            let start = batch.ids.len();
            batch.ids.extend(&document.ids[piece.tokens.clone()]);
            batch.position_ids.extend(anchored_positions(length, anchors, offset));
            batch.document_ids.extend(std::iter::repeat_n(slot as i32, length));
            let labels = &document.loss_mask[piece.tokens.clone()];
            let learned = (1..length).filter(|&t| labels[t]).map(|t| (start + t - 1) as u32);
            batch.learned.extend(learned);
            batch.loss_mask.extend(labels);
            batch.pieces.push(place);
            batch.origins.push(document.origin.clone());
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packing::{Overlong, Packing, arrange, pieces};

    fn documents() -> Vec<Document> {
        [3_usize, 5, 9]
            .iter()
            .map(|&n| Document {
                ids: (0..n as u32).collect(),
                loss_mask: (0..n).map(|t| t != 2).collect(),
                origin: n.to_string(),
            })
            .collect()
    }

    fn draws() -> Draws {
        Draws {
            position_seed: 1,
            anchor: AnchorOffset {
                enabled: true,
                redraw: true,
                max_document: 8,
                max_position: 100,
            },
        }
    }

    fn batches(draws: &Draws, epoch: u64) -> Vec<Batch> {
        let documents = documents();
        let epochs = DrawEpochs { positions: epoch, batch: epoch };
        let rows = arrange(pieces(&documents, 9, Overlong::Split), 9, Packing::BestFit);
        let rows = rows.iter().enumerate();
        rows.map(|(i, row)| Batch::from_row(i, row, &documents, draws, epochs)).collect()
    }

    #[test]
    fn labels_never_cross_documents_and_follow_the_mask() {
        for batch in batches(&draws(), 0) {
            for &t in &batch.learned {
                let t = t as usize;
                assert_eq!(batch.document_ids[t], batch.document_ids[t + 1]);
                assert_ne!(batch.ids[t + 1], 2, "token 2 of every document is masked");
            }
            assert_eq!(batch.labels().len(), batch.learned.len());
            let masked = batch.ids.iter().zip(&batch.loss_mask);
            assert!(masked.clone().all(|(id, learned)| *learned == (*id != 2)));
            assert_eq!(masked.len(), batch.ids.len());
        }
        let learned: usize = batches(&draws(), 0).iter().map(|b| b.learned.len()).sum();
        assert_eq!(learned, (3 - 2) + (5 - 2) + (9 - 2));
    }

    #[test]
    fn places_count_from_the_beginning_of_each_piece() {
        let whole = batches(&draws(), 0);
        let within = |places: Range<usize>| {
            let mut batches = batches(&draws(), 0);
            batches.iter_mut().for_each(|batch| batch.supervise_within(&places));
            batches
        };
        // The token ids of these documents are the places of their tokens.
        for batch in within(3..5) {
            assert!(batch.labels().iter().all(|id| (3..5).contains(id)));
            let masked = batch.ids.iter().zip(&batch.loss_mask);
            assert!(masked.clone().all(|(id, on)| *on == (3..5).contains(id)));
        }
        let learned = |batches: &[Batch]| batches.iter().map(|b| b.learned.len()).sum::<usize>();
        let parts = [0..3, 3..5, 5..usize::MAX].map(|places| learned(&within(places)));
        assert_eq!(parts.iter().sum::<usize>(), learned(&whole));
        assert_eq!(parts, [3, 4, 4]);
        assert_eq!(within(0..usize::MAX), whole);
    }

    #[test]
    fn positions_keep_anchors_and_stay_below_the_bound() {
        for batch in batches(&draws(), 3) {
            assert!(batch.position_ids.iter().all(|p| *p <= 100));
        }
        // The document of 9 tokens is longer than max_document.
        let long = batches(&draws(), 3).into_iter().find(|b| b.origins == ["9"]).expect("its row");
        assert_eq!(long.position_ids, (0..9).collect::<Vec<u32>>());
        assert_eq!(anchored_positions(4, 2, 10), [0, 1, 12, 13]);
    }

    #[test]
    fn draws_repeat_within_an_epoch_and_change_with_it() {
        assert_eq!(batches(&draws(), 4), batches(&draws(), 4));
        assert_ne!(batches(&draws(), 4), batches(&draws(), 5));
    }
}
