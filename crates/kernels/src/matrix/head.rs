//! Heads `[V, H]` as losses read them: tensors, which may train, or frozen quantised blocks.
//!
//! Blocks are never widened as a whole where fused ops run: products have the bits of those with the widened head, of
//! which some rows exist at a time.

use std::sync::Arc;

use candle_core::{DType, Result, Shape, Tensor, Var, bail};

use super::{Matrix, QuantisedMatrix};
use crate::dispatch::fused;
use crate::fused_op::{Argument, FusedOp, Input, fuse};
use crate::gemm::Room;
use crate::graph::Gradients;
use crate::linear::{
    Weight, add_gradient, linear, product_nn_into, product_nt, with_weight as with_tensor,
};
use crate::storage::with_f32;

/// A head `[V, H]`, or some of its rows.
#[derive(Debug, Clone, Copy)]
pub enum Head<'a> {
    /// f32, bf16 or f16; a variable in f32 gets a gradient.
    Tensor(&'a Tensor),
    /// Quantised blocks, frozen: what is computed is what their values in f32 give.
    Stored(&'a Matrix),
}

impl<'a> From<&'a Tensor> for Head<'a> {
    fn from(head: &'a Tensor) -> Self {
        Self::Tensor(head)
    }
}

impl<'a> From<&'a Var> for Head<'a> {
    fn from(head: &'a Var) -> Self {
        Self::Tensor(head.as_tensor())
    }
}

impl<'a> From<&'a Matrix> for Head<'a> {
    fn from(head: &'a Matrix) -> Self {
        match head {
            Matrix::Dense(head) => Self::Tensor(head),
            stored => Self::Stored(stored),
        }
    }
}

impl<'a> Head<'a> {
    /// Rows and width.
    ///
    /// # Errors
    /// - it is no matrix
    pub fn dims(self) -> Result<(usize, usize)> {
        match self {
            Self::Tensor(head) => head.dims2(),
            Self::Stored(head) => head.dims(),
        }
    }

    /// The type of its values: f32 of blocks.
    pub fn dtype(self) -> DType {
        self.tensor().map_or(DType::F32, Tensor::dtype)
    }

    /// Whether it gets a gradient.
    pub fn trains(self) -> bool {
        self.tensor().is_some_and(Tensor::track_op)
    }

    /// The tensor, if it is one.
    pub fn tensor(self) -> Option<&'a Tensor> {
        match self {
            Self::Tensor(head) => Some(head),
            Self::Stored(_) => None,
        }
    }

    /// All values as a tensor; blocks are widened, for ops that know none.
    pub(crate) fn to_tensor(self) -> Result<Tensor> {
        match self {
            Self::Tensor(head) => Ok(head.clone()),
            Self::Stored(head) => head.to_dense(),
        }
    }

    /// `x Wᵀ`, as [`linear`] with the values of the head.
    ///
    /// # Shapes
    /// - `x`: `[R, H]` → `[R, V]`
    ///
    /// # Errors
    /// - the width differs
    pub fn linear(self, x: &Tensor) -> Result<Tensor> {
        let blocks = match self {
            Self::Stored(Matrix::Quantised(blocks)) if fused(&[x]) => blocks,
            _ => return linear(x, &self.to_tensor()?, None),
        };
        let ((_, inputs), (outputs, width)) = (x.dims2()?, self.dims()?);
        if inputs != width {
            bail!("linear: input {:?} does not fit weight [{outputs}, {width}]", x.shape());
        }
        fuse(OfBlocks(Arc::clone(blocks)), [x])
    }

    /// Runs `f` on the head in the CPU's memory.
    pub(crate) fn with_weight<R>(self, f: impl FnOnce(Weight<'_>) -> Result<R>) -> Result<R> {
        match self {
            Self::Stored(Matrix::Quantised(blocks)) => f(Weight::Blocks(blocks.blocks())),
            _ => with_tensor(&self.to_tensor()?, f),
        }
    }
}

/// `x Wᵀ` with the values of quantised blocks.
struct OfBlocks(Arc<QuantisedMatrix>);

impl FusedOp<1> for OfBlocks {
    const NAME: &'static str = "linear";
    const READS: [bool; 1] = [false];

    fn forward(&self, [x]: [Argument<'_>; 1]) -> Result<(Vec<f32>, Shape)> {
        let (rows, inputs) = x.shape().dims2()?;
        let (_, outputs, _) = self.0.layout();
        let product = product_nt(x.f32()?, Weight::Blocks(self.0.blocks()), inputs, outputs);
        Ok((product, (rows, outputs).into()))
    }

    fn backward(&self, [x]: [&Input; 1], _: &Tensor, grad: &Tensor) -> Result<Gradients<1>> {
        let (_, outputs, inputs) = self.0.layout();
        let form = |dx: Room<'_>, accumulate| {
            with_f32(grad, |g| {
                let weight = Weight::Blocks(self.0.blocks());
                product_nn_into(dx, g, weight, (inputs, outputs), accumulate);
                Ok(())
            })
        };
        // SAFETY: a product that is not added to something writes all of its values.
        unsafe { add_gradient(0, x, form) }?;
        Ok([None])
    }
}
