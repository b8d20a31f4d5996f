//! Batches of `[B, S]` inputs and targets.
//!
//! `sequential`, as published: a cursor takes `B S + 1` tokens a micro-batch and goes on after
//! them, so one token a micro-batch is never an input; it wraps at the end.
//! `shuffled`: blocks of `S` in a seeded permutation per epoch (a Feistel network over the block
//! index), nothing dropped; the last block begins early where `S` does not divide the stream.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{START_OF_DOCUMENT, TokenStream};
use crate::error::{DataError, Result};
use longdraft_kernels::random::CounterRng;

/// Order of the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoaderKind {
    /// One after the other.
    #[default]
    Sequential,
    /// Blocks in a new order every epoch.
    Shuffled,
}

/// Where a loader stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Position {
    /// Passes over the stream.
    pub epoch: u64,
    /// Next token (sequential) or block (shuffled) of the pass.
    pub index: u64,
}

/// `B` sequences of `S` tokens, laid end to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// `[B S]`
    pub inputs: Vec<u32>,
    /// The next tokens, `[B S]`.
    pub targets: Vec<u32>,
}

impl Batch {
    /// Some of its sequences of `length` tokens.
    #[must_use]
    pub fn sequences(&self, sequences: std::ops::Range<usize>, length: usize) -> Self {
        let tokens = sequences.start * length..sequences.end * length;
        Self {
            inputs: self.inputs[tokens.clone()].to_vec(),
            targets: self.targets[tokens].to_vec(),
        }
    }

    /// A number for each input that is equal within a document of a sequence, `[B S]`.
    pub fn document_ids(&self, sequence: usize) -> Vec<i32> {
        let mut document = 0;
        let ids = self.inputs.iter().enumerate().map(|(index, token)| {
            let starts = *token == u32::from(START_OF_DOCUMENT);
            document += i32::from(starts || index % sequence.max(1) == 0);
            document
        });
        ids.collect()
    }
}

impl LoaderKind {
    /// The next `sequences` sequences of `length` tokens, `[B, S]`. `position` is then that of the token after them.
    /// The order of shuffled blocks is a function of `seed`.
    ///
    /// # Errors
    /// - a file cannot be read, or the stream is shorter than a shuffled block
    pub fn next_batch(
        self,
        (stream, seed): (&TokenStream, u64),
        position: &mut Position,
        (sequences, length): (usize, usize),
    ) -> Result<Batch> {
        match self {
            Self::Sequential => sequential(stream, position, sequences * length),
            Self::Shuffled => shuffled((stream, seed), position, (sequences, length)),
        }
    }
}

/// So many inputs, and the token after them.
fn sequential(stream: &TokenStream, position: &mut Position, inputs: usize) -> Result<Batch> {
    let tokens = stream.read_wrapping(position.index as usize, inputs + 1)?;
    let (next, all) = (position.index + inputs as u64 + 1, stream.len() as u64);
    *position = Position { epoch: position.epoch + next / all, index: next % all };
    let wide: Vec<u32> = tokens.into_iter().map(u32::from).collect();
    Ok(Batch { inputs: wide[..inputs].to_vec(), targets: wide[1..].to_vec() })
}

/// Whole blocks in the order of the seed.
fn shuffled(
    (stream, seed): (&TokenStream, u64),
    position: &mut Position,
    (sequences, length): (usize, usize),
) -> Result<Batch> {
    let targets = stream.len() - 1;
    if targets < length || length == 0 {
        let path = stream.paths().next().map(ToOwned::to_owned).unwrap_or_default();
        let problem = format!("{} tokens hold no sequence of {length}", stream.len());
        return Err(DataError::shards(path, problem));
    }
    let blocks = targets.div_ceil(length) as u64;
    let mut batch = Batch { inputs: Vec::new(), targets: Vec::new() };
    for _ in 0..sequences {
        if position.index >= blocks {
            *position = Position { epoch: position.epoch + 1, index: 0 };
        }
        let block = permuted(position.index, blocks, seed, position.epoch);
        let start = (block as usize * length).min(targets - length);
        let tokens = stream.read(start..start + length + 1)?;
        batch.inputs.extend(tokens[..length].iter().map(|token| u32::from(*token)));
        batch.targets.extend(tokens[1..].iter().map(|token| u32::from(*token)));
        position.index += 1;
    }
    Ok(batch)
}

/// Place `index` of a permutation of `0..count`: four Feistel rounds over the next even power of
/// two, repeated until the value lies in the range.
fn permuted(index: u64, count: u64, seed: u64, epoch: u64) -> u64 {
    let bits = (64 - count.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1_u64 << bits) - 1;
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> bits, value & mask);
        for round in 0..4 {
            let mix = CounterRng::new(seed, "shuffled blocks", &[epoch, round, right]).next_u64();
            (left, right) = (right, left ^ (mix & mask));
        }
        value = left << bits | right;
        if value < count {
            return value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::write_shard;
    use super::*;

    fn stream(tokens: &[u16]) -> (tempfile::TempDir, TokenStream) {
        let dir = tempfile::tempdir().expect("tempdir");
        write_shard(&dir.path().join("a.bin"), tokens).expect("written");
        let stream = TokenStream::open(&[dir.path().to_path_buf()]).expect("stream");
        (dir, stream)
    }

    #[test]
    fn a_permutation_holds_every_place_once_and_differs_by_epoch() {
        for count in [1, 2, 3, 17, 64, 100] {
            for epoch in 0..3 {
                let mut places: Vec<u64> =
                    (0..count).map(|i| permuted(i, count, 5, epoch)).collect();
                places.sort_unstable();
                assert!(places.into_iter().eq(0..count));
            }
        }
        let order = |epoch| (0..50).map(|i| permuted(i, 50, 5, epoch)).collect::<Vec<_>>();
        assert_ne!(order(0), order(1));
    }

    #[test]
    fn shuffled_blocks_drop_nothing_and_go_on_from_their_position() -> Result<()> {
        let tokens: Vec<u16> = (0..24).collect();
        let (_dir, stream) = stream(&tokens);
        let next = |position: &mut Position, sizes| {
            LoaderKind::Shuffled.next_batch((&stream, 9), position, sizes)
        };
        let (mut position, mut seen) = (Position::default(), Vec::new());
        for _ in 0..3 {
            let batch = next(&mut position, (2, 4))?;
            assert!(batch.inputs.iter().zip(&batch.targets).all(|(a, b)| a + 1 == *b));
            seen.extend(batch.targets);
        }
        seen.sort_unstable();
        seen.dedup();
        assert!(seen.into_iter().eq(1..24));
        let mut again = position;
        assert_eq!(next(&mut position, (5, 4))?, next(&mut again, (5, 4))?);
        assert!(next(&mut position, (1, 24)).is_err());
        Ok(())
    }

    #[test]
    fn a_sequential_cursor_skips_one_input_a_batch_and_wraps() -> Result<()> {
        let (_dir, stream) = stream(&[1, 2, 3, 4, 5, 6, 7]);
        let mut position = Position::default();
        let next = |position: &mut Position, sizes| {
            LoaderKind::Sequential.next_batch((&stream, 0), position, sizes)
        };
        assert_eq!(next(&mut position, (1, 4))?.inputs, [1, 2, 3, 4]);
        assert_eq!(position, Position { epoch: 0, index: 5 });
        let batch = next(&mut position, (2, 2))?;
        assert_eq!((batch.inputs, batch.targets), (vec![6, 7, 1, 2], vec![7, 1, 2, 3]));
        assert_eq!(position, Position { epoch: 1, index: 3 });
        Ok(())
    }

    #[test]
    fn documents_of_a_sequence_are_told_apart() {
        let batch = Batch { inputs: vec![1, 5, 1, 6, 7, 8], targets: vec![0; 6] };
        assert_eq!(batch.document_ids(3), [1, 1, 2, 3, 3, 3]);
    }
}
