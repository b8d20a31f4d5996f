//! Ops composed of plain tensor ops on any device, with a backward pass of their own.
//!
//! candle's own graph would keep every intermediate value; here only inputs and result are kept.

use std::sync::{Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp3, Device, InplaceOp1, Layout, MetalStorage, Result, Shape,
    Storage, Tensor, bail,
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
    let result = if begins_its_storage(&result) { result } else { result.force_contiguous()? };
    let storage = copied(&result)?;
    let backward = move |_: &Tensor, gradient: &Tensor| backward(gradient);
    node(name, arguments, (storage, result.shape().clone()), backward)
}

/// The same of a new result: no other tensor has its values, so they are taken over without a copy.
///
/// # Errors
/// - as [`differentiable`]
pub(crate) fn differentiable_new(
    name: &'static str,
    arguments: [&Tensor; 3],
    result: Tensor,
    backward: impl Fn(&Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    let backward = move |_: &Tensor, gradient: &Tensor| backward(gradient);
    differentiable_by_result(name, arguments, result, backward)
}

/// The same where `backward` reads the result, too, as its first argument.
///
/// # Errors
/// - as [`differentiable`]
pub(crate) fn differentiable_by_result(
    name: &'static str,
    arguments: [&Tensor; 3],
    result: Tensor,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    if !begins_its_storage(&result) || matches!(result.device(), Device::Metal(_)) {
        let own = result.clone();
        return differentiable(name, arguments, result, move |gradient| backward(&own, gradient));
    }
    if !arguments.iter().any(|argument| argument.track_op()) {
        return Ok(result);
    }
    let take = Take::default();
    result.inplace_op1(&take)?;
    let taken = take.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    let Some(storage) = taken else { bail!("{name}: its result was taken before") };
    node(name, arguments, (storage, result.shape().clone()), backward)
}

fn begins_its_storage(result: &Tensor) -> bool {
    result.layout().start_offset() == 0 && result.is_contiguous()
}

fn copied(result: &Tensor) -> Result<Storage> {
    let (storage, layout) = result.storage_and_layout();
    Ok(match &*storage {
        Storage::Cpu(storage) => Storage::Cpu(storage.try_clone(layout)?),
        Storage::Cuda(storage) => Storage::Cuda(storage.try_clone(layout)?),
        Storage::Metal(storage) => Storage::Metal(storage.try_clone(layout)?),
    })
}

fn node(
    name: &'static str,
    [a, b, c]: [&Tensor; 3],
    result: (Storage, Shape),
    backward: impl Fn(&Tensor, &Tensor) -> Result<Gradients> + Send + Sync + 'static,
) -> Result<Tensor> {
    a.apply_op3(b, c, Node { name, result: Mutex::new(Some(result)), backward })
}

/// Takes a tensor's values and leaves none.
#[derive(Default)]
struct Take(Mutex<Option<Storage>>);

impl Take {
    fn keep(&self, storage: Storage) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(storage);
    }
}

impl InplaceOp1 for Take {
    fn name(&self) -> &'static str {
        "take"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.keep(Storage::Cpu(std::mem::replace(storage, CpuStorage::U8(Vec::new()))));
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let device = storage.device.clone();
        // SAFETY: nobody reads the value.
        let empty = unsafe { device.alloc::<u8>(1) }?;
        let empty = CudaStorage::wrap_cuda_slice(empty, device);
        self.keep(Storage::Cuda(std::mem::replace(storage, empty)));
        Ok(())
    }
}

struct Node<F> {
    name: &'static str,
    /// Until the forward pass has taken it.
    result: Mutex<Option<(Storage, Shape)>>,
    backward: F,
}

impl<F> Node<F> {
    fn take(&self) -> Result<(Storage, Shape)> {
        let taken = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(result) = taken else { bail!("{}: its result was taken before", self.name) };
        Ok(result)
    }

    fn elsewhere<S>(&self) -> Result<S> {
        bail!("{}: arguments and result on several devices", self.name)
    }
}

impl<F: Fn(&Tensor, &Tensor) -> Result<Gradients>> CustomOp3 for Node<F> {
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
        match self.take()? {
            (Storage::Cpu(storage), shape) => Ok((storage, shape)),
            _ => self.elsewhere(),
        }
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
        match self.take()? {
            (Storage::Cuda(storage), shape) => Ok((storage, shape)),
            _ => self.elsewhere(),
        }
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
        match self.take()? {
            (Storage::Metal(storage), shape) => Ok((storage, shape)),
            _ => self.elsewhere(),
        }
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok((self.backward)(&result.detach(), gradient)?.into())
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
        let product = (x.detach() * &y)?;
        let other = y.clone();
        let own =
            differentiable_new("product", [x.as_tensor(), &y, &y], product, move |gradient| {
                Ok([Some((gradient * &other)?), None, None])
            })?;
        assert_close("forward", &own, &(x.as_tensor() * &y)?, 0.0);
        let grads = own.sqr()?.sum_all()?.backward()?;
        assert_close("x", grads.get(&x).expect("own"), want.get(&x).expect("plain"), 1e-6);
        let frozen = differentiable("none", [&y, &y, &y], y.clone(), |_| Ok([None, None, None]))?;
        assert!(!frozen.track_op());
        Ok(())
    }
}
