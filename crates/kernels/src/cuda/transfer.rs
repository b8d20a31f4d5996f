//! Tensors of the host on their way to a GPU, beside what it computes.

use candle_core::{Device, Result, Tensor};

/// A contiguous copy on `device`, there when the call returns; to be called by a thread that reads
/// ahead. On an NVIDIA GPU f32 values go through page-locked memory on the calling thread's stream, beside
/// the kernels that other threads start.
///
/// # Errors
/// - the device has no memory for it, or the transfer fails
pub fn upload_ahead(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) if on_cuda::takes(tensor) => on_cuda::upload(tensor, device),
        device => tensor.contiguous()?.to_device(device),
    }
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use std::sync::{Mutex, PoisonError};

    use candle_core::cuda_backend::cudarc::driver::{CudaSlice, PinnedHostSlice};
    use candle_core::op::BackpropOp;
    use candle_core::{CudaDevice, CudaStorage, DType, Device, Error, Result, Storage, Tensor};

    use crate::storage::with_f32;

    /// f32 values of the page-locked memory: 16 MiB.
    const STAGE: usize = 1 << 22;

    /// Page-locked memory of the process, once it was needed.
    static STAGE_MEMORY: Mutex<Option<PinnedHostSlice<f32>>> = Mutex::new(None);

    pub(super) fn takes(tensor: &Tensor) -> bool {
        tensor.dtype() == DType::F32 && matches!(tensor.device(), Device::Cpu)
    }

    pub(super) fn upload(tensor: &Tensor, device: &CudaDevice) -> Result<Tensor> {
        // Every thread has a stream of its own: that of kernels which others start goes on.
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().map_err(Error::wrap)?;
        let mut memory = STAGE_MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.is_none() {
            // SAFETY: what is sent was written before.
            let pinned = unsafe { stream.context().alloc_pinned::<f32>(STAGE) };
            *memory = Some(pinned.map_err(Error::wrap)?);
        }
        let Some(memory) = memory.as_mut() else { candle_core::bail!("no memory") };
        let copy = with_f32(tensor, |values| {
            // SAFETY: all values are written below, before the call returns.
            let mut copy: CudaSlice<f32> = unsafe { device.alloc::<f32>(values.len().max(1)) }?;
            for (index, piece) in values.chunks(STAGE).enumerate() {
                let staged = &mut memory.as_mut_slice().map_err(Error::wrap)?[..piece.len()];
                staged.copy_from_slice(piece);
                let mut part = copy.slice_mut(index * STAGE..index * STAGE + piece.len());
                stream.memcpy_htod(&*staged, &mut part).map_err(Error::wrap)?;
                // Another thread's kernels may read it from now on, and the memory be written again.
                stream.synchronize().map_err(Error::wrap)?;
            }
            Ok(copy)
        })?;
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(copy, device.clone()));
        Ok(Tensor::from_storage(storage, tensor.shape(), BackpropOp::none(), false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_holds_the_values_in_order() -> Result<()> {
        let whole = Tensor::arange(0.0_f32, 24.0, &Device::Cpu)?.reshape((2, 3, 4))?;
        let turned = whole.transpose(0, 1)?;
        let copy = upload_ahead(&turned, &Device::Cpu)?;
        assert!(copy.is_contiguous());
        assert_eq!(copy.to_vec3::<f32>()?, turned.to_vec3::<f32>()?);
        Ok(())
    }
}
