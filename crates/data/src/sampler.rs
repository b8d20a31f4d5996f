//! The order in which packed rows are visited; its cursor is the state that a resume needs.

use longdraft_kernels::random::CounterRng;
use serde::{Deserialize, Serialize};

/// Place in an endless sequence of epochs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Epoch, from 0.
    pub epoch: u64,
    /// Rows of this epoch already handed out.
    pub position: usize,
}

/// Shuffles rows anew each epoch, by seed and epoch alone.
#[derive(Debug, Clone)]
pub struct Sampler {
    seed: u64,
    rows: usize,
    cursor: Cursor,
    order: Vec<usize>,
}

impl Sampler {
    /// A sampler over `rows` rows that goes on at `cursor`.
    ///
    /// # Panics
    /// - `rows` is 0
    pub fn new(rows: usize, seed: u64, cursor: Cursor) -> Self {
        assert!(rows > 0, "a sampler needs rows");
        let mut sampler = Self { seed, rows, cursor, order: Vec::new() };
        sampler.order = sampler.shuffled();
        sampler
    }

    fn shuffled(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.rows).collect();
        CounterRng::new(self.seed, "row order", &[self.cursor.epoch]).shuffle(&mut order);
        order
    }

    /// Where the next row stands.
    pub fn cursor(&self) -> Cursor {
        self.cursor
    }

    /// The row after the next `skip` ones, if it is of this epoch.
    pub fn peek(&self, skip: usize) -> Option<usize> {
        self.order.get(self.cursor.position + skip).copied()
    }

    /// The next row and its epoch.
    pub fn next_row(&mut self) -> (usize, u64) {
        if self.cursor.position >= self.rows {
            self.cursor = Cursor { epoch: self.cursor.epoch + 1, position: 0 };
            self.order = self.shuffled();
        }
        let row = self.order[self.cursor.position];
        self.cursor.position += 1;
        (row, self.cursor.epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_once_an_epoch_and_resumed_equals_uninterrupted() {
        let mut whole = Sampler::new(7, 5, Cursor::default());
        let first: Vec<_> = (0..10).map(|_| whole.next_row()).collect();
        let mut seen: Vec<usize> = first[..7].iter().map(|(row, _)| *row).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..7).collect::<Vec<_>>());
        assert!(first[7..].iter().all(|(_, epoch)| *epoch == 1));
        let mut resumed = Sampler::new(7, 5, whole.cursor());
        assert_eq!(
            (0..9).map(|_| whole.next_row()).collect::<Vec<_>>(),
            (0..9).map(|_| resumed.next_row()).collect::<Vec<_>>()
        );
    }
}
