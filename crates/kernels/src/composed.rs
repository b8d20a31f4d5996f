//! Ops composed of plain tensor ops on any device, with a backward pass of their own.
//!
//! candle's own graph would keep every intermediate value; here only inputs and result are kept.

use std::sync::{Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp3, Layout, MetalStorage, Result, Shape, Storage, Tensor, bail,
};

/// Values, at most, that exist at a time of an intermediate result such as logits or scores.
pub(crate) const CHUNK_VALUES: usize = 1 << 25;

/// Rows of a pass without gradients up to which it is filled up with rows of zeros: then a library
/// chooses the same kernel however many tokens are verified together, and a row's sums run alike.
pub(crate) const FULL_ROWS: usize = 64;

/// Gradients of the arguments, in their order.
pub type Gradients<const N: usize = 3> = [Option<Tensor>; N];

/// `result`, which was computed from `arguments` without a graph, as a node of the graph whose
/// gradients `backward` computes from its own gradient. Two arguments may be the same tensor.
///
/// # Errors
/// - the result lies on another device than its arguments
pub fn differentiable(
    name: &'static str,
    arguments: [&Tensor; 3],
    result: Tensor,
    backward: impl Fn(&Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !arguments.iter().any(|argument| argument.track_op()) {
        return Ok(result);
    }
    // The storage is taken over whole, so it must begin with the result.
    let result = if result.layout().start_offset() == 0 && result.is_contiguous() {
        result
    } else {
        result.force_contiguous()?
    };
    let [a, b, c] = arguments;
    let op = Node { name, result: Mutex::new(Some(result.detach())), backward };
    a.apply_op3(b, c, op)
}

struct Node<F> {
    name: &'static str,
    /// Until the forward pass has taken it.
    result: Mutex<Option<Tensor>>,
    backward: F,
}

impl<F> Node<F> {
    fn take<S>(&self, copy: impl FnOnce(&Storage, &Layout) -> Result<S>) -> Result<(S, Shape)> {
        let taken = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(result) = taken else { bail!("{}: its result was taken before", self.name) };
        let (storage, layout) = result.storage_and_layout();
        Ok((copy(&storage, layout)?, layout.shape().clone()))
    }

    fn elsewhere<S>(&self) -> Result<S> {
        bail!("{}: arguments and result on several devices", self.name)
    }
}

impl<F: Fn(&Tensor) -> Result<Gradients>> CustomOp3 for Node<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.take(|storage, layout| match storage {
            Storage::Cpu(storage) => storage.try_clone(layout),
            _ => self.elsewhere(),
        })
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.take(|storage, layout| match storage {
            Storage::Cuda(storage) => storage.try_clone(layout),
            _ => self.elsewhere(),
        })
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.take(|storage, layout| match storage {
            Storage::Metal(storage) => storage.try_clone(layout),
            _ => self.elsewhere(),
        })
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok((self.backward)(gradient)?.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{Noise, assert_close};

    #[test]
    fn a_given_backward_pass_joins_the_graph() -> Result<()> {
        let mut noise = Noise::new(3);
        let (x, y) = (noise.var(&[4, 3]), noise.tensor(&[4, 3]));
        let other = y.clone();
        // A view whose values do not begin the storage.
        let product = (x.detach() * &y)?;
        let joined = Tensor::cat(&[&product, &product], 0)?.narrow(0, 4, 4)?;
        let out = differentiable("product", [x.as_tensor(), &y, &y], joined, move |gradient| {
            Ok([Some((gradient * &other)?), None, None])
        })?;
        assert_close("forward", &out, &(x.as_tensor() * &y)?, 0.0);
        let grads = out.sqr()?.sum_all()?.backward()?;
        let want = (x.as_tensor() * &y)?.sqr()?.sum_all()?.backward()?;
        assert_close("x", grads.get(&x).expect("own"), want.get(&x).expect("plain"), 1e-6);
        let frozen = differentiable("none", [&y, &y, &y], y.clone(), |_| Ok([None, None, None]))?;
        assert!(!frozen.track_op());
        Ok(())
    }
}
