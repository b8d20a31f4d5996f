//! A product that logits are made of, with the gradients of its factors.

use candle_core::{Result, Tensor};

use crate::cuda::product::{add_product, product};
use crate::factors::{as_factor, weight_factor};
use crate::linear::factor_type;
use crate::rows::select_rows;

/// States `[R, K]` times a head `[V, K]`.
pub(super) struct Product {
    /// As they are multiplied, in the order of the chunks.
    states: Tensor,
    /// As it is multiplied.
    head: Tensor,
    /// Of every chunk, where the states train.
    d_states: Option<Vec<Tensor>>,
    trains_head: bool,
    /// The sum of all chunks.
    d_head: Option<Tensor>,
}

impl Product {
    /// The product of rows in this order, if it is not their own.
    pub(super) fn new(states: &Tensor, head: &Tensor, order: Option<&[u32]>) -> Result<Self> {
        let factors = factor_type(states, head.dtype());
        let as_multiplied = as_factor(states, factors)?;
        Ok(Self {
            states: match order {
                Some(order) => select_rows(&as_multiplied, order)?,
                None => as_multiplied,
            },
            head: weight_factor(head, factors)?,
            d_states: states.track_op().then(Vec::new),
            trains_head: head.track_op(),
            d_head: None,
        })
    }

    /// The head as it is multiplied.
    pub(super) fn head(&self) -> &Tensor {
        &self.head
    }

    /// States of some rows as they are multiplied.
    pub(super) fn states(&self, (first, rows): (usize, usize)) -> Result<Tensor> {
        self.states.narrow(0, first, rows)
    }

    /// Logits of some rows, or those of another product with this one added to them in place.
    pub(super) fn onto(&self, sum: Option<Tensor>, rows: (usize, usize)) -> Result<Tensor> {
        let (states, head) = (self.states(rows)?, self.head.t()?);
        let Some(sum) = sum else { return product(&states, &head) };
        add_product(&sum, &states, &head)?;
        Ok(sum)
    }

    /// Takes the gradient of the next chunk's logits. That of the head is added to the chunks before by its product.
    pub(super) fn take(&mut self, gradient: &Tensor, rows: (usize, usize)) -> Result<()> {
        let gradient = gradient.to_dtype(self.states.dtype())?;
        if let Some(d_states) = &mut self.d_states {
            d_states.push(product(&gradient, &self.head)?);
        }
        if self.trains_head {
            let (turned, states) = (gradient.t()?, self.states(rows)?);
            match &self.d_head {
                Some(sum) => add_product(sum, &turned, &states)?,
                None => self.d_head = Some(product(&turned, &states)?),
            }
        }
        Ok(())
    }

    /// Gradients of the states, whose rows went to `places` unless they came in their order, and of the head.
    pub(super) fn gradients(self, places: Option<&[u32]>) -> Result<[Option<Tensor>; 2]> {
        let Some(parts) = self.d_states else { return Ok([None, self.d_head]) };
        let mut all = Tensor::cat(&parts, 0)?;
        drop(parts);
        if let Some(places) = places {
            all = select_rows(&all, places)?;
        }
        Ok([Some(all), self.d_head])
    }
}
