//! Tensors on their way to a GPU, beside what it computes, and back.

use candle_core::{Device, Result, Tensor};

/// A contiguous copy on `device`, there when the call returns; to be called by a thread that reads
/// ahead. On an NVIDIA GPU values of the host go through page-locked memory on a stream of their own, beside
/// the kernels that other threads start; one piece is laid out while the one before is on its way.
///
/// # Errors
/// - the device has no memory for it, or the transfer fails
pub fn upload_ahead(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    let tensor = tensor.contiguous()?;
    #[cfg(feature = "cuda")]
    if let (Device::Cuda(device), Device::Cpu) = (device, tensor.device()) {
        return on_cuda::upload(&tensor, device);
    }
    let copy = tensor.to_device(device)?;
    device.synchronize()?;
    Ok(copy)
}

/// A contiguous copy in main memory. What is large comes from an NVIDIA GPU through page-locked memory, in the order of
/// the device's work.
///
/// # Errors
/// - there is no memory for it, or the transfer fails
pub fn download(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.contiguous()?;
    #[cfg(feature = "cuda")]
    if let Some(copy) = download::download(&tensor)? {
        return Ok(copy);
    }
    tensor.to_device(&Device::Cpu)
}

#[cfg(feature = "cuda")]
mod download;

#[cfg(feature = "cuda")]
mod on_cuda {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex, PoisonError};

    use candle_core::cuda_backend::CudaDType;
    use candle_core::cuda_backend::cudarc::driver::{
        CudaEvent, CudaSlice, CudaStream, DeviceRepr, PinnedHostSlice,
    };
    use candle_core::op::BackpropOp;
    use candle_core::{
        CpuStorage, CudaDevice, CudaStorage, Error, Layout, Result, Storage, Tensor, bail,
    };

    /// Words of a page-locked buffer: 16 MiB.
    const STAGE: usize = 1 << 21;

    /// What uploads to a device use, one at a time, once the first was asked for.
    struct Stage {
        stream: Arc<CudaStream>,
        buffers: [Buffer; 2],
    }

    struct Buffer {
        /// Words, so that values of every type are aligned.
        memory: PinnedHostSlice<u64>,
        /// The end of the last copy from it.
        sent: Option<CudaEvent>,
    }

    impl Buffer {
        /// The memory, once what was sent from it has arrived.
        fn free(&mut self) -> Result<&mut [u64]> {
            if let Some(sent) = self.sent.take() {
                sent.synchronize().map_err(Error::wrap)?;
            }
            self.memory.as_mut_slice().map_err(Error::wrap)
        }
    }

    /// By the device's index.
    static STAGES: Mutex<BTreeMap<usize, Stage>> = Mutex::new(BTreeMap::new());

    impl Stage {
        fn new(device: &CudaDevice) -> Result<Self> {
            let context = Arc::clone(device.cuda_stream().context());
            let stream = context.new_stream().map_err(Error::wrap)?;
            let buffer = || {
                // SAFETY: what is sent was written before.
                let memory = unsafe { context.alloc_pinned(STAGE) }.map_err(Error::wrap)?;
                Ok::<_, Error>(Buffer { memory, sent: None })
            };
            Ok(Self { stream, buffers: [buffer()?, buffer()?] })
        }

        /// The values on the device, there when the call returns.
        fn send<T: DeviceRepr + Copy>(&mut self, values: &[T]) -> Result<CudaSlice<T>> {
            // SAFETY: all values are written below, before the call returns. The block is this stream's: if
            // the other has given it back before, the driver orders the copies after that.
            let copy = unsafe { self.stream.alloc::<T>(values.len().max(1)) };
            let mut copy = copy.map_err(Error::wrap)?;
            let most = STAGE * size_of::<u64>() / size_of::<T>();
            for (index, piece) in values.chunks(most).enumerate() {
                let buffer = &mut self.buffers[index % 2];
                let words = buffer.free()?;
                // SAFETY: the words are aligned for numbers of up to 8 bytes and hold `most` of them.
                let staged = unsafe {
                    std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<T>(), piece.len())
                };
                staged.copy_from_slice(piece);
                let mut part = copy.slice_mut(index * most..index * most + piece.len());
                self.stream.memcpy_htod(&*staged, &mut part).map_err(Error::wrap)?;
                buffer.sent = Some(self.stream.record_event(None).map_err(Error::wrap)?);
            }
            // Other threads' kernels may read it from now on.
            self.stream.synchronize().map_err(Error::wrap)?;
            Ok(copy)
        }
    }

    pub(super) fn upload(tensor: &Tensor, device: &CudaDevice) -> Result<Tensor> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { bail!("upload: a CPU tensor expected") };
        let copy = match storage {
            CpuStorage::U8(values) => send(values, layout, device),
            CpuStorage::U32(values) => send(values, layout, device),
            CpuStorage::I64(values) => send(values, layout, device),
            CpuStorage::BF16(values) => send(values, layout, device),
            CpuStorage::F16(values) => send(values, layout, device),
            CpuStorage::F32(values) => send(values, layout, device),
            CpuStorage::F64(values) => send(values, layout, device),
            _ => bail!("upload: values of type {:?}", tensor.dtype()),
        }?;
        let shape = tensor.shape();
        Ok(Tensor::from_storage(Storage::Cuda(copy), shape, BackpropOp::none(), false))
    }

    fn send<T: CudaDType + DeviceRepr + Copy>(
        values: &[T],
        layout: &Layout,
        device: &CudaDevice,
    ) -> Result<CudaStorage> {
        let first = layout.start_offset();
        let values = &values[first..first + layout.shape().elem_count()];
        let compute = device.cuda_stream();
        let mut stages = STAGES.lock().unwrap_or_else(PoisonError::into_inner);
        let index = compute.context().ordinal();
        if !stages.contains_key(&index) {
            stages.insert(index, Stage::new(device)?);
        }
        let Some(stage) = stages.get_mut(&index) else { bail!("upload: no stream") };
        let copy = stage.send(values)?;
        let count = copy.len();
        // SAFETY: the address is that of `count` values, which are all there. From here on they are used and
        // given back in the order of the device's stream.
        let copy = unsafe { compute.upgrade_device_ptr::<T>(copy.leak(), count) };
        Ok(CudaStorage::wrap_cuda_slice(copy, device.clone()))
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
        let back = download(&turned)?;
        assert!(back.is_contiguous() && back.device().is_cpu());
        assert_eq!(back.to_vec3::<f32>()?, turned.to_vec3::<f32>()?);
        Ok(())
    }
}
