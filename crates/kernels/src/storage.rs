//! Reading a tensor's CPU memory as a slice, with a named error when it cannot be.

use std::cell::Cell;

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};

/// The contiguous values of a custom op's argument.
///
/// # Errors
/// - the values are of another type
/// - the layout has gaps or is transposed
pub(crate) fn slice_of<'a, T: WithDType>(
    storage: &'a CpuStorage,
    layout: &Layout,
    op: &'static str,
) -> Result<&'a [T]> {
    if storage.dtype() != T::DTYPE {
        bail!("{op}: {} expected, found {:?}", T::DTYPE.as_str(), storage.dtype());
    }
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<T>()?[start..end]),
        None => bail!("{op}: contiguous input expected, found strides {:?}", layout.stride()),
    }
}

/// Runs `f` on the contiguous f32 values of a CPU tensor, copying only if it is not contiguous.
/// It fails where the tensor is not f32 or not on the CPU.
pub(crate) fn with_f32<R>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    f(cpu_f32(&storage, layout)?)
}

fn cpu_f32<'a>(storage: &'a Storage, layout: &Layout) -> Result<&'a [f32]> {
    match storage {
        Storage::Cpu(cpu) => slice_of(cpu, layout, "kernel input"),
        _ => bail!("kernel input: CPU tensor expected, found {:?}", storage.device().location()),
    }
}

/// The same of several tensors. It fails as [`with_f32`] does.
pub(crate) fn with_each_f32<const N: usize, R>(
    tensors: [&Tensor; N],
    f: impl FnOnce([&[f32]; N]) -> Result<R>,
) -> Result<R> {
    let tensors = tensors.iter().map(|t| t.contiguous()).collect::<Result<Vec<_>>>()?;
    let held: Vec<_> = tensors.iter().map(Tensor::storage_and_layout).collect();
    let mut slices: [&[f32]; N] = [&[]; N];
    for (slice, (storage, layout)) in slices.iter_mut().zip(&held) {
        *slice = cpu_f32(storage, layout)?;
    }
    f(slices)
}

/// Runs `f` on the contiguous f32 values of a CPU tensor, which it may change: whoever else holds them sees that.
/// It fails as [`with_f32`] does, or where the tensor is not contiguous.
pub(crate) fn change_f32(tensor: &Tensor, f: impl FnOnce(&mut [f32]) -> Result<()>) -> Result<()> {
    struct Change<F>(Cell<Option<F>>);
    impl<F: FnOnce(&mut [f32]) -> Result<()>> InplaceOp1 for Change<F> {
        fn name(&self) -> &'static str {
            "change"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            let (CpuStorage::F32(values), Some((start, end))) =
                (storage, layout.contiguous_offsets())
            else {
                bail!("values to change: contiguous f32 expected, found {layout:?}")
            };
            self.0.take().map_or(Ok(()), |f| f(&mut values[start..end]))
        }
    }
    tensor.inplace_op1(&Change(Cell::new(Some(f))))
}

/// Values in the shape and on the device of another tensor.
pub(crate) fn values_like(tensor: &Tensor, values: Vec<f32>) -> Result<Tensor> {
    Tensor::from_vec(values, tensor.shape(), tensor.device())
}

/// The values on the host in f64: not every device has that type.
pub(crate) fn host_f64(values: &Tensor) -> Result<Vec<f64>> {
    values.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1()
}

/// Values of the host on a device in one of its types.
pub(crate) fn from_f64(
    values: &[f64],
    shape: impl Into<Shape>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    Tensor::from_slice(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_give_their_values_in_order_whatever_their_layout() -> Result<()> {
        let x = Tensor::arange(0.0_f32, 6.0, &Device::Cpu)?.reshape((2, 3))?;
        let (turned, part) = (x.t()?, x.narrow(1, 1, 2)?);
        let values = with_each_f32([&x, &turned, &part], |all| Ok(all.map(<[f32]>::to_vec)))?;
        let want: [&[f32]; 3] = [
            &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
            &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0],
            &[1.0, 2.0, 4.0, 5.0],
        ];
        assert_eq!(values, want);
        let halves = x.to_dtype(DType::F16)?;
        assert!(with_each_f32([&x, &halves], |_| Ok(())).is_err());
        Ok(())
    }
}
