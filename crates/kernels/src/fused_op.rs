//! Fused ops on the CPU as nodes of candle's graph.
//!
//! candle has a trait for each number of arguments, over storages and layouts. An op here is one trait over its
//! arguments: slices come in, values and their shape go out, and `backward` gives the gradients in the same order.

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Error, Layout, Result, Shape, Tensor,
};
use half::f16;

use crate::composed::Gradients;
use crate::storage::{f16_slice, f32_slice, u8_slice};

/// An argument in the CPU's memory.
#[derive(Clone, Copy)]
pub(crate) struct Argument<'a> {
    pub(crate) storage: &'a CpuStorage,
    pub(crate) layout: &'a Layout,
    op: &'static str,
}

impl<'a> Argument<'a> {
    /// The contiguous f32 values; an error if they are of another type or have gaps, as the next two.
    pub(crate) fn f32(self) -> Result<&'a [f32]> {
        f32_slice(self.storage, self.layout, self.op)
    }

    pub(crate) fn f16(self) -> Result<&'a [f16]> {
        f16_slice(self.storage, self.layout, self.op)
    }

    pub(crate) fn u8(self) -> Result<&'a [u8]> {
        u8_slice(self.storage, self.layout, self.op)
    }

    pub(crate) fn shape(self) -> &'a Shape {
        self.layout.shape()
    }

    pub(crate) fn dtype(self) -> DType {
        self.storage.dtype()
    }
}

/// An op of `N` arguments whose result is f32.
pub(crate) trait FusedOp<const N: usize> {
    /// What errors call it.
    const NAME: &'static str;

    /// The result's values and shape.
    ///
    /// # Errors
    /// - an argument is of another type or not contiguous
    fn forward(&self, arguments: [Argument<'_>; N]) -> Result<(Vec<f32>, Shape)>;

    /// The arguments' gradients from the gradient of the result; none for arguments that do not train.
    ///
    /// # Errors
    /// - the op has no gradients
    fn backward(
        &self,
        _arguments: [&Tensor; N],
        _result: &Tensor,
        _gradient: &Tensor,
    ) -> Result<Gradients<N>> {
        Err(Error::BackwardNotSupported { op: Self::NAME })
    }
}

/// An op as candle takes it.
pub(crate) struct Fused<F>(pub(crate) F);

impl<F> Fused<F> {
    fn run<const N: usize>(
        &self,
        arguments: [(&CpuStorage, &Layout); N],
    ) -> Result<(CpuStorage, Shape)>
    where
        F: FusedOp<N>,
    {
        let arguments =
            arguments.map(|(storage, layout)| Argument { storage, layout, op: F::NAME });
        let (values, shape) = self.0.forward(arguments)?;
        Ok((CpuStorage::F32(values), shape))
    }
}

impl<F: FusedOp<1>> CustomOp1 for Fused<F> {
    fn name(&self) -> &'static str {
        F::NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.run([(storage, layout)])
    }

    fn bwd(&self, x: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let [dx] = self.0.backward([x], result, gradient)?;
        Ok(dx)
    }
}

impl<F: FusedOp<2>> CustomOp2 for Fused<F> {
    fn name(&self) -> &'static str {
        F::NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.run([(s1, l1), (s2, l2)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok(self.0.backward([a, b], result, gradient)?.into())
    }
}

impl<F: FusedOp<3>> CustomOp3 for Fused<F> {
    fn name(&self) -> &'static str {
        F::NAME
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.run([(s1, l1), (s2, l2), (s3, l3)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok(self.0.backward([a, b, c], result, gradient)?.into())
    }
}
