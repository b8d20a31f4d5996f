//! One rank's part of a row that several ranks run together (sequence parallel).
//!
//! A rank projects its own tokens and attends from them to the keys and values of all, which are
//! gathered layer by layer: hidden states and what is made of them are `1/N` of the row's, keys and
//! values of one layer are whole. A row's bits do not depend on the rows beside it, so that every
//! token has the bits of the undivided row. Where a draft learns keys that other ranks attend to, the
//! gradients take the same way back.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use longdraft_kernels::attention::KeyRanges;
use longdraft_kernels::collectives::DeviceRanks;
use longdraft_kernels::differentiable;

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

    /// Tokens of the longest part.
    fn longest(&self) -> usize {
        self.tokens.div_ceil(self.ranks.size())
    }

    /// A part's rows and zeros up to as many as the longest part has.
    fn filled_up(&self, rows: &Tensor) -> candle_core::Result<Tensor> {
        rows.pad_with_zeros(0, 0, self.longest() - rows.dim(0)?)
    }

    /// The ranks' devices, where these exchange such tensors themselves.
    fn devices(&self, tensor: &Tensor) -> Option<&dyn DeviceRanks> {
        self.ranks.devices().filter(|devices| devices.takes(tensor))
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

    /// Everybody's rows of `[t, K, D]` in f32, one part after the other: `[T, K, D]`, in the gradient
    /// graph of the own rows: what all ranks' losses ask of them is summed in the order of the ranks, or where
    /// devices exchange tensors, in theirs. Then every rank walks back through it, or the others wait.
    ///
    /// # Errors
    /// - the rows are not three-dimensional, or there is no memory for all of them
    pub fn gather(&self, own: &Tensor) -> Result<Tensor> {
        let whole = self.gathered(own)?;
        let (part, dims, dtype) = (self.clone(), own.dims().to_vec(), own.dtype());
        Ok(differentiable("gather-rows", [own; 3], whole, move |gradient| {
            let own = part.sum_own(gradient)?.reshape(dims.as_slice())?.to_dtype(dtype)?;
            Ok([Some(own), None, None])
        })?)
    }

    /// This rank's rows of everybody's `[T, K, D]`, summed.
    fn sum_own(&self, all: &Tensor) -> candle_core::Result<Tensor> {
        let (_, heads, head_dim) = all.dims3()?;
        if let Some(devices) = self.devices(all) {
            let blocks = (0..self.ranks.size()).map(|rank| {
                let rows = self.rows_of(rank);
                self.filled_up(&all.narrow(0, rows.start, rows.len())?)
            });
            let blocks = Tensor::stack(&blocks.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
            let own = devices.reduce_scatter(&blocks.to_dtype(DType::F32)?)?;
            return own.narrow(0, 0, self.rows().len());
        }
        let width = heads * head_dim;
        let values: Vec<f32> = all.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        let counts = (0..self.ranks.size()).map(|rank| self.rows_of(rank).len() * width);
        let own = self.ranks.sum_parts(&values, &counts.collect::<Vec<_>>());
        Tensor::from_vec(own, (self.rows().len(), heads, head_dim), all.device())
    }

    /// The own rows of `[t, W]` and up to `count` of those after them, in f32; without gradients.
    ///
    /// # Errors
    /// - the rows are no matrix
    pub fn with_rows_after(&self, own: &Tensor, count: usize) -> Result<Tensor> {
        let (rows, width) = own.dims2()?;
        let lead = count.min(self.longest());
        if let Some(devices) = self.devices(own).filter(|_| lead > 0) {
            return self.with_rows_on(devices, own, (count, lead));
        }
        let first = own.narrow(0, 0, lead.min(rows))?.to_dtype(DType::F32)?;
        let mut values: Vec<f32> = first.flatten_all()?.to_vec1()?;
        values.resize(lead * width, 0.0);
        let mut all = vec![0.0_f32; lead * width * self.ranks.size()];
        self.ranks.all_gather(bytemuck::cast_slice(&values), bytemuck::cast_slice_mut(&mut all));
        let mut later = Vec::new();
        let mut wanted = count.min(self.tokens - self.rows().end);
        for rank in self.ranks.rank() + 1..self.ranks.size() {
            let taken = wanted.min(self.rows_of(rank).len()).min(lead);
            later.extend_from_slice(&all[rank * lead * width..][..taken * width]);
            wanted -= taken;
        }
        let own = own.to_dtype(DType::F32)?;
        if later.is_empty() {
            return Ok(own);
        }
        let count = later.len() / width;
        let later = Tensor::from_vec(later, (count, width), own.device())?;
        Ok(Tensor::cat(&[own, later], 0)?)
    }

    /// The same on the devices; `lead` rows of every rank are gathered.
    fn with_rows_on(
        &self,
        devices: &dyn DeviceRanks,
        own: &Tensor,
        (count, lead): (usize, usize),
    ) -> Result<Tensor> {
        let own = own.detach();
        let rows = own.dim(0)?.min(lead);
        let first = own.narrow(0, 0, rows)?.pad_with_zeros(0, 0, lead - rows)?;
        let all = devices.all_gather(&[first])?;
        let mut parts = vec![own];
        let mut wanted = count.min(self.tokens - self.rows().end);
        for rank in self.ranks.rank() + 1..self.ranks.size() {
            let taken = wanted.min(self.rows_of(rank).len()).min(lead);
            if taken > 0 {
                parts.push(all[0].get(rank)?.narrow(0, 0, taken)?);
            }
            wanted -= taken;
        }
        Ok(Tensor::cat(&parts, 0)?.to_dtype(DType::F32)?)
    }

    /// Sums of everybody's values, in the order of the ranks.
    pub fn sum(&self, values: &[f64]) -> Vec<f64> {
        let mut all = vec![0.0_f64; values.len() * self.ranks.size()];
        self.ranks.all_gather(bytemuck::cast_slice(values), bytemuck::cast_slice_mut(&mut all));
        let mut sums = vec![0.0; values.len()];
        for values in all.chunks(values.len().max(1)) {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        sums
    }

    /// Everybody's rows of `[t, K, D]` in f32, one part after the other.
    fn gathered(&self, own: &Tensor) -> Result<Tensor> {
        let (_, heads, head_dim) = own.dims3()?;
        if let Some(devices) = self.devices(own) {
            let all = devices.all_gather(&[self.filled_up(&own.detach())?])?;
            let parts = (0..self.ranks.size())
                .map(|rank| all[0].get(rank)?.narrow(0, 0, self.rows_of(rank).len()));
            let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
            return Ok(Tensor::cat(&parts, 0)?.to_dtype(DType::F32)?);
        }
        let width = heads * head_dim;
        let longest = self.longest();
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
