//! One rank's part of a row that several ranks run together (sequence parallel).
//!
//! A rank projects its own tokens and attends from them to the keys and values of all, which are
//! gathered layer by layer: hidden states and what is made of them are `1/N` of the row's, keys and
//! values of one layer are whole. A row's bits do not depend on the rows beside it, so that every
//! token has the bits of the undivided row. Where a draft learns keys that other ranks attend to, the
//! gradients take the same way back. Which tokens a rank has, [`super::row_cut`] says.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use longdraft_kernels::attention::KeyRanges;
use longdraft_kernels::collectives::DeviceRanks;
use longdraft_kernels::differentiable;
use longdraft_kernels::rows::select_rows;
use longdraft_kernels::token_ranges::TokenRanges;

use super::row_cut::RowCut;
use super::spread::Ranks;
use crate::error::{Result, refused};

/// The ranks that share a row, each with some pieces of it that are as much work as those of every other.
#[derive(Debug, Clone)]
pub struct RowPart {
    ranks: Arc<dyn Ranks>,
    cut: Arc<RowCut>,
    /// How many tokens after its own this rank has states of.
    ahead: usize,
}

impl RowPart {
    /// This rank's part of a row of these documents, `[T]`: a run of equal ids is one, negative ids are padding.
    pub fn of(ranks: &Arc<dyn Ranks>, document_ids: &[i32]) -> Self {
        let cut = Arc::new(RowCut::even(document_ids, ranks.size()));
        Self { ranks: Arc::clone(ranks), cut, ahead: 0 }
    }

    /// The same where states of up to `count` tokens after each of its pieces are known here.
    #[must_use]
    pub fn seeing_ahead(&self, count: usize) -> Self {
        Self { ahead: count, ..self.clone() }
    }

    /// This rank's tokens; parts differ by one token at most.
    pub fn rows(&self) -> &TokenRanges {
        &self.cut.parts()[self.ranks.rank()]
    }

    /// The tokens whose states are known here: its own and those of [`Self::seeing_ahead`].
    pub fn known(&self) -> TokenRanges {
        self.rows().with_after(self.ahead, self.cut.tokens())
    }

    /// The ranks' devices, where these exchange such tensors themselves.
    fn devices(&self, tensor: &Tensor) -> Option<&dyn DeviceRanks> {
        self.ranks.devices().filter(|devices| devices.takes(tensor))
    }

    /// The visible keys of this rank's tokens.
    pub(super) fn ranges(&self, whole: &KeyRanges) -> KeyRanges {
        let rows: Vec<u32> = self.rows().iter().map(|row| row as u32).collect();
        whole.select(&rows)
    }

    /// Whether the row has `tokens`, and every rank at least one of them.
    pub(super) fn check(&self, tokens: usize) -> Result<()> {
        let (ranks, cut) = (self.ranks.size(), self.cut.tokens());
        if cut != tokens || tokens < ranks {
            return Err(refused(format!(
                "a row of {tokens} tokens, cut as one of {cut} over {ranks} ranks"
            )));
        }
        Ok(())
    }

    /// Everybody's rows of `[t, ..]` in f32, in the order of the row: `[T, ..]`, in the gradient
    /// graph of the own rows: what all ranks' losses ask of them is summed in the order of the ranks, or where
    /// devices exchange tensors, in theirs. Then every rank walks back through it, or the others wait.
    ///
    /// # Errors
    /// - there is no memory for all of them
    pub fn gather(&self, own: &Tensor) -> Result<Tensor> {
        let parts = self.gather_from_ranks(own, self.cut.longest())?;
        let whole = select_rows(&parts, &self.cut.places())?.to_dtype(DType::F32)?;
        let (part, dtype) = (self.clone(), own.dtype());
        Ok(differentiable("gather-rows", [own; 3], whole, move |gradient| {
            Ok([Some(part.sum_own(gradient)?.to_dtype(dtype)?), None, None])
        })?)
    }

    /// Everybody's rows of `[t, ..]`, one rank after the other, each filled up to `rows`: `[N·rows, ..]`; without
    /// gradients.
    fn gather_from_ranks(&self, own: &Tensor, rows: usize) -> Result<Tensor> {
        let filled = own.detach().pad_with_zeros(0, 0, rows - own.dim(0)?)?;
        if let Some(devices) = self.devices(&filled) {
            return Ok(devices.all_gather(&[filled])?[0].flatten(0, 1)?);
        }
        let mut shape = filled.dims().to_vec();
        shape[0] *= self.ranks.size();
        let values: Vec<f32> = filled.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        let mut all = vec![0.0_f32; values.len() * self.ranks.size()];
        self.ranks.all_gather(bytemuck::cast_slice(&values), bytemuck::cast_slice_mut(&mut all));
        Ok(Tensor::from_vec(all, shape, own.device())?)
    }

    /// This rank's rows of everybody's `[T, ..]`, summed: `[t, ..]`.
    fn sum_own(&self, all: &Tensor) -> candle_core::Result<Tensor> {
        let (all, own) = (all.detach().to_dtype(DType::F32)?, self.rows().len());
        let mut shape = all.dims().to_vec();
        if let Some(devices) = self.devices(&all) {
            // Nobody reads the sums of what a part is filled up with.
            shape.splice(..1, [self.ranks.size(), self.cut.longest()]);
            let blocks = select_rows(&all, &self.cut.in_equal_parts())?.reshape(shape)?;
            return devices.reduce_scatter(&blocks)?.narrow(0, 0, own);
        }
        let width: usize = shape[1..].iter().product();
        let values = select_rows(&all, &self.cut.in_parts())?.flatten_all()?.to_vec1::<f32>()?;
        let counts: Vec<usize> = self.cut.parts().iter().map(|part| part.len() * width).collect();
        shape[0] = own;
        Tensor::from_vec(self.ranks.sum_parts(&values, &counts), shape, all.device())
    }

    /// The own rows of `[t, W]` and up to `count` of those after each piece, in the order of the row and in f32; without
    /// gradients.
    ///
    /// # Errors
    /// - there is no memory for them
    pub fn with_rows_after(&self, own: &Tensor, count: usize) -> Result<Tensor> {
        let (own, lent) = (own.detach(), self.cut.lent(count));
        let most = lent.iter().map(TokenRanges::len).max().unwrap_or(0);
        if most == 0 {
            return Ok(own.to_dtype(DType::F32)?);
        }
        let (rank, rows) = (self.ranks.rank(), self.rows());
        let tokens: Vec<u32> = lent[rank].iter().map(|token| token as u32).collect();
        let others =
            self.gather_from_ranks(&select_rows(&own, &rows.places_of(&tokens)?)?, most)?;
        // The own rows stand before what the ranks lend.
        let of_lenders = |token: usize| {
            let mut lenders = lent.iter().enumerate();
            lenders
                .find_map(|(lender, lent)| Some(rows.len() + lender * most + lent.place_of(token)?))
        };
        let place = |token: usize| rows.place_of(token).or_else(|| of_lenders(token));
        let places: Option<Vec<u32>> = rows
            .with_after(count, self.cut.tokens())
            .iter()
            .map(|token| place(token).map(|place| place as u32))
            .collect();
        let places = places.ok_or_else(|| refused("a token that no rank lends"))?;
        let all = Tensor::cat(&[&own.to_dtype(others.dtype())?, &others], 0)?;
        Ok(select_rows(&all, &places)?.to_dtype(DType::F32)?)
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
}
