//! One rank's part of a row that several ranks run together (sequence parallel).
//!
//! A rank projects its own tokens and attends from them to the keys and values of all, which are
//! gathered layer by layer: hidden states and what is made of them are `1/N` of the row's, keys and
//! values of one layer are whole. A row's bits do not depend on the rows beside it, so that every
//! token has the bits of the undivided row.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use longdraft_kernels::attention::KeyRanges;

use super::spread::Ranks;
use crate::error::{ModelError, Result};

/// The ranks that share a row, each with neighbouring tokens of it.
#[derive(Debug, Clone)]
pub struct RowPart {
    ranks: Arc<dyn Ranks>,
    tokens: usize,
}

impl RowPart {
    /// This rank's part of a row of `tokens`.
    pub fn of(ranks: &Arc<dyn Ranks>, tokens: usize) -> Self {
        Self { ranks: Arc::clone(ranks), tokens }
    }

    /// This rank's tokens; parts differ by one token at most.
    pub fn rows(&self) -> Range<usize> {
        self.rows_of(self.ranks.rank())
    }

    fn rows_of(&self, rank: usize) -> Range<usize> {
        let size = self.ranks.size();
        self.tokens * rank / size..self.tokens * (rank + 1) / size
    }

    /// The visible keys of this rank's tokens.
    pub(super) fn ranges(&self, whole: &KeyRanges) -> KeyRanges {
        let rows: Vec<u32> = self.rows().map(|row| row as u32).collect();
        whole.select(&rows)
    }

    /// Whether the row has `tokens`, and every rank at least one of them.
    pub(super) fn check(&self, tokens: usize) -> Result<()> {
        let ranks = self.ranks.size();
        if self.tokens != tokens || tokens < ranks {
            return Err(ModelError::Tensor(candle_core::Error::Msg(format!(
                "a row of {tokens} tokens, cut as one of {} over {ranks} ranks",
                self.tokens
            ))));
        }
        Ok(())
    }

    /// Everybody's rows of `[t, K, D]` in f32, one part behind the other: `[T, K, D]`.
    pub(super) fn gather(&self, own: &Tensor) -> Result<Tensor> {
        let (_, heads, head_dim) = own.dims3()?;
        let width = heads * head_dim;
        let longest = self.tokens.div_ceil(self.ranks.size());
        let mut values: Vec<f32> = own.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        values.resize(longest * width, 0.0);
        let mut all = vec![0.0_f32; longest * width * self.ranks.size()];
        self.ranks.all_gather(bytemuck::cast_slice(&values), bytemuck::cast_slice_mut(&mut all));
        drop(values);
        // Shorter parts were filled up.
        let mut end = 0;
        for rank in 0..self.ranks.size() {
            let (start, count) = (rank * longest * width, self.rows_of(rank).len() * width);
            all.copy_within(start..start + count, end);
            end += count;
        }
        all.truncate(end);
        Ok(Tensor::from_vec(all, (self.tokens, heads, head_dim), own.device())?)
    }
}
