//! A product that logits are made of, chunk by chunk.

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var};

use super::indices;
use crate::dispatch::fused;
use crate::linear::factor_type;
use crate::matrix::Head;

/// A tensor that begins a graph, or a frozen one.
pub(super) enum Leaf {
    Trained(Var),
    Frozen(Tensor),
}

impl Leaf {
    pub(super) fn new(tensor: &Tensor, trained: bool) -> Result<Self> {
        Ok(if trained {
            Self::Trained(Var::from_tensor(tensor)?)
        } else {
            Self::Frozen(tensor.clone())
        })
    }

    pub(super) fn tensor(&self) -> &Tensor {
        match self {
            Self::Trained(var) => var.as_tensor(),
            Self::Frozen(tensor) => tensor,
        }
    }
}

/// A product that logits are made of, with the gradients of the chunks so far.
pub(super) struct Product<'a> {
    hidden: &'a Tensor,
    head: Head<'a>,
    /// The head in the type of the products; `None` where fused products read it as it is held.
    pub(super) factor: Option<Tensor>,
    /// The head as chunks read it; `None` where these are blocks.
    pub(super) leaf: Option<Leaf>,
    /// In the order of the chunks.
    d_hidden: Vec<Tensor>,
    d_head: Option<Tensor>,
}

impl<'a> Product<'a> {
    pub(super) fn new(&(hidden, head): &(&'a Tensor, Head<'a>)) -> Result<Self> {
        let (factor, leaf) = match head {
            Head::Stored(_) if fused(&[hidden]) => (None, None),
            head => {
                let (factor, leaf) = Self::of_tensor(hidden, &head.to_tensor()?)?;
                (factor, Some(leaf))
            }
        };
        Ok(Self { hidden, head, factor, leaf, d_hidden: Vec::new(), d_head: None })
    }

    /// A head's factor, and the head as chunks read it.
    fn of_tensor(hidden: &Tensor, head: &Tensor) -> Result<(Option<Tensor>, Leaf)> {
        // Turned into the type of the products once, not for every chunk; a head that trains gets its
        // gradients in its own type, as a chunk's are rounded before they are added.
        let as_factor = || head.detach().to_dtype(factor_type(hidden, head.dtype()))?.contiguous();
        let factor = (!fused(&[hidden])).then(as_factor).transpose()?;
        let leaf = if !head.track_op() {
            Leaf::Frozen(match &factor {
                Some(factor) => factor.clone(),
                None => head.contiguous()?,
            })
        } else if head.is_variable() {
            Leaf::Trained(Var::from_tensor(head)?)
        } else {
            Leaf::new(&head.detach(), true)?
        };
        Ok((factor, leaf))
    }

    /// The head that a chunk is multiplied with.
    pub(super) fn head_of_chunks(&self) -> Head<'_> {
        self.leaf.as_ref().map_or(self.head, |leaf| leaf.tensor().into())
    }

    /// Hidden states of some rows.
    pub(super) fn part(&self, rows: &[u32], reordered: bool) -> Result<Leaf> {
        let hidden = self.hidden;
        let part = if reordered {
            hidden.index_select(&indices(rows, hidden)?, 0)?
        } else {
            hidden.narrow(0, rows[0] as usize, rows.len())?
        };
        Leaf::new(&part.detach(), hidden.track_op())
    }

    /// Adds the gradients of a chunk.
    pub(super) fn add(&mut self, part: &Leaf, gradients: &GradStore) -> Result<()> {
        if let Leaf::Trained(hidden) = part {
            self.d_hidden.push(match gradients.get(hidden) {
                Some(gradient) => gradient.clone(),
                None => hidden.zeros_like()?,
            });
        }
        if let Some(Leaf::Trained(head)) = &self.leaf
            && let Some(gradient) = gradients.get(head)
        {
            let wide = if gradient.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            let gradient = gradient.to_dtype(wide)?;
            self.d_head = Some(match &self.d_head {
                Some(sum) => (sum + gradient)?,
                None => gradient,
            });
        }
        Ok(())
    }

    /// The gradient of hidden states, whose rows went to `places` unless they came in their order.
    pub(super) fn d_hidden(&self, places: Option<&[u32]>) -> Result<Option<Tensor>> {
        if !self.hidden.track_op() {
            return Ok(None);
        }
        if self.d_hidden.is_empty() {
            return self.hidden.zeros_like().map(Some);
        }
        let all = Tensor::cat(&self.d_hidden, 0)?;
        Ok(Some(match places {
            Some(places) => all.index_select(&indices(places, self.hidden)?, 0)?,
            None => all,
        }))
    }

    pub(super) fn d_head(&self) -> Result<Option<Tensor>> {
        match (self.head.tensor().filter(|head| head.track_op()), &self.d_head) {
            (None, _) => Ok(None),
            (Some(head), None) => head.zeros_like().map(Some),
            (Some(head), Some(sum)) => sum.to_dtype(head.dtype()).map(Some),
        }
    }
}
