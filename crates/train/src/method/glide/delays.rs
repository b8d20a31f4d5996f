//! How far after the target's keys a token stands: a delay a token, drawn anew in every epoch.

use longdraft_data::Batch;
use longdraft_kernels::random::CounterRng;

/// How delays are drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct DelayDraws {
    /// Run key.
    pub seed: u64,
    /// Weight of delay 1, 2, ..., G.
    pub weights: Vec<f64>,
    /// One delay for all tokens of a batch instead of one a token.
    pub shared: bool,
}

impl DelayDraws {
    /// Delay δ of the target's keys to each token, `[T]`, at least 1.
    pub fn of(&self, batch: &Batch) -> Vec<u32> {
        let draw = |rng: &mut CounterRng| rng.categorical(&self.weights) as u32 + 1;
        if self.shared {
            let key = [batch.epoch, batch.row as u64];
            let delay = draw(&mut CounterRng::new(self.seed, "delay of the batch", &key));
            return vec![delay; batch.ids.len()];
        }
        let of_piece = |piece: &longdraft_data::batch::Piece| {
            let mut rng = CounterRng::new(self.seed, "delay", &piece.key(batch.epoch));
            (0..piece.tokens).map(|_| draw(&mut rng)).collect::<Vec<_>>()
        };
        batch.pieces.iter().flat_map(of_piece).collect()
    }
}

#[cfg(test)]
mod tests {
    use longdraft_data::batch::Piece;

    use super::*;

    fn batch(row: usize, epoch: u64) -> Batch {
        let pieces = [(0, 0, 3), (4, 2, 6)];
        let pieces = pieces.map(|(document, start, tokens)| Piece { document, start, tokens });
        Batch { ids: vec![0; 9], row, epoch, pieces: pieces.to_vec(), ..Batch::default() }
    }

    #[test]
    fn draws_repeat_within_an_epoch_and_change_with_it() {
        let draws = DelayDraws { seed: 1, weights: vec![1.0; 5], shared: false };
        let delays = draws.of(&batch(0, 4));
        assert_eq!(delays.len(), 9);
        assert!(delays.iter().all(|delay| (1..=5).contains(delay)), "{delays:?}");
        // Packed elsewhere, the same documents keep their delays.
        assert_eq!(delays, draws.of(&batch(7, 4)));
        assert_ne!(delays, draws.of(&batch(0, 5)));
        let shared = DelayDraws { shared: true, ..draws };
        let delays = shared.of(&batch(0, 0));
        assert!(delays.iter().all(|delay| *delay == delays[0]), "{delays:?}");
    }
}
